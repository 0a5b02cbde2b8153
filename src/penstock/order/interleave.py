"""Interleaving by weights, without a table.

Weights become a Huffman tree of two-way splits. A node that has dealt c rows has
given round(c * share) of them to its smaller child and the rest to the larger one,
with the share as an exact 64-bit fraction. So a position finds its source, and its
ordinal among that source's rows, on the way down the tree; and a source's ordinal
finds its position on the way up. Nothing is stored but the tree, and nothing repeats
after a period. Sources that are owed rows at the start, or were given too many, have
other roundings: floor(c * share + phase), with a phase for each split (see `phases`).

Every prefix holds each source within two rows of its weight. Write W(0), W(1), … for
the weights of a leaf and of its ancestors. A split rounds by at most 1/2 row, and of
the error m levels up only the part W(0) / W(m) reaches the leaf. Huffman merges the
two lightest, so a node's sibling is no lighter than the node's children: W(m) is at
least W(m-1) + W(m-2), and W(0) / W(m) at most 1/1, 1/1, 1/2, 1/3, 1/5, 1/8, … The
errors add up to half the sum of reciprocal Fibonacci numbers, 1.68 rows. Fractions
of 64 bits add less than 1/4 row below position 2^62, and the total is below two.
With phases the same holds, measured from the debts for which they stand.
"""

from collections.abc import Sequence
from functools import cached_property
from heapq import heapify, heappop, heappush
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.digest import Unsigned, constant
from penstock.errors import PlanError
from penstock.order.integers import END, Indices, Integers, as_unsigned
from penstock.order.phases import fit_phases
from penstock.order.weights import Weight, exact_weights

__all__ = ["Mix"]

_CHUNK_ROWS = 8_192  # arrays of 64 KiB: larger ones are mapped anew each time, and cost twice
_HALF = 2**63
_WHOLE = 2**64


_HALVES = constant(_HALF)
_LOW_WORD = constant(2**32 - 1)
_32, _63 = constant(32), constant(63)


