"""The files of stores that are mapped into memory, and how many of them may be at once.

A map of Python keeps a descriptor of its file open, which shows whether the file was truncated. A
process may have few descriptors (`ulimit -n 32`), and stores may have thousands of parts. So all
open stores together keep a limited number of files mapped, and those that were not used for the
longest time are removed. A reader that uses several files at a time asks `files_at_once` how many.
To map a file again takes 60 µs, as long as to read a whole batch from files that are mapped.
"""

import errno
import mmap
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple, TypeVar
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from penstock.errors import StoreError
from penstock.paths import StorePath

_MOST_MAPPED = 16_384  # Linux allows a process 65,530 maps
# Left to the rest of the process: its streams, locks and directories, what it writes, sockets.
# With torch, an idle process has 5, and a build with two threads 12.
_OTHERS = 24


_LOOKED_AT = 16

# The parts of any store whose manifest lists them, in 50 MB.
_MOST_KEPT = 16_384

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class MappedFile(NamedTuple):
    """One file of a part in memory."""

    array: NDArray[Any]
    data: NDArray[np.uint8]
    """All bytes of the file, with its header."""
    mapping: mmap.mmap
    size: int
    """Bytes of the file."""
    address: int
    """Where `array` begins in memory: to ask NumPy takes 1 µs, and readers ask for each batch."""
    path: StorePath
    name: str
    """The path that was opened: of a remote store, that of the file on this machine."""


class Maps:
    """The mapped files of one store. Safe to use from several threads and after a fork."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.files: dict[tuple[int, str], MappedFile] = {}
        """The files by part and kind. If maps are crowded, one that is used moves to the end; the
        first is the one that was not used for the longest time."""
        self.is_crowded = False
        """Whether so many files are mapped that some may have to be removed soon."""
        with _guard:
            _open.add(self)

    def add(self, key: tuple[int, str], open_file: Callable[[], MappedFile]) -> MappedFile:
        """The file of a key, which is opened unless another thread did that."""
        with self.lock:
            found = self.files.get(key)
            if found is not None:
                return found
            found = self.files[key] = open_file()
        _remove_oldest()
        return found

    def present(self, kind: str, parts: Sequence[int]) -> list[MappedFile] | None:
        """The files of some parts; None if one is not mapped, or does not have its size.

        A batch may have rows of as many parts as it has rows. So these loops do as little as
        possible: for each part one look-up, and one call of fstat, which takes half of the time.
        """
        files = self.files
        try:
            # Without the lock: to look up one key is atomic.
            found = [files[part, kind] for part in parts]
            if [each.mapping.size() for each in found] != [each.size for each in found]:
                return None
        except (KeyError, OSError):  # the caller opens the files one by one, and explains errors
            return None
        if self.is_crowded:
            with self.lock:
                for part, each in zip(parts, found, strict=True):
                    self.files.pop((part, kind), None)
                    self.files[part, kind] = each
        return found

    def use(self, key: tuple[int, str], found: MappedFile) -> None:
        """Make a file the last one to be removed."""
        with self.lock:
            self.files.pop(key, None)
            self.files[key] = found

    def __len__(self) -> int:
        return len(self.files)

    def remove(self, key: tuple[int, str]) -> None:
        """Remove the map of a key, if there is one."""
        with self.lock:
            self.files.pop(key, None)

    def remove_evicted(self) -> None:
        """Remove some maps of files that have no name any more, so that their space is free.

        Looks at the first few files, and moves those that still have a name to the end: so the
        next calls look at others.
        """
        with self.lock:
            for key in list(islice(self.files, _LOOKED_AT)):
                found = self.files.pop(key, None)  # None: its owner was deleted at this moment
                if found is not None and Path(found.name).exists():
                    self.files[key] = found

    def remove_oldest(self) -> None:
        """Remove a map; arrays of it that are in use stay valid, and keep it open."""
        with self.lock:
            if (key := next(iter(self.files), None)) is not None:
                self.files.pop(key, None)


_open: "WeakSet[Maps]" = WeakSet()
_guard = Lock()  # a set must not change while it is listed


def keep_newest(kept: dict[_Key, _Value], key: _Key, value: _Value) -> _Value:
    """Add an entry, if there is none, and forget the oldest ones; returns the entry."""
    # RuntimeError: another thread changed the dict at this moment, and forgets entries as well.
    with suppress(RuntimeError, StopIteration):
        while len(kept) >= _MOST_KEPT:
            kept.pop(next(iter(kept)), None)
    return kept.setdefault(key, value)


def files_at_once(most: int) -> int:
    """How many files, at most `most`, a thread may use at a time."""
    return max(1, min(most, _descriptors() // 4))


@contextmanager
def explained(path: StorePath) -> Iterator[None]:
    """Raise an error that says what to do if the process has no descriptor left for `path`."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        raise StoreError(
            f"{path} cannot be opened: this process has as many open files as it may have, "
            f"{_limit():,}. Arrays of tokens that you keep hold the files of their store open, so "
            "copy them, or allow more files, for example with ulimit -n 1024."
        ) from error


def _remove_oldest() -> None:
    """Remove maps until all open stores together have as many as the process can afford."""
    limit = max(1, min(_descriptors() // 2, _MOST_MAPPED))
    with _guard:
        opened = list(_open)
    if sum(map(len, opened)) > limit // 2:
        for each in opened:
            each.is_crowded = True
    # Only one lock is held at a time, so that two threads cannot wait for each other.
    while sum(map(len, opened)) > limit:
        max(opened, key=len).remove_oldest()


def _descriptors() -> int:
    """The descriptors that the process may have for the files of stores."""
    return _limit() - _OTHERS


def _limit() -> int:
    """The descriptors that the process may have."""
    if sys.platform == "win32":  # where a map needs no descriptor
        return 4 * _MOST_MAPPED
    import resource

    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 4 * _MOST_MAPPED if limit == resource.RLIM_INFINITY else limit


def _after_fork() -> None:
    # Another thread of the parent may have held these locks when the process was forked.
    global _guard
    _guard = Lock()
    for each in _open:
        each.lock = Lock()


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_after_fork)
