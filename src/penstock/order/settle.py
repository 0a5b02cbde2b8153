"""Debts between stages, and how the next stage settles them.

    row    0 … S-1                              S, S+1, …
           a table: largest debt first          a `Mix` whose phases represent the remaining debts

The debt of a source is the number of rows that it should have had by its weights, minus the rows
that it has had. Rounding makes debts of fractions of a row; `schedule` carries them from stage to
stage.

In the table, each row adds to the debt of every source its share of one row, and then goes to the
source with the largest debt. That costs O(sources) per row, so the table is short: S is 64 plus
the number of sources. A table of this length settles all debts that can be settled soon. The debts
that remain belong to sources that have had too many rows, and whose weights are so small that
settling takes much longer.

From row S on, rows are computed without a table. A split gives its smaller child
floor(c * share + phase) of its first c rows (see `interleave`). The phase is a number from 0 to 1.
It decides how far ahead or behind the child is at the start: the child's debt, minus its share of
the parent's debt, is phase - 1/2. If all phases are 1/2, all debts are 0. So a choice of phases
represents debts of the sources, namely debts for which every split satisfies

    | debt(small) - share * debt(parent) | <= 1/2,    debt(root) = 0.

The actual debts rarely satisfy all of these conditions. Then nearby debts that satisfy them are
used instead. Two things add up to the error of a source: how much its debt was changed, and the
rounding of the splits (half a row for its own split and a share of its parent's rounding: 1.68 rows
at most, see `interleave`).

A bound on the error of all sources is found by trying larger and larger bounds. Given a bound, the
debt of a source may change by the bound minus the source's rounding error, so its possible debts
are an interval. The interval of a node follows from those of its children. The bound is large
enough if the interval of the root contains 0. Then each node, from the root down, gets a debt from
its interval. One try costs 1 µs per source; three tries are usual.

Phases are computed with Python floats that are only added, subtracted, multiplied, divided and
compared. IEEE 754 defines the results of these operations exactly, so they are equal on every
machine. A row does not depend on the length of its stage. So weights that are set during a run
give the same rows as a schedule that had them from the start.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from penstock.order.integers import END, Integers
from penstock.order.weights import Weight

ONE_ROW = 2**40
"""A debt of one row. 64 bits can then hold debts of up to eight million rows."""

_WHOLE = 2**64
_HALF = 0.5


def split_exactly(amount: int, weights: Sequence[int]) -> list[int]:
    """Split an integer in proportion to `weights`: the sum is exact, each part within 1.

    >>> split_exactly(10, [1, 0, 2]), split_exactly(-10, [1, 0, 2])
    ([4, 0, 6], [-3, 0, -7])
    """
    total = sum(weights)
    parts = [amount * weight // total for weight in weights]
    # Each part was rounded down by less than 1, so less is left than there are weights above 0,
    # and the first of those get 1 more.
    above = [source for source, weight in enumerate(weights) if weight]
    for source in above[: amount - sum(parts)]:
        parts[source] += 1
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


def num_table_rows(num_sources: int) -> int:
    """Return the number of rows of a table, enough for debts that can be settled soon."""
    return 64 + num_sources


class DebtTable:
    """The first rows of a stage with debts; it has the methods of `Mix`.

    A row goes to the source with the largest debt, or to the first of several that are equal.

    Args:
        weights: Exact weights, as integers.
        debts: The debt of each source, in units of 2^-40 rows; 0 if its weight is 0. The sum
            must be 0.
        num_rows: The number of rows in the table. Callers never ask for later positions.
    """

    def __init__(self, weights: Sequence[int], debts: Integers, num_rows: int) -> None:
        self.weights = weights
        shares = np.array(split_exactly(ONE_ROW, weights), dtype=np.int64)
        owed, counts = debts.copy(), [0] * len(weights)
        sources, ordinals = [], []
        for _ in range(num_rows):
            # Now the debts add up to one row, so the largest is above 0. Sources with weight 0
            # keep a debt of 0, so they are never chosen.
            owed += shares
            source = int(owed.argmax())
            owed[source] -= ONE_ROW
            sources.append(source)
            ordinals.append(counts[source])
            counts[source] += 1
        # uint32, because a long schedule of many sources has thousands of tables in memory.
        self._sources, self._ordinals = np.array([sources, ordinals], np.uint32)
        self._counts = counts

    def at(self, positions: Integers) -> tuple[Integers, Integers]:
        """Return the source at each of `positions`, and how many rows of it come before."""
        sources, ordinals = self._sources[positions], self._ordinals[positions]
        return sources.astype(np.int64), ordinals.astype(np.int64)

    def position(self, source: int, ordinal: int) -> int | None:
        """Return the position of one row of a source; None if it is not in the table."""
        if ordinal >= self._counts[source]:
            return None
        return int(np.flatnonzero(self._sources == source)[ordinal])

    def not_before(self, source: int, ordinal: int) -> int:
        """Return a lower bound of the position of a row; END if it is not in the table."""
        return 0 if ordinal < self._counts[source] else END

    def counts(self, num_rows: int) -> list[int]:
        """Return how many of the first `num_rows` rows belong to each source."""
        counts = np.bincount(self._sources[:num_rows], minlength=len(self.weights))
        return [int(count) for count in counts]


def fit_phases(
    shares: Sequence[float], children: Sequence[int], debts: Sequence[float]
) -> list[int]:
    """Return the phase of every split, in units of 2^-64.

    Args:
        shares: The smaller child's share of each node; a node comes after its children.
        children: The larger and the smaller child of node 0, of node 1, … Source s is ~s.
        debts: The debt of each source, in rows.
    """
    # Index ~s = -1 - s counts from the end. So in a list that begins with the nodes and ends with
    # the sources in reverse order, both node numbers and ~s are valid indices.
    debt = [0.0] * len(shares) + list(debts)[::-1]
    size = [0] * len(shares) + [1] * len(debts)
    # The debt and the number of sources of a node are the sums of its children's.
    for node, (large, small) in enumerate(zip(children[::2], children[1::2], strict=True)):
        debt[node] = debt[large] + debt[small]
        size[node] = size[large] + size[small]
    low, high = _intervals(shares, children, debt)
    phases = [0] * len(shares)
    fitted = [0.0] * len(debt)
    for node in reversed(range(len(shares))):
        large, small, share = children[2 * node], children[2 * node + 1], shares[node]
        here = fitted[node]
        # The debt of this node was changed by `here - debt[node]`. Every source below it gets an
        # equal part of the change, as far as the intervals of both children allow.
        wanted = debt[small] - (debt[node] - here) * size[small] / size[node]
        wanted = max(wanted, low[small], here - high[large])
        wanted = min(wanted, high[small], here - low[large])
        offset = min(max(wanted - share * here, -_HALF), _HALF)
        phases[node] = min(int((offset + _HALF) * _WHOLE), _WHOLE - 1)
        fitted[small] = share * here + offset
        fitted[large] = here - fitted[small]
    return phases


def _intervals(
    shares: Sequence[float], children: Sequence[int], debt: Sequence[float]
) -> tuple[list[float], list[float]]:
    """Return the lowest and highest possible debts of all nodes and sources.

    The intervals belong to the smallest of the tried bounds for which valid debts exist.
    """
    error = [0.0] * len(debt)  # the largest rounding error of each node and source
    for node in reversed(range(len(shares))):
        large, small, share = children[2 * node], children[2 * node + 1], shares[node]
        error[small] = _HALF + share * error[node]
        error[large] = _HALF + (1 - share) * error[node]
    # No bound can be below the rounding. 2^-20 covers the inexact sums of floats below.
    worst, more = max(error), 2**-20
    while True:
        bound = worst + more
        low = [owed - bound + own for owed, own in zip(debt, error, strict=True)]
        high = [owed + bound - own for owed, own in zip(debt, error, strict=True)]
        if _fill_nodes(low, high, shares, children):
            return low, high
        more = 1.25 * more + 0.0625


def _fill_nodes(
    low: list[float], high: list[float], shares: Sequence[float], children: Sequence[int]
) -> bool:
    """Compute the intervals of nodes from those of sources; return whether the root's contains 0.

    With x and y the debts of the small and the large child, a split requires
    |(1 - share) * x - share * y| <= 1/2. Its highest debt is x + y with both children at their
    highest, unless one is too far ahead of the other: then that one is limited by the other.
    """
    for node, share in enumerate(shares):
        large, small, rest = children[2 * node], children[2 * node + 1], 1 - share
        low_x, high_x, low_y, high_y = low[small], high[small], low[large], high[large]
        # Even the extremes are too far apart: no debts within these intervals satisfy the split.
        if rest * high_x - share * low_y < -_HALF or rest * low_x - share * high_y > _HALF:
            return False
        ahead = rest * high_x - share * high_y
        if ahead > _HALF:
            high_x = (share * high_y + _HALF) / rest
        elif ahead < -_HALF:
            high_y = (rest * high_x + _HALF) / share
        ahead = rest * low_x - share * low_y
        if ahead < -_HALF:
            low_x = (share * low_y - _HALF) / rest
        elif ahead > _HALF:
            low_y = (rest * low_x - _HALF) / share
        low[node], high[node] = low_x + low_y, high_x + high_y
    root = len(shares) - 1
    return low[root] <= 0 <= high[root]


class Begin(NamedTuple):
    """A position where weights change: the start of a stage, or where a source reaches its cap."""

    position: int
    weights: Sequence[Weight]
    exact: Sequence[int]
    """The weights as integers in the same ratios."""
    counts: Integers
    """How many rows of each source come before the position."""
    debts: Integers

    def debts_at(self, position: int, counts: Integers) -> Integers:
        """Return the debts at a later position, before which each source had `counts` rows."""
        num_rows, drawn = position - self.position, counts - self.counts
        return debts_after(self.debts, self.exact, num_rows, drawn.tolist())
