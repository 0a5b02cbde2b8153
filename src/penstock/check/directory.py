"""Tries the directory that a store is to be built in."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

from penstock.sources.files import InputFile

_SHOWN = 5


def nearest_existing(path: Path) -> Path:
    """The path itself, or its nearest parent that exists."""
    absolute = path.absolute()
    return next(each for each in (absolute, *absolute.parents) if each.exists())


def directory_problem(directory: Path, inputs: Sequence[InputFile]) -> str | None:
    """Why a store of `inputs` cannot be built in `directory`; None if it can.

    An unnamed file is created there and removed, because permissions alone do not show everything
    that can prevent writing.
    """
    existing = nearest_existing(directory)
    if not existing.is_dir():
        return f"{existing} is a file, and a store is a directory"
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        return (
            f"{existing} cannot be written to ({error.strerror}), so no store can be built in "
            f"{directory}"
        )
    return _other_contents(directory, inputs)


def _other_contents(directory: Path, inputs: Sequence[InputFile]) -> str | None:
    """What the directory holds, unless a build of `inputs` can use it."""
    from penstock.store.journal import Journal
    from penstock.store.manifest import FILE_NAME, read_manifest

    # A split store has a manifest on each side, and its journal beside them.
    built = [each for each in (directory, directory / "train") if (each / FILE_NAME).exists()]
    begun = Journal(directory).begun()
    if not built and begun is None:
        found = sorted(each.name for each in directory.iterdir()) if directory.exists() else []
        shown = ", ".join(found[:_SHOWN])
        return f"{directory} is not empty and not a store; it holds {shown}" if found else None
    stored = read_manifest(built[0]).inputs if built else (begun or {}).get("inputs", [])
    # Only the last part of each name, because the same file can be named in several ways. A store
    # of one file is fine too: training and validation files are checked together.
    known = {(Path(each["name"]).name, each["bytes"]) for each in stored}
    if known <= {(Path(each.name).name, each.size) for each in inputs}:
        return None
    return f"{directory} is {'a finished store' if built else 'an unfinished build'} of other files"
