"""Which pieces a row is made of, as an array on disk that is made once.

    stores/web/.rows/packs-2048-5f0c9a….npy      or, where that cannot be written, in
    ~/.cache/penstock/rows/                      (or $PENSTOCK_CACHE/rows)

    32 bytes   digest of the store, of the kind of rows and of their length
    32 bytes   SHA-256 of all that follows
     8 words   parts, rows, pieces, empty and long documents, tokens cut off, two to spare
     parts     rows of each part
     rows + 1  the first piece of each row, and the end
     pieces    where it begins in its part (40 bits) and how long it is (24 bits)

Plain `.npy` of 64-bit words, mapped into memory: 8 bytes a piece and 8 a row. Nothing has
to be invalidated, since the name and the first words follow from what was packed; a file
that is cut off, damaged or of something else is not used but made again. It is written
under another name and renamed, so that several processes may make it at once.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.digest import digest_json
from penstock.errors import DiskFullError, PlanError
from penstock.paths import cache_directory
from penstock.rows.packing import PACKING_FORMAT, Layout
from penstock.store.files import sync_directory, write_file
from penstock.store.npy import HEADER_BYTES, header
from penstock.store.reader import TokenStore

__all__ = ["LONGEST", "RowIndex", "index_of", "joined", "of_layout"]

LONGEST = (1 << 24) - 1
"""The longest row that an index can describe."""
_FIRST = 1 << 40  # no part has so many tokens
_WORD = np.dtype("<u8")
_HEAD = 16  # words
_COUNTS = ("num_empty", "num_long", "num_cut")

Words = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class RowIndex:
    """The rows of a store, or of several: lists of pieces."""

    part_rows: Words
    edges: Words
    """The first piece of each row, and the number of pieces."""
    pieces: Words
    """Where each begins in its part, and its size, in one word."""
    num_empty: int
    num_long: int
    num_cut: int

    @property
    def num_rows(self) -> int:
        """Rows of all parts."""
        return len(self.edges) - 1

    @property
    def num_pieces(self) -> int:
        """Pieces of all rows."""
        return len(self.pieces)

    def spans(
        self, samples: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """How many pieces each row has; where they begin in their part, and their sizes."""
        first = self.edges[samples].astype(np.int64)
        counts = self.edges[samples + 1].astype(np.int64) - first
        # Rows of 2 and 3 pieces, from 5 and 9 on: [0, 1, 2, 3, 4] + [5, 5, 9 - 2, …].
        numbers = np.arange(int(counts.sum())) + np.repeat(
            first - np.cumsum(counts) + counts, counts
        )
        words = self.pieces[numbers]
        return counts, (words >> np.uint64(24)).view(np.int64), _sizes(words)

    def row_sizes(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """The tokens of each row; of its first piece, where rows have one."""
        return _sizes(self.pieces[self.edges[samples]])

    @property
    def num_tokens(self) -> int:
        """Tokens in all pieces; the overlap of split documents counts twice."""
        step = 1 << 20
        blocks = (self.pieces[start : start + step] for start in range(0, len(self.pieces), step))
        return sum(int(_sizes(block).sum()) for block in blocks)


def _sizes(words: Words) -> NDArray[np.int64]:
    return (words & np.uint64(LONGEST)).view(np.int64)


def index_of(
    store: TokenStore, kind: str, length: int, lay_out: Callable[[NDArray[Any]], Layout]
) -> RowIndex:
    """The index of a store, found or made; in memory alone where no place can be written.

    Args:
        store: What the rows are of.
        kind: A name for what `lay_out` does.
        length: How long rows are.
        lay_out: The rows of a part, from where its documents end.
    """
    key = digest_json(["rows", PACKING_FORMAT, kind, length, store.digest])
    name = f"{kind}-{length}-{key[:16]}.npy"
    places = [store.path / ".rows" / name, cache_directory() / "rows" / name]
    parts = [part.num_tokens for part in store.manifest.parts]
    for place in places:
        if (found := _read(place, key, parts, length)) is not None:
            return found
    made = _made(store, lay_out)
    for place in places:
        if _written(place, key, made):
            # Mapped, so that the memory of one that was made can be given back.
            return _read(place, key, parts, length) or made
    return made


def joined(indexes: list[RowIndex]) -> RowIndex:
    """Several indexes as one, in memory where they are more than one."""
    if len(indexes) == 1:
        return indexes[0]
    pieces = np.cumsum([0] + [len(each.pieces) for each in indexes]).astype(np.uint64)
    edges = [each.edges[:-1] + first for each, first in zip(indexes, pieces[:-1], strict=True)]
    return RowIndex(
        np.concatenate([each.part_rows for each in indexes]),
        np.concatenate([*edges, pieces[-1:]]),
        np.concatenate([each.pieces for each in indexes]),
        *(sum(getattr(each, name) for each in indexes) for name in _COUNTS),
    )


def _made(store: TokenStore, lay_out: Callable[[NDArray[Any]], Layout]) -> RowIndex:
    """The index of a store, part by part."""
    part_rows, edges, pieces = [], [np.zeros(1, _WORD)], [np.zeros(0, _WORD)]
    counts = dict.fromkeys(_COUNTS, 0)
    num_pieces = 0
    for number, part in enumerate(store.manifest.parts):
        if part.num_tokens >= _FIRST:
            raise PlanError(f"{store.path}: part {number} has 2^40 tokens or more.")
        layout = lay_out(store.part_array(number, "bounds"))
        part_rows.append(len(layout.edges) - 1)
        edges.append((layout.edges[1:] + num_pieces).astype(_WORD))
        pieces.append(_packed(layout))
        num_pieces += len(layout.starts)
        counts = {name: told + getattr(layout, name) for name, told in counts.items()}
    joined_pieces = pieces[1] if len(pieces) == 2 else np.concatenate(pieces)
    return RowIndex(np.array(part_rows, _WORD), np.concatenate(edges), joined_pieces, **counts)


def of_layout(layout: Layout) -> RowIndex:
    """The index of one part."""
    return RowIndex(
        np.array([len(layout.edges) - 1], _WORD),
        layout.edges.astype(_WORD),
        _packed(layout),
        *(getattr(layout, name) for name in _COUNTS),
    )


def _packed(layout: Layout) -> Words:
    return (layout.starts << 24 | layout.sizes).astype(_WORD)


def _written(place: Path, key: str, made: RowIndex) -> bool:
    """Whether an index could be put there; a full or read-only disk is no reason to stop."""
    sections = [made.part_rows, made.edges, made.pieces]
    told = [len(made.part_rows), made.num_rows, len(made.pieces)]
    told += [getattr(made, name) for name in _COUNTS] + [0, 0]
    body = [np.array(told, _WORD), *sections]
    digest = hashlib.sha256()
    for section in body:
        digest.update(np.ascontiguousarray(section).data)
    size = 8 + sum(map(len, body))
    head = header(_WORD, (size,)) + bytes.fromhex(key) + digest.digest()
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        write_file(place, [head, *(np.ascontiguousarray(section) for section in body)])
        sync_directory(place.parent)
    except (OSError, DiskFullError):
        return False
    return True


def _read(place: Path, key: str, part_tokens: list[int], length: int) -> RowIndex | None:
    """The index that lies there, if it is the one asked for, whole and sound."""
    try:
        size = (place.stat().st_size - HEADER_BYTES) // _WORD.itemsize
        with place.open("rb") as stream:
            if size < _HEAD or stream.read(HEADER_BYTES) != header(_WORD, (size,)):
                return None
            words = np.memmap(stream, _WORD, "r", HEADER_BYTES, (size,)).view(np.ndarray)
    except (OSError, ValueError):
        return None
    told = words[:8].tobytes()
    if told[:32].hex() != key or told[32:] != hashlib.sha256(words[8:].data).digest():
        return None
    num_parts, num_rows, num_pieces, *counts = (int(word) for word in words[8:14])
    if [num_parts, _HEAD + num_parts + num_rows + 1 + num_pieces] != [len(part_tokens), size]:
        return None
    part_rows, edges, pieces = np.split(words[_HEAD:], [num_parts, num_parts + num_rows + 1])
    found = RowIndex(part_rows, edges, pieces, *counts)
    return found if _sound(found, part_tokens, length) else None


def _sound(index: RowIndex, part_tokens: list[int], length: int) -> bool:
    """Whether every piece lies in its part and every row is long enough for its pieces."""
    edges, pieces = index.edges, index.pieces
    if int(index.part_rows.sum()) != index.num_rows or int(edges[0]) or edges[-1] != len(pieces):
        return False
    if (edges[1:] <= edges[:-1]).any():
        return False
    last = np.concatenate(([0], np.cumsum(index.part_rows))).astype(np.int64)
    for number, num_tokens in enumerate(part_tokens):
        low, high = last[number], last[number + 1]
        rows = edges[low : high + 1].astype(np.int64)
        words = pieces[rows[0] : rows[-1]] if high > low else pieces[:0]
        sizes = _sizes(words)
        stops = (words >> np.uint64(24)).view(np.int64) + sizes
        if len(words) and (int(stops.max()) > num_tokens or int(sizes.min()) < 1):
            return False
        if len(words) and int(np.add.reduceat(sizes, rows[:-1] - rows[0]).max()) > length:
            return False
    return True
