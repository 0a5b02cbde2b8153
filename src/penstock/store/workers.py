"""The coordination of a build: which slices are left, and what is done when one is made.

    slices left ── take ──► runner (threads, processes) ── MadeSlice ──► journal

The build has one thread for each slot of its runner (see `penstock.store.runners`). A thread waits
until its slot has made the parts of a slice, and then writes the record of the slice to the
journal. Slices are sealed in any order, but parts have the order of the slices.
"""

import logging
import threading

from penstock.errors import DiskFullError, TokenMismatchError
from penstock.sources.batch import Tally
from penstock.sources.slices import Slice
from penstock.store.job import BuildProgress, Job, Report
from penstock.store.journal import Journal, SealedSlice
from penstock.store.memory import arrow_from_malloc, keep_freed_memory
from penstock.store.refusals import BadRecords
from penstock.store.runners import Runner, runner_for
from penstock.store.slice_work import Advance, MadeSlice, Order, Stopped, Watch
from penstock.store.summary import rule_text

_log = logging.getLogger("penstock")


class Workers:
    """The threads of one build and the state that they share."""

    def __init__(self, job: Job, sealed: list[SealedSlice]) -> None:
        self._job = job
        self._journal = Journal(job.directory)
        # Cutting a compressed file reads it, which may take seconds. The separate lock lets
        # progress be shown while a thread cuts. It also guards `_first`.
        self._cutting = threading.Lock()
        self._slices = job.slices()
        self._first: int | None = None  # the slice that holds the first documents
        self._total_bytes = sum(file.size for file in job.files)
        # Guards everything from here to `_rules_seen`.
        self._lock = threading.Lock()
        self._sealed = {record.number: record for record in sealed}
        self._bad = BadRecords(job)
        tally = Tally.total(record.tally for record in sealed)
        num_tokens = sum(p.num_tokens for each in sealed for p in each.parts.values())
        self._done = Advance(0, tally, num_tokens, [])
        self._error: BaseException | None = None
        self._rules_seen: set[str] = set()  # the rules that were logged
        self._wake = threading.Event()
        # Set when the run ends, also by an error.
        self._stop = threading.Event()

    def run(self, progress: Report | None) -> list[SealedSlice]:
        """Process all slices that are not sealed yet; returns the records of all, in order.

        An error in one slot stops the others at their next block, and sealed slices stay. An
        interrupt takes at most about a second, whatever the slots are doing.
        """
        keep_freed_memory()
        with arrow_from_malloc():
            return self._run(progress)

    def _run(self, progress: Report | None) -> list[SealedSlice]:
        self._bad.refuse_bad(self._sealed)
        runner = runner_for(self._job)
        workers: list[threading.Thread] = []
        try:
            self._start_slots(runner, workers)
            while any(worker.is_alive() for worker in workers):
                self._wake.wait(0.1)
                self._wake.clear()
                if self._stop.is_set():
                    runner.close()  # ends slots that wait for another process
                runner.tick()
                self._start_slots(runner, workers)
                if progress:
                    progress(self._progress())
        finally:
            self._stop.set()
            runner.close()
            # Daemon threads: a slot that tokenizes a document of 1 GB does not delay the exit.
            for worker in filter(threading.Thread.is_alive, workers):
                worker.join(timeout=1.0 / len(workers))
        if isinstance(self._error, TokenMismatchError):
            # Sealed slices may hold wrong ids too, and the same build with another
            # engine would keep them. So their records are removed.
            self._journal.forget()
        if isinstance(self._error, DiskFullError):
            self._error.add_note(self._needed())
        if self._error is not None:
            raise self._error
        self._bad.refuse_bad(self._sealed, ended=True)
        if progress:
            # Nothing is reported above if all threads ended at once. And the bytes of slices are
            # estimates: the size of a table is divided by its slices and rounded, and bytes after
            # the last text of a compressed file are not counted.
            progress(self._progress(ended=True))
        return [self._sealed[number] for number in sorted(self._sealed)]

    def _progress(self, *, ended: bool = False) -> BuildProgress:
        done = self._done
        return BuildProgress(
            done_bytes=self._total_bytes if ended else done.disk_bytes,
            total_bytes=self._total_bytes,
            text_bytes=done.tally.total_bytes,
            num_documents=done.tally.documents,
            num_tokens=done.num_tokens,
            num_rejects=done.tally.rejected,
        )

    def _needed(self) -> str:
        """Return how much room the store needs, for the error of a full disk."""
        done = self._done
        if not done.num_tokens or not done.disk_bytes:
            return f"The inputs of this store have {self._total_bytes:,} bytes."
        # The tokens so far, of the bytes that were read so far. Bounds and checksums are small.
        share = self._total_bytes / min(done.disk_bytes, self._total_bytes)
        whole = round(done.num_tokens * self._job.tokenizer.dtype.itemsize * share)
        parts = [part for each in self._sealed.values() for part in each.parts.values()]
        written = sum(size for part in parts for size, _ in part.files.values())
        return (
            f"The whole store needs about {whole:,} bytes, of which {written:,} are written: make "
            f"room for about {max(0, whole - written):,} more."
        )

    def _start_slots(self, runner: Runner, workers: list[threading.Thread]) -> None:
        """Start a thread for each slot that has none yet."""
        for slot in range(len(workers), runner.num_slots):
            name = f"build-{slot}"
            args = (runner, slot)
            workers.append(threading.Thread(target=self._work, args=args, daemon=True, name=name))
            workers[-1].start()

    def _work(self, runner: Runner, slot: int) -> None:
        """Make the parts of slice after slice, until none is left or the build stops."""
        watch = Watch(self._advance, self._stop.is_set)
        try:
            while (made := runner.make_next(slot, self._next_order, watch)) is not None:
                self._seal(made)
        except Stopped:
            pass
        except BaseException as error:  # noqa: BLE001  (raised again in the calling thread)
            with self._lock:
                # The first error counts: those of other slots may only follow from it, or from the
                # stop after an interrupt.
                if not self._stop.is_set():
                    self._error = self._error or error
                self._stop.set()
        finally:
            self._wake.set()

    def _next_order(self) -> Order | None:
        """The next slice that is not sealed; None if none is left, or the build stops."""
        with self._cutting:
            piece = None if self._stop.is_set() else self._next_slice()
            if piece is None:
                return None
            if self._first is None:
                self._first = piece.index
            return Order(piece, is_first=piece.index == self._first)

    def _next_slice(self) -> Slice | None:
        for piece in self._slices:
            if self._stop.is_set():
                raise Stopped
            # Slices do not depend on who cuts them, so those that an earlier run sealed are
            # cut again and skipped: the numbers of the others stay the same.
            if piece.index not in self._sealed:
                return piece
            self._advance(Advance(piece.disk_bytes, Tally(), 0, []))
        return None

    def _advance(self, new: Advance) -> None:
        """Add to the progress, and log what a document is in files whose rule is new."""
        with self._lock:
            done = self._done
            self._done = Advance(
                done.disk_bytes + new.disk_bytes,
                Tally.total((done.tally, new.tally)),
                done.num_tokens + new.num_tokens,
                [],
            )
            rules = [(file, rule) for file, rule in new.rules if rule not in self._rules_seen]
            self._rules_seen.update(rule for _, rule in rules)
        separators = " or ".join(map(repr, self._job.options.separators))
        for file, rule in {rule: (file, rule) for file, rule in reversed(rules)}.values():
            why = f"no {separators}" if rule == "file" else repr(rule)
            text = f"a document is {rule_text(rule)}; the first 64 MB contain {why}"
            _log.info("%s: %s", self._job.files[file].name, text)

    def _seal(self, made: MadeSlice) -> None:
        """Write the record of a slice to the journal, which makes its parts count.

        The record comes last, because it promises that the parts are whole and on disk.
        """
        record = made.record
        made.sample.compare(self._job.tokenizer)
        self._journal.seal(record)
        if self._job.remote is not None:
            self._job.remote.upload(record)
        if made.turns is not None and self._job.chat is not None:
            self._job.chat.report.merge(made.turns)
        if not record.tally.documents and not record.tally.continued:
            with self._cutting:
                # The first documents are in a later slice.
                self._first = None if record.number == self._first else self._first
        with self._lock:
            self._sealed[record.number] = record
            self._bad.refuse_bad(self._sealed)
