"""The records of a store's parts, and the table that holds them if there are many.

A manifest of 10^6 parts as JSON has 500 MB, and takes a minute to parse. So the manifest of a store
with more than 16,384 parts does not list them. It has the size and the SHA-256 of a table:

    parts-5f0c9a….npy     uint64, shape (24, parts): a column is a part

    0         the number of the part
    1         documents, or pieces of them
    2         how many of these continue in the next part
    3         tokens
    4 to 7    the SHA-256 of its tokens file, then those of bounds, origin, loss and checks;
              zeros if the part has no such file

The sizes of files follow from these counts. The table is mapped into memory, so the processes of
one machine share it, and a record is made only when somebody asks for it. Its name contains its
digest: an append writes another file, and does not touch the one that the old manifest needs.
"""

import hashlib
import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from penstock.errors import MissingStoreError, StoreError
from penstock.paths import naming
from penstock.ranges import Integers
from penstock.store.blocks import BLOCK_BYTES
from penstock.store.files import HEADER_BYTES, header
from penstock.store.folders import open_to_read

JsonObject = dict[str, Any]
"""A JSON object; its values are checked where they are read from a file."""

KINDS = ("tokens", "bounds", "origin")
CHECKED_KINDS = (*KINDS, "loss")
"""The files whose blocks have checksums, in the order of the checksums."""
ALL_KINDS = (*CHECKED_KINDS, "checks")
MAX_COUNT = 2**62  # sums of counts still fit into int64
_WORD = np.dtype("<u8")
_NUM_COUNTS = 4
_DIGEST_WORDS = 4
_NUM_WORDS = _NUM_COUNTS + _DIGEST_WORDS * len(ALL_KINDS)
_NUMBER, _DOCUMENTS, _CONTINUED, _TOKENS = range(_NUM_COUNTS)

_ABSENT = (0, "0" * 64)
_NUM_RECENT = 4096  # the parts of two blocks of rows, in 5 MB

_Count = TypeVar("_Count", int, Integers)


@dataclass(frozen=True, slots=True)
class PartRecord:
    """The entry of one part in the manifest."""

    number: int
    num_documents: int
    """Documents or pieces of documents, that is, entries of the bounds."""
    num_tokens: int
    files: dict[str, tuple[int, str]]
    """The size and SHA-256 of the file of each kind."""
    num_continued: int = 0
    """How many of `num_documents` are pieces whose document continues in the next part."""

    def to_json(self) -> JsonObject:
        """The entry as JSON."""
        # In a fixed order, also if the record was read from the journal, which sorts keys.
        kinds = [kind for kind in ALL_KINDS if kind in self.files]
        return {
            "part": self.number,
            "documents": self.num_documents,
            **({"continued": self.num_continued} if self.num_continued else {}),
            "tokens": self.num_tokens,
            "files": {kind: list(self.files[kind]) for kind in kinds},
        }

    @classmethod
    def of(cls, entry: JsonObject) -> "PartRecord":
        """The record that `to_json` wrote."""
        files = {kind: (size, digest) for kind, (size, digest) in entry["files"].items()}
        counts = (entry["part"], entry["documents"], entry["tokens"])
        return cls(*counts, files, entry.get("continued", 0))


