"""The integers that this package computes with.

Positions come in and go out as int64. In between they are unsigned: those wrap around
by definition, on every platform, and shift without a sign. 2^62 is the end of every
order, so that sums of two never leave 64 bits; at a million rows a second it is
146,000 years away.
"""

import numpy as np
import numpy.typing as npt

from penstock.digest import Unsigned
from penstock.errors import PlanError

__all__ = ["END", "Indices", "Integers", "as_unsigned", "label_pairs"]

Integers = npt.NDArray[np.int64]
Indices = npt.NDArray[np.intp]

END = 2**62
"""Every position, sample and number of rows is below this or equal to it."""


def as_unsigned(values: npt.ArrayLike, end: int) -> Unsigned:
    """A copy of `values` as unsigned integers, all of them below `end`.

    >>> as_unsigned([0, 7], end=8)
    array([0, 7], dtype=uint64)
    """
    numbers = np.asarray(values)
    if numbers.size == 0:
        return np.empty(numbers.shape, dtype=np.uint64)
    if numbers.dtype.kind not in "iu":
        raise PlanError(f"Positions and samples are integers; these are {numbers.dtype}.")
    unsigned = numbers.astype(np.uint64)  # negative numbers become huge ones
    if int(unsigned.max()) >= end:
        outside = int(numbers[unsigned >= np.uint64(end)][0])
        raise PlanError(f"{outside:,} is out of range: this order has rows 0 to {end - 1:,}.")
    return unsigned


def label_pairs(firsts: Integers, seconds: Integers) -> tuple[Indices, Integers, Integers]:
    """Number the distinct pairs: the number of each row's pair, and the pairs.

    In time linear in the rows where the pairs of each first lie close together, as
    the epochs of one source do in one call.

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
    if num_firsts * width > 4 * len(firsts) + 4096:
        return _label_far_pairs(firsts, seconds)
    codes = firsts * width + offsets
    present = np.zeros(num_firsts * width, dtype=bool)
    present[codes] = True
    distinct = np.flatnonzero(present)
    numbers = np.cumsum(present) - 1
    first_of = distinct // width
    return numbers[codes], first_of, distinct % width + lowest[first_of]


def _label_far_pairs(firsts: Integers, seconds: Integers) -> tuple[Indices, Integers, Integers]:
    values, ranks = np.unique(seconds, return_inverse=True)
    distinct, which = np.unique(firsts * len(values) + ranks, return_inverse=True)
    return which, distinct // len(values), values[distinct % len(values)]
