"""Parquet files, Hugging Face datasets and texts in memory: one document per row.

`penstock.sources.parquet` reads row groups of Parquet files. A dataset saved by
`datasets.save_to_disk` is a directory of Arrow streams; Arrow maps them into memory without the
`datasets` package. In both cases only the text column is read, and extension types are refused
before anything is decoded. Text of a dictionary is expanded in blocks.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from penstock.errors import SourceError
from penstock.options import ReadSettings
from penstock.sources.document import ArrowArray, Batch, binary_array, byte_lengths, null_rows
from penstock.sources.files import InputFile, open_file
from penstock.sources.parquet import (
    open_parquet,
    our_errors,
    parquet_rows,
    parquet_sizes,
    refuse_no_text,
    text_column,
)
from penstock.sources.settings import BLOCK_BYTES, Texts
from penstock.sources.validate import validate


def table_spans(
    file: InputFile, reading: ReadSettings, slice_bytes: int
) -> Iterator[tuple[int, int, int]]:
    """Ranges of row groups (of record batches in Arrow files), of about `slice_bytes` each.

    Yields the first number, the number after the last, and the size in bytes of each range.
    """
    is_parquet = file.format == "parquet"
    sizes = parquet_sizes(file, reading) if is_parquet else _arrow_sizes(file, reading)
    start, held = 0, 0
    for number, size in enumerate(sizes):
        # A quarter above a slice is allowed: row groups are often close to a slice in size.
        if held and held + size > slice_bytes * 5 // 4:
            yield start, number, held
            start, held = number, 0
        held += size
    yield start, len(sizes), held


def read_rows(
    file: InputFile, number: int, start: int, stop: int, reading: ReadSettings
) -> Iterator[Batch]:
    """The documents of the row groups, record batches or texts `[start, stop)` of `file`."""
    if file.texts is not None:
        rows = _text_rows(file.texts, start, stop)
    else:
        read = parquet_rows if file.format == "parquet" else _arrow_rows
        rows = _expanded(read(file, start, stop, reading.field))
    keep_blank = file.texts is not None and file.texts.keep_blank
    for first, column in rows:
        places = np.arange(first, first + len(column), dtype=np.uint64)
        yield validate(column, file=number, places=places, reading=reading, keep_blank=keep_blank)


def _expanded(rows: Iterator[tuple[int, ArrowArray]]) -> Iterator[tuple[int, ArrowArray]]:
    """The columns of `rows` as large_binary arrays, in blocks of about 4 MiB."""
    for first, column in rows:
        ends = np.cumsum(_text_lengths(column))
        start = 0
        while start < len(column):
            # Up to the first row at which the block is full, and at least one row.
            held = int(ends[start - 1]) if start else 0
            stop = max(start + 1, int(np.searchsorted(ends, held + BLOCK_BYTES, side="right")))
            yield first + start, _decoded(column.slice(start, stop - start))
            start = stop


def _text_lengths(column: ArrowArray) -> NDArray[np.int64]:
    """The length of each text in bytes; 0 for nulls."""
    if isinstance(column.type, pa.DictionaryType):
        lengths = np.append(_text_lengths(column.dictionary), 0)
        # A null becomes the last index, whose length is 0.
        indices = column.indices.cast(pa.int64()).fill_null(len(lengths) - 1)
        return np.asarray(lengths[indices.to_numpy(zero_copy_only=False)], np.int64)
    if column.type == pa.string_view() and len(column):
        # Arrow has no function for these: each row is 16 bytes, which begin with the length.
        views = np.frombuffer(column.buffers()[1], np.int32).reshape(-1, 4)
        sizes = views[column.offset : column.offset + len(column), 0].astype(np.int64)
        sizes[null_rows(column)] = 0
        return sizes
    return byte_lengths(column.cast(pa.large_binary()))


def _arrow_source(file: InputFile) -> Any:
    # Mapped into memory, so that only the pages of the text column are read.
    return pa.PythonFile(open_file(file), "r") if file.remote else pa.memory_map(file.path)


def _arrow_batches(file: InputFile) -> Iterator[Any]:
    with our_errors(file, "an Arrow stream"):
        yield from _untruncated(file, pa.ipc.open_stream(_arrow_source(file)))


def _untruncated(file: InputFile, batches: Iterator[Any]) -> Iterator[Any]:
    """The batches of a stream; raise if the file was truncated after it was listed.

    To read a page that a mapped file no longer has would end the process (SIGBUS). So the size is
    compared before each batch is found, and before it is used.
    """
    batch = None
    while True:
        if not file.remote and (size := Path(file.path).stat().st_size) < file.size:
            raise SourceError(
                f"{file.name} has {size:,} bytes, but had {file.size:,} before. It was truncated "
                "while it was read. Write or download it again."
            )
        if batch is not None:
            yield batch
            batch = None
        elif (batch := next(batches, None)) is None:
            return


def _arrow_column(batch: Any, file: InputFile, field: str) -> ArrowArray:
    """One column of a batch, after all its offsets were checked.

    Arrow itself does not check offsets, and an offset past the end of the text would crash the
    process.
    """
    with our_errors(file, "an Arrow stream"):
        refuse_no_text(batch.schema, file, field)
        batch.validate()
        column = text_column(batch, field)
        column.validate(full=True)
        return column


def _arrow_sizes(file: InputFile, reading: ReadSettings) -> list[int]:
    field = reading.field
    return [_arrow_column(batch, file, field).nbytes for batch in _arrow_batches(file)]


def _arrow_rows(
    file: InputFile, start: int, stop: int, field: str
) -> Iterator[tuple[int, ArrowArray]]:
    row = 0
    for number, batch in enumerate(_arrow_batches(file)):
        if number >= stop:
            return
        if number >= start:
            yield row, _arrow_column(batch, file, field)
        row += batch.num_rows


def _decoded(column: ArrowArray) -> ArrowArray:
    """A column of any type of text as a large_binary array."""
    if isinstance(column.type, pa.DictionaryType):
        column = column.dictionary_decode()
    if column.type == pa.string_view():
        column = column.cast(pa.large_string())
    return column.cast(pa.large_binary())


def num_rows(file: InputFile) -> int:
    """The number of rows of a table."""
    if file.format == "parquet":
        return int(open_parquet(file).metadata.num_rows)
    return sum(batch.num_rows for batch in _arrow_batches(file))


def text_spans(
    texts: Texts, num_bytes: int, start: int = 0, stop: int | None = None
) -> Iterator[tuple[int, int, int]]:
    """Ranges of texts of at least `num_bytes` each, except the last, and their sizes in bytes."""
    stop = len(texts) if stop is None else stop
    held = 0
    for number, size in enumerate(texts.sizes(start, stop), start):
        if held >= num_bytes:
            yield start, number, held
            start, held = number, 0
        held += size
    yield start, stop, held


def _text_rows(texts: Texts, start: int, stop: int) -> Iterator[tuple[int, ArrowArray]]:
    for first, last, _ in text_spans(texts, BLOCK_BYTES, start, stop):
        yield first, binary_array(texts.encoded(first, last))
