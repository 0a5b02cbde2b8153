"""Interleaving sources by weights, without a table.

The weights become a Huffman tree of two-way splits. A node that has passed on c rows has given
round(c * share) of them to its smaller child and the rest to its larger child; the share is an
exact 64-bit fraction. So the way down the tree computes the source of a position and its ordinal,
which is its index among the rows of that source. The way up the tree computes the position of an
ordinal. Only the tree is stored, and the pattern has no period.

    weights 0.5, 0.25, 0.25             root: small = A, share 1/2; large = the other node
                                        node: small = B, share 1/2; large = C
    position  0  1  2  3  4  5  6  7
    source    A  B  A  C  A  B  A  C    (which child is small is decided by weight, then order)

If sources have debts at the start (see `schedule`), splits round differently:
floor(c * share + phase), with a phase for each split (see `settle`).

In every prefix, the row count of each source is within two rows of its share. Proof: write W(0),
W(1), … for the weights of a leaf and of its ancestors. A split rounds by at most 1/2 row, and of
the error m levels up only the part W(0) / W(m) reaches the leaf. Huffman merges the two lightest,
so a node's sibling is no lighter than the node's children: W(m) is at least W(m-1) + W(m-2), and
W(0) / W(m) at most 1/1, 1/1, 1/2, 1/3, 1/5, 1/8, … The errors add up to half the sum of reciprocal
Fibonacci numbers, 1.68 rows. Fractions of 64 bits add less than 1/4 row below position 2^62, and
the total is below two. With phases the same is true, measured from the debts that they represent.
"""

from collections.abc import Sequence
from functools import cached_property
from heapq import heapify, heappop, heappush

import numpy as np
import numpy.typing as npt

from penstock.digest import Unsigned, constant
from penstock.order.integers import END, Indices, Integers, as_unsigned
from penstock.order.settle import fit_phases
from penstock.order.weights import Weight, exact_weights

# Arrays of 64 KiB. malloc gets larger ones from the kernel each time, which doubles the time.
_CHUNK_ROWS = 8_192
_HALF = 2**63  # 1/2 and 1 in units of 2^-64
_WHOLE = 2**64
_HALVES = constant(_HALF)
_LOW_WORD = constant(2**32 - 1)
_32, _63 = constant(32), constant(63)


