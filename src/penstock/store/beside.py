"""A directory that is made beside its place, and appears there when it is complete.

stores/.owt.copy/    while it is made; after a kill, the same call continues there
stores/owt/          the whole directory, by one rename
"""

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.disk import rename
from penstock.errors import StoreError
from penstock.store.part import SIDES

_SHOWN = 5


@contextmanager
def made_beside(directory: Path, kind: str) -> Iterator[Path]:
    """The directory to write in a `with` block; it then takes the place of `directory`.

    The caller holds the lock of `directory`, which is empty.
    """
    whole = directory.resolve()
    if os.path.ismount(whole):
        raise StoreError(f"{directory} is a mount point. Name a directory inside of it.")
    new = whole.with_name(f".{whole.name}.{kind}")
    new.mkdir(exist_ok=True)
    yield new
    # Atomic: the directory is empty, and then it holds everything, with both sides of a split.
    rename(new, whole)


def remove_others(directory: Path, names: Collection[str]) -> None:
    """Remove the files of a directory that is being made which do not belong to it."""
    for path in directory.iterdir():
        if path.name not in names and path.name not in SIDES:
            path.unlink()


def refuse_occupied(directory: Path, instead: str) -> None:
    """Raise if a directory is not empty; `instead` says what should be there."""
    found = sorted(each.name for each in directory.iterdir() if each.name != ".lock")
    if found:
        raise StoreError(
            f"{directory} is not empty, and not {instead}; it holds {', '.join(found[:_SHOWN])}. "
            "Choose another directory."
        )
