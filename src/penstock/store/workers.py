"""Slices through the pipeline, several at a time.

A worker takes the next slice and carries it from reading to fsync alone: nothing is
handed between threads, and NumPy, Arrow, gigatoken and hashlib all work without the
interpreter lock. As many tokenize at once as there are threads to use; a few workers more
hash, write and wait for the disk meanwhile. Whoever finishes first seals first; the order
of parts is that of slices, not of time.

Of a build whose parts are read meanwhile, one worker alone works while nobody waits for it
(`penstock.store.live`).
"""

import itertools
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from penstock.errors import TokenMismatchError
from penstock.sources.document import Batch, Reject, Tally
from penstock.sources.slices import Slice
from penstock.store.comparison import Comparison
from penstock.store.explain import log_rules
from penstock.store.files import keep_freed_memory, sync_directory, sync_file
from penstock.store.holdout import SIDES
from penstock.store.job import Job, Progress, refuse_bad
from penstock.store.journal import MANY_TOKENS, Journal, SealedSlice
from penstock.store.live import Readers, give_way
from penstock.store.manifest import part_file
from penstock.store.part import Encoded, PartBuilder

__all__ = ["run"]


@dataclass(slots=True)
class _Shared:
    """What workers share; what several of them change, under one lock."""

    slices: Iterator[Slice]
    comparison: Comparison
    tokenizing: threading.Semaphore
    stop: threading.Event
    lock: threading.Lock = field(default_factory=threading.Lock)
    reading_lock: threading.Lock = field(default_factory=threading.Lock)
    wake: threading.Event = field(default_factory=threading.Event)
    begun: threading.Event = field(default_factory=threading.Event)
    """Set when the first slice is made, and others may take the next ones."""
    hurry: threading.Event = field(default_factory=threading.Event)
    """Set while all workers are to take slices, and not the first alone."""
    ended: bool = False
    """Whether a worker found nothing left to do, or failed."""
    readable: float | None = None
    """When the first part that is read meanwhile was announced."""
    sealed: dict[int, SealedSlice] = field(default_factory=dict)
    num_slices: int = 0
    """Cut so far; only touched under `reading_lock`."""
    error: BaseException | None = None
    done_bytes: int = 0
    text_bytes: int = 0
    num_documents: int = 0
    num_tokens: int = 0

    def advance(self, disk_bytes: int) -> None:
        """Count bytes of the input as done, for showing progress."""
        with self.lock:
            self.done_bytes += disk_bytes


class _Stopped(Exception):  # noqa: N818  (not an error: another worker failed, or Ctrl-C)
    """The build was told to stop."""


