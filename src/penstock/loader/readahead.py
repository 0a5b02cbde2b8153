"""Asking the disk for rows before they are wanted.

A row that is not in memory costs a wait: 0.1 ms on NVMe, 10 ms on a disk that turns, and
rows that lie all over a store wait one after the other. Named beforehand, hundreds of them
are fetched at once. Naming them costs about a microsecond a row also where all are in
memory, so by default it is done while the disk is felt: for some blocks after one in which
this thread had to wait for pages, and for more of them after more pages.
"""

import resource
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["ReadAhead"]

_LASTS = 64  # blocks, at most
_WHOSE = getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)  # macOS counts by process


class ReadAhead:
    """Whether rows are named to the kernel before they are read, and the naming of them."""

    def __init__(self, rows: list[Any], wanted: bool | None) -> None:
        self._rows = rows
        self._wanted = wanted
        self._left = 0
        self._faults = 0

    def begin(self) -> bool:
        """Whether to name the rows of the next block, before this one is read."""
        if self._wanted is not None:
            return self._wanted
        self._faults = _page_waits()
        return self._left > 0

    def end(self) -> None:
        """Say that a block was read, on the same thread as `begin`."""
        if self._wanted is None:
            waits = _page_waits() - self._faults
            self._left = max(min(_LASTS, 4 * waits), self._left - 1, 0)

    def name(self, located: NDArray[np.int64]) -> None:
        """Ask for the rows of a block; returns at once."""
        numbers, samples = located[0], located[2]
        for number in np.unique(numbers).tolist():
            read_ahead = getattr(self._rows[number], "read_ahead", None)
            if read_ahead is not None:
                read_ahead(samples[numbers == number])


def _page_waits() -> int:
    """How often this thread has waited for a page to come from a disk."""
    return resource.getrusage(_WHOSE).ru_majflt