class Mix:
    """A mixture with fixed weights: maps positions to (source, ordinal), and back.

    The ordinal of a row is its index among the rows of its source. In every prefix, the row count
    of each source is within two rows of its share. A source with weight 0 is never drawn. The
    result depends on the ratios of the weights and, for equal weights, on their order. Immutable,
    so threads may share it. A call costs O(log sources) per row.

    Args:
        weights: Shares of the rows, as ratios.
        debts: The debt of each source at the start: how many rows it should have had before by
            its weights, minus how many it has had. The sum must be 0. Only small debts can be
            settled completely: see `penstock.order.settle`.

    >>> mix = Mix([0.5, 0.25, 0.25])
    >>> sources, ordinals = mix.at(range(8))
    >>> sources, ordinals
    (array([0, 1, 0, 2, 0, 1, 0, 2]), array([0, 0, 1, 0, 2, 1, 3, 1]))
    >>> [mix.position(0, ordinal) for ordinal in range(4)]
    [0, 2, 4, 6]
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
        self._phases: Unsigned | None = None  # None means 1/2 at every split
        if debts is not None:
            fitted = fit_phases([share / _WHOLE for share in shares], children, debts)
            self._phases = np.array(fitted, dtype=np.uint64)

    def _build(self, weights: list[int]) -> tuple[list[int], list[int]]:
        """Return the smaller child's share of each node, and both children of each node.

        The children of node n are at 2 * n (larger) and 2 * n + 1 (smaller). Source s is ~s.
        """
        # Ties go to the lower source, then to the node created first. The heap gives the lightest
        # first, so the first of each pair is the smaller child.
        heap = [(weight, source, ~source) for source, weight in enumerate(weights) if weight]
        heapify(heap)
        shares: list[int] = []
        children: list[int] = []
        while len(heap) > 1:
            (small_weight, _, small), (large_weight, _, large) = heappop(heap), heappop(heap)
            node, weight = len(shares), small_weight + large_weight
            # small / weight in units of 2^-64: computed with one bit more, then rounded.
            shares.append(((small_weight << 65) // weight + 1) >> 1)
            children += [large, small]
            heappush(heap, (weight, len(weights) + node, node))
        self._root = heap[0][2]
        return shares, children

    def at(self, positions: npt.ArrayLike) -> tuple[Integers, Integers]:
        """Return the source at each of `positions`, and how many rows of that source come before.

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
        """Replace positions by ordinals, in place, and write their sources.

        All rows go down the tree one level at a time. Rows that have reached a leaf are written
        out and removed from `nodes`, `remaining` and `rows`.
        """
        remaining, nodes = counters, np.full(len(counters), self._root, dtype=np.int64)
        rows: Indices | None = None  # the rows that are not at a leaf yet; None means all
        while True:
            phases = None if self._phases is None else self._phases[nodes]
            small, before = _split(remaining, self._shares[nodes], phases)
            remaining = np.where(small, before, remaining - before)
            nodes = self._children[2 * nodes + small]
            arrived = nodes < 0
            if not arrived.any():
                continue
            # With few sources, all rows usually reach a leaf together. Then no indices are needed.
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

    def position(self, source: int, ordinal: int) -> int | None:
        """Return the position of one row of a source: the inverse of `at`.

        The position may be above 2^62, because Python's integers have no limit. None if the row is
        never drawn.

        >>> Mix([1, 1]).position(0, 10**30)
        2000000000000000000000000000000
        >>> Mix([1, 0]).position(1, 0) is None
        True
        """
        if not self.weights[source]:
            return None
        node = ~source
        # From the leaf up to the root.
        while node != self._root:
            slot = int(self._slots[node])
            node, is_small = slot // 2, slot % 2 == 1
            share = int(self._shares[node])
            phase = _HALF if self._phases is None else int(self._phases[node])
            # Row o of the small child is the first row c of its parent at which
            # (c + 1) * share + phase reaches o + 1. Row o of the large child is the last row c at
            # which c * (1 - share) - phase is at most o. Both in units of 2^-64.
            if not is_small:
                ordinal = (ordinal * _WHOLE + phase) // (_WHOLE - share)
            elif share:
                ordinal = -((phase - (ordinal + 1) * _WHOLE) // share) - 1
            else:
                return None  # a share so small that it is rounded to 0
        return ordinal

    def not_before(self, source: int, ordinal: int) -> int:
        """Return a lower bound of the position of a row; much cheaper than the position."""
        # A source is never four rows ahead of its share: with phases it begins at most 1.68 rows
        # ahead, and then stays within two rows of that. So row o is not drawn before its share of
        # the rows is o - 3.
        return max(0, (ordinal - 3) * self._total // self.weights[source])

    @cached_property
    def _slots(self) -> Integers:
        """The index of each node in the list of children; source s is at ~s, from the end."""
        slots = np.empty(len(self._shares) + len(self.weights), dtype=np.int64)
        slots[self._children] = np.arange(len(self._children))
        return slots

    def counts(self, num_rows: int) -> list[int]:
        """Return how many of the first `num_rows` rows belong to each source, in O(sources)."""
        num_nodes = len(self._shares)
        shares, children = self._shares.tolist(), self._children.tolist()
        phases = [_HALF] * num_nodes if self._phases is None else self._phases.tolist()
        counts = [0] * (num_nodes + len(self.weights))  # source s is at ~s, from the end
        counts[self._root] = num_rows
        # A parent has a higher number than its children, so this visits parents first.
        for node in reversed(range(num_nodes)):
            rows = counts[node]
            small = (rows * shares[node] + phases[node]) >> 64
            counts[children[2 * node + 1]] = small
            counts[children[2 * node]] = rows - small
        return counts[num_nodes:][::-1]


def _split(
    counters: Unsigned, shares: Unsigned, phases: Unsigned | None = None
) -> tuple[npt.NDArray[np.bool_], Unsigned]:
    """Return whether row c goes to the small child, and how many rows before it did.

    With p = c * share + phase, in units of 2^-64: the whole part of p is the number of earlier rows
    that did, and row c goes to the small child if adding one more share carries into the whole
    part. Phases of 1/2 have separate code that is 5 % faster: adding 1/2 carries if and only if
    the highest bit is set.
    """
    product = counters * shares  # the lower 64 of the product's 128 bits
    before = _high_word(counters, shares)
    if phases is None:
        # x + share carries if x > 2^64 - 1 - share, which is ~share.
        return product + _HALVES > ~shares, before + (product >> _63)
    product += phases
    return product > ~shares, before + (product < phases)


def _high_word(counters: Unsigned, shares: Unsigned) -> Unsigned:
    """Return the upper 64 bits of the products, by long multiplication with 32-bit digits."""
    high, low = shares >> _32, shares & _LOW_WORD
    upper: Unsigned
    # One digit is enough for the first 4 billion rows, with half the operations.
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
