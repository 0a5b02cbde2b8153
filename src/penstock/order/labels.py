"""Telling apart the few orders that many rows belong to.

A call for 65,536 rows touches some sources, and one or two epochs of each. Every such
pair has a key of its own, which costs microseconds to derive; so rows are labelled
with the number of their pair, and keys are made once a pair. Sorting the rows to find
the pairs would cost more than shuffling them: 75 ns a row against 15.
"""

import numpy as np

from penstock.order.integers import END, Indices, Integers

__all__ = ["label_pairs"]


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
