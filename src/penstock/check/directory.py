"""Tries the directory that a store is to be built in."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.options import ReadSettings
from penstock.sources.files import InputFile

if TYPE_CHECKING:
    from penstock.tokenize.tokenizer import Tokenizer

_SHOWN = 5


def nearest_existing(path: Path) -> Path:
    """The path itself, or its nearest parent that exists."""
    absolute = path.absolute()
    return next(each for each in (absolute, *absolute.parents) if each.exists())


def directory_problem(
    directory: Path, files: Sequence[InputFile], tokenizer: "Tokenizer", reading: ReadSettings
) -> str | None:
    """Why a store of `files` cannot be built in `directory`; None if it can.

    An unnamed file is created there and removed, because permissions alone do not show everything
    that can prevent writing.

    Raises:
        StoreError: a finished store is there that a build of `files` would refuse.
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
    return _other_contents(directory, files, tokenizer, reading)


def _other_contents(
    directory: Path, files: Sequence[InputFile], tokenizer: "Tokenizer", reading: ReadSettings
) -> str | None:
    from penstock.store.existing import refuse_other
    from penstock.store.job import recorded_inputs
    from penstock.store.journal import Journal
    from penstock.store.manifest import FILE_NAME, read_manifest

    inputs = recorded_inputs(files)
    # A split store has a manifest on each side, and its journal beside them.
    built = [each for each in (directory, directory / "train") if (each / FILE_NAME).exists()]
    begun = Journal(directory).begun()
    if built:
        manifest = read_manifest(built[0])
        old = manifest.settings
        # A check has fewer options than a build, so the other settings are those of the store.
        new = {**old, "append": False, "inputs": inputs}
        if "chat" not in old and "added_tokens" not in old["tokenizer"]:
            if not tokenizer.digest or tokenizer.digest != old["tokenizer"]["digest"]:
                new["tokenizer"] = tokenizer.describe()
            new["reading"] = reading.describe()
        refuse_other(directory, manifest, new, files)
    elif begun is None:
        found = sorted(each.name for each in directory.iterdir()) if directory.exists() else []
        shown = ", ".join(found[:_SHOWN])
        return f"{directory} is not empty and not a store; it holds {shown}" if found else None
    elif [(each["name"], each["bytes"]) for each in begun.get("inputs", [])] != [
        (each["name"], each["bytes"]) for each in inputs
    ]:
        return f"{directory} is an unfinished build of other files"
    return None
