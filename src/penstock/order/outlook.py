"""What the first rows of a run hold of each source, and from where on rows repeat."""

from typing import TYPE_CHECKING, NamedTuple

from penstock.order.epochs import EpochOrder
from penstock.order.weighted import Mixture

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


def find_outlook(
    plan: "Plan", layout: Mixture | EpochOrder, num_rows: int
) -> tuple[SourceOutlook, ...]:
    """Return what `Plan.outlook` describes; `layout` is how the plan orders sources."""
    counts = plan.counts(num_rows)
    asked: list[float | None] = [None] * len(plan.names)
    if isinstance(layout, Mixture):
        asked = list(layout.schedule.asked(num_rows))
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
        found.append(SourceOutlook(name, counts[name], asked[number], repeats))
    return tuple(found)
