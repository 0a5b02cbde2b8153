"""Directories of shards with an `index.json`: those of MosaicML Streaming and of LitData.

MDS, the format of MosaicML Streaming, has `.mds` files:

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
it is opened, and those of all documents by `verify_tokens`.

LitData writes `chunk-*.bin` for its `TokensLoader`:

    uint32          items, n
    uint32          n + 1 offsets in bytes
    n items         the ids

An item is what the function given to `litdata.optimize` returned: usually a document. The ids of
all items are contiguous, so a chunk is mapped in place.

Shards and chunks that are compressed with zstd are decompressed into the cache.
"""

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from penstock.errors import StoreError
from penstock.formats.arrays import check_ids, check_not_halves
from penstock.formats.mapped import (
    Array,
    FilePart,
    Integers,
    MappedArray,
    MappedBytes,
    ScatteredArray,
    beside,
    checked_bounds,
    decompressed,
    size_of,
    spread_blocks,
)
from penstock.formats.options import TokenOptions
from penstock.formats.tables import ID_COLUMNS, MASKS

# The codes of integers in MDS documents; 18, 34 and 66 are floats.
_CODES = {8: "u1", 9: "i1", 16: "<u2", 17: "<i2", 32: "<u4", 33: "<i4", 64: "<u8", 65: "<i8"}
_DTYPES = {np.dtype(each).name: np.dtype(each) for each in _CODES.values()}
_CHECKED = 1024
# The codes of dtypes in LitData, which count those of torch and of NumPy.
_TORCH = {11: "u1", 12: "i1", 13: "<i2", 14: "<i2", 15: "<i4", 16: "<i4", 17: "<i8", 18: "<i8"}
_TORCH |= {20: "<u2"}
_NUMPY = dict(enumerate(("i1", "<i2", "<i4", "<i8", "u1", "<u2", "<u4", "<u8")))


