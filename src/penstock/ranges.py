"""Ranges and groups of numbers in arrays, without loops over their elements; whole numbers."""

from collections.abc import Iterator
from itertools import pairwise
from operator import index
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from penstock.errors import PlanError

Integers = npt.NDArray[np.int64]
Indices = npt.NDArray[np.intp]
_Int = TypeVar("_Int", bound=np.signedinteger)


def ranges(firsts: npt.NDArray[_Int], counts: npt.NDArray[_Int]) -> Integers:
    """Return several ranges of numbers, concatenated: `counts[i]` numbers from `firsts[i]` on.

    >>> ranges(np.array([5, 9]), np.array([2, 3]))
    array([ 5,  6,  9, 10, 11])
    """
    # Number i of the result is i plus a shift, with one shift per range: here 5 5 | 7 7 7.
    shifts = firsts - np.cumsum(counts) + counts
    numbers = np.arange(int(counts.sum()), dtype=np.int64)
    numbers += np.repeat(shifts, counts)
    return numbers


def distinct(numbers: Integers) -> Integers:
    """Return the different numbers, ascending, as `np.unique` does.

    `np.unique` imports `numpy.ma` in its first call, which takes 30 ms of the first batch.

    >>> distinct(np.array([7, 2, 7]))
    array([2, 7])
    """
    ascending = np.sort(numbers)
    is_first = np.ones(len(ascending), bool)
    is_first[1:] = ascending[1:] != ascending[:-1]
    found: Integers = ascending[is_first]
    return found


def whole_number(name: str, value: object) -> int:
    """The value of an argument as an int.

    Raises:
        PlanError: The value is not a whole number. The message names the argument.
    """
    try:
        if not isinstance(value, bool):
            return index(value)  # type: ignore[arg-type]
    except TypeError:
        pass
    raise PlanError(f"{name}={value!r:.80} is not a whole number.")


def group_rows(numbers: Integers | Indices) -> Iterator[tuple[int, Indices | slice]]:
    """Yield each number that occurs in `numbers`, and the indices at which it occurs.

    >>> [(number, rows.tolist()) for number, rows in group_rows(np.array([5, 2, 5]))]
    [(2, [1]), (5, [0, 2])]
    """
    if not numbers.size:
        return
    # Numbers of consecutive positions are often sorted already. Then no sort is needed, and slices
    # avoid copies.
    if (numbers[1:] >= numbers[:-1]).all():
        borders = np.flatnonzero(numbers[1:] != numbers[:-1]) + 1
        for start, stop in pairwise([0, *borders.tolist(), len(numbers)]):
            yield int(numbers[start]), slice(start, stop)
        return
    # NumPy sorts 16-bit integers by radix sort, ten times as fast as 64-bit integers.
    narrow = np.uint16 if int(numbers.max()) < 2**16 else np.int64
    order = np.argsort(numbers.astype(narrow), kind="stable")
    grouped = numbers[order]
    for rows in np.split(order, np.flatnonzero(grouped[1:] != grouped[:-1]) + 1):
        yield int(numbers[rows[0]]), rows


def checked_rows(samples: Integers, num_rows: int) -> Integers:
    """Return row numbers as an array; raise IndexError unless all are in [0, num_rows)."""
    numbers = np.asarray(samples, np.int64)
    # As unsigned integers, negative numbers are larger than any `num_rows`.
    if len(numbers) and numbers.view(np.uint64).max() >= num_rows:
        raise IndexError(
            f"rows {numbers.min():,} to {numbers.max():,} were requested, but there are "
            f"{num_rows:,} rows, numbered from 0"
        )
    return numbers