def file_sizes(
    num_documents: _Count, num_tokens: _Count, item_size: int, has: Mapping[str, _Count]
) -> dict[str, _Count]:
    """The size of each file of a part, or of many parts; 0 where `has` is 0, and else 1.

    >>> file_sizes(2, 13, 2, {"tokens": 1, "bounds": 1, "origin": 1, "loss": 0, "checks": 1})
    {'tokens': 154, 'bounds': 144, 'origin': 160, 'loss': 0, 'checks': 140}
    """
    sizes = {
        kind: _array_size(kind, num_documents, num_tokens, item_size) * has[kind]
        for kind in CHECKED_KINDS
    }
    # A CRC-32 for each block of each other file.
    blocks = [-(-size // BLOCK_BYTES) for size in sizes.values()]
    num_blocks = blocks[0] + blocks[1] + blocks[2] + blocks[3]
    return {**sizes, "checks": (HEADER_BYTES + num_blocks * 4) * has["checks"]}


def _array_size(kind: str, num_documents: _Count, num_tokens: _Count, item_size: int) -> _Count:
    if kind in ("bounds", "origin"):
        return HEADER_BYTES + num_documents * (8 if kind == "bounds" else 16)
    return HEADER_BYTES + num_tokens * (item_size if kind == "tokens" else 1)


class PartTable(Sequence[PartRecord]):
    """The records of many parts; each is made when it is asked for.

    Args:
        table: The words of the file, of shape (24, parts).
        item_size: The bytes of a token.
        mapping: The file that `table` is a view of, if it is one.
        file: The name, size and SHA-256 of that file.
    """

    def __init__(
        self,
        table: NDArray[np.uint64],
        item_size: int,
        mapping: mmap.mmap | None = None,
        file: tuple[str, int, str] | None = None,
        *,
        is_file: bool = True,
    ) -> None:
        self._words, self._item_size, self._mapping = table, item_size, mapping
        self.file, self.is_file = file, is_file
        """Whether the parts are in a table beside the manifest, not listed in the manifest."""
        self._recent: dict[int, PartRecord] = {}

    def __getstate__(self) -> JsonObject:
        return {**self.__dict__, "_words": np.array(self.table), "_mapping": None, "_recent": {}}

    @property
    def table(self) -> NDArray[np.uint64]:
        """All words, as they are in the file."""
        # Reading a page that the file no longer has ends the process (SIGBUS).
        if self._mapping is not None and self._mapping.size() != len(self._mapping):
            raise StoreError(
                "The table of parts of an open store was cut off or overwritten. Restore the file "
                "parts-….npy of the store from a copy, and open the store again."
            )
        return self._words

    def __len__(self) -> int:
        return int(self._words.shape[1])

    @overload
    def __getitem__(self, index: int) -> PartRecord: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[PartRecord, ...]: ...
    def __getitem__(self, index: int | slice) -> PartRecord | tuple[PartRecord, ...]:
        if isinstance(index, slice):
            return tuple(map(self._record, range(*index.indices(len(self)))))
        return self._record(range(len(self))[index])

    def __iter__(self) -> Iterator[PartRecord]:
        return map(self._record, range(len(self)))

    def _record(self, index: int) -> PartRecord:
        # A reader asks for the record of a part several times when it first reads the part.
        found = self._recent.get(index)
        if found is None:
            if len(self._recent) >= _NUM_RECENT:
                self._recent = {}  # another thread may still use the old dict
            found = self._recent[index] = self._made(index)
        return found

    def _made(self, index: int) -> PartRecord:
        words = self.table[:, index].tobytes()
        number, documents, continued, tokens = np.frombuffer(words, _WORD, _NUM_COUNTS).tolist()
        text = words[_NUM_COUNTS * _WORD.itemsize :].hex()
        digests = {kind: text[at * 64 : at * 64 + 64] for at, kind in enumerate(ALL_KINDS)}
        has = {kind: int(digest.strip("0") != "") for kind, digest in digests.items()}
        sizes = file_sizes(documents, tokens, self._item_size, has)
        files = {kind: (sizes[kind], digests[kind]) for kind in ALL_KINDS if has[kind]}
        return PartRecord(number, documents, tokens, files, continued)

    def counts(self, row: int) -> Integers:
        """One row of the table, as a view."""
        return np.asarray(self.table[row].view(np.int64))

    def sizes(self, kind: str) -> Integers:
        """The size of one file of each part; 0 where there is none."""
        counts = (self.counts(_DOCUMENTS), self.counts(_TOKENS))
        if kind != "checks":
            return _array_size(kind, *counts, self._item_size) * self.has(kind)
        has = {each: self.has(each) for each in ALL_KINDS}
        return file_sizes(*counts, self._item_size, has)[kind]

    def has(self, kind: str) -> Integers:
        """1 for each part that has a file of this kind, else 0."""
        first = _NUM_COUNTS + _DIGEST_WORDS * ALL_KINDS.index(kind)
        digests = self.table[first : first + _DIGEST_WORDS]
        has: Integers = (digests != 0).any(axis=0).astype(np.int64)
        return has

    def problem(self) -> str | None:
        """What is wrong with the values of the table; None if nothing is."""
        numbers, documents, continued, tokens = self.table[:_NUM_COUNTS]
        # Then no sum and no size is 2^63 or more: a document has 16 bytes of origin.
        limit = MAX_COUNT // max(16, len(self))
        if max(int(column.max(initial=0)) for column in (documents, tokens)) > limit:
            return "a part has more documents or tokens than a store can have"
        if int(numbers.max(initial=0)) > MAX_COUNT or (numbers[1:] <= numbers[:-1]).any():
            return "it lists parts twice or out of order"
        if (continued > documents).any():
            return "more pieces of a part continue in the next part than it has"
        if not all(self.has(kind).all() for kind in KINDS):
            return f"a part lacks one of the files {', '.join(KINDS)}"
        return None


def token_counts(parts: Sequence[PartRecord]) -> Integers:
    """The number of tokens of each part."""
    if isinstance(parts, PartTable):
        return parts.counts(_TOKENS)
    return np.fromiter((part.num_tokens for part in parts), np.int64, len(parts))


def document_counts(parts: Sequence[PartRecord]) -> Integers:
    """The number of documents, or pieces of documents, of each part."""
    if isinstance(parts, PartTable):
        return parts.counts(_DOCUMENTS)
    return np.fromiter((part.num_documents for part in parts), np.int64, len(parts))


def continued_counts(parts: Sequence[PartRecord]) -> Integers:
    """How many pieces of each part continue in the next one."""
    if isinstance(parts, PartTable):
        return parts.counts(_CONTINUED)
    return np.fromiter((part.num_continued for part in parts), np.int64, len(parts))


def has_kind(parts: Sequence[PartRecord], kind: str) -> bool:
    """Whether any part has a file of this kind."""
    if isinstance(parts, PartTable):
        return bool(parts.has(kind).any())
    return any(kind in part.files for part in parts)


def kind_sizes(parts: Sequence[PartRecord], kind: str) -> Integers:
    """The size of the file of this kind of each part; 0 where there is none."""
    if isinstance(parts, PartTable):
        return parts.sizes(kind)
    sizes = (part.files.get(kind, (0, ""))[0] for part in parts)
    return np.fromiter(sizes, np.int64, len(parts))


def exact_sum(counts: Integers) -> int:
    """The sum of counts below 2^63, also if it is larger.

    >>> exact_sum(np.array([2**62, 2**62, 2**62, 2**62])) == 2**64
    True
    """
    # The sum of 2^31 numbers of 32 bits fits into int64.
    return (int((counts >> 32).sum()) << 32) + int((counts & 0xFFFF_FFFF).sum())


def joined_parts(
    earlier: Sequence[PartRecord], new: Sequence[PartRecord], item_size: int
) -> Sequence[PartRecord]:
    """The records of a store after an append; a table stays a table."""
    if not isinstance(earlier, PartTable):
        return [*earlier, *new]
    joined = np.hstack((earlier.table, table_of(new)))
    return PartTable(joined, item_size, is_file=earlier.is_file)


def compact(parts: Sequence[PartRecord], item_size: int) -> Sequence[PartRecord]:
    """The same records in an array, in 192 bytes each, if that is possible."""
    table = PartTable(table_of(parts), item_size, is_file=False)
    # An array cannot hold the digests of zeros and the counts of some forged manifests.
    return parts if table.problem() else table


def table_of(parts: Sequence[PartRecord]) -> NDArray[np.uint64]:
    """The words of the table of some parts, of shape (24, parts)."""
    if isinstance(parts, PartTable):
        return parts.table
    counts = [(p.number, p.num_documents, p.num_continued, p.num_tokens) for p in parts]
    text = "".join(p.files.get(kind, _ABSENT)[1] for p in parts for kind in ALL_KINDS)
    digests = np.frombuffer(bytes.fromhex(text), _WORD).reshape(len(parts), -1)
    rows = np.array(counts, _WORD).reshape(len(parts), _NUM_COUNTS)
    return np.ascontiguousarray(np.hstack((rows, digests)).T)


def table_bytes(parts: Sequence[PartRecord]) -> bytes:
    """The contents of the file of the table of some parts."""
    table = table_of(parts)
    return header(_WORD, table.shape) + table.tobytes()


def table_file(digest: str) -> str:
    """The name of the table with this SHA-256.

    >>> table_file("5f0c" * 16)
    'parts-5f0c5f0c5f0c5f0c.npy'
    """
    return f"parts-{digest[:16]}.npy"


def read_table(
    path: Path, num_parts: int, num_bytes: int, digest: str, item_size: int
) -> PartTable:
    """The table in a file, mapped into memory and checked.

    Raises:
        ValueError: it is not the table that the manifest says, or its values are impossible.
        MissingStoreError: there is no such file.
    """
    if num_bytes != HEADER_BYTES + num_parts * _NUM_WORDS * _WORD.itemsize:
        raise ValueError(f"a table of {num_parts:,} parts does not have {num_bytes:,} bytes")
    try:
        opened = open_to_read(path)
    except FileNotFoundError:
        raise MissingStoreError(
            f"{path} is missing. It lists the parts of the store. Copy it from a good store, or "
            "build the store again."
        ) from None
    with opened as stream, naming(path):
        size = os.fstat(stream.fileno()).st_size
        if size != num_bytes:
            raise ValueError(
                f"{path.name} has {size:,} bytes, but the manifest says {num_bytes:,}. Copy it "
                "from a good store"
            )
        mapping = mmap.mmap(stream.fileno(), size, access=mmap.ACCESS_READ)
    actual = hashlib.sha256(mapping).hexdigest()
    if actual != digest:
        raise ValueError(
            f"{path.name} was changed after it was written: its SHA-256 is {actual[:8]}…, not "
            f"{digest[:8]}…. Copy it from a good store"
        )
    if mapping[:HEADER_BYTES] != header(_WORD, (_NUM_WORDS, num_parts)):
        raise ValueError(f"{path.name} is not a table of {num_parts:,} parts")
    words = np.frombuffer(mapping, _WORD, offset=HEADER_BYTES).reshape(_NUM_WORDS, num_parts)
    table = PartTable(words, item_size, mapping, (path.name, num_bytes, digest))
    if problem := table.problem():
        raise ValueError(f"{path.name}: {problem}")
    return table
