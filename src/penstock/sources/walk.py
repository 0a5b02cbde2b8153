"""Listing of directories and globs, with an error for everything that cannot be listed.

`os.walk`, `glob` and fsspec silently leave out a directory that they cannot list. A build would
then miss its documents without any sign of it. Here every such directory is an error, with its
name and the reason.
"""

# Names stay as the user wrote them: Path would make "a.txt" of "./a.txt".
# ruff: noqa: PTH116, PTH118, PTH208

import errno
import fnmatch
import glob
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from penstock.errors import SourceError


def find_files(folder: str) -> list[str]:
    """All files below `folder`, except names that begin with a dot.

    Links to directories are followed, and every real directory is listed once.
    """
    found: list[str] = []
    listed: set[str] = set()
    waiting = [folder]
    while waiting:
        current = waiting.pop()
        # By the real path, so that a link to a parent folder does not lead in circles.
        real = os.path.realpath(current)
        if real in listed:
            continue
        listed.add(real)
        with _our_errors(current), os.scandir(current) as entries:
            visible = [entry for entry in entries if not entry.name.startswith(".")]
        for entry in visible:
            with _our_errors(entry.path):  # following a link may fail
                (waiting if entry.is_dir() else found).append(entry.path)
    return found


def matching(pattern: str) -> list[str]:
    """The files that a glob matches; `**` matches any number of directories, including none.

    Like `glob.glob(pattern, recursive=True)`, but errors are raised, and broken links are listed.
    """
    # Each file once: two `**` in a pattern may find it in several ways.
    return [path for path in dict.fromkeys(_matches(pattern)) if not _is_directory(path)]


def _matches(pattern: str) -> Iterator[str]:
    folder, name = os.path.split(pattern)
    if not glob.has_magic(pattern):
        if _exists(pattern):
            yield pattern
        return
    # The root is its own parent, and contains no wildcard.
    folders = _matches(folder) if folder != pattern and glob.has_magic(folder) else [folder]
    for each in folders:
        if name == "**":
            yield from _below(each, ())
        elif glob.has_magic(name):
            yield from (os.path.join(each, found) for found in _matching_names(each, name))
        elif _exists(os.path.join(each, name)):
            yield os.path.join(each, name)


def _below(folder: str, above: tuple[str, ...]) -> Iterator[str]:
    """`folder` and everything below it; a link to one of its parents is not followed."""
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
    """The names in a folder that match; a name with a leading dot needs a pattern with one."""
    if not _is_directory(folder):
        return []
    with _our_errors(folder):
        names = fnmatch.filter(sorted(os.listdir(folder or os.curdir)), pattern)
    return names if pattern.startswith(".") else [each for each in names if each[:1] != "."]


def _exists(path: str) -> bool:
    """Whether `path` exists; a broken link counts as existing."""
    return file_mode(path, follow=False) != 0


def _is_directory(path: str) -> bool:
    """Whether `path` is a directory or a link to one."""
    return stat.S_ISDIR(file_mode(path))


def file_mode(path: str, *, follow: bool = True) -> int:
    """The `st_mode` of the file or directory at `path`; 0 if nothing exists there."""
    with _our_errors(path):
        try:
            return os.stat(path or os.curdir, follow_symlinks=follow).st_mode
        except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a NUL in the name
            return 0
        except OSError as error:
            if error.errno != errno.ENAMETOOLONG:  # no file has such a name; it may be a text
                raise
            return 0


def refuse_unlisted(filesystem: Any, folder: str, depth: int | None = None) -> None:
    """Raise if fsspec cannot list a directory below `folder`; fsspec itself would leave it out.

    Args:
        filesystem: A file system of fsspec. One with its own `find`, as object stores have, is
            trusted to raise errors.
        folder: The directory to begin with.
        depth: How many levels to list; all of them if None.
    """
    from fsspec.asyn import AsyncFileSystem
    from fsspec.spec import AbstractFileSystem

    kind = type(filesystem)
    finds = kind.find is not AbstractFileSystem.find
    if finds or getattr(kind, "_find", AsyncFileSystem._find) is not AsyncFileSystem._find:
        return
    # fsspec lists folders with `ls` and ignores its errors, so the same calls are made here first.
    waiting = [(folder, 1)]
    while waiting:
        current, level = waiting.pop()
        with _our_errors(current):
            try:
                entries = filesystem.ls(current, detail=True)
            except (FileNotFoundError, NotADirectoryError):
                if level == 1:  # nothing matches in a folder that does not exist, or in a file
                    return
                raise
        if depth is None or level < depth:
            waiting += [
                (entry["name"], level + 1)
                for entry in entries
                if entry["type"] == "directory" and entry["name"].rstrip("/") != current.rstrip("/")
            ]


@contextmanager
def _our_errors(path: str) -> Iterator[None]:
    """Turn an error of the system into a SourceError that names the path."""
    try:
        yield
    except OSError as error:
        raise SourceError(
            f"{path} cannot be listed or examined ({error.strerror or error}), so its documents "
            "would be missing from the build. Make it readable, move it away, or name the files to "
            "read one by one."
        ) from error
