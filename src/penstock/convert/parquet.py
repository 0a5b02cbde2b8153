"""Parquet with a row for each document: `input_ids`, and `loss_mask` if there is one.

Hugging Face datasets reads the file with `load_dataset("parquet", data_files=…)`.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from penstock.convert.source import TokenSource
from penstock.errors import StoreError
from penstock.formats.member import Array, Integers
from penstock.store.files import sync_file

# Bytes of ids in a row group, which is assembled in memory.
_GROUP_BYTES = 1 << 24
# The offsets in a list column are int32.
_LONGEST = 2**31 - 1


def write_parquet(
    directory: Path, side: str, source: TokenSource, group_bytes: int = _GROUP_BYTES
) -> None:
    """Write one file with row groups of about `group_bytes`."""
    columns = {"input_ids": pa.list_(pa.int32())}
    if source.member.has_loss:
        columns["loss_mask"] = pa.list_(pa.uint8())
    path = directory / f"{side}.parquet"
    with path.open("xb") as stream, pq.ParquetWriter(stream, pa.schema(columns)) as writer:
        for table in _tables(source, group_bytes, pa.schema(columns)):
            writer.write_table(table)
    sync_file(path)


def _tables(source: TokenSource, group_bytes: int, schema: pa.Schema) -> Iterator[pa.Table]:
    """Yield the documents of each row group."""
    start = 0
    for ends in source.groups(group_bytes, 4, 4):
        stop = int(ends[-1])
        if stop - start > _LONGEST:
            raise StoreError(
                f"{source.member.path} has a document of {stop - start:,} tokens, and a row of "
                f"Parquet has at most {_LONGEST:,}. Choose another format."
            )
        offsets = np.append(start, ends) - start
        lists = [_lists(offsets, source.ids(start, stop, "int32"), np.dtype(np.int32))]
        if "loss_mask" in schema.names:
            lists.append(_lists(offsets, source.masks(start, stop), np.dtype(np.uint8)))
        yield pa.table(lists, schema=schema)
        start = stop


def _lists(
    offsets: Integers, pieces: Iterator[Array], dtype: "np.dtype[np.integer]"
) -> pa.ListArray:
    values = np.concatenate([np.zeros(0, dtype), *pieces])
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(values))