def run(
    job: Job,
    slices: Iterator[Slice],
    sealed: list[SealedSlice],
    *,
    num_threads: int,
    progress: Callable[[Progress], None] | None = None,
) -> list[SealedSlice]:
    """Process all slices that are not sealed yet; returns the records of all, in order.

    Any error stops the others at the next block; what is sealed by then stays. Returns
    within about a second after an interrupt, whatever the workers are doing.
    """
    keep_freed_memory()
    journal = Journal(job.directory)
    shared = _Shared(
        slices,
        Comparison(job),
        tokenizing=threading.Semaphore(num_threads),
        stop=job.stop,
        sealed={record.number: record for record in sealed},
    )
    shared.num_tokens = sum(p.num_tokens for r in sealed for p in r.parts.values())
    shared.num_documents = sum(record.tally.documents for record in sealed)
    shared.text_bytes = sum(record.tally.total_bytes for record in sealed)
    refuse_bad(job.files, job.max_bad, shared.sealed)
    if job.live:
        journal.await_readers()
    else:
        shared.begun.set()
        shared.hurry.set()
    readers = Readers(journal)
    workers = [
        threading.Thread(
            target=_work,
            args=(job, shared, journal, i, num_threads if i == 0 and job.live else 0),
            daemon=True,
            name=f"build-{i}",
        )
        for i in range(num_threads + 1 + num_threads // 4)
    ]
    for worker in workers:
        worker.start()
    total_bytes = sum(file.size for file in job.files)
    try:
        while any(worker.is_alive() for worker in workers):
            shared.wake.wait(0.1)
            shared.wake.clear()
            if job.live:
                wanted = shared.ended or readers.wait(shared.readable)
                (shared.hurry.set if wanted else shared.hurry.clear)()
            if progress:
                progress(_progress(shared, total_bytes))
    finally:
        shared.stop.set()
        shared.hurry.set()
        # Daemon threads: one that is deep in a gigabyte document does not hold up the exit.
        for worker in workers:
            worker.join(timeout=1.0 / len(workers))
    if isinstance(shared.error, TokenMismatchError):
        # Other slices may hold wrong ids too, and the same build with engine="tokenizers" would
        # keep those that are sealed.
        journal.forget()
    if shared.error is not None:
        raise shared.error
    return [shared.sealed[number] for number in range(shared.num_slices) if number in shared.sealed]


def _progress(shared: _Shared, total_bytes: int) -> Progress:
    with shared.lock:
        rejects = sum(record.tally.rejected for record in shared.sealed.values())
        return Progress(
            done_bytes=shared.done_bytes,
            total_bytes=total_bytes,
            text_bytes=shared.text_bytes,
            num_documents=shared.num_documents,
            num_tokens=shared.num_tokens,
            num_rejects=rejects,
        )


def _work(job: Job, shared: _Shared, journal: Journal, worker: int, num_helpers: int) -> None:
    """Take slice after slice; the first one with helpers, where there are, and before all others.

    So the first part is there as soon as all cores together can make it. The second one is made
    by the second worker, while the first writes: rows at the end of a part reach into the next.
    """
    try:
        if not num_helpers:
            shared.begun.wait()
        for number in itertools.count():
            _await_turn(job, shared, is_free=worker == 0 or (worker == 1 and number == 0))
            if shared.stop.is_set():
                return
            with shared.tokenizing:
                piece = _next_slice(shared)
                if piece is None:
                    return
                filled = _tokenize(job, shared, piece, num_helpers)
            shared.begun.set()
            num_helpers = 0
            record = _seal(job, piece, filled)
            del filled  # half a slice, not to be held while the next one is read
            if job.live:
                journal.announce(record)
                shared.readable = shared.readable or time.monotonic()
                _force(job, record)
            journal.seal(record)
            with shared.lock:
                shared.sealed[piece.index] = record
                refuse_bad(job.files, job.max_bad, shared.sealed)
            _compare_later(job, shared, piece)
    except _Stopped:
        return
    except BaseException as error:  # noqa: BLE001  (raised again in the calling thread)
        with shared.lock:
            if shared.error is None:
                shared.error = error
        shared.stop.set()
    finally:
        shared.ended = True
        for event in (shared.begun, shared.hurry, shared.wake):
            event.set()


def _await_turn(job: Job, shared: _Shared, *, is_free: bool) -> None:
    """Wait until this worker is needed, and let those who read go before it."""
    if not is_free:
        shared.hurry.wait()
    if job.live and shared.begun.is_set():
        give_way()


def _next_slice(shared: _Shared) -> Slice | None:
    """The next slice that nobody has sealed; cutting compressed files happens in here."""
    with shared.reading_lock:
        for piece in shared.slices:
            if shared.stop.is_set():
                raise _Stopped
            shared.num_slices = piece.index + 1
            with shared.lock:
                done = piece.index in shared.sealed
            if not done:
                return piece
            shared.advance(piece.disk_bytes)
    return None


_Filled = tuple[dict[str, PartBuilder], Tally, list[Reject], dict[str, int]]


def _tokenize(job: Job, shared: _Shared, piece: Slice, num_helpers: int) -> _Filled:
    """One slice from text to the tokens of its parts."""
    sides = SIDES if job.split else ("",)
    builders = {side: PartBuilder(job.tokenizer, job.eos_id, job.bos_id) for side in sides}
    tally = Tally()
    rejects: list[Reject] = []
    rules: Counter[str] = Counter()
    left = piece.disk_bytes
    told = not job.live
    for batch, encoded in _encoded(job, piece, builders, num_helpers):
        if shared.stop.is_set():
            raise _Stopped
        tokens_before = sum(builder.num_tokens for builder in builders.values())
        shared.comparison.see(piece.index, batch)
        if encoded is not None:
            builders[""].append(*encoded)
        else:
            for side, share in _sides(job, batch):
                rejects += _fill(job, builders[side], share)
        if not told and builders[""].num_tokens > MANY_TOKENS:
            Journal(job.directory).tell_many(piece.index)
            told = True
        tally.add(batch.tally)
        rejects += batch.rejects
        rules.update(rule for _, rule in batch.rules)
        log_rules(job, batch.rules)
        tokens = sum(builder.num_tokens for builder in builders.values()) - tokens_before
        seen = min(left, batch.tally.total_bytes)
        left -= seen
        shared.advance(seen)
        with shared.lock:
            shared.text_bytes += batch.tally.total_bytes
            shared.num_documents += batch.tally.documents
            shared.num_tokens += tokens
    shared.advance(left)
    if not job.live:
        shared.comparison.settle(piece.index)
    return builders, tally, rejects, dict(sorted(rules.items()))


def _compare_later(job: Job, shared: _Shared, piece: Slice) -> None:
    """Make the comparisons that were put off so that a part can be read sooner."""
    if job.live:
        with shared.tokenizing:  # one call more at a time would load another tokenizer
            shared.comparison.settle(piece.index)


def _encoded(
    job: Job, piece: Slice, builders: dict[str, PartBuilder], num_helpers: int
) -> Iterator[tuple[Batch, Encoded | None]]:
    """The batches of a slice, in order; with helpers, as tokens already."""
    batches = job.batches(piece)
    if num_helpers < 2 or job.split is not None or job.chat is not None:
        for batch in batches:
            yield batch, None
        return
    with ThreadPoolExecutor(num_helpers, thread_name_prefix="build-help") as helpers:
        pending: deque[tuple[Batch, Future[Encoded]]] = deque()
        for batch in batches:
            pending.append((batch, helpers.submit(builders[""].encode, batch)))
            if len(pending) > 2 * num_helpers:
                done, encoded = pending.popleft()
                yield done, encoded.result()
        for done, encoded in pending:
            yield done, encoded.result()


def _fill(job: Job, builder: PartBuilder, batch: Batch) -> list[Reject]:
    """Add a batch to a part; gives what is no conversation to train on, where they should be."""
    if job.chat is None:
        builder.add(batch)
        return []
    return job.chat.fill(builder, batch, job.first_file)


def _seal(job: Job, piece: Slice, filled: _Filled) -> SealedSlice:
    """Write the parts of one slice; to disk, unless they are read first."""
    builders, tally, rejects, rules = filled
    parts = {}
    for side, builder in builders.items():
        directory = job.side_directory(side)
        parts[side] = builder.seal(directory, job.first_part + piece.index, live=job.live)
        if not job.live:
            sync_directory(directory)
    return SealedSlice(piece.index, tally, parts, rejects, rules)


def _force(job: Job, record: SealedSlice) -> None:
    """Force to disk what was written without."""
    for side, part in record.parts.items():
        for kind in part.files:
            sync_file(job.side_directory(side) / part_file(part.number, kind))
        sync_directory(job.side_directory(side))


def _sides(job: Job, batch: Batch) -> list[tuple[str, Batch]]:
    if job.split is None:
        return [("", batch)]
    held_out = job.split.held_out(batch)
    return [("train", batch.where(~held_out)), ("val", batch.where(held_out))]
