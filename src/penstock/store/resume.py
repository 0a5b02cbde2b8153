"""Where a build writes its store: a directory of this machine, or object storage.

    claim ── intact ── (parts are made) ── refuse_deleted ── commit ── end

`LocalTarget` is for a directory. There the journal and the lock do most of this already.
`penstock.store.upload` is for object storage.
"""

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from penstock.errors import StoreError
from penstock.paths import StorePath, StoreUrl
from penstock.store.job import Job
from penstock.store.journal import Journal, SealedSlice
from penstock.store.manifest import part_file
from penstock.store.upload import staging_directory
from penstock.store.verify import file_problem

_log = logging.getLogger("penstock")


class Target(Protocol):
    """Where a store is written."""

    def claim(self) -> None:
        """Keep other writers away; the journal has begun."""

    def intact(self, sealed: list[SealedSlice]) -> list[SealedSlice]:
        """The slices of an earlier run that was killed whose files are intact."""

    def refuse_deleted(self, done: Sequence[SealedSlice]) -> None:
        """Raise if a file of a sealed part was deleted or cut off while other parts were made."""

    def fail(self, error: BaseException) -> None:
        """Record that the build failed; `Journal.fail` was called before."""

    def commit(self, sides: Sequence[str]) -> None:
        """Publish the manifests, which are in the directory of the job."""

    def end(self) -> None:
        """Remove the journal; `Journal.end` was called before."""


def target_of(job: Job) -> Target:
    """Where a build writes its store."""
    return job.remote or LocalTarget(job)


def intact_slices(job: Job, journal: Journal, sealed: list[SealedSlice]) -> list[SealedSlice]:
    """The sealed slices whose files have the recorded contents; the others are made again.

    A record is written after its files were synced. So a file with other contents was changed by
    somebody, or the disk does not return what was written to it. All bytes are read, and hashed on
    as many threads as the build has: a file that was damaged here would become part of the store.
    """

    def is_intact(record: SealedSlice) -> bool:
        for side, part in record.parts.items():
            for kind, recorded in part.files.items():
                path = job.directory / side / part_file(part.number, kind)
                if problem := file_problem(path, *recorded, says="the journal"):
                    _log.warning("%s %s. Its slice is made again.", path, problem)
                    return False
        return True

    with ThreadPoolExecutor(job.num_threads) as threads:
        intact = list(threads.map(is_intact, sealed))
    for record, is_kept in zip(sealed, intact, strict=True):
        if not is_kept:
            journal.forget(record.number)  # a reader of a live build must not take it
    return [record for record, is_kept in zip(sealed, intact, strict=True) if is_kept]


@dataclass(frozen=True, slots=True)
class LocalTarget:
    """The directory of a job."""

    job: Job

    def claim(self) -> None:
        """Do nothing: the caller holds the lock of the directory."""

    def intact(self, sealed: list[SealedSlice]) -> list[SealedSlice]:
        """The sealed slices whose files have the recorded contents."""
        return intact_slices(self.job, Journal(self.job.directory), sealed)

    def refuse_deleted(self, done: Sequence[SealedSlice]) -> None:
        """Raise if a file of a sealed part was deleted or cut off while other parts were made."""
        directory = self.job.directory
        for record in done:
            for side, part in record.parts.items():
                for kind, (size, _) in part.files.items():
                    path = directory / side / part_file(part.number, kind)
                    if not path.exists() or path.stat().st_size != size:
                        raise StoreError(
                            f"{path} was deleted or changed during the build, so the store would "
                            "not be complete. Run this again: only the missing parts are made "
                            "again."
                        )

    def fail(self, error: BaseException) -> None:
        """Do nothing: the journal is in the directory."""

    def commit(self, sides: Sequence[str]) -> None:
        """Do nothing: the manifests are in the directory."""

    def end(self) -> None:
        """Do nothing: the journal is in the directory."""


def was_interrupted(place: StorePath, *, overwrite: bool) -> bool:
    """Whether an unfinished build has left a record of a slice, so that it will be resumed."""
    if isinstance(place, StoreUrl):
        place = staging_directory(place)
    # With --overwrite, these are beside an old store that is finished.
    whole = place.resolve()  # "." has no name
    places = [whole, whole.parent / f".{whole.name}.new"][: 1 + overwrite]
    # A build that failed begins again if its settings have changed.
    return any(
        path
        for each in places
        for path in each.glob(".slice-*.json")
        if not (each / ".failed").exists()
    )
