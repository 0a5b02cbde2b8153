"""Token shards of MosaicML Streaming: a directory of `.mds` files with an `index.json`.

    uint32          documents, n
    uint32          n + 1 offsets in bytes
    JSON            the columns, as in the index
    n documents     uint32 sizes of the columns that have no fixed size, then the columns

    a column `ndarray:uint16`     one byte: 4 (one dimension) + code of the next dtype
                                  uint8, uint16, uint32 or uint64: the number of ids
                                  the ids
    a column `ndarray`            the same, after one byte with the code of the dtype
    a column `ndarray:uint16:99`  the ids, of this shape
    a column `bytes`              the ids, of a dtype that the caller names

The ids of a document are mapped in place, at any byte. The size of a column gives the number of its
ids, and the header must repeat it. The headers of 1,024 documents of each shard are compared when
it is opened, and those of all documents by `verify_tokens`. A shard that is compressed with zstd is
decompressed into the cache. Columns of pickled objects are refused.
"""

from pathlib import Path
from typing import Any

import numpy as np

from penstock.errors import StoreError
from penstock.formats.columns import ID_COLUMNS, MASKS
from penstock.formats.decoded import decompressed
from penstock.formats.index_file import beside, looks_like, read_index, value
from penstock.formats.mapped import MappedArray, size_of
from penstock.formats.mds_shard import DTYPE_CODES, MdsColumn, MdsShard
from penstock.formats.member import Integers
from penstock.formats.token_files import FilePart, Settings

_DTYPES = {np.dtype(each).name: np.dtype(each) for each in DTYPE_CODES.values()}


def is_mds(path: Path) -> bool:
    """Return whether a directory has an index of MDS shards."""
    index = path / "index.json"
    if not looks_like(index, "shards", "version"):
        return False
    shards = read_index(index)["shards"]
    return isinstance(shards, list) and all(
        isinstance(each, dict) and each.get("format") == "mds" for each in shards
    )


def open_mds(path: Path, given: Settings) -> list[FilePart]:
    """Return the ids and the documents of each shard of a directory."""
    index = path / "index.json"
    size_of(index)
    if not is_mds(path):
        raise StoreError(f"{index} does not list shards of the format 'mds'.")
    return [_open_shard(index, each, given) for each in read_index(index)["shards"]]


def _open_shard(index: Path, record: dict[str, Any], given: Settings) -> FilePart:
    if value(record, "version", int, index) != 2:
        raise StoreError(f"{index} lists a shard of version {record['version']}, not 2.")
    columns = _columns(index, record)
    column = _token_column(index, columns, given)
    raw = value(record, "raw_data", dict, index)
    name = beside(index, value(raw, "basename", str, index))
    data = name if name.exists() else _decompressed(index, record, name)
    expected = value(raw, "bytes", int, index)
    if size_of(data) != expected:
        raise StoreError(
            f"{name} has {size_of(data):,} bytes, but {index} says {expected:,}. It is truncated "
            "or damaged, or belongs to another index."
        )
    offsets = _offsets(data, value(record, "samples", int, index), name)
    return MdsShard(data, name, offsets, [size for _, _, size in columns], column).part()


def _decompressed(index: Path, record: dict[str, Any], name: Path) -> Path:
    packed = record.get("zip_data")
    if packed is None:
        size_of(name)  # raises: it does not exist
    kind = value(record, "compression", str, index)
    if kind.partition(":")[0] != "zstd":
        raise StoreError(
            f"{index}: {name.name} is compressed with {kind!r}; zstd can be read. Decompress it, "
            f"and keep it as {name}."
        )
    return decompressed(beside(index, value(packed, "basename", str, index)))


