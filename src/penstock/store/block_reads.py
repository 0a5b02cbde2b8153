"""Reading many blocks of mapped files, so that their checksums can be compared.

    blocks that are needed     3 4   6          40 41 42 …
    runs that are read       │ 3 4 5 6 │      │ 40 41 42 … │

Blocks that are close to each other are one run: a disk, and the kernel, take about as long for
512 KiB as for 64 KiB, and a shuffled epoch needs the blocks in between soon. So more blocks in
between are read if few blocks are read in all: then a small store is read in a few long runs.
The kernel loads runs while earlier ones are checked. Several threads check long runs: a checksum
releases the GIL, and so does the wait for a page that is not in memory yet.
"""

import mmap
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from typing import NamedTuple

from penstock.disk import BLOCK_BYTES, MappedFile
from penstock.errors import StoreError
from penstock.options import num_cores
from penstock.ranges import Integers

# 4 MiB. With 1 MiB, a shuffled epoch from a cold disk took a tenth more processor time.
_MOST_BLOCKS = 64
# Blocks in a row that are read although nobody needs them now. With 2 instead of 8, an epoch of
# shuffled rows from a cold disk took longer: it had four times as many requests.
_MOST_BETWEEN = 8
_MOST_BETWEEN_FEW = 32
# 256 MiB, which a disk delivers in a fraction of a second. A batch of a larger store must not wait
# for more than it needs.
_FEW_BLOCKS = 4096
# Threads compete for the GIL, which takes longer than a checksum of a few blocks.
_LONG = 4
_MOST_THREADS = 4
# The operating system Windows has no madvise, so blocks are not requested there.
_WILL_NEED: int | None = getattr(mmap, "MADV_WILLNEED", None)


class Run(NamedTuple):
    """Blocks of one file that are read together."""

    part: int
    first: int
    stop: int
    needed: list[int]
    """Those of the blocks that must be good."""

    @property
    def span(self) -> slice:
        """The bytes of the file; the last block of a file may be shorter."""
        return slice(self.first * BLOCK_BYTES, self.stop * BLOCK_BYTES)


def runs_of(needed: Sequence[tuple[int, Integers]]) -> list[Run]:
    """The runs that hold some blocks of some parts; the blocks of a part ascend.

    >>> import numpy as np
    >>> [run[1:] for run in runs_of([(0, np.array([3, 4, 6, 40]))])]
    [(3, 7, [3, 4, 6]), (40, 41, [40])]
    """
    for between in (_MOST_BETWEEN_FEW, _MOST_BETWEEN):
        found = [run for part, blocks in needed for run in _joined(part, blocks, between)]
        if sum(run.stop - run.first for run in found) <= _FEW_BLOCKS:
            break
    return found


def _joined(part: int, blocks: Integers, between: int) -> Iterator[Run]:
    """Join blocks with at most `between` others between them, up to the longest run."""
    first = 0
    numbers = blocks.tolist()
    for at, block in enumerate(numbers):
        following = numbers[at + 1] if at + 1 < len(numbers) else None
        # The next block is far away, or would make the run too long.
        if (
            following is None
            or following > block + 1 + between
            or following >= numbers[first] + _MOST_BLOCKS
        ):
            yield Run(part, numbers[first], block + 1, numbers[first : at + 1])
            first = at + 1


def request_runs(runs: Sequence[tuple[MappedFile, Run]]) -> None:
    """Ask the kernel to load runs; return without waiting.

    A page that is missing when it is used is loaded with its neighbours, up to 8 MB of them, while
    the thread waits. Requests have no neighbours, and many are served at a time.
    """
    if _WILL_NEED is not None:
        for file, run in runs:
            size = min(run.span.stop, file.size) - run.span.start
            file.mapping.madvise(_WILL_NEED, run.span.start, size)


@cache
def _most_threads() -> int:
    """How many threads check runs: on two cores, more than two only took processor time."""
    return min(_MOST_THREADS, num_cores())


def check_runs(runs: Sequence[Run], check: Callable[[Run], None]) -> list[tuple[Run, StoreError]]:
    """Call `check` with each run, in this thread and others; return the runs that failed, in order.

    An error that is not a StoreError is raised.
    """
    left: Iterator[tuple[int, Run]] = iter(enumerate(runs))
    lock, failed = threading.Lock(), dict[int, Exception]()

    def work() -> None:
        while True:
            with lock:
                number, run = next(left, (0, None))
            if run is None:
                return
            try:
                check(run)
            except Exception as error:  # noqa: BLE001  (raised below, or by the caller)
                failed[number] = error

    number = min(_most_threads(), sum(run.stop - run.first >= _LONG for run in runs)) - 1
    helpers: list[threading.Thread] = []
    try:
        # RuntimeError: the process may not have more threads, or it is about to end.
        with suppress(RuntimeError):
            while len(helpers) < number:
                thread = threading.Thread(target=work, name="penstock-check", daemon=True)
                thread.start()
                helpers.append(thread)
        work()
    finally:
        with lock:
            left = iter(())  # after an interrupt, the other threads stop
        for each in helpers:
            each.join()
    found: list[tuple[Run, StoreError]] = []
    for at in sorted(failed):
        error = failed[at]
        if not isinstance(error, StoreError):
            raise error
        found.append((runs[at], error))
    return found
