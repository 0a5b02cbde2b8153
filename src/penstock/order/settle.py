"""A mixture that begins with debts and settles them.

    row    0 … S-1                              S, S+1, …
           a table: largest debt first          a `Mix` whose phases stand for what is left

In the table, every row adds to each source what it is owed for one row, and then goes to
the source that is owed most. That costs O(sources) a row, so the table is short: S is 64
rows and one for each source. It is long enough for the sources whose debts can be settled
soon; others have been given too much and weigh so little that nothing can be done but to
wait. From row S on rows are computed without a table, and no row is far from its turn:
the phases of the splits stand for the debts, as nearly as they can.

A row does not depend on how long the stage is. So weights that are set while a run is
under way give the same rows as a schedule that had them from the start.
"""

from collections.abc import Sequence
from functools import cached_property
from operator import add

import numpy as np
import numpy.typing as npt

from penstock.order.integers import END, Integers
from penstock.order.interleave import Mix

__all__ = ["ONE_ROW", "SettlingMix", "debts_after", "debts_of_present", "split_exactly"]

ONE_ROW = 2**40
"""A debt of one row. 64 bits then hold debts of up to eight million rows."""


def split_exactly(amount: int, weights: Sequence[int]) -> list[int]:
    """Split an integer in proportion to `weights`, each part to within 1, the sum exact.

    >>> split_exactly(10, [1, 0, 2]), split_exactly(-10, [1, 0, 2])
    ([4, 0, 6], [-3, 0, -7])
    """
    total = sum(weights)
    parts = [amount * weight // total for weight in weights]
    left = amount - sum(parts)  # less than one for each source that has a weight
    for source, weight in enumerate(weights):
        if not left:
            break
        if weight:
            parts[source] += 1
            left -= 1
    return parts


def debts_of_present(debts: Integers, weights: Sequence[int]) -> Integers:
    """Debts when a stage begins: those of sources without weight pass to the others.

    They are spread over the sources of the stage by weight. So a source that comes back
    later starts with no debt.
    """
    absent = np.array([not weight for weight in weights])
    passed_on = int(debts[absent].sum())
    debts = np.where(absent, 0, debts)
    if passed_on:
        debts += np.array(split_exactly(passed_on, weights), dtype=np.int64)
    return debts


def debts_after(
    debts: Integers, weights: Sequence[int], num_rows: int, counts: Sequence[int]
) -> Integers:
    """Debts after `num_rows` rows of a stage, of which each source was given `counts`."""
    # Python's integers: rows times 2^40 do not fit into 64 bits, their difference does.
    asked = split_exactly(num_rows * ONE_ROW, weights)
    owed = [rows - count * ONE_ROW for rows, count in zip(asked, counts, strict=True)]
    return debts + np.array(owed, dtype=np.int64)


_LEAST_TABLE_ROWS = 64


class SettlingMix:
    """A fixed mixture with debts at the start: position → (source, ordinal), and back.

    Has the methods of `Mix`, for positions below `num_rows`.

    Args:
        weights: Exact weights, as integers.
        debts: What each source is owed, in units of 2^-40 row; 0 where the weight is 0. They
            add up to 0.
        num_rows: How many rows will be asked for, at most.
    """

    def __init__(self, weights: Sequence[int], debts: Integers, num_rows: int = END) -> None:
        self.weights = weights
        self._debts = debts
        self._has_mix = num_rows > _LEAST_TABLE_ROWS + len(weights)
        num_rows = min(num_rows, _LEAST_TABLE_ROWS + len(weights))
        self._table = _largest_debt_first(debts, weights, num_rows)
        self._ranks = _ranks(self._table)

    @cached_property
    def _mix(self) -> Mix:
        """The rows after the table; many stages end before."""
        counts = self._counts_in_table.tolist()
        debts = debts_after(self._debts, self.weights, len(self._table), counts)
        return Mix(self.weights, (debts / ONE_ROW).tolist())

    @cached_property
    def _counts_in_table(self) -> Integers:
        return np.bincount(self._table, minlength=len(self.weights))

    def at(self, positions: Integers) -> tuple[Integers, Integers]:
        """The source at each of `positions`, and how many rows of it came before."""
        later = positions >= len(self._table)
        if not later.any():
            return self._table[positions].astype(np.int64), self._ranks[positions].astype(np.int64)
        if later.all():
            sources, ordinals = self._mix.at(positions - len(self._table))
            return sources, ordinals + self._counts_in_table[sources]
        sources, ordinals = np.empty_like(positions), np.empty_like(positions)
        for rows in (later, ~later):
            sources[rows], ordinals[rows] = self.at(positions[rows])
        return sources, ordinals

    def positions(self, source: int, ordinals: npt.ArrayLike) -> Integers:
        """The positions of a source's rows, numbered from 0: the inverse of `at`."""
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
        """The position of one row of a source; None where there is none."""
        in_table = np.flatnonzero(self._table == source)
        if ordinal < len(in_table):
            return int(in_table[ordinal])
        after = self._mix.position(source, ordinal - len(in_table)) if self._has_mix else None
        return None if after is None else after + len(self._table)

    def not_before(self, source: int, ordinal: int) -> int:
        """A position that the row does not come before; cheaper to know than its own."""
        later = ordinal - int(self._counts_in_table[source])
        if later < 0 or not self._has_mix:
            return 0
        return len(self._table) + self._mix.not_before(source, later)

    def counts(self, num_rows: int) -> list[int]:
        """How many of the first `num_rows` rows belong to each source, in O(sources)."""
        counts: list[int] = np.bincount(
            self._table[:num_rows], minlength=len(self.weights)
        ).tolist()
        if num_rows > len(self._table):
            after = self._mix.counts(num_rows - len(self._table))
            counts = list(map(add, counts, after))
        return counts


def _largest_debt_first(
    debts: Integers, weights: Sequence[int], num_rows: int
) -> npt.NDArray[np.uint32]:
    """The source of each row: whoever is owed most when the row is due, the first of equals."""
    shares = np.array(split_exactly(ONE_ROW, weights), dtype=np.int64)
    owed = debts.copy()
    table = np.empty(num_rows, dtype=np.uint32)
    for row in range(num_rows):
        # After this the debts add up to one row, so someone with a weight is owed most.
        owed += shares
        source = owed.argmax()
        owed[source] -= ONE_ROW
        table[row] = source
    return table


def _ranks(table: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """How often the source of each row came before it."""
    order = np.argsort(table, kind="stable")
    grouped = table[order]
    firsts = np.searchsorted(grouped, grouped)  # where each row's group begins
    ranks = np.empty(len(table), dtype=np.uint32)
    ranks[order] = np.arange(len(table)) - firsts
    return ranks
