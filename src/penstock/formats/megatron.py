"""Token files of Megatron-LM: `.bin` with the ids, and `.idx` with the ends of documents.

    MMIDIDX, the current index          TNTIDX, the index of old versions
    9 bytes  magic                      8 bytes  magic
    uint64   version, 1                 uint64   version, 1
    uint8    dtype code                 uint64   dtype code
    uint64   sequences, n               uint64   bytes of an id
    uint64   entries of documents, m    uint64   sequences, n
    int32    n lengths                  uint64   lengths, n as sequences have one dimension
    int64    n offsets in bytes         uint64   entries of documents, m
    int64    m documents                int64    n + 1 offsets of dimensions
    int8     n modes, or nothing        int64    n + 1 offsets in ids
                                        int64    n lengths
                                        int64    m documents

Sequences are sentences or whole documents. The documents are the numbers of the sequences with
which they begin, and the number of all sequences.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from penstock.errors import MissingStoreError, StoreError
from penstock.formats.mapped import MappedArray, first_bytes, is_listed, size_of
from penstock.formats.member import Array
from penstock.formats.sample import check_dtype
from penstock.formats.token_files import FilePart, checked_bounds

_MAGIC = b"MMIDIDX\x00\x00"
_OLD_MAGIC = b"TNTIDX\x00\x00"
_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}


class _Index(NamedTuple):
    """What an index says, as it is in the file."""

    dtype: str
    lengths: Array
    offsets: Array
    """Where each sequence begins, in ids."""
    documents: Array


def megatron_files(path: Path) -> tuple[Path, Path]:
    """Return the `.bin` and the `.idx` of a prefix, or of either file."""
    prefix = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
    # The name of a prefix may have dots, which `with_suffix` would cut.
    return prefix.with_name(prefix.name + ".bin"), prefix.with_name(prefix.name + ".idx")


def is_megatron(path: Path) -> bool:
    """Return whether there is an index, beside the file or itself, with Megatron's magic string."""
    index = megatron_files(path)[1]
    return is_listed(index) and first_bytes(index, 9).startswith((_MAGIC, _OLD_MAGIC))


def open_megatron(path: Path) -> FilePart:
    """Return the ids and the documents of a pair of files."""
    data, index = megatron_files(path)
    if not data.exists() or not index.exists():
        missing = index if data.exists() else data
        raise MissingStoreError(f"{missing} does not exist; Megatron's files are a pair.")
    head = first_bytes(index, 48)
    if head.startswith(_MAGIC):
        found = _read_current(index, head)
    elif head.startswith(_OLD_MAGIC):
        found = _read_old(index, head)
    else:
        raise StoreError(f"{index} does not begin with MMIDIDX or TNTIDX, as Megatron's files do.")
    check_dtype(np.dtype(found.dtype), data)
    ids = MappedArray(data, np.dtype(found.dtype))
    bounds = _document_ends(found, len(ids.array()), index)
    return FilePart(ids, bounds)


def _number(head: bytes, at: int, size: int = 8) -> int:
    return int.from_bytes(head[at : at + size], "little")


def _dtype(code: int, version: int, index: Path) -> str:
    if version == 1 << 56:
        raise StoreError(f"{index} is big-endian; only files of little-endian machines are read.")
    if version != 1:
        raise StoreError(f"{index} is an index of version {version}; only version 1 can be read.")
    if code not in _DTYPES:
        raise StoreError(f"{index} has the dtype code {code}, which is not one from 1 to 8.")
    return _DTYPES[code]


class _Sections:
    """Reads arrays from a file, one after the other; each is checked against the file's size."""

    def __init__(self, path: Path, offset: int) -> None:
        self._path, self.offset = path, offset

    def take(self, dtype: str, count: int) -> Array:
        found = MappedArray(self._path, np.dtype(dtype), self.offset, count).array()
        self.offset += found.nbytes
        return found

    def refuse_rest(self, *allowed: int) -> None:
        rest = size_of(self._path) - self.offset
        if rest not in allowed:
            raise StoreError(
                f"{self._path} has {rest:,} bytes more than its header counts. It is damaged."
            )


def _read_current(index: Path, head: bytes) -> _Index:
    dtype = _dtype(_number(head, 17, 1), _number(head, 9), index)
    count, num_documents = _number(head, 18), _number(head, 26)
    sections = _Sections(index, 34)
    lengths = sections.take("<i4", count)
    offsets = sections.take("<i8", count)
    documents = sections.take("<i8", num_documents)
    sections.refuse_rest(0, count)  # with or without the modes of multimodal sequences
    size = np.dtype(dtype).itemsize
    if (offsets % size).any():
        raise StoreError(f"{index} has an offset that is not a multiple of {size} bytes.")
    return _Index(dtype, lengths, offsets // size, documents)


def _read_old(index: Path, head: bytes) -> _Index:
    dtype = _dtype(_number(head, 16), _number(head, 8), index)
    size, count, num_lengths = (_number(head, at) for at in (24, 32, 40))
    if size != np.dtype(dtype).itemsize or count != num_lengths:
        raise StoreError(
            f"{index} counts {count:,} sequences, {num_lengths:,} lengths and {size} bytes for "
            f"each {np.dtype(dtype)}. It is damaged, or its sequences are not one-dimensional."
        )
    sections = _Sections(index, 48)
    num_documents = int(sections.take("<u8", 1)[0])
    dimensions = sections.take("<i8", count + 1)
    offsets = sections.take("<i8", count + 1)
    lengths = sections.take("<i8", count)
    documents = sections.take("<i8", num_documents)
    sections.refuse_rest(0)
    if (dimensions != np.arange(count + 1)).any():
        raise StoreError(f"{index} describes sequences that are not one-dimensional.")
    return _Index(dtype, lengths, offsets[:-1], documents)


def _document_ends(found: _Index, num_tokens: int, index: Path) -> Array:
    """Return where documents end, after all lengths, offsets and documents were compared."""
    lengths, documents = found.lengths, found.documents
    # A length above the number of tokens could make the sum wrap around to a valid one.
    if len(lengths) and not 0 <= int(lengths.min()) <= int(lengths.max()) <= num_tokens:
        raise StoreError(f"{index} has a sequence of a length that is not 0 to {num_tokens:,}.")
    ends = np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)))
    if (ends[:-1] != found.offsets).any():
        number = int(np.flatnonzero(ends[:-1] != found.offsets)[0])
        raise StoreError(
            f"{index}: sequence {number:,} begins at token {int(found.offsets[number]):,}, but the "
            f"one before it ends at {int(ends[number]):,}. Sequences must be stored one after the "
            "other. The index is damaged, or of another file."
        )
    # A writer that does not know where documents end records the first 0 only. Then sequences
    # are the documents.
    if documents[:2].tolist() == [0] and len(lengths):
        return checked_bounds(ends[1:], num_tokens, index)
    falls = (documents[1:] < documents[:-1]).any()
    if not len(documents) or documents[0] != 0 or documents[-1] != len(lengths) or falls:
        raise StoreError(
            f"{index}: documents must begin with sequence 0, ascend, and end with sequence "
            f"{len(lengths):,}. The index is damaged."
        )
    return checked_bounds(ends[documents[1:]], num_tokens, index)
