"""Debts between stages, and a mixture that begins with debts and settles them.

    row    0 … S-1                              S, S+1, …
           a table: largest debt first          a `Mix` whose phases represent the remaining debts

The debt of a source is the number of rows that it should have had by its weights, minus the rows
that it has had. Rounding makes debts of fractions of a row; `schedule` carries them from stage to
stage.

In the table, each row adds to the debt of every source its share of one row, and then goes to the
source with the largest debt. That costs O(sources) per row, so the table is short: S is 64 plus
the number of sources. This is enough for the debts that can be settled soon. The other sources
have had too many rows and have such small weights that only waiting helps. From row S on, rows
are computed without a table: the phases of the splits represent the remaining debts as exactly
as they can (see `phases`), so no row is far from where it should be.

A row does not depend on the length of its stage. So weights that are set during a run give the
same rows as a schedule that had them from the start.
"""

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from penstock.order.integers import END, Integers
from penstock.order.interleave import Mix

__all__ = ["ONE_ROW", "SettlingMix", "debts_after", "debts_of_present", "split_exactly"]

ONE_ROW = 2**40
"""A debt of one row. 64 bits can then hold debts of up to eight million rows."""

_MIN_TABLE_ROWS = 64
# uint32, because a long schedule of many sources has thousands of tables in memory.
_Table = npt.NDArray[np.uint32]


def split_exactly(amount: int, weights: Sequence[int]) -> list[int]:
    """Split an integer in proportion to `weights`: each part is off by less than 1, the sum by 0.

    >>> split_exactly(10, [1, 0, 2]), split_exactly(-10, [1, 0, 2])
    ([4, 0, 6], [-3, 0, -7])
    """
    total = sum(weights)
    parts = [amount * weight // total for weight in weights]
    # Each part was rounded down by less than 1, so `left` is less than the number of weights
    # above 0, and the first of those get 1 more.
    left = amount - sum(parts)
    for source, weight in enumerate(weights):
        if not left:
            break
        if weight:
            parts[source] += 1
            left -= 1
    return parts


def debts_of_present(debts: Integers, weights: Sequence[int]) -> Integers:
    """Return the debts at the start of a stage, when some sources have weight 0.

    The debts of those sources are divided among the others by weight. So a source that comes
    back later starts without a debt, and the sum of all debts stays 0.
    """
    absent = np.array([not weight for weight in weights])
    moved = int(debts[absent].sum())
    debts = np.where(absent, 0, debts)
    if moved:
        debts += np.array(split_exactly(moved, weights), dtype=np.int64)
    return debts


def debts_after(
    debts: Integers, weights: Sequence[int], num_rows: int, counts: Sequence[int]
) -> Integers:
    """Return the debts after `num_rows` rows of a stage, of which each source had `counts`."""
    # Python's integers: rows times 2^40 don't fit into 64 bits, but the differences do.
    asked = split_exactly(num_rows * ONE_ROW, weights)
    owed = [rows - count * ONE_ROW for rows, count in zip(asked, counts, strict=True)]
    return debts + np.array(owed, dtype=np.int64)


class SettlingMix:
    """A mixture with fixed weights and debts at the start; it has the methods of `Mix`.

    Args:
        weights: Exact weights, as integers.
        debts: The debt of each source, in units of 2^-40 rows; 0 if its weight is 0. The sum
            must be 0.
        num_rows: The end of the stage. Later positions are never asked for.
    """

    def __init__(self, weights: Sequence[int], debts: Integers, num_rows: int = END) -> None:
        self.weights = weights
        self._debts = debts
        # Many stages end within their tables, so whether the mix is needed is known first.
        self._has_mix = num_rows > _MIN_TABLE_ROWS + len(weights)
        num_rows = min(num_rows, _MIN_TABLE_ROWS + len(weights))
        table = _largest_debt_first(debts, weights, num_rows)
        self._table, self._ordinals, self._counts_in_table = table

    @cached_property
    def _mix(self) -> Mix:
        """The rows after the table; created when needed, as many stages end before."""
        counts = self._counts_in_table.tolist()
        debts = debts_after(self._debts, self.weights, len(self._table), counts)
        return Mix(self.weights, (debts / ONE_ROW).tolist())

    def at(self, positions: Integers) -> tuple[Integers, Integers]:
        """Return the source at each of `positions`, and how many rows of it come before."""
        later = positions >= len(self._table)
        if not later.any():
            ordinals = self._ordinals[positions].astype(np.int64)
            return self._table[positions].astype(np.int64), ordinals
        if later.all():
            sources, ordinals = self._mix.at(positions - len(self._table))
            return sources, ordinals + self._counts_in_table[sources]
        # Some of each: call this again for the rows of either kind.
        sources, ordinals = np.empty_like(positions), np.empty_like(positions)
        for rows in (later, ~later):
            sources[rows], ordinals[rows] = self.at(positions[rows])
        return sources, ordinals

    def positions(self, source: int, ordinals: npt.ArrayLike) -> Integers:
        """Return the positions of a source's rows, numbered from 0: the inverse of `at`."""
        numbers = np.array(ordinals, dtype=np.int64)
        in_table = np.flatnonzero(self._table == source)
        later = numbers >= len(in_table)
        positions = np.empty_like(numbers)
        positions[~later] = in_table[numbers[~later]]
        if later.any():
            after = self._mix.positions(source, numbers[later] - len(in_table))
            positions[later] = after + len(self._table)
        return positions

    def position(self, source: int, ordinal: int) -> int | None:
        """Return the position of one row of a source; None if there is no such row."""
        in_table = np.flatnonzero(self._table == source)
        if ordinal < len(in_table):
            return int(in_table[ordinal])
        after = self._mix.position(source, ordinal - len(in_table)) if self._has_mix else None
        return None if after is None else after + len(self._table)

    def not_before(self, source: int, ordinal: int) -> int:
        """Return a lower bound of the position of a row; much cheaper than the position."""
        # In the table there is no bound, and looking a row up is cheap anyway.
        later = ordinal - int(self._counts_in_table[source])
        if later < 0 or not self._has_mix:
            return 0
        return len(self._table) + self._mix.not_before(source, later)

    def counts(self, num_rows: int) -> list[int]:
        """Return how many of the first `num_rows` rows belong to each source, in O(sources)."""
        if num_rows <= len(self._table):
            counts = np.bincount(self._table[:num_rows], minlength=len(self.weights))
        else:
            counts = self._counts_in_table + self._mix.counts(num_rows - len(self._table))
        return [int(count) for count in counts]


def _largest_debt_first(
    debts: Integers, weights: Sequence[int], num_rows: int
) -> tuple[_Table, _Table, Integers]:
    """Return the source and the ordinal of each row, and the number of rows of each source.

    A row goes to the source with the largest debt, the first of equals.
    """
    shares = np.array(split_exactly(ONE_ROW, weights), dtype=np.int64)
    owed = debts.copy()
    sources, ordinals = np.empty(num_rows, np.uint32), np.empty(num_rows, np.uint32)
    counts = [0] * len(weights)
    for row in range(num_rows):
        # Now the debts add up to one row, so the largest is above 0. Sources with weight 0 keep
        # a debt of 0, so they are never chosen.
        owed += shares
        source = int(owed.argmax())
        owed[source] -= ONE_ROW
        sources[row], ordinals[row] = source, counts[source]
        counts[source] += 1
    return sources, ordinals, np.array(counts, dtype=np.int64)
