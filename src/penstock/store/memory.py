"""What malloc is asked for."""

from functools import cache

import numpy as np

__all__ = ["keep_freed_memory"]


@cache
def keep_freed_memory() -> None:
    """Have malloc keep the memory of large arrays for the next ones, once in a process.

    glibc gives freed memory back to the system when it is more than twice the largest array
    that was freed before, and an array that needs it again waits for every page of it. After
    one large array, never touched, that is 64 MiB (see M_MMAP_THRESHOLD in mallopt(3)). Without
    it, a tenth of a build was spent on pages, and loaders were up to a quarter slower, by chance.
    """
    np.empty((32 << 20) - (1 << 16), np.uint8)
