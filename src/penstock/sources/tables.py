"""Parquet files, Hugging Face datasets and texts in memory: one document per row.

Parquet is read by row group, and page checksums are verified if the file has them. A dataset
saved by `datasets.save_to_disk` is a directory of Arrow streams; Arrow maps them into memory
without the `datasets` package. In both cases only the text column is read, and extension types
are refused before anything is decoded.

A table of a few hundred bytes may stand for terabytes: one long text in a dictionary, and a run of
a million references to it. So sizes are checked against `max_expansion` before text is expanded,
and text is expanded in blocks.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
from numpy.typing import NDArray

from penstock.errors import SourceError
from penstock.sources.claims import arrow_claims
from penstock.sources.decompress import expansion_limit, too_expanded
from penstock.sources.document import ArrowArray, Batch, binary_array, byte_lengths, null_rows
from penstock.sources.files import InputFile, open_file, read_fully
from penstock.sources.pages import page_claims
from penstock.sources.settings import BLOCK_BYTES, ReadSettings, Texts
from penstock.sources.validate import validate

# Rows of a batch of Parquet are so few that they fit into this memory even if each of them is the
# longest text of the dictionary.
_BATCH_MEMORY = 64 << 20
# The length of a page has 31 bits.
_LONGEST_PAGE = 1 << 31


def table_spans(
    file: InputFile, reading: ReadSettings, slice_bytes: int
) -> Iterator[tuple[int, int, int]]:
    """Ranges of row groups (of record batches in Arrow files), of about `slice_bytes` each.

    Yields the first number, the number after the last, and the size in bytes of each range.
    """
    is_parquet = file.format == "parquet"
    sizes = _parquet_sizes(file, reading) if is_parquet else _arrow_sizes(file, reading)
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
        rows = _expanded(read(file, start, stop, reading.field), file, reading.max_expansion)
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


def _expanded(
    rows: Iterator[tuple[int, ArrowArray]], file: InputFile, max_expansion: int
) -> Iterator[tuple[int, ArrowArray]]:
    """The columns of `rows` as large_binary arrays, in blocks of about 4 MiB.

    Raises:
        SourceError: the text is longer than `max_expansion` allows; it was not expanded yet.
    """
    limit, done = expansion_limit(file, max_expansion), 0
    for first, column in rows:
        ends = np.cumsum(_text_lengths(column))
        done += int(ends[-1]) if len(ends) else 0
        if done > limit:
            raise too_expanded(file, max_expansion)
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


def _open_parquet(file: InputFile, field: str | None = None, **options: Any) -> Any:
    import pyarrow.parquet as pq

    with _our_errors(file, "Parquet"):
        source = open_file(file) if file.remote else file.path
        parquet = pq.ParquetFile(source, page_checksum_verification=True, **options)
        if field is not None:
            _refuse_no_text(parquet.schema_arrow, file, field)
        return parquet


def _parquet_sizes(file: InputFile, reading: ReadSettings) -> list[int]:
    """The size of each row group, including columns other than the text.

    The size of the text column would be more exact. But Arrow 26 ends the process when it reads
    damaged metadata of a column.
    """
    metadata = _open_parquet(file, reading.field).metadata
    sizes = [
        max(0, metadata.row_group(group).total_byte_size)
        for group in range(metadata.num_row_groups)
    ]
    # The file says this itself, so nothing was decompressed yet.
    limit, claimed = expansion_limit(file, reading.max_expansion), sum(sizes)
    # The footer may be forged, and pages say how long they are, too. To a larger file the limit
    # allows a page of any length, and Arrow holds one page at a time.
    if claimed <= limit < _LONGEST_PAGE:
        with _our_errors(file, "Parquet"), open_file(file) as stream:
            claimed = page_claims(read_fully(stream, file.size))
    if claimed > limit:
        raise too_expanded(file, reading.max_expansion)
    return sizes


def _parquet_rows(
    file: InputFile, start: int, stop: int, field: str
) -> Iterator[tuple[int, ArrowArray]]:
    parquet = _open_parquet(file, field)
    # Offsets of documents are row numbers of the whole file, so earlier groups are counted.
    groups = [parquet.metadata.row_group(group) for group in range(stop)]
    row = sum(group.num_rows for group in groups[:start])
    for number in range(start, stop):
        group = groups[number]
        end = row + group.num_rows
        # As many rows as make about one block of text, by the average size of a row.
        wanted = BLOCK_BYTES * group.num_rows // max(1, group.total_byte_size)
        longest = _longest_entry(file, field, number) if group.num_rows else 0
        with _our_errors(file, "Parquet"):
            batches = parquet.iter_batches(
                batch_size=max(1, min(65_536, wanted, _BATCH_MEMORY // max(1, longest))),
                row_groups=[number],
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
                f"{file.name} is damaged: row group {number} ends at row {row:,} and not at "
                f"{end:,}. Download or write it again."
            )


def _longest_entry(file: InputFile, field: str, group: int) -> int:
    """The length of the longest text in the dictionary of a row group; 0 if it has none.

    Read as a dictionary, the first row comes with all entries. The other rows are not read so,
    because Arrow would make a dictionary of texts that have none, in ten times the time.
    """
    parquet = _open_parquet(file, field, read_dictionary=[field], pre_buffer=False)
    with _our_errors(file, "Parquet"):
        batches = parquet.iter_batches(
            batch_size=1, row_groups=[group], columns=[field], use_threads=False
        )
        # A damaged group may have no row; the caller reports that.
        columns = [_column(batch, field, is_decoded=False) for batch in islice(batches, 1)]
    entries = [each.dictionary for each in columns if isinstance(each.type, pa.DictionaryType)]
    # A copy of the entries, as `_text_lengths` makes it, took as long as reading them.
    lengths = [pa.compute.max(pa.compute.binary_length(each)).as_py() for each in entries]
    return max((length or 0 for length in lengths), default=0)


def _arrow_source(file: InputFile) -> Any:
    # Mapped into memory, so that only the pages of the text column are read.
    return pa.PythonFile(open_file(file), "r") if file.remote else pa.memory_map(file.path)


def _arrow_batches(file: InputFile) -> Iterator[Any]:
    with _our_errors(file, "an Arrow stream"):
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
    with _our_errors(file, "an Arrow stream"):
        _refuse_no_text(batch.schema, file, field)
        batch.validate()
        column = _column(batch, field)
        column.validate(full=True)
        return column


def _arrow_sizes(file: InputFile, reading: ReadSettings) -> list[int]:
    with _our_errors(file, "an Arrow stream"):
        # Arrow allocates what a compressed buffer claims before it decompresses the buffer.
        if arrow_claims(_arrow_source(file)) > expansion_limit(file, reading.max_expansion):
            raise too_expanded(file, reading.max_expansion)
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


def _column(batch: Any, field: str, *, is_decoded: bool = True) -> ArrowArray:
    names = _path(batch.schema, field)
    column = batch.column(names[0])
    for name in names[1:]:
        column = pa.compute.struct_field(column, name)
    # Decoding an index outside the dictionary would crash the process.
    if is_decoded and isinstance(column.type, pa.DictionaryType):
        column.validate(full=True)
    return column


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
