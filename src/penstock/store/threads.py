"""Threads of this process that make slices, each a whole slice at a time.

NumPy, Arrow, gigatoken and xxhash all release the GIL. A semaphore limits how many threads
tokenize at once; a few more threads hash, write and wait for the disk while those tokenize. Nothing
is passed between threads.

In a live build, whose parts are read while others are built, one thread works alone as long as no
reader waits for it. Threads hold the GIL for part of their time, and a training loop needs the GIL
for every kernel that it launches. Beside sixteen threads, a training loop on an H200 ran at a
fifth of its speed. A single thread makes tokens far faster than a GPU uses them.
"""

import threading
from collections.abc import Callable

from penstock.store.job import Job
from penstock.store.journal import Journal
from penstock.store.memory import num_slots
from penstock.store.slice_work import (
    MadeSlice,
    Order,
    TokenizedSlice,
    Watch,
    sync_parts,
    tokenize,
    write_parts,
)
from penstock.store.waiting import WaitingReaders, lower_priority

Take = Callable[[], Order | None]
"""A function that returns the next slice to make; None if none is left."""


class ThreadRunner:
    """Makes slices in the thread that asks for them."""

    def __init__(self, job: Job, num_threads: int) -> None:
        self._job = job
        self.num_slots = num_slots(num_threads)
        # A slice holds about 30 MB of tokens, and the text too if its file is compressed. So this
        # also limits the memory of the build.
        self._tokenizing = threading.Semaphore(num_threads)
        self._first: TokenizedSlice | None = None
        """The first slice of a live build, until its documents are compared."""

    def make_next(self, slot: int, take: Take, watch: Watch) -> MadeSlice | None:
        """Take a slice and make its parts; see `penstock.store.runners.Runner`."""
        # Taken under the semaphore: a slice of a compressed file holds its text.
        with self._tokenizing:
            order = take()
            if order is None:
                return None
            done = tokenize(self._job, order, watch)
        if done.first is not None:
            self._first = done
        write_parts(done)
        return sync_parts(done)

    def tick(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to do: the threads belong to the caller."""


class LiveRunner(ThreadRunner):
    """Makes the slices of a live build, whose parts are read while others are built.

    The first slots make the first two slices at once, because rows at the end of the first part
    reach into the next. After that, all slots but the first wait until a reader does.
    """

    def __init__(self, job: Job, num_threads: int) -> None:
        super().__init__(job, num_threads)
        self._readers = WaitingReaders(Journal(job.directory))
        # Set while all slots are to take slices, and not the first one alone.
        self._hurry = threading.Event()
        self._has_worked: set[int] = set()  # slots
        self._ended = False  # whether a slot found nothing left to do, or failed

    def make_next(self, slot: int, take: Take, watch: Watch) -> MadeSlice | None:
        """Wait for the slot's turn, take a slice and make its parts."""
        made = None
        try:
            if slot > 1 or (slot == 1 and slot in self._has_worked):
                self._hurry.wait()
            if slot in self._has_worked:
                lower_priority()
            self._has_worked.add(slot)
            if self._first is not None:  # its part is sealed, and readers use it
                self._first.compare_first()
            made = super().make_next(slot, take, watch)
        finally:
            if made is None:
                self.close()
        return made

    def tick(self) -> None:
        """Let all slots work while a reader waits, or when a slot has ended."""
        wanted = self._ended or self._readers.hurry()
        (self._hurry.set if wanted else self._hurry.clear)()

    def close(self) -> None:
        """Let all slots continue: one that waits would not see that the build stops."""
        self._ended = True
        self._hurry.set()