class Mix:
    """A fixed mixture: position → (source, ordinal), and back.

    For every number of rows, from the first on, each source has had within two rows
    of its weight's share. A source of weight 0 is never drawn. Depends on the ratios
    of the weights and, between equal ones, on their order. Immutable, so threads may
    share it; a call costs O(log sources) a row.

    Args:
        weights: Shares of the rows, as ratios.
        debts: What each source is owed at the start, in rows. These add up to 0, and to be
            settled in full they must be small: see `penstock.order.phases`.

    >>> mix = Mix([0.5, 0.25, 0.25])
    >>> sources, ordinals = mix.at(range(8))
    >>> sources, ordinals
    (array([0, 1, 0, 2, 0, 1, 0, 2]), array([0, 0, 1, 0, 2, 1, 3, 1]))
    >>> mix.positions(0, [0, 1, 2, 3])
    array([0, 2, 4, 6])
    >>> mix.counts(1_000_001)
    [500001, 250000, 250000]
    """

    def __init__(self, weights: Sequence[Weight], debts: Sequence[float] | None = None) -> None:
        self.weights = exact_weights(weights)
        """The weights as integers in the same ratios."""
        self._total = sum(self.weights)
        shares, children = self._build(self.weights)
        self._shares = np.array(shares, dtype=np.uint64)
        self._children = np.array(children, dtype=np.int64)
        self._phases: Unsigned | None = None  # 1/2 at every split
        if debts is not None:
            fitted = fit_phases([share / _WHOLE for share in shares], children, debts)
            self._phases = np.array(fitted, dtype=np.uint64)

    def _build(self, weights: list[int]) -> tuple[list[int], list[int]]:
        """The smaller child's share of each node; and the large and small child of each."""
        # A leaf is ~source, a negative number; ties go to the lower source, then to the
        # node made first. Merging the two lightest makes the smaller child come first.
        heap = [(weight, source, ~source) for source, weight in enumerate(weights) if weight]
        heapify(heap)
        shares: list[int] = []
        children: list[int] = []
        while len(heap) > 1:
            (small_weight, _, small), (large_weight, _, large) = heappop(heap), heappop(heap)
            node, weight = len(shares), small_weight + large_weight
            shares.append(((small_weight << 65) // weight + 1) >> 1)  # rounded to 2^-64
            children += [large, small]
            heappush(heap, (weight, len(weights) + node, node))
        self._root = heap[0][2]
        return shares, children

    def at(self, positions: npt.ArrayLike) -> tuple[Integers, Integers]:
        """The source at each of `positions`, and how many rows of it came before.

        Positions are integers from 0 to 2^62 - 1, in any order.
        """
        numbers = as_unsigned(positions, END)
        if self._root < 0:
            return np.full(len(numbers), ~self._root, dtype=np.int64), numbers.view(np.int64)
        sources = np.empty(len(numbers), dtype=np.int64)
        for start in range(0, len(numbers), _CHUNK_ROWS):
            rows = slice(start, start + _CHUNK_ROWS)
            self._descend(numbers[rows], sources[rows])
        return sources, numbers.view(np.int64)

    def _descend(self, counters: Unsigned, sources: Integers) -> None:
        """Turn positions into ordinals in place, and write their sources."""
        remaining, nodes = counters, np.full(len(counters), self._root, dtype=np.int64)
        rows: Indices | None = None  # which rows remain; None is all of them
        while True:
            phases = None if self._phases is None else self._phases[nodes]
            small, before = _split(remaining, self._shares[nodes], phases)
            remaining = np.where(small, before, remaining - before)
            nodes = self._children[2 * nodes + small]
            arrived = nodes < 0
            if not arrived.any():
                continue
            if rows is None and arrived.all():
                sources[:], counters[:] = ~nodes, remaining
                return
            rows = rows if rows is not None else np.arange(len(counters))
            done = rows[arrived]
            sources[done], counters[done] = ~nodes[arrived], remaining[arrived]
            if len(done) == len(rows):
                return
            underway = ~arrived
            nodes, remaining, rows = nodes[underway], remaining[underway], rows[underway]

    def positions(self, source: int, ordinals: npt.ArrayLike) -> Integers:
        """The positions of a source's rows, numbered from 0: the inverse of `at`.

        Raises:
            PlanError: The source has no such row below position 2^62.
        """
        numbers = as_unsigned(ordinals, END)
        if numbers.size == 0:
            return numbers.view(np.int64)
        way = self._way_up(source)
        furthest = int(numbers.max())
        if way is None or _climb(way, furthest) >= END:
            raise PlanError(
                f"Source {source} has no row {furthest:,} below position {END:,} (2^62)."
            )
        # Products exceed 64 bits, so these are Python's integers in an array.
        climbed: npt.NDArray[Any] = _climb(way, numbers.astype(object))
        return climbed.astype(np.int64)

    def position(self, source: int, ordinal: int) -> int | None:
        """The position of one row of a source, however far; None where it never comes.

        >>> Mix([1, 1]).position(0, 10**30)
        2000000000000000000000000000000
        >>> Mix([1, 0]).position(1, 0) is None
        True
        """
        way = self._way_up(source)
        return None if way is None else int(_climb(way, ordinal))

    def not_before(self, source: int, ordinal: int) -> int:
        """A position that the row does not come before; cheaper to know than its own."""
        # A source is never four rows ahead of its weight: it begins at most 1.68 ahead, where
        # phases say so, and then keeps within two rows of that.
        return max(0, (ordinal - 3) * self._total // self.weights[source])

    def _way_up(self, source: int) -> list[tuple[int, int, bool]] | None:
        """The splits from a leaf to the root: share, phase, and whether it is the small child.

        None where the source is never drawn: its weight is 0, or a share on the way is so
        small that it rounds to 0.
        """
        if not self.weights[source]:
            return None
        way, node = [], ~source
        while node != self._root:
            slot = int(self._slots[node])
            node, is_small = slot // 2, slot % 2 == 1
            share = int(self._shares[node])
            phase = _HALF if self._phases is None else int(self._phases[node])
            if is_small and not share:
                return None
            way.append((share, phase, is_small))
        return way

    @cached_property
    def _slots(self) -> Integers:
        """Where in the list of children each node is; a source s at ~s, from the end."""
        slots = np.empty(len(self._shares) + len(self.weights), dtype=np.int64)
        slots[self._children] = np.arange(len(self._children))
        return slots

    def counts(self, num_rows: int) -> list[int]:
        """How many of the first `num_rows` rows belong to each source, in O(sources)."""
        if not 0 <= num_rows <= END:
            raise PlanError(f"A count of {num_rows:,} rows cannot be; it is 0 to 2^62.")
        num_nodes = len(self._shares)
        shares, children = self._shares.tolist(), self._children.tolist()
        phases = [_HALF] * num_nodes if self._phases is None else self._phases.tolist()
        counts = [0] * (num_nodes + len(self.weights))  # source s is at ~s, from the end
        counts[self._root] = num_rows
        # A parent is made after its children, so from the last on, parents come first.
        for node in reversed(range(num_nodes)):
            rows = counts[node]
            small = (rows * shares[node] + phases[node]) >> 64
            counts[children[2 * node + 1]] = small
            counts[children[2 * node]] = rows - small
        return counts[num_nodes:][::-1]


def _climb(way: list[tuple[int, int, bool]], ordinals: Any) -> Any:
    """Ordinals of a leaf to positions; for Python's integers, alone or in an array."""
    for share, phase, is_small in way:
        # The small child's row o is the first c at which (c + 1) * share + phase reaches
        # o + 1; the large child's is the last at which c * (1 - share) - phase stays at or
        # below o. Both in units of 2^-64.
        if is_small:
            ordinals = -((phase - (ordinals + 1) * _WHOLE) // share) - 1
        else:
            ordinals = (ordinals * _WHOLE + phase) // (_WHOLE - share)
    return ordinals


def _split(
    counters: Unsigned, shares: Unsigned, phases: Unsigned | None = None
) -> tuple[npt.NDArray[np.bool_], Unsigned]:
    """Whether row c goes to the small child, and how many rows before it did.

    With p = c * share + phase, in units of 2^-64: the whole part of p counts the rows
    before, and row c is one of them when one more share carries into the whole part.
    Without phases they are 1/2, which is 5 % faster: adding it carries with the highest bit.
    """
    product = counters * shares  # the lower 64 of its 128 bits
    before = _high_word(counters, shares)
    if phases is None:
        return product + _HALVES > ~shares, before + (product >> _63)
    product += phases
    return product > ~shares, before + (product < phases)


def _high_word(counters: Unsigned, shares: Unsigned) -> Unsigned:
    """The upper 64 bits of the products: schoolbook multiplication in 32-bit digits."""
    high, low = shares >> _32, shares & _LOW_WORD
    upper: Unsigned
    if int(counters.max()) < 2**32:
        upper = counters * high
        upper += counters * low >> _32
        upper >>= _32
        return upper
    # A counter is below 2^62 and a share at most 2^63, so no sum here reaches 2^64.
    digit, rest = counters >> _32, counters & _LOW_WORD
    middle = digit * low + (rest * low >> _32)
    lower = rest * high + (middle & _LOW_WORD)
    upper = digit * high
    upper += middle >> _32
    upper += lower >> _32
    return upper
