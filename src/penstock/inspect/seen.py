"""What a run has seen at a step: rows, tokens and epochs of each source."""

from dataclasses import asdict, dataclass
from typing import Any

from penstock.inspect.runs import RunSteps
from penstock.order.plan import Plan
from penstock.rows.protocol import Rows, WrappedRows

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class SeenSource:
    """What was read of one source."""

    source: str
    rows: int
    """Rows that were read; a row counts once for each epoch."""
    rows_in_epoch: int
    """All rows of the source."""
    epochs: int
    """Complete epochs."""
    rows_in_last_epoch: int
    """Rows of the epoch that is not complete."""
    tokens: int | None
    """Targets in the rows that were read; None if the source does not know its targets."""
    tokens_exact: bool
    """Whether `tokens` is the number of targets that were trained on. Otherwise it follows from
    the mean of all rows, and counts targets that a loss mask excludes."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What a run has seen after a step."""

    step: int
    position: int
    sources: tuple[SeenSource, ...]

    def to_json(self) -> Json:
        """Return it as JSON."""
        return asdict(self)


def seen(plan: Plan, steps: RunSteps, step: int) -> Seen:
    """Return what a run has seen when a step is done; the step before the first has seen nothing.

    In a plan with weights, that is computed. In one without, the rows of the epoch that is not
    complete are counted, at about 30 ns each.
    """
    position = steps.span(steps.first)[0] if step == steps.first - 1 else steps.span(step)[1]
    return Seen(step, position, tuple(count_sources(plan, position)))


def count_sources(plan: Plan, position: int) -> list[SeenSource]:
    """Return what the rows before a position hold of each source."""
    found = []
    for name, rows in plan.counts(position).items():
        source = plan.sources[name]
        size = len(source)
        epochs, rest = divmod(rows, max(1, size))
        targets, is_exact = targets_in(source, rows), targets_exact(plan, name, rows)
        found.append(SeenSource(name, rows, size, epochs, rest, targets, is_exact))
    return found


def targets_in(source: Rows, num_rows: int) -> int | None:
    """Return the targets in `num_rows` rows of a source, by the mean of all its rows."""
    if source.num_tokens is None:
        return None
    return round(source.num_tokens * num_rows / max(1, len(source)))


def targets_exact(plan: Plan, name: str, num_rows: int) -> bool:
    """Return whether `targets_in` is exactly what `num_rows` rows of a source train on."""
    source = plan.sources[name]
    if source.num_tokens is None or isinstance(source, WrappedRows):  # transforms change targets
        return False
    masked = source.stream is None or source.stream.has_loss or "borders" in source.describe()
    if masked:
        return False
    # No row has more targets than its length, so with this sum every row has as many.
    if source.num_tokens == len(source) * source.length:
        return True
    return num_rows % len(source) == 0  # whole epochs
