"""Files of ids with an index of documents: those of Megatron-LM and of datatrove.

Megatron's `.bin` has the ids, and `.idx` the ends of documents:

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

datatrove's `.ds` has `.ds.index` and `.ds.loss` beside it:

    x.ds          the ids, uint16 or uint32, without a header
    x.ds.index    where each document ends, in tokens, uint64
    x.ds.loss     one byte for each token: 1 if it is trained on

The file does not record its dtype. But the last end in the index is the number of tokens, so the
size of the file says how many bytes an id has.
"""

import struct
from pathlib import Path

import numpy as np

from penstock.errors import MissingStoreError, StoreError
from penstock.formats.arrays import check_dtype
from penstock.formats.mapped import (
    Array,
    FilePart,
    MappedArray,
    checked_bounds,
    first_bytes,
    is_listed,
    size_of,
)
from penstock.formats.options import TokenOptions

_MAGIC = b"MMIDIDX\x00\x00"
_OLD_MAGIC = b"TNTIDX\x00\x00"
_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}


def megatron_files(path: Path) -> tuple[Path, Path]:
    """Return the `.bin` and the `.idx` of a prefix, or of either file."""
    prefix = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
    # The name of a prefix may have dots, which `with_suffix` would cut.
    return prefix.with_name(prefix.name + ".bin"), prefix.with_name(prefix.name + ".idx")


def is_megatron(path: Path) -> bool:
    """Return whether there is an index, beside the file or itself, with Megatron's magic string."""
    index = megatron_files(path)[1]
    return is_listed(index) and first_bytes(index, 9).startswith((_MAGIC, _OLD_MAGIC))


def open_megatron(path: Path, given: TokenOptions) -> list[FilePart]:
    """Return the ids and the documents of a pair of files."""
    data, index = megatron_files(path)
    for each in (data, index):
        if not each.exists():
            raise MissingStoreError(f"{each} does not exist; Megatron's files are a pair.")
    head = first_bytes(index, 56)
    if head.startswith(_MAGIC):
        version, code, count, num_documents = struct.unpack_from("<QBQQ", head, 9)
        kinds, position = [("<i4", count), ("<i8", count), ("<i8", num_documents)], 34
    elif head.startswith(_OLD_MAGIC):
        version, code, _, count, _, num_documents = struct.unpack_from("<6Q", head, 8)
        # After the offsets of dimensions, of which each sequence has one.
        kinds = [("<i8", count + 1), ("<i8", count), ("<i8", num_documents)]
        position = 56 + 8 * (count + 1)
    else:
        raise StoreError(f"{index} does not begin with MMIDIDX or TNTIDX, as Megatron's files do.")
    if version != 1:
        # The number of a big-endian machine is 1 << 56.
        raise StoreError(f"{index} is an index of version {version}; only version 1 can be read.")
    dtype = np.dtype(_DTYPES[code])
    check_dtype(dtype, data)
    arrays = []
    for kind, length in kinds:
        arrays.append(MappedArray(index, np.dtype(kind), position, length).array())
        position += arrays[-1].nbytes
    # With or without the modes of multimodal sequences.
    if size_of(index) - position not in (0, count if head.startswith(_MAGIC) else 0):
        raise StoreError(f"{index} has more bytes than its header counts. It is damaged.")
    ids = MappedArray(data, dtype)
    if head.startswith(_MAGIC):
        lengths, offsets, documents = arrays
        starts, rests = np.divmod(offsets, dtype.itemsize)
    else:
        starts, lengths, documents = arrays
        starts, rests = starts[:-1], np.zeros(1)
    ends = np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)))
    if rests.any() or (ends[:-1] != starts).any():
        raise StoreError(
            f"{index}: each sequence must begin where the one before it ends. The index is "
            "damaged, or of another file."
        )
    return [FilePart(ids, _document_ends(ends, documents, len(ids), index))]


def _document_ends(ends: Array, documents: Array, num_tokens: int, index: Path) -> Array:
    """Return where documents end; `ends` are the ends of sequences, after a 0."""
    count = len(ends) - 1
    # A writer that does not know where documents end records the first 0 only. Then sequences
    # are the documents.
    if documents[:2].tolist() == [0] and count:
        return checked_bounds(ends[1:], num_tokens, index)
    falls = (documents[1:] < documents[:-1]).any()
    if documents[:1].tolist() != [0] or documents[-1] != count or falls:
        raise StoreError(
            f"{index}: documents must begin with sequence 0, ascend, and end with sequence "
            f"{count:,}. The index is damaged."
        )
    return checked_bounds(ends[documents[1:]], num_tokens, index)


def _beside(path: Path, ending: str) -> Path:
    return path.with_name(path.name + ending)


def is_datatrove(path: Path) -> bool:
    """Return whether an index is beside a file, and ends with the number of its ids."""
    index = _beside(path, ".index")
    return is_listed(index) and _datatrove_dtype(path, index) is not None


def _datatrove_dtype(path: Path, index: Path) -> "np.dtype[np.unsignedinteger] | None":
    """Return the dtype of which the file has as many ids as the index says; None if none is."""
    if size_of(index) % 8:
        return None
    ends = MappedArray(index, np.dtype("<u8")).array()
    num_tokens = int(ends[-1]) if len(ends) else 0
    for dtype in (np.dtype("<u2"), np.dtype("<u4")):
        if size_of(path) == num_tokens * dtype.itemsize:
            return dtype
    return None


def open_datatrove(path: Path, given: TokenOptions) -> list[FilePart]:
    """Return the ids, the documents and the loss mask of a file."""
    index, mask = _beside(path, ".index"), _beside(path, ".loss")
    size_of(path)
    dtype = _datatrove_dtype(path, index)
    if dtype is None:
        raise StoreError(
            f"{path} has {size_of(path):,} bytes, which is neither 2 nor 4 for each token that "
            f"{index} counts. A file is truncated or damaged, or the two do not belong together."
        )
    ids = MappedArray(path, dtype)
    bounds = checked_bounds(MappedArray(index, np.dtype("<u8")).array(), len(ids), index)
    if not is_listed(mask):
        return [FilePart(ids, bounds, path=path)]
    loss = MappedArray(mask, np.dtype("u1"))
    if len(loss) != len(ids):
        raise StoreError(f"{mask} is for {len(loss):,} tokens, but {path} has {len(ids):,}.")
    return [FilePart(ids, bounds, loss, path=path, masks=("loss mask",))]
