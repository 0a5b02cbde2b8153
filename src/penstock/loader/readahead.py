"""Deciding when to ask the disk for rows before they are read.

A row that is not in memory costs a wait: 0.1 ms on NVMe, 10 ms on a rotating disk. Random rows
wait one after the other, but the kernel loads hundreds at the same time if it knows them. Telling
it costs about a microsecond per row, also if all rows are in memory. So rows are only announced
after a block in which this thread had to wait for pages: for some blocks, and for more blocks
after more waits.
"""

import sys

__all__ = ["ReadAhead"]

_MOST_BLOCKS = 64
_BLOCKS_PER_WAIT = 4


class ReadAhead:
    """Counts waits for the disk, and decides whether to announce the rows of the next block."""

    def __init__(self) -> None:
        self._left = 0  # blocks to announce
        self._waits = 0

    def begin(self) -> bool:
        """Return whether to announce the next block; call it before a block is read."""
        self._waits = _page_waits()
        return self._left > 0

    def end(self) -> None:
        """Count the waits of a block; call it after the block, on the same thread as `begin`."""
        waits = _page_waits() - self._waits
        self._left = max(min(_MOST_BLOCKS, _BLOCKS_PER_WAIT * waits), self._left - 1, 0)


def _page_waits() -> int:
    """Return how often this thread has waited for a page from a disk."""
    if sys.platform == "win32":  # which does not count page faults, so no row is announced there
        return 0
    import resource

    # macOS counts page faults by process only.
    whose = resource.RUSAGE_THREAD if sys.platform == "linux" else resource.RUSAGE_SELF
    return resource.getrusage(whose).ru_majflt
