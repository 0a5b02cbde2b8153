"""Rows that an amendment leaves out, so that a run continues with the rows after them.

    order    0 ─────────── 8 ▒▒▒▒▒▒▒▒ 12 ───────────────    at position 8, 4 rows are left out
    run      0 ─────────── 8 ──────────────────────

Positions of a run have no gaps: position 8 of the run holds the row that is at 12 in the order. So
a rest of a run is a shift of the order, and everything can still be computed in both directions.
Rows that are left out stay in their epoch, and occur again in the next one.
"""

from collections.abc import Sequence
from functools import cached_property
from operator import sub

import numpy as np
import numpy.typing as npt

from penstock.order.epochs import EpochOrder
from penstock.order.integers import END, Integers
from penstock.order.weighted import Mixture


class Skips:
    """Maps positions of a run to positions of an order, and back.

    Args:
        skips: Positions of the run in ascending order, and how many rows are left out at each.

    >>> skips = Skips([(8, 4)])
    >>> skips.to_order(np.array([7, 8])), skips.to_run(np.array([7, 9, 12]))
    (array([ 7, 12]), (array([7, 8]), array([ True, False,  True])))
    """

    def __init__(self, skips: Sequence[tuple[int, int]] = ()) -> None:
        self.skips = tuple(skips)
        self._at = np.array([position for position, _ in self.skips], dtype=np.int64)
        rows = np.array([rows for _, rows in self.skips], dtype=np.int64)
        # How many rows are left out before each skip, and after the last.
        self._shifts = np.concatenate((np.zeros(1, np.int64), np.cumsum(rows)))
        self.begins: Integers = self._at + self._shifts[:-1]
        """Where the rows that are left out begin in the order."""
        self.ends: Integers = self.begins + rows

    def added(self, position: int, rows: int) -> "Skips":
        """Return these skips and one more, which is not before the last."""
        if not rows:
            return self
        # Two skips at one position are one, so that each begins after rows of the run.
        merged = sum(each for at, each in self.skips if at == position)
        kept = [each for each in self.skips if each[0] != position]
        return Skips([*kept, (position, merged + rows)])

    def after(self, position: int) -> int:
        """Return the position in the order of the row at a position of the run."""
        return position + int(self._shifts[np.searchsorted(self._at, position, side="right")])

    def before(self, num_rows: int) -> int:
        """Return the position in the order after the first `num_rows` rows of the run."""
        return num_rows + int(self._shifts[self.num_before(num_rows)])

    def num_before(self, num_rows: int) -> int:
        """Return how many skips are before the last of the first `num_rows` rows of the run."""
        return int(np.searchsorted(self._at, num_rows, side="left"))

    def to_order(self, positions: Integers) -> Integers:
        """Return the position in the order of each position of the run."""
        shifted: Integers = (
            positions + self._shifts[np.searchsorted(self._at, positions, side="right")]
        )
        return shifted

    def to_run(self, positions: Integers) -> tuple[Integers, npt.NDArray[np.bool_]]:
        """Return positions of the run for those of the order that it has, and which it has."""
        numbers = np.searchsorted(self.begins, positions, side="right")
        # The end of the last skip that begins at or before each position; 0 without one.
        kept = positions >= np.concatenate((np.zeros(1, np.int64), self.ends))[numbers]
        return (positions - self._shifts[numbers])[kept], kept


class SkippingOrder:
    """An order without the rows that are left out; it has the methods of `Mixture`."""

    epoch_rows = None  # one epoch has fewer rows than the others

    def __init__(self, order: Mixture | EpochOrder, skips: Skips) -> None:
        self.order, self.skips = order, skips
        self.ended_by = order.ended_by
        self.end = END
        if order.end < END:
            self.end = int(skips.to_run(np.array([order.end]))[0][0])

    def locate(self, positions: Integers) -> tuple[Integers, Integers, Integers]:
        """Return the source, epoch and sample at each position."""
        return self.order.locate(self.skips.to_order(positions))

    def positions_of(self, source: int, samples: npt.ArrayLike, epochs: Integers) -> Integers:
        """Return the positions of samples, each in its epoch, without those that are left out."""
        return self.skips.to_run(self.order.positions_of(source, samples, epochs))[0]

    def num_epochs(self, source: int, before: int) -> int:
        """Return how many epochs of a source have begun before a position."""
        return self.order.num_epochs(source, self.skips.before(before))

    def counts(self, num_rows: int) -> list[int]:
        """Return how many of the first `num_rows` rows belong to each source."""
        left_out = self._left_out[: self.skips.num_before(num_rows)]
        return [
            count - sum(each)
            for count, *each in zip(self.cursors(num_rows), *left_out, strict=True)
        ]

    def cursors(self, num_rows: int) -> list[int]:
        """Return the same with the rows that were left out before: where sources continue."""
        return self.order.counts(self.skips.before(num_rows))

    @cached_property
    def _left_out(self) -> list[list[int]]:
        """The rows of each source in each skip."""
        spans = zip(self.skips.begins.tolist(), self.skips.ends.tolist(), strict=True)
        counts = self.order.counts
        return [list(map(sub, counts(stop), counts(start))) for start, stop in spans]

    def asked(self, num_rows: int) -> list[float] | None:
        """Return how many of the first `num_rows` rows the weights ask for, for each source."""
        asked, order = self.order.asked(self.skips.before(num_rows)), self.order
        if asked is None or isinstance(order, EpochOrder):
            return None
        for number in range(self.skips.num_before(num_rows)):
            start, stop = int(self.skips.begins[number]), int(self.skips.ends[number])
            left_out = zip(asked, order.asked(stop), order.asked(start), strict=True)
            asked = [each - (upto - before) for each, upto, before in left_out]
        return asked

    @property
    def default_num_rows(self) -> int:
        """The number of rows of all sources together, or of the first epoch of all of them."""
        return min(self.order.default_num_rows, self.end)

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return self.order.num_stages

    def stage(self, number: int) -> tuple[int, str]:
        """Return where a stage begins in the run, and its sources as text."""
        start, text = self.order.stage(number)
        # A stage that begins among rows that are left out begins after them.
        numbers = np.flatnonzero((self.skips.begins <= start) & (start < self.skips.ends))
        start = int(self.skips.ends[numbers[-1]]) if len(numbers) else start
        return int(self.skips.to_run(np.array([start]))[0][0]), text


Layout = Mixture | EpochOrder | SkippingOrder
