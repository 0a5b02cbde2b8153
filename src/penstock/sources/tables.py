"""Parquet files, Hugging Face datasets and texts in memory: one document per row.

Parquet is read by row group, and page checksums are verified if the file has them. A dataset
saved by `datasets.save_to_disk` is a directory of Arrow streams; Arrow maps them into memory
without the `datasets` package. In both cases only the text column is read, and extension types
are refused before anything is decoded.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from penstock.errors import SourceError
from penstock.sources.document import ArrowArray, Batch, binary_array
from penstock.sources.files import InputFile, open_file
from penstock.sources.settings import BLOCK_BYTES, ReadSettings, Texts
from penstock.sources.validate import validate


def table_spans(file: InputFile, field: str, slice_bytes: int) -> Iterator[tuple[int, int, int]]:
    """Ranges of row groups (of record batches in Arrow files), of about `slice_bytes` each.

    Yields the first number, the number after the last, and the size in bytes of each range.
    """
    sizes = _parquet_sizes(file, field) if file.format == "parquet" else _arrow_sizes(file, field)
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
        read = _parquet_rows if file.format == "parquet" else _arrow_rows
        rows = read(file, start, stop, reading.field)
    keep_blank = file.texts is not None and file.texts.keep_blank
    for first, column in rows:
        places = np.arange(first, first + len(column), dtype=np.uint64)
        yield validate(column, file=number, places=places, reading=reading, keep_blank=keep_blank)


@contextmanager
def _our_errors(file: InputFile, kind: str) -> Iterator[None]:
    """Turn the errors that Arrow raises for damaged files into a SourceError."""
    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise SourceError(f"{file.name} cannot be read as {kind}: {error}") from error


def _open_parquet(file: InputFile, field: str | None = None) -> Any:
    import pyarrow.parquet as pq

    with _our_errors(file, "Parquet"):
        parquet = pq.ParquetFile(
            open_file(file) if file.remote else file.path, page_checksum_verification=True
        )
        if field is not None:
            _refuse_no_text(parquet.schema_arrow, file, field)
        return parquet


def _parquet_sizes(file: InputFile, field: str) -> list[int]:
    """The size of each row group, including columns other than the text.

    The size of the text column would be more exact. But Arrow 26 ends the process when it reads
    damaged metadata of a column.
    """
    metadata = _open_parquet(file, field).metadata
    return [
        max(0, metadata.row_group(group).total_byte_size)
        for group in range(metadata.num_row_groups)
    ]


def _parquet_rows(
    file: InputFile, start: int, stop: int, field: str
) -> Iterator[tuple[int, ArrowArray]]:
    parquet = _open_parquet(file, field)
    # Offsets of documents are row numbers of the whole file, so earlier groups are counted.
    groups = [parquet.metadata.row_group(group) for group in range(stop)]
    row = sum(group.num_rows for group in groups[:start])
    end = sum(group.num_rows for group in groups)
    num_bytes = sum(group.total_byte_size for group in groups[start:])
    with _our_errors(file, "Parquet"):
        batches = parquet.iter_batches(
            # As many rows as make about one block of text, by the average size of a row.
            batch_size=max(1, min(65_536, BLOCK_BYTES * (end - row) // max(1, num_bytes))),
            row_groups=list(range(start, stop)),
            columns=[field],
            # The workers of the build use all cores already.
            use_threads=False,
        )
        for batch in batches:
            yield row, _column(batch, field)
            row += batch.num_rows
    # Arrow stops too early in some damaged files, without an error.
    if row != end:
        raise SourceError(
            f"{file.name} is damaged: it ends at row {row:,} and not at {end:,}. Download or write "
            "it again."
        )


def _arrow_batches(file: InputFile) -> Iterator[Any]:
    with _our_errors(file, "an Arrow stream"):
        # Mapped into memory, so that only the pages of the text column are read.
        source = pa.PythonFile(open_file(file), "r") if file.remote else pa.memory_map(file.path)
        yield from _untruncated(file, pa.ipc.open_stream(source))


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
    with _our_errors(file, "an Arrow stream"):
        _refuse_no_text(batch.schema, file, field)
        batch.validate()
        column = _column(batch, field)
        column.validate(full=True)
        return column


def _arrow_sizes(file: InputFile, field: str) -> list[int]:
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


def _refuse_no_text(schema: Any, file: InputFile, field: str) -> None:
    """Raise if the schema has no column `field`, or if that column does not hold text."""
    kind: Any = pa.struct(list(schema))
    for name in _path(schema, field):
        known = [each.name for each in kind] if isinstance(kind, pa.StructType) else []
        if name not in known:
            shown = ", ".join(f'"{each}"' for each in known[:5]) or "no columns at that level"
            raise SourceError(
                f'{file.name} has no column "{field}"; it has {shown}. '
                "Name a column of strings with field= (--field) of penstock.build, or column= of "
                "LLMDataModule."
            )
        found = kind.field(name)
        kind = found.type
    if isinstance(kind, pa.DictionaryType):
        kind = kind.value_type
    texts = (pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary())
    extension = (found.metadata or {}).get(b"ARROW:extension:name")
    if kind not in texts or extension:
        shown = f"the extension type {extension.decode(errors='replace')}" if extension else kind
        raise SourceError(
            f'{file.name}: column "{field}" holds {shown}, not text. Name a column of strings '
            "with field= (--field) of penstock.build, or column= of LLMDataModule."
        )


def _path(schema: Any, field: str) -> list[str]:
    """The names that lead to `field`: the column `a.b` if it exists, else `b` inside of `a`."""
    return [field] if field in schema.names else field.split(".")


def _column(batch: Any, field: str) -> ArrowArray:
    names = _path(batch.schema, field)
    column = batch.column(names[0])
    for name in names[1:]:
        column = pa.compute.struct_field(column, name)
    # Decoding an index outside the dictionary would crash the process.
    if isinstance(column.type, pa.DictionaryType):
        column.validate(full=True)
        column = column.dictionary_decode()
    if column.type == pa.string_view():
        column = column.cast(pa.large_string())
    return column.cast(pa.large_binary())


def num_rows(file: InputFile) -> int:
    """The number of rows of a table."""
    if file.format == "parquet":
        return int(_open_parquet(file).metadata.num_rows)
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
