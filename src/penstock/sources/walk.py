"""Listing of directories and globs, with an error for everything that cannot be listed.

`os.walk`, `glob` and fsspec silently leave out a directory that they cannot list. A build would
then miss its documents without any sign of it. Here every such directory is an error, with its
name and the reason. The little that is left out on purpose is counted by kind: see `KINDS`.
"""

# Names stay as the user wrote them: Path would make "a.txt" of "./a.txt".
# ruff: noqa: PTH116, PTH118, PTH119, PTH120, PTH208

import errno
import fnmatch
import glob
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from penstock.errors import SourceError

# What a listing may leave out. Everything else is read, or is an error.
KINDS = {
    "hidden": "hidden",
    "linked": "directories that a link leads to a second time",
    "directories": "directories that match a pattern of files",
}


class Skipped:
    """The paths that a listing left out, by kind; each path counts once."""

    def __init__(self) -> None:
        self._paths: dict[str, set[str]] = {}

    def add(self, kind: str, *paths: str) -> None:
        """Leave out `paths`; `kind` is a key of `KINDS`."""
        if paths:
            self._paths.setdefault(kind, set()).update(paths)

    def paths(self, kind: str) -> list[str]:
        """The paths of one kind, sorted."""
        return sorted(self._paths.get(kind, ()), key=os.fsencode)

    @property
    def counts(self) -> dict[str, int]:
        """How many paths were left out, by kind."""
        return {kind: len(self._paths[kind]) for kind in KINDS if kind in self._paths}

    def __str__(self) -> str:
        shown = {kind: ", ".join(self.paths(kind)[:3]) for kind in self.counts}
        return "; ".join(
            f"{number:,} {KINDS[kind]} ({shown[kind]}{', …' if number > 3 else ''})"
            for kind, number in self.counts.items()
        )


def skipped_text(counts: Mapping[str, int]) -> str:
    """What a listing left out, from the counts in a manifest.

    >>> skipped_text({"hidden": 2, "directories": 1})
    '2 hidden; 1 directories that match a pattern of files'
    """
    return "; ".join(f"{number:,} {KINDS.get(kind, kind)}" for kind, number in counts.items())


def find_files(folder: str, skipped: Skipped) -> list[str]:
    """All files below `folder`, except names that begin with a dot.

    Links to directories are followed. A directory that several names lead to is listed once, under
    its real name if that is below `folder`, and otherwise under the first of the links. So the
    names do not depend on the order in which the system lists a directory.
    """
    found: list[str] = []
    listed: set[tuple[int, int]] = set()
    links = [folder]
    while links:
        # Links found in this round wait for the next one, so real directories come first.
        round_links, links = sorted(links, key=os.fsencode), []
        for link in round_links:
            waiting = [link]
            while waiting:
                current = waiting.pop()
                with _our_errors(current):
                    state = os.stat(current)
                # By device and inode, so that a link to a parent does not lead in circles.
                if (state.st_dev, state.st_ino) in listed:
                    skipped.add("linked", current)
                    continue
                listed.add((state.st_dev, state.st_ino))
                for entry in _visible(current, skipped):
                    with _our_errors(entry.path):  # following a link may fail
                        kind = links if entry.is_symlink() else waiting
                        (kind if entry.is_dir() else found).append(entry.path)
    return found


def _visible(folder: str, skipped: Skipped) -> list["os.DirEntry[str]"]:
    """The entries of a directory whose names do not begin with a dot."""
    with _our_errors(folder), os.scandir(folder) as entries:
        visible = []
        for entry in entries:
            if entry.name.startswith("."):
                skipped.add("hidden", entry.path)
            else:
                visible.append(entry)
    return visible


def matching(pattern: str, skipped: Skipped | None = None) -> list[str]:
    """The files that a glob matches; `**` matches any number of directories, including none.

    Like `glob.glob(pattern, recursive=True)`, but errors are raised, broken links are listed, and
    hidden names and directories that match are added to `skipped`.
    """
    seen = Skipped()
    # Each file once: two `**` in a pattern may find it in several ways.
    paths = list(dict.fromkeys(_matches(pattern, seen)))
    if skipped is not None:
        name = os.path.basename(pattern)
        is_wanted = partial(fnmatch.fnmatch, pat=name)
        # A hidden file counts if the pattern names it, and a hidden directory in any case.
        hidden = [
            path
            for path in seen.paths("hidden")
            if is_wanted(os.path.basename(path)) or _is_directory(path)
        ]
        entered = {folder for path in paths for folder in _parents(path)}
        closed = [each for each in paths if _is_directory(each) and each.rstrip("/") not in entered]
        skipped.add("hidden", *hidden)
        skipped.add("linked", *seen.paths("linked"))
        skipped.add("directories", *closed)
    return [path for path in paths if not _is_directory(path)]


def _parents(path: str) -> Iterator[str]:
    """The directories above `path`, as it names them."""
    path = path.rstrip("/")
    while (above := os.path.dirname(path)) not in ("", path):
        yield above
        path = above


def _matches(pattern: str, skipped: Skipped) -> Iterator[str]:
    folder, name = os.path.split(pattern)
    if not glob.has_magic(pattern):
        if _exists(pattern):
            yield pattern
        return
    # The root is its own parent, and contains no wildcard.
    is_deep = folder != pattern and glob.has_magic(folder)
    folders = _matches(folder, skipped) if is_deep else [folder]
    for each in folders:
        if name == "**":
            yield from _below(each, (), skipped)
        elif glob.has_magic(name):
            names = _matching_names(each, name, skipped)
            yield from (os.path.join(each, found) for found in names)
        elif _exists(os.path.join(each, name)):
            yield os.path.join(each, name)


def _below(folder: str, above: tuple[str, ...], skipped: Skipped) -> Iterator[str]:
    """`folder` and everything below it; a link to one of its parents is not followed."""
    if not _is_directory(folder):
        return
    real = os.path.realpath(folder or os.curdir)
    if real in above:
        skipped.add("linked", folder)
        return
    yield os.path.join(folder, "")
    for name in _matching_names(folder, "*", skipped):
        path = os.path.join(folder, name)
        yield path
        if _is_directory(path):
            yield from _below(path, (*above, real), skipped)


def _matching_names(folder: str, pattern: str, skipped: Skipped) -> list[str]:
    """The names in a folder that match; a name with a leading dot needs a pattern with one."""
    if not _is_directory(folder):
        return []
    with _our_errors(folder):
        names = fnmatch.filter(sorted(os.listdir(folder or os.curdir)), pattern)
    if pattern.startswith("."):
        return names
    for name in names:
        if name.startswith("."):
            skipped.add("hidden", os.path.join(folder, name))
    return [each for each in names if each[:1] != "."]


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
