"""Damaged and missing files of a finished store, which the same build makes again.

A part depends on one slice of the inputs and on the settings alone, so a single part can be made
again:

    out/owt/.again/     the parts of damaged files are made here
    out/owt/            a file is moved here if it has the size and SHA-256 that the manifest says

Nothing else of the store changes, and a call that was killed can be repeated.
"""

import logging
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.disk import remove_tree, rename, write_file
from penstock.errors import StoreError
from penstock.store.inputs import reject_lines
from penstock.store.job import Job, Report
from penstock.store.journal import Journal
from penstock.store.manifest import part_file, read_manifest, rejects_file
from penstock.store.verify import file_problem
from penstock.store.workers import Workers

_AGAIN = ".again"
_SHOWN = 5
_log = logging.getLogger("penstock")


@dataclass(frozen=True, slots=True)
class StoreFile:
    """A file of a finished store, as its manifest records it."""

    name: str
    """With the side of a split, as in `train/part-00000.tokens.npy`."""
    size: int
    digest: str
    part: int | None
    """The number of its part; None for a log of rejected records."""


def damaged_files(job: Job) -> list[StoreFile]:
    """The files that this build wrote to a finished store and that are damaged.

    The sizes of all files are compared. Only if one is missing or has another size, all files are
    read and their digests are compared: a finished store of terabytes must open at once.
    """
    if job.remote is not None:
        return []
    # A call that was killed at its end leaves it; on a disk that is read-only, it stays.
    shutil.rmtree(job.directory / _AGAIN, ignore_errors=True)
    files = list(_recorded_files(job))
    if all(_size(job.directory / each.name) == each.size for each in files):
        return []

    def is_damaged(each: StoreFile) -> bool:
        return file_problem(job.directory / each.name, each.size, each.digest) is not None

    with ThreadPoolExecutor(job.num_threads) as threads:  # hashing releases the GIL
        flags = list(threads.map(is_damaged, files))
    return [each for each, is_bad in zip(files, flags, strict=True) if is_bad]


def _recorded_files(job: Job) -> Iterator[StoreFile]:
    """All files of one build of a store: the first build or an append."""
    for side in job.sides:
        manifest, prefix = read_manifest(job.directory / side), f"{side}/" if side else ""
        done = manifest.builds[job.first_build]
        log = done["rejects"]
        name = f"{prefix}{rejects_file(job.first_build)}"
        yield StoreFile(name, log["bytes"], log["xxh3_128"], None)
        parts = range(job.first_part, job.first_part + done["slices"])
        for part in manifest.parts:
            if part.number in parts:
                for kind, (size, digest) in part.files.items():
                    name = f"{prefix}{part_file(part.number, kind)}"
                    yield StoreFile(name, size, digest, part.number)


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def remake(job: Job, files: Sequence[StoreFile], progress: Report | None = None) -> None:
    """Make the parts of damaged files again, and move the files to their places.

    The caller holds the lock of the store.

    Raises:
        StoreError: a file would get other contents than the manifest records. Nothing was changed.
    """
    _log.warning(
        "%s has %d damaged or missing files, which are made again: %s",
        job.directory,
        len(files),
        _listed(each.name for each in files),
    )
    again = job.directory / _AGAIN
    for side in job.sides:
        (again / side).mkdir(parents=True, exist_ok=True)
    numbers = {each.part - job.first_part for each in files if each.part is not None}
    # A rejected record may be in any slice.
    is_any = any(each.part is None and each.size for each in files)
    made = replace(job, directory=again, wanted=None if is_any else frozenset(numbers))
    Journal(again).begin(made.stamped, 0)
    records = Workers(made, []).run(progress)
    inputs = job.recorded["inputs"]
    rejects = [reject for record in records for reject in record.rejects]
    for each in files:
        if each.part is None:
            write_file(again / each.name, reject_lines(rejects if each.size else [], inputs))
    problems = {
        each.name: file_problem(again / each.name, each.size, each.digest) for each in files
    }
    if wrong := [name for name, problem in problems.items() if problem]:
        remove_tree(again)
        raise StoreError(
            f"{job.directory} cannot be made whole: {_listed(wrong)} would get other contents than "
            "the manifest records. An input was changed, or another version of penstock, or of a "
            "library, makes other tokens. Nothing was changed. Copy these files "
            "from a good store, or replace the store with `penstock build --overwrite` (in "
            "Python, overwrite=True)."
        )
    for each in files:
        rename(again / each.name, job.directory / each.name)
    remove_tree(again)


def _listed(names: Iterator[str] | Sequence[str]) -> str:
    found = sorted(names)
    rest = f" and {len(found) - _SHOWN:,} more" if len(found) > _SHOWN else ""
    return ", ".join(found[:_SHOWN]) + rest
