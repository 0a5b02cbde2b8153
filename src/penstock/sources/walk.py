"""Directories and globs, listed in full or not at all.

`os.walk`, `glob` and fsspec leave out a directory that they cannot list, in silence. A build
would then miss its documents, and nothing would ever say so. Here every such directory is an
error, with its name and the reason.
"""

# Names stay as the user wrote them: Path would make "a.txt" of "./a.txt".
# ruff: noqa: PTH116, PTH118, PTH208

import fnmatch
import glob
import os
import stat
from collections.abc import Iterator
from typing import Any

from penstock.errors import SourceError

__all__ = ["find_files", "matching", "refuse_unlisted"]


def find_files(folder: str) -> list[str]:
    """All files below `folder`, but for names that begin with a dot.

    Links to directories are followed; one that leads back to a directory that was listed is not
    listed again.
    """
    found: list[str] = []
    listed: set[str] = set()
    waiting = [folder]
    while waiting:
        current = waiting.pop()
        real = os.path.realpath(current)
        if real in listed:
            continue
        listed.add(real)
        for entry in _entries(current):
            if not entry.name.startswith("."):
                (waiting if _is_folder(entry) else found).append(entry.path)
    return found


def _entries(folder: str) -> list["os.DirEntry[str]"]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError as error:
        raise _unlisted(folder, error) from error


def _is_folder(entry: "os.DirEntry[str]") -> bool:
    """Whether an entry is a directory or a link to one; asks the system about links only."""
    try:
        return entry.is_dir()
    except OSError as error:
        raise _unlisted(entry.path, error) from error


def matching(pattern: str) -> list[str]:
    """The files that a glob matches; `**` matches any number of directories, also none.

    As `glob.glob(pattern, recursive=True)`, but errors are not left out, and neither are links to
    nothing.
    """
    return [path for path in dict.fromkeys(_matches(pattern)) if not _is_directory(path)]


def _matches(pattern: str) -> Iterator[str]:
    folder, name = os.path.split(pattern)
    if not glob.has_magic(pattern):
        if _exists(pattern):
            yield pattern
        return
    # The root is its own parent, and has no magic.
    folders = _matches(folder) if folder != pattern and glob.has_magic(folder) else [folder]
    for each in folders:
        if name == "**":
            yield from _below(each, ())
        elif glob.has_magic(name):
            yield from (os.path.join(each, found) for found in _matching_names(each, name))
        elif _exists(os.path.join(each, name)):
            yield os.path.join(each, name)


def _below(folder: str, above: tuple[str, ...]) -> Iterator[str]:
    """`folder`, and all that is in it at any depth; a link to a directory above ends there."""
    real = os.path.realpath(folder or os.curdir)
    if real in above or not _is_directory(folder):
        return
    yield os.path.join(folder, "")
    for name in _matching_names(folder, "*"):
        path = os.path.join(folder, name)
        yield path
        if _is_directory(path):
            yield from _below(path, (*above, real))


def _matching_names(folder: str, pattern: str) -> list[str]:
    """The names in a folder that match; a leading dot is matched by a dot only."""
    if not _is_directory(folder):
        return []
    names = fnmatch.filter(_names(folder or os.curdir), pattern)
    return names if pattern.startswith(".") else [each for each in names if each[:1] != "."]


def _names(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError as error:
        raise _unlisted(folder, error) from error


def _exists(path: str) -> bool:
    try:
        os.lstat(path or os.curdir)
    except (FileNotFoundError, NotADirectoryError, ValueError):  # the last of a NUL in a name
        return False
    except OSError as error:
        raise _unlisted(path, error) from error
    return True


def _is_directory(path: str) -> bool:
    """Whether `path` is a directory, or a link to one; a link to nothing is none."""
    try:
        return stat.S_ISDIR(os.stat(path or os.curdir).st_mode)
    except (FileNotFoundError, NotADirectoryError, ValueError):  # the last of a NUL in a name
        return False
    except OSError as error:
        raise _unlisted(path, error) from error


def refuse_unlisted(filesystem: Any, folder: str, depth: int | None = None) -> None:
    """Raise where fsspec cannot list a directory below `folder`, which it would leave out.

    Args:
        filesystem: Of fsspec. One that finds files by itself, as those of object stores do, is
            trusted to raise.
        folder: Where to begin.
        depth: How many levels to list; all of them if None.
    """
    from fsspec.asyn import AsyncFileSystem
    from fsspec.spec import AbstractFileSystem

    kind = type(filesystem)
    finds = kind.find is not AbstractFileSystem.find
    if finds or getattr(kind, "_find", AsyncFileSystem._find) is not AsyncFileSystem._find:
        return
    waiting = [(folder, 1)]
    while waiting:
        current, level = waiting.pop()
        try:
            entries = filesystem.ls(current, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            if level > 1:
                raise
            return  # a pattern in a folder that does not exist, or in a file, matches nothing
        except OSError as error:
            raise _unlisted(current, error) from error
        if depth is None or level < depth:
            waiting += [
                (entry["name"], level + 1)
                for entry in entries
                if entry["type"] == "directory" and entry["name"].rstrip("/") != current.rstrip("/")
            ]


def _unlisted(path: str, error: OSError) -> SourceError:
    reason = error.strerror or str(error)
    return SourceError(
        f"{path} cannot be listed or examined ({reason}), so its documents would be missing from "
        "the build. Make it readable, move it away, or name the files to read one by one."
    )
