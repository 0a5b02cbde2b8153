"""Replacing a store by another one.

    stores/owt/          the old store, which can be read until the new one is complete
    stores/.owt.new/     the new store while it is built; a killed build is resumed there
    stores/.owt.old/     the old store for the moment between two renames, before it is deleted

Only a directory whose files were all written by a build is replaced. Where a directory cannot be
renamed, such as a mount point, the old store is deleted before the new one is built. So is a store
in object storage.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from penstock.digest import canonical_json
from penstock.disk import remove_tree, rename
from penstock.errors import StoreError
from penstock.store.existing import discard, earlier_build
from penstock.store.inputs import stamps_path
from penstock.store.job import Job
from penstock.store.journal import Journal
from penstock.store.manifest import FILE_NAME
from penstock.store.part import SIDES

# Every name that a build or a lock gives to a file of a store. Earlier versions also kept
# row indices there, in `.rows`.
_OURS = re.compile(
    r"penstock\.json|part-\d+\.(tokens|bounds|origin|loss|checks)\.npy|rejects(-\d+)?\.jsonl"
    r"|parts-[0-9a-f]{16}\.npy"
    r"|\.(stamps|building)\.json|\.slice-\d+\.json|\.awaited|\.failed|\.lock"
    r"|\.rows|\.again|\..*\.tmp"
)


@contextmanager
def replacement(job: Job) -> Iterator[Job]:
    """The job that builds the new store; its directory is the old one if nothing is finished there.

    The caller holds the lock of the store, and runs the job in the `with` block. If the block ends
    without an error, the new store is moved to the directory of `job`, and the old one is deleted.

    Raises:
        StoreError: the directory holds a file that no build wrote.
    """
    if job.remote is not None:
        # Object storage has no renames, so the old store is deleted before the new one is built.
        if not _is_begun(job):
            job.remote.clear()
        yield job
        return
    made = _replacement(job)
    if made is job:
        yield job
        return
    yield made
    _put_in_place(made, job)


def _replacement(job: Job) -> Job:
    directory = job.directory.resolve()
    new, old = (directory.with_name(f".{directory.name}.{kind}") for kind in ("new", "old"))
    _refuse_foreign(directory)
    for each in (new, old):
        # A kill may have ended their deletion after the manifest was gone.
        _refuse_foreign(each, is_partial=True)
    if old.exists():
        remove_tree(old)
    is_fixed = os.path.ismount(directory) or not os.access(directory.parent, os.W_OK)
    is_finished = any((directory / side / FILE_NAME).exists() for side in ("", *SIDES))
    if is_finished and is_fixed:
        _empty(job.directory)
    if not new.exists() and (is_fixed or not is_finished):
        # An unfinished build is no loss, unless it is this one, which is then resumed.
        if not _is_begun(job) and Journal(job.directory).exists:
            discard(job.directory)
        return job
    made = replace(job, directory=new)
    # A finished store is there if a build was killed before `put_in_place`.
    if new.exists() and not _is_begun(made) and (is_finished or not _is_done(made)):
        remove_tree(new)
    new.mkdir(exist_ok=True)
    return made


def _put_in_place(made: Job, job: Job) -> None:
    """Move the store that `made` has built to the directory of `job`, and delete the old one."""
    new, directory = made.directory, job.directory.resolve()
    old = directory.with_name(f".{directory.name}.old")
    # A kill between the renames leaves an empty or missing directory and a complete new store,
    # which the next build with overwrite=True puts in place.
    rename(directory, old)
    rename(new, directory)
    with suppress(FileNotFoundError):
        rename(stamps_path(new), stamps_path(directory))
    remove_tree(old)


def _is_begun(job: Job) -> bool:
    """Whether the directory holds this very build, unfinished."""
    try:
        begun = Journal(job.directory).begun()
    except StoreError:  # its journal is damaged
        return False
    return begun is not None and canonical_json(begun) == canonical_json(job.stamped)


def _is_done(job: Job) -> bool:
    """Whether the directory holds this very build, finished."""
    try:
        return earlier_build(job) is not None
    except StoreError:
        return False


def _files(directory: Path) -> Iterator[Path]:
    for path in directory.iterdir() if directory.is_dir() else ():
        yield from path.iterdir() if path.name in SIDES and _is_own(path) else [path]


def _is_own(path: Path) -> bool:
    """Whether this is a directory, and not a link to one that is elsewhere."""
    return path.is_dir() and not path.is_symlink()


def _refuse_foreign(directory: Path, *, is_partial: bool = False) -> None:
    """Raise if the directory is not empty, and not a store or holds more than a store.

    With `is_partial`, some files of a store are enough.
    """
    found = sorted(_files(directory))
    others = [path.name for path in found if not _OURS.fullmatch(path.name)]
    is_store = is_partial or any(
        path.name in (FILE_NAME, ".building.json", ".failed") for path in found
    )
    named = {".lock"} | {path.name for path in found if path.name.endswith(".tmp")}
    if others or (found and not is_store and not {path.name for path in found} <= named):
        listed = ", ".join((others or [path.name for path in found])[:5])
        raise StoreError(
            f"{directory} is not a store, or not only a store: it holds {listed}. overwrite=True "
            "(--overwrite) of penstock.build deletes the whole directory, so it must hold nothing "
            "but a store. Move these files, or choose another directory."
        )


def _empty(directory: Path) -> None:
    """Delete the files of a store, and keep its directory."""
    # The manifest goes first: without it, nobody takes what is left for a store.
    for path in sorted(_files(directory), key=lambda path: path.name != FILE_NAME):
        if _is_own(path):
            remove_tree(path)
        elif path.name != ".lock":
            path.unlink()
    for side in SIDES:
        if _is_own(directory / side):
            (directory / side).rmdir()
