"""Hugging Face datasets on disk (Arrow streams), and Parquet files, with a column of ids.

    dataset/state.json                 lists the Arrow files
    dataset/data-00000-of-00002.arrow  a stream of record batches

The ids of an Arrow file are mapped in place: those of one record batch are one run. A file with
masks is read completely when it is first opened, because a mask may exclude tokens. If no mask
does, that is remembered in the cache, and the ids are mapped. Otherwise, and for Parquet, the ids
are decoded into the cache:

    KEY.ids     the ids            KEY.bounds  where documents end, uint64
    KEY.loss    1 if trained on    KEY.json    written last: the dtype, and which of these exist
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from penstock.errors import StoreError
from penstock.formats.columns import (
    arrow_errors,
    has_ids,
    kept_rows,
    row_lists,
    token_columns,
)
from penstock.formats.decoded import cache_key, cached
from penstock.formats.index_file import beside, looks_like, read_index, value
from penstock.formats.mapped import MappedArray, MappedBytes, first_bytes
from penstock.formats.member import Array, Integers
from penstock.formats.scattered import ScatteredArray
from penstock.formats.token_files import FilePart, Settings, checked_bounds
from penstock.store.files import write_file

Batches = Callable[[], Iterator[Any]]
_END = b"\xff\xff\xff\xff\x00\x00\x00\x00"
_MAGIC = {"arrow": b"\xff\xff\xff\xff", "parquet": b"PAR1"}
_ROWS_AT_ONCE = 1024
_BATCH_BYTES = 64 << 20


def table_kind(path: Path) -> list[str]:
    """Return "arrow" or "parquet" for a file or dataset of that kind, whatever its columns are."""
    if path.is_dir():
        return ["arrow"] if looks_like(path / "state.json", "_data_files") else []
    if not path.is_file():
        return []
    return [kind for kind, magic in _MAGIC.items() if first_bytes(path, 4) == magic]


def _schema(path: Path) -> Any:
    """Return the schema of an Arrow or Parquet file, or of the first file of a dataset.

    Raises:
        StoreError: it is damaged.
    """
    import pyarrow as pa

    place = _dataset_files(path)[0] if path.is_dir() else path
    if "parquet" in table_kind(place):
        return _parquet_file(place).schema_arrow
    with arrow_errors(place, "an Arrow stream"), pa.OSFile(str(place)) as stream:
        return pa.ipc.open_stream(stream).schema


def is_table(kind: str, path: Path) -> bool:
    """Return whether a file or dataset is of a kind of tables, with a column of ids."""
    return kind in table_kind(path) and _has_column(path, has_ids)


def holds_text(path: Path) -> bool:
    """Return whether a path is of an Arrow or Parquet file, or a dataset, with a column `text`."""
    return bool(table_kind(path)) and _has_column(path, lambda schema: "text" in schema.names)


def _has_column(path: Path, matches: Callable[[Any], bool]) -> bool:
    try:
        return matches(_schema(path))
    except (StoreError, IndexError):  # IndexError: the dataset lists no files
        return False


def open_dataset(path: Path, given: Settings) -> list[FilePart]:
    """Return the ids and the rows of each file of a dataset, or of one Arrow file."""
    files = _dataset_files(path) if path.is_dir() else [path]
    return [part for each in files for part in _open_arrow(each, given)]


def _dataset_files(path: Path) -> list[Path]:
    state = path / "state.json"
    contents = read_index(state)
    # Old versions of datasets stored the order of rows in a file of its own.
    if contents.get("_indices_data_files") or contents.get("_indices_files"):
        raise StoreError(
            f"{state} stores the order of rows in a separate file. Save the dataset again with "
            "a current version of datasets."
        )
    records = value(contents, "_data_files", list, state)
    return [beside(state, value(each, "filename", str, state)) for each in records]


def _open_arrow(path: Path, given: Settings) -> list[FilePart]:
    import pyarrow as pa

    file = MappedBytes(path)
    # Arrow reads a file that was truncated between two record batches without an error.
    if not file.size or file.array()[-8:].tobytes() != _END:
        raise StoreError(f"{path} has no mark at its end, as an Arrow stream has. It is truncated.")

    def batches() -> Iterator[Any]:
        buffer = pa.py_buffer(file.array())
        with arrow_errors(path, "an Arrow stream"):
            yield from pa.ipc.open_stream(buffer)

    with arrow_errors(path, "an Arrow stream"):
        buffer = pa.py_buffer(file.array())
        names = token_columns(pa.ipc.open_stream(buffer).schema, path, given)
    key = cache_key(path, "arrow", names)
    part = None
    if len(names) == 1 or _is_plain(key, batches, names, path):
        part = _mapped(file, batches(), names[0], path)
    part = part or _decoded(key, batches, names, path)
    return [part._replace(path=path, masks=tuple(names[1:]))]


def _mapped(file: MappedBytes, batches: Iterator[Any], name: str, path: Path) -> FilePart | None:
    """Return the ids of an Arrow file in place; None if its buffers are compressed."""
    base = file.array().ctypes.data
    starts, counts, ends = [], [], [np.zeros(0, np.int64)]
    dtype: np.dtype[Any] = np.dtype(np.uint16)
    total = 0
    for batch in batches:
        with arrow_errors(path, "an Arrow stream"):
            batch.validate()
        values, offsets = row_lists(batch.column(name), name, path)
        dtype = np.dtype(values.type.to_pandas_dtype())
        first, count = int(offsets[0]), int(offsets[-1]) - int(offsets[0])
        ends.append(offsets[1:] - first + total)
        if not count:
            continue
        buffer = values.buffers()[1]
        start = buffer.address - base + (values.offset + first) * dtype.itemsize
        if not 0 <= start <= start + count * dtype.itemsize <= file.size:
            return None
        starts.append(start)
        counts.append(count)
        total += count
    ids = ScatteredArray(
        file, dtype.newbyteorder("<"), np.array(starts, np.int64), np.cumsum(counts, dtype=np.int64)
    )
    return FilePart(ids, checked_bounds(np.concatenate(ends), total, path))


def open_parquet(path: Path, given: Settings) -> list[FilePart]:
    """Return the ids and the rows of a Parquet file."""
    names = token_columns(_parquet_file(path).schema_arrow, path, given)
    key = cache_key(path, "parquet", names)
    part = _decoded(key, lambda: _parquet_batches(path, names), names, path)
    return [part._replace(path=path, masks=tuple(names[1:]))]


def _parquet_file(path: Path) -> Any:
    import pyarrow.parquet as pq

    with arrow_errors(path, "Parquet"):
        return pq.ParquetFile(path, page_checksum_verification=True)


def _parquet_batches(path: Path, names: list[str]) -> Iterator[Any]:
    with arrow_errors(path, "Parquet"):
        parquet = _parquet_file(path)
        metadata = parquet.metadata
        num_rows = metadata.num_rows
        groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        # As many rows as are about 64 MiB. Encoded ids take about a quarter of their memory.
        per_row = 4 * sum(group.total_byte_size for group in groups) // max(1, num_rows)
        size = max(1, min(_ROWS_AT_ONCE, _BATCH_BYTES // max(1, per_row)))
        read = 0
        for batch in parquet.iter_batches(batch_size=size, columns=names, use_threads=False):
            read += batch.num_rows
            yield batch
    # Arrow stops too early in some damaged files, without an error.
    if read != num_rows:
        raise StoreError(f"{path} is damaged: it has {read:,} of {num_rows:,} rows.")


def _is_plain(key: str, batches: Batches, names: list[str], path: Path) -> bool:
    """Return whether no mask of a file excludes a token; it is read once, and remembered."""

    def answer(_: Path) -> Iterator[bytes]:
        found = kept_rows(batches(), names, path)
        plain = all(each.loss is None and not each.is_padded for each in found)
        yield json.dumps({"is_plain": plain}).encode()

    known = cached(f"{key}.masks", answer, lambda known: looks_like(known, "is_plain"))
    return value(read_index(known), "is_plain", bool, known)


def _decoded(key: str, batches: Batches, names: list[str], path: Path) -> FilePart:
    """Return the tokens of a file, decoded into the cache."""
    done = cached(
        f"{key}.json", lambda folder: _decode(folder / key, batches, names, path), _is_whole
    )
    return _open_decoded(done)


def _is_whole(done: Path) -> bool:
    """Return whether no file of a decoded copy was deleted or truncated."""
    try:
        _open_decoded(done)
    except StoreError:
        return False
    return True


def _open_decoded(done: Path) -> FilePart:
    """Return the tokens of a decoded copy.

    Raises:
        StoreError: a file of it is missing, or not whole.
    """
    record = read_index(done)
    dtype = np.dtype(value(record, "dtype", str, done))
    ids = MappedArray(done.with_suffix(".ids"), dtype)
    bounds = MappedArray(done.with_suffix(".bounds"), np.dtype("<u8")).array()
    loss = None
    if value(record, "has_loss", bool, done):
        loss = MappedArray(done.with_suffix(".loss"), np.dtype("u1"))
        if len(loss.array()) != len(ids.array()):
            raise StoreError(f"{done.with_suffix('.loss')} is damaged.")
    return FilePart(ids, checked_bounds(bounds.copy(), len(ids.array()), done), loss)


def _decode(target: Path, batches: Batches, names: list[str], path: Path) -> Iterator[bytes]:
    """Write the ids, the ends of documents and the loss mask; yield the contents of `KEY.json`."""
    lengths: list[Integers] = [np.zeros(0, np.int64)]
    dtype, has_loss = "<u2", False

    def ids() -> Iterator[Array]:
        nonlocal dtype, has_loss
        for kept in kept_rows(batches(), names, path):
            lengths.append(kept.lengths)
            dtype = kept.ids.dtype.newbyteorder("<").str
            has_loss = has_loss or kept.loss is not None
            yield np.ascontiguousarray(kept.ids, dtype)

    def loss() -> Iterator[Array]:
        for kept in kept_rows(batches(), names, path):
            yield np.ones(len(kept.ids), np.uint8) if kept.loss is None else kept.loss

    write_file(target.with_suffix(".ids"), ids())
    write_file(target.with_suffix(".bounds"), [np.cumsum(np.concatenate(lengths)).astype("<u8")])
    # A second reading: masks of all tokens might not fit into memory.
    if has_loss:
        write_file(target.with_suffix(".loss"), loss())
    yield json.dumps({"dtype": dtype, "has_loss": has_loss}).encode()
