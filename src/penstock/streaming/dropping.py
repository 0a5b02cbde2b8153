"""A build that keeps only what is being read.

    slices     0   1   2   3   4   5   6   7   8   9
               ·   ·   ·  [3] [4] [5] [6]  ─   ─   ─        one reader at 3, ahead=3
               dropped     on disk         not made yet

The builder stays at most `ahead` slices in front of the readers, and removes the files of the
slices that no reader wants. The record of a slice (its counts and digests) is kept for good:
the order of rows needs nothing else, and a slice that is wanted once more, by a resumed run or
in the next epoch, is made again and must come out the same.

When all slices were made once, the manifest that the whole store would have is written to
`.whole/`, so that its digest is the same as that of a store that was kept.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from penstock.errors import StoreError
from penstock.sources.slices import Slice
from penstock.store.build import commit, intact, refuse_lost_bytes
from penstock.store.existing import remember_stamps
from penstock.store.files import remove_temporary
from penstock.store.job import BuildProgress, Job
from penstock.store.journal import Journal, SealedSlice
from penstock.store.manifest import FILE_NAME, part_file
from penstock.store.workers import run
from penstock.streaming.marks import wanted_slices

__all__ = ["WHOLE", "serve"]

WHOLE = ".whole"
"""The folder of the manifest of a store whose parts come and go."""
_NAP_SECONDS = 0.02


def serve(
    job: Job,
    ahead: int,
    stop: threading.Event,
    progress: Callable[[BuildProgress], None],
) -> None:
    """Make the slices that readers want, under the store's lock, until told to stop."""
    journal = Journal(job.directory)
    begun = journal.begin(job.stamped)
    remove_temporary(job.directory)
    service = _Service(job, {record.number: record for record in begun})
    while not stop.is_set():
        first = service.first_missing()
        if first is None:
            service.drop()
            stop.wait(_NAP_SECONDS)
            continue
        known = [record for number, record in service.records.items() if number < first]
        sweep = replace(job, sealing=service.sealing, stop=threading.Event())
        run(
            sweep,
            service.slices(first, sweep.stop),
            known,
            num_threads=min(job.num_threads, ahead + 1),
            progress=progress,
        )
        if service.num_slices == len(service.records) and not _whole(job.directory).exists():
            done = [service.records[number] for number in range(service.num_slices)]
            refuse_lost_bytes(job, done)
            remember_stamps(job.directory, job.files)
            _whole(job.directory).parent.mkdir(exist_ok=True)
            commit(job, "", done, _whole(job.directory).parent)


def _whole(directory: Path) -> Path:
    return directory / WHOLE / FILE_NAME


class _Service:
    """Which slices there are, which are being made, and which are wanted."""

    def __init__(self, job: Job, records: dict[int, SealedSlice]) -> None:
        self._job = job
        self.records = records
        self.num_slices: int | None = None
        """How many there are, once the inputs were cut to their end."""
        self._in_work: set[int] = set()
        self._on_disk = set(records)

    def first_missing(self) -> int | None:
        """The slice from which on something has to be made, or None.

        A slice that nobody has made before comes first if one behind it is wanted: only its
        counts tell where the rows of that one lie.
        """
        missing = [number for number in self._wanted() if self._is_missing(number)]
        if not missing:
            return None
        unknown = next(
            number for number in range(len(self.records) + 1) if number not in self.records
        )
        return min([*missing, unknown]) if max(missing) >= unknown else min(missing)

    def _wanted(self) -> list[int]:
        wanted = wanted_slices(self._job.directory)
        if self.num_slices is None:
            return wanted
        return [number for number in wanted if number < self.num_slices]

    def _is_missing(self, number: int) -> bool:
        if number in self._in_work:
            return False
        record = self.records.get(number)
        return record is None or not intact(self._job, record)

    def slices(self, first: int, stop: threading.Event) -> Iterator[Slice]:
        """The slices to make, each when it is wanted; ends where one before it is wanted."""
        index = -1
        for piece in self._job.slices():
            index = piece.index
            while index >= first and self._is_missing(index):
                if stop.is_set():
                    return
                self.drop()
                wanted = self._wanted()
                if any(number < index and self._is_missing(number) for number in wanted):
                    return
                if index in wanted or (
                    index not in self.records and any(n > index for n in wanted)
                ):
                    self._in_work.add(index)
                    yield piece
                    break
                if any(number > index for number in wanted):
                    break  # made before, and not wanted now
                stop.wait(_NAP_SECONDS)
        self.num_slices = index + 1

    @contextmanager
    def sealing(self, record: SealedSlice) -> Iterator[None]:
        """Take note of a slice that was made; one that was made before must be as it was."""
        before = self.records.get(record.number)
        if before is not None and before.parts != record.parts:
            raise StoreError(
                f"{self._job.directory}: slice {record.number} was made again and came out "
                "otherwise than before, so rows that were read already would be others now. An "
                "input was changed, or the tokenizer. Delete the directory to start anew."
            )
        yield
        self.records[record.number] = record
        self._on_disk.add(record.number)
        self._in_work.discard(record.number)

    def drop(self) -> None:
        """Remove the files of slices that no reader wants; without readers, none."""
        wanted = set(wanted_slices(self._job.directory))
        if not wanted:
            return
        for number in self._on_disk - wanted - self._in_work:
            for part in self.records[number].parts.values():
                for kind in part.files:
                    path = self._job.directory / part_file(part.number, kind)
                    path.unlink(missing_ok=True)
            self._on_disk.discard(number)
