"""The threads of a build: each worker turns one slice at a time into a sealed part.

A worker takes the next slice and does everything for it, from reading to fsync. Nothing is
passed between threads, and NumPy, Arrow, gigatoken and hashlib all release the GIL. A semaphore
limits how many workers tokenize at once; a few more workers hash, write and wait for the disk
while those tokenize. Slices are sealed in any order, but parts have the order of the slices.

In a live build, whose parts are read while others are built, one worker works alone as long as
no reader waits for it. Workers hold the GIL for part of their time, and a training loop needs the
GIL for every kernel that it launches. Beside sixteen workers, a training loop on an H200 ran at a
fifth of its speed. A single worker makes tokens far faster than a GPU uses them.
"""

import itertools
import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

from penstock.errors import TokenMismatchError
from penstock.sources.document import Batch, Tally
from penstock.sources.slices import Slice
from penstock.store.files import keep_freed_memory, refuse_unlike, sync_directory, sync_file
from penstock.store.inputs import piece_digests
from penstock.store.job import BuildProgress, Job, Report
from penstock.store.journal import MANY_TOKENS, Journal, SealedSlice, WaitingReaders, lower_priority
from penstock.store.manifest import part_file
from penstock.store.part import Encoded, PartBuilder, encode_ahead
from penstock.store.refusals import BadRecords
from penstock.store.summary import rule_text
from penstock.tokenize.oracle import SliceSample, compare

_log = logging.getLogger("penstock")


class _Stopped(Exception):  # noqa: N818  (not an error: another worker failed, or Ctrl-C)
    """Ends a worker, because the build has to stop."""


@dataclass(slots=True)
class _Tokenized:
    """One slice as tokens, before its parts are written."""

    builders: dict[str, PartBuilder]
    sample: SliceSample
    record: SealedSlice
    first: Batch | None = None
    """The first documents of a live build, if this slice holds them."""

    @property
    def num_tokens(self) -> int:
        return sum(builder.num_tokens for builder in self.builders.values())


