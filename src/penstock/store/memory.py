"""How much memory a build uses.

A build holds a bounded number of slices at once. Each process also has Python, its libraries and
tokenizers. Measured with GPT-2's tokenizer, by `benchmarks/build.py --scale --memory`, as the peak
of anonymous memory (mapped files do not count).
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import numpy as np


@cache
def keep_freed_memory() -> None:
    """Make malloc keep the memory of large arrays for the next ones; once per process.

    glibc returns freed memory to the system if it is more than twice the largest array that was
    freed before. Freeing one large array, which was never touched, raises that limit to 64 MiB
    (see M_MMAP_THRESHOLD in mallopt(3)). Without this, a build spent a tenth of its time on getting
    pages, and some loaders were a quarter slower.
    """
    np.empty((32 << 20) - (1 << 16), np.uint8)


@contextmanager
def arrow_from_malloc() -> Iterator[None]:
    """Let Arrow use malloc inside the `with` block, unless the user has chosen another allocator.

    Arrow's own allocator returns the memory of every block of text to the system, which clears all
    pages for the next one: a seventh of the time of a build of Parquet. malloc keeps them, after
    `keep_freed_memory`.
    """
    import pyarrow as pa

    if "ARROW_DEFAULT_MEMORY_POOL" in os.environ:
        yield
        return
    before = pa.default_memory_pool()
    pa.set_memory_pool(pa.system_memory_pool())
    try:
        yield
    finally:
        pa.set_memory_pool(before)


def num_slots(num_threads: int) -> int:
    """How many slices are in flight if `num_threads` are tokenized at once."""
    # One fourth more threads than may tokenize, plus one: the extra ones hash and write.
    return num_threads + 1 + num_threads // 4
