"""Which paths are of token files, for functions that also take a store or text."""

import os
from pathlib import Path
from typing import Any

from penstock.formats.megatron import megatron_files
from penstock.formats.open import open_tokens, recognised
from penstock.formats.sets import (
    files_in,
    found_by,
    is_pattern,
    natural_key,
    without_companions,
)
from penstock.formats.tables import table_kind
from penstock.formats.token_files import TokenFiles
from penstock.paths import expand_user, is_remote

TOKEN_SUFFIXES = (".bin", ".idx", ".ds", ".npy")
"""Usual suffixes of token files; the contents decide about the format."""
_TABLE_SUFFIXES = (".arrow", ".parquet")


def token_files_at(path: object, **given: Any) -> TokenFiles | None:
    """Open the token files at a path that may also be a store's; None if it is not of token files.

    Every place that takes a store uses this, so all take and refuse the same files. `given` are the
    arguments of `open_tokens`. The reader of stores refuses other files: it says how to build one.
    """
    if not isinstance(path, str | os.PathLike) or is_remote(path):
        return None
    place = expand_user(path)
    is_named = any(given.get(name) is not None for name in ("format", "column"))
    # A table without ids and a directory of files without headers are opened too: the error says
    # which columns there are, and which argument is missing.
    if (is_named and holds_files(place)) or is_token_file(place) or table_kind(place):
        return open_tokens(path, **given)
    if is_pattern(place) and next(found_by(place), None) is None:
        return open_tokens(path, **given)  # raises: it matches no file
    names = _other_files(place) if place.is_dir() else []
    has_usual = any(
        each.suffix in TOKEN_SUFFIXES or (each.suffix in _TABLE_SUFFIXES and recognised(each))
        for each in names
    )
    return open_tokens(path, **given) if has_usual else None


def is_token_file(path: Path) -> bool:
    """Return whether a path is of token files: by their contents, or by a usual suffix.

    A suffix alone opens nothing: `open_tokens` then says which argument is missing. Any other file
    is left to the reader of text.
    """
    if path.is_dir():
        return _is_token_directory(path)
    if is_pattern(path):
        files = without_companions([each for each in found_by(path) if each.exists()])
        first = min(files, key=natural_key, default=None)
        return first is not None and first.is_file() and is_token_file(first)
    if all(each.exists() for each in megatron_files(path)):
        return True
    return path.is_file() and (path.suffix in TOKEN_SUFFIXES or bool(recognised(path)))


def holds_files(path: Path) -> bool:
    """Return whether a path is a file, a pattern, or a directory with files that is no store."""
    if path.is_dir():
        return not (path / "penstock.json").exists() and bool(files_in(path))
    return path.is_file() or is_pattern(path)


def _is_token_directory(path: Path) -> bool:
    files = _other_files(path)
    if files and (recognised(path) or (path / "dataset_dict.json").is_file()):
        return True
    # The first file stands for all: a directory of text may have millions of files.
    first = next((each for each in files if each.is_file()), None)
    return first is not None and bool(recognised(first))


def _other_files(path: Path) -> list[Path]:
    """Return the files of a directory; none of a store, finished or not."""
    files = [] if (path / "penstock.json").exists() else files_in(path)
    return [] if any(each.name.endswith(".tokens.npy") for each in files) else files
