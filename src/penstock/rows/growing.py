"""Which pieces a row is made of, in a store whose parts come one after the other.

The rows of a part follow from where its documents end, so a part that is sealed has its rows
whatever comes after it. Their number is counted once and written beside the store, under the
digest of what it was counted from:

    stores/web/.rows/packs-2048.json       {"5f0c9a…": [rows, pieces, tokens, …], …}

The pieces themselves are laid out when a part is read, and forgotten a few parts later: rows
come part after part, so memory does not grow with the store.
"""

import json
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.digest import canonical_json, digest_json
from penstock.errors import DiskFullError
from penstock.rows.index import RowIndex, joined, of_layout
from penstock.rows.packing import PACKING_FORMAT, Layout
from penstock.rows.tokens import Stream
from penstock.store.files import write_file

__all__ = ["GrowingIndex"]

_KEPT_PARTS = 4
_NUM_COUNTS = 6


class GrowingIndex:
    """The rows of a growing store, as `RowIndex` tells those of a finished one.

    Args:
        stream: The store.
        kind: A name for what `lay_out` does.
        length: How long rows are.
        lay_out: The rows of a part, from where its documents end.
    """

    def __init__(
        self, stream: Stream, kind: str, length: int, lay_out: Callable[[NDArray[Any]], Layout]
    ) -> None:
        self._stream = stream
        self._lay_out = lay_out
        self._store: Any = stream.members[0]
        self._file = Path(self._store.path) / ".rows" / f"{kind}-{length}.json"
        self._key = [PACKING_FORMAT, kind, length]
        self._counts = _read(self._file)
        self._known: list[list[int]] = []
        self._ends = np.zeros(0, np.int64)
        self._laid: OrderedDict[int, RowIndex] = OrderedDict()
        self._lock = Lock()
        self.grow()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_lock": None, "_laid": OrderedDict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = Lock()

    def grow(self) -> None:
        """Count the rows of the parts that were sealed since."""
        with self._lock:
            added = False
            parts = self._store.manifest.parts
            for number in range(len(self._known), len(self._stream.ends)):
                key = digest_json([*self._key, parts[number].files["bounds"]])[:32]
                if key not in self._counts:
                    self._counts[key] = _counted(self._index(number))
                    added = True
                self._known.append(self._counts[key])
            self._ends = np.cumsum([each[0] for each in self._known], dtype=np.int64)
            if added:
                _write(self._file, self._counts)

    @property
    def part_rows(self) -> NDArray[np.uint64]:
        """The rows of each part that is known."""
        return np.array([each[0] for each in self._known], np.uint64)

    def _sum(self, place: int) -> int:
        return sum(each[place] for each in self._known)

    @property
    def num_rows(self) -> int:
        """Rows of all parts so far."""
        return int(self._ends[-1]) if len(self._ends) else 0

    @property
    def num_pieces(self) -> int:
        """Pieces of all rows so far."""
        return self._sum(1)

    @property
    def num_tokens(self) -> int:
        """Tokens in all pieces so far; the overlap of split documents counts twice."""
        return self._sum(2)

    @property
    def num_empty(self) -> int:
        """Documents without a token, which are in no row."""
        return self._sum(3)

    @property
    def num_long(self) -> int:
        """Documents longer than a row."""
        return self._sum(4)

    @property
    def num_cut(self) -> int:
        """Tokens that are in no row, because their documents were cut off."""
        return self._sum(5)

    def spans(
        self, samples: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """How many pieces each row has; where they begin in their part, and their sizes."""
        index, local = self._localised(samples)
        return index.spans(local)

    def row_sizes(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """The tokens of each row; of its first piece, where rows have one."""
        index, local = self._localised(samples)
        return index.row_sizes(local)

    def _localised(self, samples: NDArray[np.int64]) -> tuple[RowIndex, NDArray[np.int64]]:
        """An index of the parts that `samples` lie in, and their numbers in it."""
        numbers = np.searchsorted(self._ends, samples, side="right")
        present, places = np.unique(numbers, return_inverse=True)
        with self._lock:
            indexes = [self._index(number) for number in present.tolist()]
        if not indexes:
            none = np.zeros(0, np.int64)
            return of_layout(Layout(np.zeros(1, np.int64), none, none)), samples
        rows = np.array([each.num_rows for each in indexes], np.int64)
        shifts = np.cumsum(rows) - self._ends[present]  # rows before it here, less those there
        return joined(indexes), samples + shifts[places]

    def _index(self, number: int) -> RowIndex:
        if number not in self._laid:
            self._laid[number] = of_layout(self._lay_out(self._stream.bounds(number)))
        self._laid.move_to_end(number)
        while len(self._laid) > _KEPT_PARTS:
            self._laid.popitem(last=False)
        return self._laid[number]


def _counted(index: RowIndex) -> list[int]:
    told = [index.num_rows, index.num_pieces, index.num_tokens]
    return [*told, index.num_empty, index.num_long, index.num_cut]


def _read(file: Path) -> dict[str, list[int]]:
    """The counts that lie there, if they are as they were written."""
    try:
        told = json.loads(file.read_bytes())
        counts: dict[str, list[int]] = told["counts"]
        if told["check"] != digest_json(counts):
            return {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return counts if all(len(each) == _NUM_COUNTS for each in counts.values()) else {}


def _write(file: Path, counts: dict[str, list[int]]) -> None:
    with suppress(OSError, DiskFullError):  # they can be counted again
        file.parent.mkdir(exist_ok=True)
        write_file(file, [canonical_json({"counts": counts, "check": digest_json(counts)})])
