"""Who reads which slices, so that what nobody reads can be dropped.

    .readers/4711-000000-9f0c2e81.json    [7, 8, 9]    the slices one reader wants, nearest first

A mark is a file that its reader keeps locked. The lock ends with the process, however that
ends, so a mark that can be locked by another belongs to nobody and is removed.
"""

import itertools
import json
import os
import secrets
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any

__all__ = ["Mark", "Wishes", "has_readers", "wanted_slices"]

_FOLDER = ".readers"
_SIZE = 1024  # bytes, written at once
_MOST = 100  # slices named
_TRIES = 1_000  # to read a mark
_serial = itertools.count()

# A forked child has the same locks, and would keep them after the process that took them has
# ended; so what is held is closed there, which lets go of nothing here.
_held: set[int] = set()


def hold(handle: int) -> bool:
    """Lock an open file until it is closed with `close_held`; whether that could be done."""
    if not _try_lock(handle):
        return False
    _held.add(handle)
    return True


def close_held(handle: int) -> None:
    """Close a file that was locked, unless a fork has done so."""
    if handle in _held:
        _held.discard(handle)
        os.close(handle)


def _let_go() -> None:
    for handle in list(_held):
        close_held(handle)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)


def _try_lock(handle: int) -> bool:
    try:
        import fcntl
    except ImportError:  # Windows
        return _try_lock_windows(handle)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _try_lock_windows(handle: int) -> bool:
    import msvcrt

    try:
        msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined,unused-ignore]
    except OSError:
        return False
    return True


class Mark:
    """What one reader wants."""

    def __init__(self, directory: Path) -> None:
        self._folder = directory / _FOLDER
        # On another machine, or in another container, a process may have the same number.
        name = f"{os.getpid()}-{next(_serial):06d}-{secrets.token_hex(4)}.json"
        self.path = self._folder / name
        self._process = os.getpid()
        self._wanted: list[int] | None = None
        self._closed = False
        # Under another name until it is locked and says something: it would pass for nobody's.
        new = self.path.with_suffix(".new")
        self._handle = _create(new)
        hold(self._handle)
        self.want([])
        new.rename(self.path)

    def want(self, slices: Sequence[int]) -> None:
        """Say which slices are wanted, nearest first."""
        wanted = list(slices[:_MOST])
        if self._closed or wanted == self._wanted or os.getpid() != self._process:
            return
        os.pwrite(self._handle, json.dumps(wanted).encode().ljust(_SIZE), 0)
        self._wanted = wanted

    def close(self) -> None:
        """Want nothing any more."""
        if self._closed or os.getpid() != self._process:
            return
        self._closed = True
        self.path.unlink(missing_ok=True)
        close_held(self._handle)
        with suppress(OSError):  # others are there, or were never
            self._folder.rmdir()


def _create(path: Path) -> int:
    """Make a file and its folder, which goes when a last reader leaves, perhaps meanwhile."""
    while True:
        with suppress(FileExistsError):
            path.parent.mkdir()
        with suppress(FileNotFoundError):
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)


class Wishes:
    """What the readers of one process want: where each is, and so many slices further.

    Readers may be on several threads, and go on when it was closed, which then tells nobody.

    Args:
        directory: Of the store.
        ahead: How many slices after the one that is read may be made.
    """

    def __init__(self, directory: Path, ahead: int) -> None:
        self._mark = Mark(directory)
        self._telling = Lock()
        self._ahead = ahead
        self._places: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._more: list[int] = []

    def place(self, reader: Any, number: int, num_slices: int | None) -> set[int]:
        """Say that a reader is at slice `number` of so many; returns all that is wanted now."""
        with self._telling:
            self._places[reader] = number
            self._more = []
            return self._tell(num_slices)

    def add(self, number: int, num_slices: int | None) -> None:
        """Say that a slice is wanted besides, until a reader moves on."""
        with self._telling:
            if number not in self._more:
                self._more = [*self._more, number]
            self._tell(num_slices)

    def close(self) -> None:
        """Want nothing any more."""
        # The file's number may be another file's the moment it is closed.
        with self._telling:
            self._mark.close()

    def _tell(self, num_slices: int | None) -> set[int]:
        places = list(self._places.values())
        ranges = [place + step for step in range(self._ahead + 1) for place in places]
        # After the last slice the first one comes again, in the next epoch.
        wanted = [number % num_slices if num_slices else number for number in ranges]
        wanted = list(dict.fromkeys([*self._more, *wanted]))
        self._mark.want(wanted)
        return set(wanted)


def wanted_slices(directory: Path) -> list[int]:
    """All slices that some living reader wants, nearest first."""
    marks = _marks(directory)
    lists = [wanted for path in marks if (wanted := _wanted(path)) is not None]
    nearest = itertools.chain.from_iterable(itertools.zip_longest(*lists))
    return list(dict.fromkeys(each for each in nearest if each is not None))


def has_readers(directory: Path) -> bool:
    """Whether a living reader has a mark here, whatever it wants."""
    return any(_wanted(path) is not None for path in _marks(directory))


def _marks(directory: Path) -> list[Path]:
    with suppress(FileNotFoundError):  # no reader, or the last one leaves now
        return sorted((directory / _FOLDER).glob("*.json"))
    return []


def _wanted(path: Path) -> list[int] | None:
    """What the reader of a mark wants; None where it lives no more."""
    try:
        handle = os.open(path, os.O_RDWR | getattr(os, "O_CLOEXEC", 0))
    except FileNotFoundError:
        return None
    if hold(handle):  # nobody's
        path.unlink(missing_ok=True)
        close_held(handle)
        return None
    try:
        return _told(handle)
    finally:
        os.close(handle)


def _told(handle: int) -> list[int]:
    """What a mark says; read once more where it was being written, and half of it is of before."""
    for _ in range(_TRIES):
        with suppress(ValueError):
            return [int(each) for each in json.loads(os.pread(handle, _SIZE, 0))]
    return []  # damaged; what its reader misses is made again