def _columns(index: Path, record: dict[str, Any]) -> list[tuple[str, str, int]]:
    """Return the name, the encoding and the size of each column; 0 if sizes differ."""
    names, encodings, sizes = (
        value(record, f"column_{each}", list, index) for each in ("names", "encodings", "sizes")
    )
    sizes = [0 if each is None else each for each in sizes]
    are_texts = all(isinstance(each, str) for each in [*names, *encodings])
    are_sizes = all(type(each) is int and 0 <= each < 1 << 32 for each in sizes)
    if not are_texts or not are_sizes or not len(names) == len(encodings) == len(sizes) > 0:
        raise StoreError(f"{index} describes columns that cannot be: {str(record)[:200]}.")
    columns = list(zip(names, encodings, sizes, strict=True))
    for name, encoding, _ in columns:
        if encoding.partition(":")[0] == "pkl":
            raise StoreError(
                f"{index}: the column {name!r} is pickled. Unpickling can run any code, so "
                "it is never done. Write the shards again without this column."
            )
    return columns


def _token_column(index: Path, columns: list[tuple[str, str, int]], given: Settings) -> MdsColumn:
    """Return the column that was named, or else the one that holds ids by its name or encoding."""
    names = [name for name, _, _ in columns]
    usual = [each for each in names if each in ID_COLUMNS]
    arrays = [name for name, encoding, _ in columns if encoding.startswith("ndarray")]
    found = [given.column] if given.column is not None else usual or arrays
    if len(found) != 1 or found[0] not in names:
        raise StoreError(
            f"{index} has the columns {', '.join(names)}, and it is not clear which holds the ids. "
            f'Name it: open_tokens(path, column="{(arrays or names)[0]}"), or --column.'
        )
    masks = [each for each in names if each in MASKS]
    if masks and given.column is None:
        raise StoreError(
            f"{index} has the column {masks[0]!r}, which penstock does not read from MDS shards, "
            "so tokens would be trained on that should not be. Write the documents as Parquet, "
            f'or ignore it: open_tokens(path, column="{found[0]}").'
        )
    number = names.index(found[0])
    _, encoding, size = columns[number]
    return _decoder(index, found[0], number, encoding, size, given)


def _decoder(
    index: Path, name: str, number: int, encoding: str, size: int, given: Settings
) -> MdsColumn:
    kind, _, rest = encoding.partition(":")
    if kind == "bytes":
        if given.dtype not in _DTYPES or given.vocab_size is None:
            raise StoreError(
                f"{index}: the column {name!r} holds bytes, whose dtype is not recorded. Pass "
                f"dtype= ({', '.join(_DTYPES)}) and vocab_size= or tokenizer=."
            )
        return MdsColumn(number, _DTYPES[given.dtype], False, given.vocab_size)
    named, _, shape = rest.partition(":")
    if kind != "ndarray" or (named and named not in _DTYPES):
        raise StoreError(
            f"{index}: the column {name!r} has the encoding {encoding!r}; token ids are read from "
            f"ndarray and bytes, of integers. Nothing was decoded."
        )
    dtype = _DTYPES[named] if named else None
    if shape:
        length = int(shape) if shape.isdecimal() and len(shape) < 11 else 0
        if dtype is None or not length or size != length * dtype.itemsize:
            raise StoreError(
                f"{index}: the column {name!r} has the encoding {encoding!r} and {size:,} bytes, "
                "which is not one row of ids."
            )
    return MdsColumn(number, dtype, not shape)


def _offsets(data: Path, num_documents: int, name: Path) -> Integers:
    """Return the byte at which each document begins, and the end of the last one."""
    count = int(MappedArray(data, np.dtype("<u4"), 0, 1).array()[0])
    if count != num_documents:
        raise StoreError(
            f"{name} has {count:,} documents, but its index says {num_documents:,}. It is damaged, "
            "or belongs to another index."
        )
    # Copied: the file could be changed while it is mapped, after the offsets were checked.
    found = MappedArray(data, np.dtype("<u4"), 4, count + 1).array().astype(np.int64)
    falls = np.flatnonzero(found[1:] < found[:-1])
    if int(found[0]) < 8 + 4 * count or len(falls) or int(found[-1]) != size_of(data):
        raise StoreError(
            f"{name}: documents must begin after byte {8 + 4 * count:,}, follow each other, and "
            f"end at byte {size_of(data):,}. The offsets are damaged, or the file is truncated."
        )
    return found
