"""What the first rows of a run hold of each source, and from where on rows repeat."""

from typing import TYPE_CHECKING, NamedTuple

from penstock.errors import PlanError
from penstock.order.arguments import Caps
from penstock.order.layout import Layout

if TYPE_CHECKING:
    from penstock.order.plan import Plan


class SourceOutlook(NamedTuple):
    """One source in the first rows of a run."""

    source: str
    rows: int
    """Its rows among the first ones; a row counts once for each epoch."""
    asked: float | None
    """The rows that its weights ask for; None in a plan without weights."""
    repeats_at: int | None
    """The first position at which its second epoch has begun; None if it does not begin."""


def find_outlook(plan: "Plan", layout: Layout, num_rows: int) -> tuple[SourceOutlook, ...]:
    """Return what `Plan.outlook` describes; `layout` is how the plan orders sources."""
    counts = plan.counts(num_rows)
    asked = layout.asked(num_rows)
    found = []
    for number, name in enumerate(plan.names):
        repeats = None
        if layout.num_epochs(number, num_rows) > 1:
            # Bisection: the number of epochs that have begun never decreases.
            low, high = 0, num_rows
            while low < high:
                middle = (low + high) // 2
                if layout.num_epochs(number, middle) > 1:
                    high = middle
                else:
                    low = middle + 1
            repeats = low - 1  # `low` rows include the first row of the second epoch
        share = None if asked is None else asked[number]
        found.append(SourceOutlook(name, counts[name], share, repeats))
    return tuple(found)


def past_the_end(plan: "Plan", layout: Layout, caps: Caps | None, position: int) -> PlanError:
    """Return the error for a position after the end of a plan with caps."""
    cause = "every source has reached its max_epochs"
    if layout.ended_by is not None and caps is not None:
        name = plan.names[layout.ended_by]
        cause = f'"{name}" has reached its max_epochs of {caps.of(name)}'
    return PlanError(
        f"Position {position:,} is after the end of this plan. The plan ends at position "
        f"{plan.end:,}, because {cause}. Ask for fewer rows, raise max_epochs, or let other "
        'sources continue: Caps(…, "redistribute").'
    )
