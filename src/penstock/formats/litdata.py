"""Token chunks that LitData writes for its `TokensLoader`: `chunk-*.bin` with an `index.json`.

    uint32         items, n
    uint32         n + 1 offsets in bytes
    n items        the ids

An item is what the function given to `litdata.optimize` returned: usually a document. The ids of
all items are contiguous, so a chunk is mapped in place. A chunk that is compressed with zstd is
decompressed into the cache.
"""

from pathlib import Path
from typing import Any

import numpy as np

from penstock.errors import StoreError
from penstock.formats.decoded import decompressed
from penstock.formats.index_file import beside, looks_like, read_index, value
from penstock.formats.mapped import MappedArray, size_of
from penstock.formats.token_files import FilePart, Settings, checked_bounds

_TORCH = {11: "u1", 12: "i1", 13: "<i2", 14: "<i2", 15: "<i4", 16: "<i4", 17: "<i8", 18: "<i8"}
_TORCH |= {20: "<u2"}
_NUMPY = ("i1", "<i2", "<i4", "<i8", "u1", "<u2", "<u4", "<u8")
_DTYPES = {
    "no_header_tensor": _TORCH,
    "no_header_numpy": dict(enumerate(_NUMPY)),
}


def is_litdata(path: Path) -> bool:
    """Return whether a directory has an index of LitData."""
    return looks_like(path / "index.json", "chunks", "config")


def open_litdata(path: Path, given: Settings) -> list[FilePart]:
    """Return the ids and the items of each chunk of a directory."""
    index = path / "index.json"
    contents = read_index(index)
    config = value(contents, "config", dict, index)
    dtype = _dtype(index, config)
    chunks = value(contents, "chunks", list, index)
    _refuse_other_items(index, config.get("item_loader"), chunks)
    compression = config.get("compression")
    if config.get("encryption") or config.get("compression_level") not in (None, "chunk"):
        raise StoreError(f"{index} describes chunks that are encrypted or compressed by items.")
    if compression is not None and str(compression).partition(":")[0] != "zstd":
        raise StoreError(f"{index}: compression {compression!r} is not zstd.")
    return [_open_chunk(index, each, dtype, is_packed=compression is not None) for each in chunks]


def _refuse_other_items(index: Path, loader: object, chunks: list[Any]) -> None:
    """Raise unless chunks were written for `TokensLoader`.

    Those of `litdata.optimize` without it have the same dtype and offsets, but each item begins
    with its size, which would become a token.
    """
    counts = [each.get("dim") for each in chunks if isinstance(each, dict)]
    # Old versions do not record the loader. They count tokens, "dim", for this loader only.
    is_counted = any(each is not None for each in counts)
    if loader != "TokensLoader" and (loader is not None or not is_counted):
        raise StoreError(
            f"{index} has items for {loader or 'another loader'}, and not for TokensLoader. Write "
            "the tokens again with litdata.optimize and a TokensLoader."
        )


def _dtype(index: Path, config: dict[str, Any]) -> np.dtype[Any]:
    """Return the dtype of tokens.

    Raises:
        StoreError: the chunks hold something else.
    """
    kinds = value(config, "data_format", list, index)
    name, _, code = str(kinds[0] if len(kinds) == 1 else "").partition(":")
    if name not in _DTYPES or not code.isdecimal() or len(code) > 4:
        raise StoreError(
            f"{index} describes items of the format {str(kinds)[:100]}. Tokens are written by "
            "litdata.optimize with a TokensLoader, from one-dimensional arrays or tensors."
        )
    known = _DTYPES[name]
    if int(code) not in known:
        raise StoreError(
            f"{index} has the dtype {name}:{code}, which is not one of integers; token ids are "
            "integers. Nothing was decoded."
        )
    return np.dtype(known[int(code)])


def _open_chunk(index: Path, record: object, dtype: np.dtype[Any], *, is_packed: bool) -> FilePart:
    name = beside(index, value(record, "filename", str, index))
    size_of(name)
    path = decompressed(name) if is_packed else name
    word = np.dtype("<u4")
    count = int(MappedArray(path, word, 0, 1).array()[0])
    if count != value(record, "chunk_size", int, index):
        raise StoreError(
            f"{name} has {count:,} items, but {index} says {str(record)[:200]}. It is damaged, or "
            "belongs to another index."
        )
    # Copied: the file could be changed while it is mapped, after the offsets were checked.
    offsets = MappedArray(path, word, 4, count + 1).array().astype(np.int64)
    first, size = 8 + 4 * count, size_of(path)
    if int(offsets[0]) != first or int(offsets[-1]) != size:
        raise StoreError(
            f"{name}: items must begin at byte {first:,} and end at byte {size:,}, but the offsets "
            f"say {int(offsets[0]):,} and {int(offsets[-1]):,}. It is truncated or damaged."
        )
    ends, rests = np.divmod(offsets[1:] - first, dtype.itemsize)
    if rests.any():
        number = int(np.flatnonzero(rests)[0])
        raise StoreError(
            f"{name}: item {number:,} ends inside an id of {dtype}. It is damaged, or the index "
            "has another dtype."
        )
    ids = MappedArray(path, dtype, first)
    dim = record.get("dim") if isinstance(record, dict) else None
    if dim is not None and dim != len(ids.array()):
        raise StoreError(f"{name} has {len(ids.array()):,} ids, but {index} says {dim}.")
    return FilePart(ids, checked_bounds(ends, len(ids.array()), name))
