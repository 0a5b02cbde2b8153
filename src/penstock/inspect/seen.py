"""What a run has seen at a step: rows, tokens and epochs of each source."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from penstock.inspect.runs import RunSteps
from penstock.loader.fingerprints import RowReader
from penstock.order.plan import Plan
from penstock.rows.protocol import Integers, Rows, WrappedRows

Json = dict[str, Any]
_READ_ROWS = 256  # rows at a time, so that any number of them needs little memory


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
    """Rows of the epoch that is not complete; with those that an amendment left out."""
    tokens: int | None
    """Targets in the rows that were read; None if the source does not know its targets."""
    tokens_exact: bool
    """Whether `tokens` is the number of targets that were trained on. Otherwise it follows from
    the mean of all rows, and counts targets that a loss mask or an amendment excludes."""


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
    cursors = plan.cursors(position)
    for name, rows in plan.counts(position).items():
        source = plan.sources[name]
        size = len(source)
        # Rows that an amendment left out are not read, but belong to the epoch.
        epochs, rest = divmod(cursors[name], max(1, size))
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
    if masked or any(name in each.exclude for each in plan.amendments):
        return False
    # No row has more targets than its length, so with this sum every row has as many.
    if source.num_tokens == len(source) * source.length:
        return True
    return not plan.amendments and num_rows % len(source) == 0  # whole epochs


def excluded_targets(plan: Plan, end: int) -> dict[str, int]:
    """Return how many targets before a position amendments exclude, by source; exact.

    The rows with excluded documents are read, and no others.
    """
    positions: dict[str, set[int]] = {}
    for each in plan.amendments:
        for name, spans in each.exclude.items():
            for span in spans:
                samples = plan.sources[name].holding(*span)
                found = plan.positions_of(name, samples, before=end)
                positions.setdefault(name, set()).update(found[found >= each.position].tolist())
    if not positions:
        return {}
    # Rows are read by their numbers, so the order of the second plan does not matter.
    amended, plain = RowReader(plan), RowReader(Plan(dict(plan.sources), shuffle="none"))
    counts = dict.fromkeys(positions, 0)
    for name, some in positions.items():
        ordered = np.array(sorted(some), np.int64)
        for first in range(0, len(ordered), _READ_ROWS):
            located = amended.locate(ordered[first : first + _READ_ROWS])
            counts[name] += _num_targets(plain, located) - _num_targets(amended, located)
    return counts


def _num_targets(reader: RowReader, located: Integers) -> int:
    tokens, targets, _ = reader.assembler.read(located)
    return tokens[:, 1:].size if targets is None else int(targets.sum())
