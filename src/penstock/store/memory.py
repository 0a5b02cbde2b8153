"""How much memory a build uses, and how many slices fit into a limit.

A build holds a bounded number of slices at once. Each process also has Python, its libraries and
tokenizers. Measured with GPT-2's tokenizer, by `benchmarks/build.py --scale --memory`, as the peak
of anonymous memory (mapped files do not count).
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

from penstock.errors import StoreError

PROCESS_BYTES = 300_000_000
"""What a process needs without slices."""
SLICE_BYTES_IN_MEMORY = 200_000_000
"""What a slice needs at most while it is read, tokenized and written, if no document is longer than
a slice. A longer document needs four times its length."""
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY_UNITS = {unit: 1024**power for power, unit in enumerate(["", "K", "M", "G", "T"])}


def parse_size(size: int | str) -> int:
    """A number of bytes, as a number or as text.

    >>> parse_size("8GB"), parse_size("1.5 GiB"), parse_size(4_000_000_000)
    (8000000000, 1610612736, 4000000000)
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(I?)B?", str(size).upper())
    if found is None or (found[3] and not found[2]):
        raise StoreError(
            f"memory={size!r} (--memory) is not a size. Write a number of bytes, or a text such as "
            '"8GB" or "8GiB".'
        )
    return int(float(found[1]) * (_BINARY_UNITS if found[3] else _UNITS)[found[2]])


@contextmanager
def arrow_from_malloc() -> Iterator[None]:
    """Let Arrow use malloc inside the `with` block, unless the user has chosen another allocator.

    Arrow's own allocator returns the memory of every block of text to the system, which clears all
    pages for the next one: a seventh of the time of a build of Parquet. malloc keeps them, after
    `penstock.store.files.keep_freed_memory`.
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


def needed_bytes(num_threads: int, threads_each: int) -> int:
    """The memory of a build that tokenizes `num_threads` slices at once.

    Args:
        num_threads: The slices of all processes.
        threads_each: The slices of one process; the last process may have fewer.
    """
    whole, rest = divmod(num_threads, threads_each)
    counts = [threads_each] * whole + [rest] * (rest > 0)
    return sum(PROCESS_BYTES + num_slots(count) * SLICE_BYTES_IN_MEMORY for count in counts)


def fitting_threads(memory: int | str | None, num_threads: int, threads_each: int) -> int:
    """How many slices may be tokenized at once, at most `num_threads`, within `memory`.

    Raises:
        StoreError: not even one fits.
    """
    if memory is None:
        return num_threads
    limit = parse_size(memory)
    for count in range(num_threads, 0, -1):
        if needed_bytes(count, min(count, threads_each)) <= limit:
            return count
    least = needed_bytes(1, 1)
    raise StoreError(
        f"memory={memory!r} (--memory) is less than the {least:,} bytes that a build needs for one "
        "slice at a time. Allow more."
    )
