"""Who reads which slices, so that what nobody reads can be dropped.

    .readers/4711-000000.json    [7, 8, 9, 10]    the slices one reader wants, nearest first

A mark is a file that its reader keeps locked. The lock ends with the process, however that
ends, so a mark that can be locked by another belongs to nobody and is removed.
"""

import itertools
import json
import os
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from penstock.store.lock import close_held, hold

__all__ = ["Mark", "Wishes", "wanted_slices"]

_FOLDER = ".readers"
_SIZE = 1024  # bytes, written at once
_MOST = 100  # slices named
_serial = itertools.count()


class Mark:
    """What one reader wants."""

    def __init__(self, directory: Path) -> None:
        self._folder = directory / _FOLDER
        self._folder.mkdir(exist_ok=True)
        self.path = self._folder / f"{os.getpid()}-{next(_serial):06d}.json"
        self._process = os.getpid()
        self._wanted: list[int] | None = None
        # Under another name until it is locked and says something: it would pass for nobody's.
        new = self.path.with_suffix(".new")
        self._handle = os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        hold(self._handle)
        self.want([])
        new.rename(self.path)

    def want(self, slices: Sequence[int]) -> None:
        """Say which slices are wanted, nearest first."""
        wanted = list(slices[:_MOST])
        if wanted == self._wanted or os.getpid() != self._process:
            return
        os.pwrite(self._handle, json.dumps(wanted).encode().ljust(_SIZE), 0)
        self._wanted = wanted

    def close(self) -> None:
        """Want nothing any more."""
        if os.getpid() != self._process:
            return
        self.path.unlink(missing_ok=True)
        close_held(self._handle)
        with suppress(OSError):  # others are there, or were never
            self._folder.rmdir()


class Wishes:
    """What the readers of one process want: where each is, and so many slices further.

    Args:
        directory: Of the store.
        ahead: How many slices after the one that is read may be made.
    """

    def __init__(self, directory: Path, ahead: int) -> None:
        self.mark = Mark(directory)
        self._ahead = ahead
        self._places: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._more: list[int] = []

    def place(self, reader: Any, number: int, num_slices: int | None) -> set[int]:
        """Say that a reader is at slice `number` of so many; returns all that is wanted now."""
        self._places[reader] = number
        self._more = []
        return self._tell(num_slices)

    def add(self, number: int, num_slices: int | None) -> None:
        """Say that a slice is wanted besides, until a reader moves on."""
        if number not in self._more:
            self._more = [*self._more, number]
        self._tell(num_slices)

    def _tell(self, num_slices: int | None) -> set[int]:
        places = list(self._places.values())
        ranges = [place + step for step in range(self._ahead + 1) for place in places]
        # After the last slice the first one comes again, in the next epoch.
        wanted = [number % num_slices if num_slices else number for number in ranges]
        wanted = list(dict.fromkeys([*self._more, *wanted]))
        self.mark.want(wanted)
        return set(wanted)


def wanted_slices(directory: Path) -> list[int]:
    """All slices that some living reader wants, nearest first."""
    lists = [_wanted(path) for path in sorted((directory / _FOLDER).glob("*.json"))]
    nearest = itertools.chain.from_iterable(itertools.zip_longest(*lists))
    return list(dict.fromkeys(each for each in nearest if each is not None))


def _wanted(path: Path) -> list[int]:
    try:
        handle = os.open(path, os.O_RDWR | getattr(os, "O_CLOEXEC", 0))
    except FileNotFoundError:
        return []
    if hold(handle):  # nobody's
        path.unlink(missing_ok=True)
        close_held(handle)
        return []
    told = os.pread(handle, _SIZE, 0)
    os.close(handle)
    return [int(each) for each in json.loads(told)]