def read_index(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty if there is none."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def is_mds(path: Path) -> bool:
    """Return whether a directory has an index of MDS shards."""
    shards = read_index(path / "index.json").get("shards")
    return isinstance(shards, list) and all(
        isinstance(each, dict) and each.get("format") == "mds" for each in shards
    )


def is_litdata(path: Path) -> bool:
    """Return whether a directory has an index of LitData."""
    return {"chunks", "config"} <= read_index(path / "index.json").keys()


def open_mds(path: Path, given: TokenOptions) -> list[FilePart]:
    """Return the ids and the documents of each MDS shard of a directory."""
    index = path / "index.json"
    size_of(index)  # raises: it does not exist
    return [_open_shard(index, each, given) for each in read_index(index)["shards"]]


def _open_shard(index: Path, record: dict[str, Any], given: TokenOptions) -> FilePart:
    number, encoding = _token_column(index, record, given)
    name = data = beside(index, record["raw_data"]["basename"])
    if not name.exists() and record["zip_data"]:
        if not str(record["compression"]).startswith("zstd"):
            raise StoreError(
                f"{index}: {name.name} is compressed with {record['compression']!r}; zstd can be "
                f"read. Decompress it, and keep it as {name}."
            )
        data = decompressed(beside(index, record["zip_data"]["basename"]))
    offsets = _offsets(data, name)
    if (size_of(data), len(offsets) - 1) != (record["raw_data"]["bytes"], record["samples"]):
        raise StoreError(
            f"{name} has {size_of(data):,} bytes and {len(offsets) - 1:,} documents, which is not "
            f"what {index} says. It is truncated or damaged, or belongs to another index."
        )
    kind, _, rest = encoding.partition(":")
    dtype, _, shape = rest.partition(":")
    if kind == "bytes":
        if given.dtype not in _DTYPES or given.vocab_size is None:
            raise StoreError(
                f"{index}: a column of bytes does not record its dtype. Pass dtype= "
                f"({', '.join(_DTYPES)}) and vocab_size= or tokenizer=."
            )
        dtype = given.dtype
    elif kind != "ndarray" or (dtype and dtype not in _DTYPES) or (shape and not shape.isdecimal()):
        raise StoreError(
            f"{index}: the column of ids has the encoding {encoding!r}; ids are read from ndarray "
            "and bytes, of integers in one dimension."
        )
    sizes = [each or 0 for each in record["column_sizes"]]
    has_header = kind == "ndarray" and not shape
    shard = _Shard(data, name, offsets, sizes, number, _DTYPES.get(dtype), has_header)
    part = shard.part()
    for block in spread_blocks(part.ids.array()) if kind == "bytes" else ():
        check_not_halves(block, name, given.vocab_size, is_chosen=True)
        check_ids(block, name, given.vocab_size, is_recorded=False)
    return part


def _token_column(index: Path, record: dict[str, Any], given: TokenOptions) -> tuple[int, str]:
    """Return the number and the encoding of the column that was named, or that holds the ids."""
    names, encodings = record["column_names"], record["column_encodings"]
    arrays = [
        name
        for name, encoding in zip(names, encodings, strict=True)
        if encoding.startswith("ndarray")
    ]
    usual = [each for each in names if each in ID_COLUMNS]
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
    return number, encodings[number]


def _offsets(data: Path, name: Path) -> Integers:
    """Return the byte at which each document or item begins, and the end of the last one."""
    word = np.dtype("<u4")
    count = int(MappedArray(data, word, 0, 1).array()[0])
    found = MappedArray(data, word, 4, count + 1).array().astype(np.int64)
    is_ascending = (found[1:] >= found[:-1]).all()
    if found[0] < 8 + 4 * count or not is_ascending or found[-1] != size_of(data):
        raise StoreError(
            f"{name}: documents must begin after byte {8 + 4 * count:,}, follow each other, and "
            f"end at byte {size_of(data):,}. The offsets are damaged, or the file is truncated."
        )
    return found


class _Shard:
    """The places of the ids of one MDS shard.

    All places are computed from the offsets of the documents, which are inside the file. Headers
    are compared with them, and are never followed.
    """

    def __init__(
        self,
        data: Path,
        name: Path,
        offsets: Integers,
        sizes: list[int],
        column: int,
        dtype: np.dtype[Any] | None,
        has_header: bool,
    ) -> None:
        self._file, self._name = MappedBytes(data), name
        self._offsets, self._sizes, self._column = offsets, sizes, column
        self._variable = [number for number, size in enumerate(sizes) if not size]
        self._starts, self._lengths = self._column_places()
        self._code: list[int] = []
        """The code of the dtype, if each document records it; the first one's."""
        if dtype is None:
            self._code = self._bytes(self._starts[:1], 1)[:, 0].tolist() or [16]
            dtype = np.dtype(_CODES[self._code[0]])
        self._dtype = dtype
        self._headers = self._header_sizes() if has_header else np.zeros(len(offsets) - 1, np.int64)

    def part(self) -> FilePart:
        """Return the ids and the ends of documents, after some headers were compared."""
        counts, rests = np.divmod(self._lengths - self._headers, self._dtype.itemsize)
        if rests.any() or (counts < (self._headers > 0)).any():  # no array is empty
            raise StoreError(
                f"{self._name}: a document does not have a header and a whole number of "
                f"{self._dtype} ids. It is damaged, or of another dtype."
            )
        total, ends = len(counts), np.cumsum(counts)
        spread = np.arange(total)
        # A document whose dtype is in its header may have another one than the first document.
        if total > _CHECKED and not self._code:
            spread = np.unique(np.linspace(0, total - 1, _CHECKED).astype(np.int64))
        self._compare(spread, counts)
        ids = ScatteredArray(self._file, self._dtype, self._starts + self._headers, ends)
        bounds = checked_bounds(ends, len(ids), self._name)
        return FilePart(ids, bounds, check=partial(self._compare, np.arange(total), counts))

    def _column_places(self) -> tuple[Integers, Integers]:
        """Return the byte at which the column of each document begins, and its size."""
        begins, sizes = self._offsets[:-1], np.diff(self._offsets)
        head = 4 * len(self._variable)
        found: dict[int, Integers | int] = dict(enumerate(self._sizes))
        # The sizes of documents give that of the only column without a fixed size. If there are
        # several, each document has to be read.
        left = sizes - head - sum(self._sizes)
        is_bad = left < 0
        if len(self._variable) == 1:
            found[self._variable[0]] = left
        elif not is_bad.any():
            words = self._words(np.arange(len(begins)))
            found |= {each: words[:, at] for at, each in enumerate(self._variable)}
            is_bad = left != words.sum(axis=1)
        if is_bad.any():
            raise StoreError(
                f"{self._name}: a document does not have the size of its columns. The file is "
                "damaged, or its index is of another one."
            )
        starts = begins + head
        for each in range(self._column):
            starts += found[each]
        return starts, np.broadcast_to(np.asarray(found[self._column]), len(sizes))

    def _words(self, numbers: Integers) -> Integers:
        """Return the sizes at the front of documents, one for each column without a fixed size."""
        if not self._variable:
            return np.zeros((len(numbers), 0), np.int64)
        found = self._bytes(self._offsets[numbers], 4 * len(self._variable))
        return found.view("<u4").astype(np.int64)

    def _bytes(self, starts: Integers, size: int) -> Array:
        """Return `size` bytes from each of `starts` on; IndexError beyond the end of the file."""
        data = self._file.array()
        shape = max(0, len(data) - size + 1), size
        found: Array = as_strided(data, shape, (1, 1), writeable=False)[starts]
        return found

    def _header_sizes(self) -> Integers:
        """Return the size of the header of each document, by the size of its column.

        The writer uses the narrowest dtype for the number of ids. So sizes of columns with a
        narrower one are all smaller, and the size of a column shows which dtype it has.
        """
        sizes, item = self._lengths - len(self._code), self._dtype.itemsize
        widths = np.full(len(sizes), 8)
        for width in (4, 2, 1):
            widths[sizes <= 1 + width + ((1 << 8 * width) - 1) * item] = width
        return len(self._code) + 1 + widths

    def _compare(self, numbers: Integers, counts: Integers) -> None:
        """Raise unless the headers of documents say what their sizes do."""
        is_equal = True
        if self._variable == [self._column]:
            is_equal = bool((self._words(numbers)[:, 0] == self._lengths[numbers]).all())
        for size in set(self._headers[numbers].tolist()) - {0}:
            chosen = numbers[self._headers[numbers] == size]
            found, at = self._bytes(self._starts[chosen], size), len(self._code)
            width = size - 1 - at
            # 4 is one dimension, and the two lowest bits are the dtype of the number of ids.
            expected = [*self._code, 4 | (width.bit_length() - 1)]
            lengths = np.ascontiguousarray(found[:, at + 1 :]).view(f"<u{width}")[:, 0]
            is_equal &= bool((found[:, : at + 1] == expected).all())
            is_equal &= bool((lengths == counts[chosen]).all())
        if not is_equal:
            raise StoreError(
                f"{self._name}: the header of a document does not describe one row of "
                f"{self._dtype} ids of its size. Arrays must have one dimension, and all the same "
                "dtype. The document is of another kind, or the file is damaged."
            )


def open_litdata(path: Path, given: TokenOptions) -> list[FilePart]:
    """Return the ids and the items of each chunk of a directory."""
    index = path / "index.json"
    size_of(index)  # raises: it does not exist
    contents = read_index(index)
    config, chunks = contents["config"], contents["chunks"]
    loader, compression = config.get("item_loader"), config.get("compression")
    # Items of other loaders have the same dtype and offsets, but each begins with its size, which
    # would become a token. Old versions do not record the loader. They count tokens, "dim", for
    # this loader only.
    is_counted = any(each.get("dim") is not None for each in chunks)
    if loader != "TokensLoader" and (loader is not None or not is_counted):
        raise StoreError(
            f"{index} has items for {loader or 'another loader'}, and not for TokensLoader. Write "
            "the tokens again with litdata.optimize and a TokensLoader."
        )
    is_by_items = config.get("encryption") or config.get("compression_level") not in (None, "chunk")
    if is_by_items or not str(compression or "zstd").startswith("zstd"):
        raise StoreError(
            f"{index} describes chunks that are encrypted, compressed by items, or compressed with "
            f"{compression!r}; zstd can be read."
        )
    (kind,) = config["data_format"]
    name, _, code = kind.partition(":")
    known = {"no_header_tensor": _TORCH, "no_header_numpy": _NUMPY}.get(name, {})
    if int(code or -1) not in known:
        raise StoreError(
            f"{index} describes items of the format {kind!r}, and not rows of integers. Tokens are "
            "written by litdata.optimize with a TokensLoader, from one-dimensional arrays."
        )
    return [_open_chunk(index, each, np.dtype(known[int(code)]), compression) for each in chunks]


def _open_chunk(
    index: Path, record: dict[str, Any], dtype: np.dtype[Any], compression: str | None
) -> FilePart:
    name = path = beside(index, record["filename"])
    size_of(name)
    if compression is not None:
        path = decompressed(name)
    offsets = _offsets(path, name)
    ends, rests = np.divmod(offsets[1:] - offsets[0], dtype.itemsize)
    dim, num_ids = record.get("dim"), int(ends[-1]) if len(ends) else 0
    is_listed = record["chunk_size"] == len(ends) and dim in (None, num_ids)
    if rests.any() or not is_listed or offsets[0] != 8 + 4 * len(ends):
        raise StoreError(
            f"{name} has {len(ends):,} items and {num_ids:,} {dtype} ids, and {index} describes "
            "others. It is truncated or damaged, or belongs to another index."
        )
    ids = MappedArray(path, dtype, int(offsets[0]))
    return FilePart(ids, checked_bounds(ends, len(ids), name))