class Workers:
    """The threads of one build and the state that they share."""

    def __init__(self, job: Job, sealed: list[SealedSlice]) -> None:
        self._job = job
        self._journal = Journal(job.directory)
        self._names = [file.name for file in job.files]
        self._num_threads = job.num_threads
        self._total_bytes = sum(file.size for file in job.files)
        # A slice holds about 30 MB of tokens, and the text too if its file is compressed. So this
        # also limits the memory of the build.
        self._tokenizing = threading.Semaphore(self._num_threads)
        # Cutting a compressed file reads it, which may take seconds. The separate lock lets
        # progress be shown while a worker cuts.
        self._cutting = threading.Lock()
        self._slices = job.slices()
        # Guards everything from here to `_error`.
        self._lock = threading.Lock()
        self._sealed = {record.number: record for record in sealed}
        self._bad = BadRecords(job)
        self._done_bytes = 0
        self._tally = Tally.total(record.tally for record in sealed)
        self._num_tokens = sum(p.num_tokens for each in sealed for p in each.parts.values())
        self._error: BaseException | None = None
        # Taken by the worker that has the first batch, and never released.
        self._first_batch = threading.Lock()
        # The rules that were logged. Without a lock: at worst, two workers log one rule twice.
        self._rules_seen: set[str] = set()
        self._wake = threading.Event()
        # Set when the run ends, also by an error.
        self._stop = threading.Event()
        # Set when the first slice is made, and other workers may take the next ones.
        self._begun = threading.Event()
        # Set while all workers are to take slices, and not the first one alone.
        self._hurry = threading.Event()
        self._ended = False  # whether a worker found nothing left to do, or failed
        self._readable: float | None = None  # when the first live part was announced

    def run(self, progress: Report | None) -> list[SealedSlice]:
        """Process all slices that are not sealed yet; returns the records of all, in order.

        An error in one worker stops the others at their next block, and sealed slices stay. An
        interrupt takes at most about a second, whatever the workers are doing.
        """
        keep_freed_memory()
        self._bad.refuse_bad(self._sealed)
        if self._job.live:
            self._journal.await_readers()
        else:
            self._begun.set()
            self._hurry.set()
        # One fourth more workers than may tokenize, plus one: the extra ones hash and write.
        workers = [
            threading.Thread(target=self._work, args=(i,), daemon=True, name=f"build-{i}")
            for i in range(self._num_threads + 1 + self._num_threads // 4)
        ]
        for worker in workers:
            worker.start()
        try:
            self._watch(workers, progress)
        finally:
            self._stop.set()
            # A worker that waits for its turn would otherwise not see that the build stops.
            self._hurry.set()
            # Daemon threads: a worker that tokenizes a document of 1 GB does not delay the exit.
            for worker in workers:
                worker.join(timeout=1.0 / len(workers))
        if isinstance(self._error, TokenMismatchError):
            # Sealed slices may hold wrong ids too, and the same build with engine="tokenizers"
            # would keep them. So their records are removed.
            self._journal.forget()
        if self._error is not None:
            raise self._error
        self._bad.refuse_bad(self._sealed, ended=True)
        if progress:
            # `_watch` reports nothing if all workers ended before it began. And the bytes of
            # slices are estimates: the size of a table is divided by its slices and rounded, and
            # bytes after the last text of a compressed file are not counted.
            self._done_bytes = self._total_bytes
            progress(self._progress())
        return [self._sealed[number] for number in sorted(self._sealed)]

    def _watch(self, workers: list[threading.Thread], progress: Report | None) -> None:
        """Report progress and look for waiting readers, until all workers have ended."""
        readers = WaitingReaders(self._journal)
        while any(worker.is_alive() for worker in workers):
            self._wake.wait(0.1)
            self._wake.clear()
            if self._job.live:
                wanted = self._ended or readers.hurry(self._readable)
                (self._hurry.set if wanted else self._hurry.clear)()
            if progress:
                progress(self._progress())

    def _progress(self) -> BuildProgress:
        with self._lock:
            return BuildProgress(
                done_bytes=self._done_bytes,
                total_bytes=self._total_bytes,
                text_bytes=self._tally.total_bytes,
                num_documents=self._tally.documents,
                num_tokens=self._num_tokens,
                num_rejects=self._tally.rejected,
            )

    def _work(self, worker: int) -> None:
        """Make the parts of slice after slice, until none is left or the build stops.

        In a live build, the first worker makes the first slice with helpers, before all others
        begin, so the first part is ready as soon as possible. The second worker makes the second
        slice while the first one writes, because rows at the end of a part reach into the next.
        """
        num_helpers = self._num_threads if worker == 0 and self._job.live else 0
        try:
            if not num_helpers:
                self._begun.wait()
            for number in itertools.count():
                if worker > 1 or (worker == 1 and number > 0):
                    self._hurry.wait()
                if self._job.live and self._begun.is_set():
                    lower_priority()
                if not self._make_part(num_helpers if number == 0 else 0):
                    return
        except _Stopped:
            pass
        except BaseException as error:  # noqa: BLE001  (raised again in the calling thread)
            with self._lock:
                # The first error counts; those of other workers may only follow from it.
                self._error = self._error or error
            self._stop.set()
        finally:
            self._ended = True
            for event in (self._begun, self._hurry, self._wake):
                event.set()

    def _make_part(self, num_helpers: int) -> bool:
        """Read, tokenize and write the next slice; False if none is left, or the build stops."""
        if self._stop.is_set():
            return False
        with self._tokenizing:
            piece = self._next_slice()
            if piece is None:
                return False
            tokenized = self._tokenize(piece, num_helpers)
            if not self._job.live:
                tokenized.sample.compare()
        self._begun.set()
        self._seal(tokenized, piece)
        if self._job.live:
            # Under the semaphore: one more call at the same time would load another tokenizer.
            with self._tokenizing:
                if tokenized.first is not None:
                    self._compare_first(tokenized.first)
                tokenized.sample.compare()
        return True

    def _next_slice(self) -> Slice | None:
        """The next slice that is not sealed."""
        with self._cutting:
            for piece in self._slices:
                if self._stop.is_set():
                    raise _Stopped
                # Slices do not depend on who cuts them, so those that an earlier run sealed are
                # cut again and skipped: the numbers of the others stay the same.
                with self._lock:
                    if piece.index not in self._sealed:
                        return piece
                    self._done_bytes += piece.disk_bytes
        return None

    def _tokenize(self, piece: Slice, num_helpers: int) -> _Tokenized:
        """Read one slice and tokenize it."""
        job = self._job
        builders = {
            side: PartBuilder(job.tokenizer, job.recorded["eos_id"], job.recorded["bos_id"])
            for side in job.sides
        }
        sample = SliceSample(job.tokenizer, piece.index, self._names, job.first_file)
        record = SealedSlice(piece.index)
        done = _Tokenized(builders, sample, record)
        left = piece.disk_bytes
        batches: Iterator[tuple[Batch, Encoded | None]]
        if num_helpers > 1 and job.split is None and job.chat is None:
            batches = encode_ahead(builders[""], job.batches(piece), num_helpers)
        else:
            batches = ((batch, None) for batch in job.batches(piece))
        for batch, encoded in batches:
            if self._stop.is_set():
                raise _Stopped
            num_tokens = done.num_tokens
            self._pick(batch, done)
            if encoded is not None:
                builders[""].append(encoded)
            else:
                self._fill(batch, done)
            if job.live and num_tokens <= MANY_TOKENS < done.num_tokens:
                self._journal.announce_many(piece.index)
            record.tally = Tally.total((record.tally, batch.tally))
            record.rejects += batch.rejects
            for file, rule in batch.rules:
                record.rules[rule] = record.rules.get(rule, 0) + 1
                self._log_rule(job.files[file].name, rule)
            # A compressed file has more bytes of text than bytes on disk.
            on_disk = min(left, batch.tally.total_bytes)
            left -= on_disk
            with self._lock:
                self._done_bytes += on_disk
                self._tally = Tally.total((self._tally, batch.tally))
                self._num_tokens += done.num_tokens - num_tokens
        with self._lock:
            self._done_bytes += left
        return done

    def _log_rule(self, name: str, rule: str) -> None:
        """Log what a document is in a file, unless a file with the same rule was logged before."""
        if rule not in self._rules_seen:
            self._rules_seen.add(rule)
            separators = " or ".join(map(repr, self._job.reading.separators))
            why = f"no {separators}" if rule == "file" else repr(rule)
            text = f"a document is {rule_text(rule)}; the first 64 MB contain {why}"
            _log.info("%s: %s", name, text)

    def _pick(self, batch: Batch, done: _Tokenized) -> None:
        """Choose the documents to compare with the reference tokenizer.

        The first documents of the build are compared before anything is sealed, and a sample of
        every slice before that slice is sealed. In a live build both wait until the part can be
        read, because loading the reference takes as long as making the first part.
        """
        is_first = len(batch) > 0 and self._first_batch.acquire(blocking=False)
        done.sample.add(batch)
        if is_first and self._job.live:
            done.first = batch
        elif is_first:
            self._compare_first(batch)

    def _compare_first(self, batch: Batch) -> None:
        compare(self._job.tokenizer, batch.texts)
        if self._job.chat is not None:
            self._job.chat.compare(batch)

    def _fill(self, batch: Batch, done: _Tokenized) -> None:
        """Tokenize a batch into the parts of its sides."""
        job = self._job
        for side, share in job.split.sides(batch) if job.split else [("", batch)]:
            if job.chat is None:
                done.builders[side].append(done.builders[side].encode(share))
            else:
                done.record.rejects += job.chat.fill(done.builders[side], share, job.first_file)

    def _seal(self, done: _Tokenized, piece: Slice) -> None:
        """Write the parts of one slice, and then the record of the slice in the journal.

        The record comes last, because it promises that the parts are whole and on disk. A live
        build announces the parts before they are on disk: readers get them from the page cache.
        """
        job, record = self._job, done.record
        number = job.first_part + record.number
        for side, builder in done.builders.items():
            record.parts[side] = builder.seal(job.directory / side, number, live=job.live)
        done.builders.clear()  # frees half a slice of memory before the slow fsyncs
        if job.live:
            # Before the fsyncs, so that no reader waits for the disk.
            self._journal.announce(record)
            self._readable = self._readable or time.monotonic()
            for side, part in record.parts.items():
                for kind in part.files:
                    sync_file(job.directory / side / part_file(part.number, kind))
        if job.settings.read_back:
            for side, part in record.parts.items():
                for kind, (_, digest) in part.files.items():
                    refuse_unlike(job.directory / side / part_file(part.number, kind), digest)
        # The text of the slice is still in the page cache, so this costs no read from the disk.
        record.digests = piece_digests(job.files, piece.spans)
        # The names of the parts are synced before the record is written: a record that survives a
        # power cut must not name files that did not survive it.
        for side in record.parts:
            sync_directory(job.directory / side)
        self._journal.seal(record)
        with self._lock:
            self._sealed[record.number] = record
            self._bad.refuse_bad(self._sealed)
