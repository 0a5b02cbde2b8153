"""Integer types and limits that the modules of this package share.

Positions are int64 in arguments and results. The arithmetic in between uses uint64, which
wraps around by definition on every platform and shifts without a sign. Every order ends at
2^62, so the sum of two positions never overflows; a run that reads a million rows per second
would take 146,000 years to get there.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from penstock.digest import Unsigned
from penstock.errors import PlanError
from penstock.ranges import Indices, Integers

__all__ = ["END", "Indices", "Integers", "as_unsigned", "check_starts", "label_pairs"]

END = 2**62
"""The largest number of rows. Every position and every sample is below it."""


def as_unsigned(values: npt.ArrayLike, end: int) -> Unsigned:
    """Return a copy of `values` as uint64; raise PlanError unless all are in [0, end).

    >>> as_unsigned([0, 7], end=8)
    array([0, 7], dtype=uint64)
    """
    numbers = np.asarray(values)
    if numbers.size == 0:
        return np.empty(numbers.shape, dtype=np.uint64)
    if numbers.dtype.kind not in "iu":
        raise PlanError(f"Positions and samples must be integers; got {numbers.dtype}.")
    # Negative numbers become huge ones, so a single comparison checks both ends of the range.
    unsigned = numbers.astype(np.uint64)
    if int(unsigned.max()) >= end:
        outside = int(numbers[unsigned >= np.uint64(end)][0])
        raise PlanError(f"{outside:,} is out of range: this order has rows 0 to {end - 1:,}.")
    return unsigned


def label_pairs(firsts: Integers, seconds: Integers) -> tuple[Indices, Integers, Integers]:
    """Number the distinct pairs; return each row's pair number, and both halves of each pair.

    Takes linear time if the second numbers that occur with each first number are close to each
    other, as the epochs of one source in one call are.

    >>> label_pairs(np.array([3, 0, 3]), np.array([7, 1, 7]))
    (array([1, 0, 1]), array([0, 3]), array([1, 7]))
    """
    if len(firsts) == 0:
        return np.empty(0, dtype=np.intp), firsts, seconds
    if (firsts == firsts[0]).all() and (seconds == seconds[0]).all():
        return np.zeros(len(firsts), dtype=np.intp), firsts[:1], seconds[:1]
    num_firsts = int(firsts.max()) + 1
    lowest = np.full(num_firsts, END, dtype=np.int64)
    np.minimum.at(lowest, firsts, seconds)
    offsets = seconds - lowest[firsts]
    width = int(offsets.max()) + 1
    # If the numbers are far apart, a table of all possible pairs would be large; sort instead.
    if num_firsts * width > 4 * len(firsts) + 4096:
        values, ranks = np.unique(seconds, return_inverse=True)
        distinct, which = np.unique(firsts * len(values) + ranks, return_inverse=True)
        return which, distinct // len(values), values[distinct % len(values)]
    # A pair is the cell (first, second - lowest) of a table with `width` columns. The number of
    # a pair is the number of occupied cells before its own.
    codes = firsts * width + offsets
    present = np.zeros(num_firsts * width, dtype=bool)
    present[codes] = True
    distinct = np.flatnonzero(present)
    numbers = np.cumsum(present) - 1
    first_of = distinct // width
    return numbers[codes], first_of, distinct % width + lowest[first_of]


def check_starts(starts: Sequence[int], origin: int = 0) -> None:
    """Raise PlanError unless the first stage begins at `origin` and the others in order."""
    if not starts or starts[0] != origin:
        first = f"begins at {starts[0]:,}" if starts else "is missing"
        raise PlanError(f"The first stage {first}; it must begin at position {origin:,}.")
    for before, start in pairwise(starts):
        if not before < start < END:
            raise PlanError(
                f"A stage that begins at {start:,} cannot follow one that begins at {before:,}: "
                "each must begin later than the one before it, and below 2^62."
            )
