"""Columns of ids and masks in Hugging Face datasets on disk (Arrow streams) and Parquet files.

    dataset/state.json                 lists the Arrow files
    dataset/data-00000-of-00002.arrow  a stream of record batches

    input_ids         the ids; a row is a document
    attention_mask    0 is padding, which is removed; it must be at the ends of a row
    labels            -100 is not trained on; any other label must be the id at the same place
    loss_mask         0 is not trained on, 1 is; also completion_mask and assistant_masks of TRL

Other columns are ignored. Tokens that are not trained on stay in the documents.

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
from typing import Any, NamedTuple

import numpy as np

from penstock.disk import write_file
from penstock.errors import StoreError
from penstock.formats.arrays import check_dtype
from penstock.formats.mapped import (
    Array,
    FilePart,
    Integers,
    MappedArray,
    MappedBytes,
    ScatteredArray,
    beside,
    checked_bounds,
    decoded,
    first_bytes,
    parsing,
    size_of,
)
from penstock.formats.options import TokenOptions

ID_COLUMNS = ("input_ids", "tokens")
"""The names of the column of ids, if the caller names none."""
_LOSS = ("loss_mask", "completion_mask", "assistant_masks")
MASKS = ("attention_mask", "labels", *_LOSS)
"""The columns that say which tokens are padding, or not trained on."""
_NOT_TRAINED = -100
_END = b"\xff\xff\xff\xff\x00\x00\x00\x00"
_MAGIC = {"arrow": b"\xff\xff\xff\xff", "parquet": b"PAR1"}
_ROWS_AT_ONCE = 1024
_BATCH_BYTES = 1 << 24

Batches = Callable[[], Iterator[Any]]


class _Kept(NamedTuple):
    """The tokens of some rows, without padding."""

    ids: Array
    lengths: Integers
    """The number of tokens of each row."""
    loss: Array | None
    """1 for each token that is trained on; None if all are."""


def table_kind(path: Path) -> list[str]:
    """Return "arrow" or "parquet" for a file or dataset of that kind, whatever its columns are."""
    if path.is_dir():
        state = path / "state.json"
        return ["arrow"] if state.is_file() and b'"_data_files"' in state.read_bytes() else []
    if not path.is_file():
        return []
    return [kind for kind, magic in _MAGIC.items() if first_bytes(path, 4) == magic]


def is_table(kind: str, path: Path) -> bool:
    """Return whether a file or dataset is of a kind of tables, with a column of ids."""
    if kind not in table_kind(path):
        return False
    return any(each.name in ID_COLUMNS and _is_list(each.type) for each in _schema(path))


def holds_text(path: Path) -> bool:
    """Return whether a path is of an Arrow or Parquet file, or a dataset, with a column `text`."""
    return bool(table_kind(path)) and "text" in [each.name for each in _schema(path)]


def _schema(path: Path) -> Any:
    """Return the schema of a file, or of the first file of a dataset; empty if it is damaged."""
    import pyarrow as pa

    try:
        place = _dataset_files(path)[0] if path.is_dir() else path
        size_of(place)  # raises: it does not exist
        with parsing(place, "a table"):
            if "parquet" in table_kind(place):
                return _parquet_file(place).schema_arrow
            with pa.OSFile(str(place)) as stream:
                return pa.ipc.open_stream(stream).schema
    except (StoreError, IndexError):  # IndexError: the dataset lists no files
        return pa.schema([])


def _is_list(kind: Any, *, of_masks: bool = False) -> bool:
    """Return whether a type is that of rows of integers; or of other numbers, as masks may be."""
    import pyarrow as pa

    if not isinstance(kind, pa.ListType | pa.LargeListType | pa.FixedSizeListType):
        return False
    item, types = kind.value_type, pa.types
    is_mask = types.is_boolean(item) or types.is_floating(item)
    return bool(types.is_integer(item) or (of_masks and is_mask))


def _token_columns(schema: Any, path: Path, given: TokenOptions) -> list[str]:
    """Return the names of the column with the ids, and of the masks.

    Raises:
        StoreError: no column holds ids, or it is not clear which.
    """
    lists = [each.name for each in schema if _is_list(each.type)]
    wanted = ID_COLUMNS if given.column is None else (given.column,)
    found = [each for each in lists if each in wanted]
    if len(found) != 1:
        shown = ", ".join(f"{each.name} ({each.type})" for each in list(schema)[:8])
        advice = (
            f'Name the column: open_tokens(path, column="{lists[0]}"), or --column {lists[0]}.'
            if lists
            else "None of them holds lists of integers. Text is tokenized with penstock build."
        )
        raise StoreError(
            f"{path} has no column {wanted[0]} of lists of integers, or several that could be: "
            f"{shown}. {advice}"
        )
    masks = [each for each in MASKS if each in schema.names and each != found[0]]
    for each in masks:
        if not _is_list(schema.field(each).type, of_masks=True):
            raise StoreError(
                f"{path}: the column {each!r} ({schema.field(each).type}) is not a list for each "
                "row, with a number for each token, as labels and masks are. Remove or rename it."
            )
    return [found[0], *masks]


def open_dataset(path: Path, given: TokenOptions) -> list[FilePart]:
    """Return the ids and the rows of each file of a dataset, or of one Arrow file."""
    files = _dataset_files(path) if path.is_dir() else [path]
    return [_open_arrow(each, given) for each in files]


def _dataset_files(path: Path) -> list[Path]:
    state = path / "state.json"
    with parsing(state, "the state of a dataset"):
        contents = json.loads(state.read_bytes())
        # Old versions of datasets stored the order of rows in a file of its own.
        if contents.get("_indices_data_files") or contents.get("_indices_files"):
            raise StoreError(
                f"{state} stores the order of rows in a separate file. Save the dataset again with "
                "a current version of datasets."
            )
        return [beside(state, each["filename"]) for each in contents["_data_files"]]


def _open_arrow(path: Path, given: TokenOptions) -> FilePart:
    import pyarrow as pa

    file = MappedBytes(path)
    # Arrow reads a file that was truncated between two record batches without an error.
    if not file.size or file.array()[-8:].tobytes() != _END:
        raise StoreError(f"{path} has no mark at its end, as an Arrow stream has. It is truncated.")

    def batches() -> Iterator[Any]:
        yield from pa.ipc.open_stream(pa.py_buffer(file.array()))

    with parsing(path, "an Arrow stream"):
        names = _token_columns(pa.ipc.open_stream(pa.py_buffer(file.array())).schema, path, given)
        part = _mapped(file, batches(), names[0], path)
        if part is None or len(names) > 1:
            part = _open_decoded(batches, names, path, part)
    return part._replace(path=path, masks=tuple(names[1:]))


def _mapped(file: MappedBytes, batches: Iterator[Any], name: str, path: Path) -> FilePart | None:
    """Return the ids of an Arrow file in place; None if its buffers are compressed."""
    base = file.array().ctypes.data
    starts, counts, lengths = [], [], [np.zeros(0, np.int64)]
    dtype: np.dtype[Any] = np.dtype(np.uint16)
    for batch in batches:
        values, sizes = _flat(batch, name, path)
        dtype = np.dtype(values.type.to_pandas_dtype())
        lengths.append(sizes)
        if not len(values):
            continue
        start = values.buffers()[1].address - base + values.offset * dtype.itemsize
        if not 0 <= start <= file.size - len(values) * dtype.itemsize:
            return None
        starts.append(start)
        counts.append(len(values))
    runs = np.array(starts, np.int64), np.cumsum(counts, dtype=np.int64)
    ids = ScatteredArray(file, dtype.newbyteorder("<"), *runs)
    return FilePart(ids, checked_bounds(np.cumsum(np.concatenate(lengths)), len(ids), path))


def open_parquet(path: Path, given: TokenOptions) -> list[FilePart]:
    """Return the ids and the rows of a Parquet file."""
    with parsing(path, "Parquet"):
        names = _token_columns(_parquet_file(path).schema_arrow, path, given)
        part = _open_decoded(lambda: _parquet_batches(path, names), names, path)
    return [part._replace(path=path, masks=tuple(names[1:]))]


def _parquet_file(path: Path) -> Any:
    import pyarrow.parquet as pq

    return pq.ParquetFile(path, page_checksum_verification=True)


def _parquet_batches(path: Path, names: list[str]) -> Iterator[Any]:
    parquet = _parquet_file(path)
    num_rows, groups = parquet.metadata.num_rows, range(parquet.metadata.num_row_groups)
    # A document may have a million ids. So a batch has about 16 MB, by the average row.
    sizes = [parquet.metadata.row_group(each).total_byte_size for each in groups]
    size = max(1, min(_ROWS_AT_ONCE, _BATCH_BYTES * num_rows // max(1, sum(sizes))))
    read = 0
    for batch in parquet.iter_batches(batch_size=size, columns=names, use_threads=False):
        read += batch.num_rows
        yield batch
    # Arrow stops too early in some damaged files, without an error.
    if read != num_rows:
        raise StoreError(f"{path} is damaged: it has {read:,} of {num_rows:,} rows.")


def _open_decoded(
    batches: Batches, names: list[str], path: Path, mapped: FilePart | None = None
) -> FilePart:
    """Return the tokens of a file, decoded into the cache; or mapped, if no mask excludes one."""

    def write(target: Path) -> dict[str, Any]:
        lengths: list[Integers] = [np.zeros(0, np.int64)]
        dtype, has_loss = "<u2", False
        if mapped is not None:
            kept = _kept_rows(batches(), names, path)
            total = sum(len(each.ids) for each in kept if each.loss is None)
            if total == len(mapped.ids.array()):  # nothing was removed, nor excluded
                return {"is_plain": True}

        def ids() -> Iterator[Array]:
            nonlocal dtype, has_loss
            for kept in _kept_rows(batches(), names, path):
                lengths.append(kept.lengths)
                dtype = kept.ids.dtype.newbyteorder("<").str
                has_loss = has_loss or kept.loss is not None
                yield np.ascontiguousarray(kept.ids, dtype)

        def loss() -> Iterator[Array]:
            for kept in _kept_rows(batches(), names, path):
                yield np.ones(len(kept.ids), np.uint8) if kept.loss is None else kept.loss

        write_file(target.with_suffix(".ids"), ids())
        bounds = np.cumsum(np.concatenate(lengths)).astype("<u8")
        write_file(target.with_suffix(".bounds"), [bounds])
        # A second reading: masks of all tokens might not fit into memory.
        if has_loss:
            write_file(target.with_suffix(".loss"), loss())
        return {"is_plain": False, "dtype": dtype, "has_loss": has_loss}

    target, record = decoded(path, names, write)
    if record["is_plain"] and mapped is not None:
        return mapped
    ids = MappedArray(target.with_suffix(".ids"), np.dtype(record["dtype"]))
    bounds = MappedArray(target.with_suffix(".bounds"), np.dtype("<u8")).array()
    loss = MappedArray(target.with_suffix(".loss"), np.dtype("u1")) if record["has_loss"] else None
    return FilePart(ids, checked_bounds(bounds, len(ids), path), loss)


def _flat(batch: Any, name: str, path: Path) -> tuple[Any, Integers]:
    """Return the values of all rows of a column, and the number of values of each row."""
    column = batch.column(name)
    column.validate(full=True)  # the offsets are inside the values
    values = column.flatten()
    if column.null_count or values.null_count:
        raise StoreError(f"{path}: the column {name!r} has a null. Remove such rows first.")
    return values, column.value_lengths().to_numpy(zero_copy_only=False).astype(np.int64)


def _kept_rows(batches: Iterator[Any], names: list[str], path: Path) -> Iterator[_Kept]:
    """Yield the tokens of each record batch of a file, by the rules at the top of this module."""
    first = 0
    for batch in batches:
        yield _kept_tokens(batch, names, path, first)
        first += batch.num_rows


def _kept_tokens(batch: Any, names: list[str], path: Path, first: int) -> _Kept:
    """Return the tokens of a record batch; `first` is the number of its first row in the file."""
    values, lengths = _flat(batch, names[0], path)
    ids = values.to_numpy(zero_copy_only=False)
    check_dtype(ids.dtype, path)
    if len(names) == 1:
        return _Kept(ids, lengths, None)
    rows = np.repeat(np.arange(len(lengths)), lengths)
    keep, loss = np.ones(len(ids), bool), np.ones(len(ids), bool)
    for name in names[1:]:
        values, counts = _flat(batch, name, path)
        mask = values.to_numpy(zero_copy_only=False)
        if not np.array_equal(counts, lengths):
            row = int(np.flatnonzero(counts != lengths)[0])
            raise StoreError(
                f"{path}: row {first + row:,} has {int(lengths[row]):,} ids, but "
                f"{int(counts[row]):,} values in {name!r}."
            )
        is_wrong, rule = (mask != 0) & (mask != 1), "It must be 0 or 1."
        if name == "labels":
            # `attention_mask` is before it in the list of masks: labels of padding are ignored.
            is_wrong = (mask != _NOT_TRAINED) & (mask != ids) & keep
            rule = (
                "A model is trained on the next id, so a label must be the id at the same place, "
                "or -100. Labels of another task cannot be read, and labels that were shifted "
                "already must be shifted back."
            )
        if is_wrong.any():
            at = int(np.flatnonzero(is_wrong)[0])
            raise StoreError(
                f"{path}: row {first + int(rows[at]):,} has the value {mask[at]} in the column "
                f"{name!r}, at the id {ids[at]}. {rule}"
            )
        if name == "attention_mask":
            keep &= mask == 1
        else:
            loss &= mask != (_NOT_TRAINED if name == "labels" else 0)
    kept = np.flatnonzero(keep)
    is_gap = (np.diff(kept) > 1) & (rows[kept[1:]] == rows[kept[:-1]])
    if is_gap.any():
        row = first + int(rows[kept[:-1][is_gap][0]])
        raise StoreError(
            f"{path}: the attention mask of row {row:,} is 0 between tokens. Only padding at the "
            "ends of a row can be removed."
        )
    is_trained = loss[keep]
    lengths = np.bincount(rows[kept], minlength=len(lengths))
    return _Kept(ids[keep], lengths, None if is_trained.all() else is_trained.view(np.uint8))
