"""Threads of this process that make slices, each a whole slice at a time.

NumPy, Arrow, gigatoken and hashlib all release the GIL. A semaphore limits how many threads
tokenize at once; a few more threads hash, write and wait for the disk while those tokenize. Nothing
is passed between threads as long as slices are left. After that, see `penstock.store.idle`.

In a live build, whose parts are read while others are built, one thread works alone as long as no
reader waits for it. Threads hold the GIL for part of their time, and a training loop needs the GIL
for every kernel that it launches. Beside sixteen threads, a training loop on an H200 ran at a
fifth of its speed. A single thread makes tokens far faster than a GPU uses them.
"""

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

from penstock.store.idle import IdleThreads, encode_ahead
from penstock.store.job import Job
from penstock.store.journal import MANY_TOKENS, Journal
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
        self._idle = IdleThreads()

    def make_next(self, slot: int, take: Take, watch: Watch) -> MadeSlice | None:
        """Take a slice and make its parts; see `penstock.store.runners.Runner`."""
        # Taken under the semaphore: a slice of a compressed file holds its text.
        with ExitStack() as opened:
            with self._tokenizing:
                order = take()
                if order is None:
                    self._idle.help()
                    return None
                opened.enter_context(self._idle.open_slice())
                done = tokenize(self._job, order, watch, encode=self._idle.encode)
            digests = self._idle.offer(done.input_digests)
            write_parts(done)
            return sync_parts(done, partial(self._idle.result, digests))

    def add_threads(self, number: int) -> None:
        """Let more slices be tokenized at once."""
        self._tokenizing.release(number)

    def tick(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Let threads without a slice return; the threads belong to the caller."""
        self._idle.close()


class LiveRunner:
    """Makes the slices of a live build, whose parts are read while others are built.

    The first slot makes the first slice with helpers, before all others begin, so the first part is
    ready as soon as possible. The second slot makes the second slice while the first one writes,
    because rows at the end of a part reach into the next.
    """

    def __init__(self, job: Job, num_threads: int) -> None:
        self._job = job
        self._num_threads = num_threads
        self.num_slots = num_slots(num_threads)
        self._tokenizing = threading.Semaphore(num_threads)
        self._journal = Journal(job.directory)
        self._journal.await_readers()
        self._readers = WaitingReaders(self._journal)
        # Set when the first slice is made, and other slots may take the next ones.
        self._begun = threading.Event()
        # Set while all slots are to take slices, and not the first one alone.
        self._hurry = threading.Event()
        self._has_worked: set[int] = set()  # slots
        self._announced: set[int] = set()  # slices that have many tokens
        self._ended = False  # whether a slot found nothing left to do, or failed
        self._readable: float | None = None  # when the first part was announced

    def make_next(self, slot: int, take: Take, watch: Watch) -> MadeSlice | None:
        """Wait for the slot's turn, take a slice and make its parts."""
        made = None
        try:
            is_first = slot not in self._has_worked
            self._has_worked.add(slot)
            self._await_turn(slot, is_first)
            made = self._make(take, watch, self._num_threads if slot == 0 and is_first else 0)
        finally:
            if made is None:
                self.close()
        return made

    def _await_turn(self, slot: int, is_first: bool) -> None:
        if slot > 0 or not is_first:
            self._begun.wait()
        if slot > 1 or (slot == 1 and not is_first):
            self._hurry.wait()
        if self._begun.is_set():
            lower_priority()

    def _make(self, take: Take, watch: Watch, num_helpers: int) -> MadeSlice | None:
        with self._tokenizing:
            order = take()
            if order is None:
                return None
            encode = partial(encode_ahead, num_threads=num_helpers) if num_helpers > 1 else None
            done = tokenize(self._job, order, watch, encode=encode, on_batch=self._announce_many)
        self._begun.set()
        write_parts(done)
        # Before the fsyncs, so that no reader waits for the disk.
        self._journal.announce(done.record)
        self._readable = self._readable or time.monotonic()
        made = sync_parts(done)
        # Under the semaphore: one more call at the same time would load another tokenizer.
        with self._tokenizing:
            done.compare_first()
        return made

    def _announce_many(self, done: TokenizedSlice) -> None:
        if done.num_tokens > MANY_TOKENS and done.record.number not in self._announced:
            self._announced.add(done.record.number)
            self._journal.announce_many(done.record.number)

    def tick(self) -> None:
        """Let all slots work while a reader waits, or when a slot has ended."""
        wanted = self._ended or self._readers.hurry(self._readable)
        (self._hurry.set if wanted else self._hurry.clear)()

    def close(self) -> None:
        """Let all slots continue: one that waits would not see that the build stops."""
        self._ended = True
        self._begun.set()
        self._hurry.set()
