r"""Tables: one document per row of Parquet and Arrow files, of CSV and TSV, and of texts in memory.

A dataset saved by `datasets.save_to_disk` is a directory of Arrow streams, which are read without
the `datasets` package. Only the text column is used. Page checksums of Parquet are verified.

In CSV, the first record is the header. A field that begins with a quote ends at the next single
quote, may contain line ends and commas, and writes a quote as two; a quote inside any other field
is an ordinary character. So where a record ends depends on all quotes before it, and a file is read
in order. In TSV, a field is what is between two tabs, and a quote is an ordinary character.

Patterns parse CSV, because libraries do not say where a record begins and why it is bad. Arrow also
ends a line at a lone carriage return, and accepts text after a closing quote. Python's `csv`
refuses fields above 128 KB unless a setting of the whole process is changed.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.errors import SourceError
from penstock.options import ReadSettings
from penstock.sources.batch import (
    ArrowArray,
    Batch,
    Reason,
    binary_array,
    compute,
    text_offsets,
    validate,
)
from penstock.sources.files import BOM, InputFile, byte_order_mark, open_file
from penstock.sources.settings import BLOCK_BYTES, Texts
from penstock.sources.text import Spans, Splitter, without_blank

_MOST_ROWS = 1 << 14


def read_rows(
    file: InputFile, number: int, start: int, stop: int, reading: ReadSettings
) -> Iterator[Batch]:
    """The documents of the row groups, record batches or texts `[start, stop)` of `file`."""
    if file.texts is not None:
        rows = _text_rows(file.texts, start, stop)
    else:
        read = _parquet_rows if file.format == "parquet" else _arrow_rows
        rows = _blocks(read(file, start, stop, reading.field))
    keep_blank = file.texts is not None and file.texts.keep_blank
    for first, column in rows:
        places = np.arange(first, first + len(column), dtype=np.uint64)
        yield validate(column, file=number, places=places, reading=reading, keep_blank=keep_blank)


def _blocks(rows: Iterator[tuple[int, ArrowArray]]) -> Iterator[tuple[int, ArrowArray]]:
    """The columns of `rows` as large_binary arrays of about 4 MiB, each with its first row."""
    for first, column in rows:
        if isinstance(column.type, pa.DictionaryType):
            column = column.dictionary_decode()
        if column.type == pa.string_view():
            column = column.cast(pa.large_string())
        texts = column.cast(pa.large_binary())
        ends, start = text_offsets(texts), 0
        while start < len(texts):
            # Up to the last row that fits into the block, and at least one row.
            fits = int(np.searchsorted(ends, ends[start] + BLOCK_BYTES, side="right")) - 1
            stop = min(max(start + 1, fits), len(texts))
            yield first + start, texts.slice(start, stop - start)
            start = stop


def row_group_sizes(file: InputFile, field: str) -> list[int]:
    """The size of each row group of a Parquet file, or of each record batch of an Arrow file."""
    if file.format == "arrow":
        columns = (_arrow_column(batch, file, field) for batch in _arrow_batches(file))
        return [max(0, column.nbytes) for column in columns]
    # With the columns other than the text. The size of the text column would be more exact, but
    # Arrow 26 ends the process when it reads damaged metadata of a column.
    metadata = _open_parquet(file, field).metadata
    groups = map(metadata.row_group, range(metadata.num_row_groups))
    return [max(0, group.total_byte_size) for group in groups]


def num_rows(file: InputFile) -> int:
    """The number of rows of a table."""
    if file.format == "parquet":
        return int(_open_parquet(file).metadata.num_rows)
    return sum(batch.num_rows for batch in _arrow_batches(file))


@contextmanager
def _our_errors(file: InputFile, kind: str) -> Iterator[None]:
    """Turn the errors that Arrow raises for damaged files into a SourceError."""
    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise SourceError(f"{file.name} cannot be read as {kind}: {error}") from error


def _open_parquet(file: InputFile, field: str | None = None) -> Any:
    """A Parquet file as a `pyarrow.parquet.ParquetFile`; raises if `field` is no text column."""
    import pyarrow.parquet as pq

    with _our_errors(file, "Parquet"):
        source = open_file(file) if file.remote else file.path
        parquet = pq.ParquetFile(source, page_checksum_verification=True)
        if field is not None:
            _refuse_no_text(parquet.schema_arrow, file, field)
        return parquet


def _parquet_rows(
    file: InputFile, start: int, stop: int, field: str
) -> Iterator[tuple[int, ArrowArray]]:
    """The text column of the row groups `[start, stop)`, in pieces of about a block."""
    parquet = _open_parquet(file, field)
    # Offsets of documents are row numbers of the whole file, so earlier groups are counted.
    groups = [parquet.metadata.row_group(group) for group in range(stop)]
    row = sum(group.num_rows for group in groups[:start])
    for number in range(start, stop):
        group, end = groups[number], row + groups[number].num_rows
        average = max(1, group.total_byte_size // max(1, group.num_rows))
        with _our_errors(file, "Parquet"):
            for batch in parquet.iter_batches(
                batch_size=max(1, min(_MOST_ROWS, BLOCK_BYTES // average)),
                row_groups=[number],
                columns=[field],
                # The workers of the build use all cores already.
                use_threads=False,
            ):
                yield row, _text_column(batch, field)
                row += len(batch)
        # Arrow stops too early in some damaged files, without an error.
        if row != end:
            raise SourceError(
                f"{file.name} is damaged: row group {number} ends at row {row:,} and not at "
                f"{end:,}. Download or write it again."
            )


def _arrow_batches(file: InputFile) -> Iterator[Any]:
    with _our_errors(file, "an Arrow stream"):
        # Not mapped into memory: truncating a mapped file would end the process (SIGBUS).
        opened = pa.PythonFile(open_file(file), "r") if file.remote else pa.OSFile(file.path)
        with opened:
            yield from pa.ipc.open_stream(opened)


def _arrow_column(batch: Any, file: InputFile, field: str) -> ArrowArray:
    with _our_errors(file, "an Arrow stream"):
        _refuse_no_text(batch.schema, file, field)
        batch.validate()
        return _text_column(batch, field)


def _arrow_rows(
    file: InputFile, start: int, stop: int, field: str
) -> Iterator[tuple[int, ArrowArray]]:
    row = 0
    for number, batch in enumerate(_arrow_batches(file)):
        if number >= stop:
            return
        if number >= start:
            column = _arrow_column(batch, file, field)
            with _our_errors(file, "an Arrow stream"):
                # An offset past the end of the text would end the process. Arrow does not check.
                column.validate(full=True)
            yield row, column
        row += batch.num_rows


def _refuse_no_text(schema: Any, file: InputFile, field: str) -> None:
    """Raise if the schema has no column `field`, or if that column does not hold text."""
    advice = (
        "Name a column of strings with field= (--field) of penstock.build, or column= of "
        "LLMDataModule."
    )
    kind: Any = pa.struct(list(schema))
    for name in _path(schema, field):
        known = [each.name for each in kind] if isinstance(kind, pa.StructType) else []
        if name not in known:
            shown = ", ".join(f'"{each}"' for each in known[:5]) or "no columns at that level"
            raise SourceError(f'{file.name} has no column "{field}"; it has {shown}. {advice}')
        found = kind.field(name)
        kind = found.type
    if isinstance(kind, pa.DictionaryType):
        kind = kind.value_type
    texts = (pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary())
    extension = (found.metadata or {}).get(b"ARROW:extension:name")
    if kind not in texts or extension:
        shown = f"the extension type {extension.decode(errors='replace')}" if extension else kind
        raise SourceError(f'{file.name}: column "{field}" holds {shown}, not text. {advice}')


def _path(schema: Any, field: str) -> list[str]:
    """The names that lead to `field`: the column `a.b` if it exists, else `b` inside of `a`."""
    return [field] if field in schema.names else field.split(".")


def _text_column(batch: Any, field: str) -> ArrowArray:
    """The column `field` of a batch of rows; the indices of a dictionary are checked."""
    names = _path(batch.schema, field)
    column = batch.column(names[0])
    for name in names[1:]:
        column = compute().struct_field(column, name)
    # Decoding an index outside the dictionary would crash the process.
    if isinstance(column.type, pa.DictionaryType):
        column.validate(full=True)
    return column


def text_spans(
    texts: Texts, wanted: Callable[[], int], start: int = 0, stop: int | None = None
) -> Iterator[tuple[int, int, int]]:
    """Ranges of texts of at least `wanted()` bytes each, except the last, and their sizes."""
    stop = len(texts) if stop is None else stop
    sizes = texts.sizes(start, stop)
    held, left = 0, sum(sizes)
    for number, size in enumerate(sizes, start):
        if held >= wanted() and left * 2 > wanted():  # a short rest belongs to the range before
            yield start, number, held
            start, held = number, 0
        held += size
        left -= size
    yield start, stop, held


def _text_rows(texts: Texts, start: int, stop: int) -> Iterator[tuple[int, ArrowArray]]:
    for first, last, _ in text_spans(texts, lambda: BLOCK_BYTES, start, stop):
        yield first, binary_array(texts.encoded(first, last))


DELIMITERS = {"csv": b",", "tsv": b"\t"}
MAX_HEADER = 1 << 20
# Every repetition keeps what it matched (`*+`), so a quote that is never closed is found in one
# pass, and a field of many megabytes needs no memory for ways back.
_QUOTED = rb'"[^"]*+(?:""[^"]*+)*+"'
_UNQUOTED = rb"[^\t\n]*+"


class Records(Splitter):
    """The records of a CSV or TSV file."""

    in_order = True

    def __init__(self, delimiter: bytes) -> None:
        self.is_quoted = delimiter == b","
        # More lenient than a valid field: text after a closing quote is rejected later, alone.
        field = rb'(?:%b[^,\n]*+|[^",\n][^,\n]*+|)' % _QUOTED if self.is_quoted else _UNQUOTED
        self._field = re.compile(field)
        self._record = re.compile(rb"%b(?:%b%b)*(?:\n|\Z)" % (field, delimiter, field))

    def head(self, data: bytes) -> int:
        """The length of the byte order mark; the header is a record."""
        return len(BOM) if data.startswith(BOM) else 0

    def spans(self, data: bytes) -> Spans:
        """The records of `data` without their line ends; blank lines are skipped."""
        edges = [0, *self.ends(data)]
        if edges[-1] < len(data):
            raise ValueError("a quote is opened in this record and never closed", edges[-1])
        starts, stops = np.array(edges[:-1], np.int64), np.array(edges[1:], np.int64)
        text = np.frombuffer(data, np.uint8)
        # A record ends with "\n" or "\r\n"; at the end of the file, with neither or with "\r".
        for byte in b"\n\r":
            stops = stops - ((stops > starts) & (text[stops - 1] == byte))
        return without_blank(data, starts, stops)

    def last_border(self, data: bytes) -> int:
        """The place after the last complete record."""
        # The last match may be the beginning of a record.
        return max((end for end in self.ends(data) if data[end - 1] == ord("\n")), default=0)

    def ends(self, data: bytes) -> Iterator[int]:
        """Where each record ends, with its line end."""
        place = 0
        while place < len(data) and (found := self._record.match(data, place)):
            place = found.end()
            yield place

    def fields(self, record: bytes) -> list[bytes]:
        """The fields of a record without its line end."""
        fields, place = [], 0
        while place <= len(record) and (found := self._field.match(record, place)):
            fields.append(self.text(found[0]))
            place = found.end() + 1
        return fields

    def text(self, field: bytes) -> bytes:
        """A field without its quotes."""
        if self.is_quoted and field[:1] == b'"':
            return field[1:-1].replace(b'""', b'"')
        return field


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a CSV or TSV file."""

    records: Records
    field: "re.Pattern[bytes]"
    """Matches a valid record; its group is the field of this column."""
    num_columns: int
    start: int
    """The offset of the first record after the header."""


def find_column(data: bytes, file: InputFile, field: str) -> Column:
    """The column that `field` names in the header of a file, which begins with `data`."""
    delimiter = DELIMITERS[file.format]
    records = Records(delimiter)
    place = lead = byte_order_mark(data, file)
    header = b""
    for end in records.ends(data[lead:]):
        header, place = data[place : lead + end].strip(b"\r\n"), lead + end
        if header.strip():  # blank lines may come before it
            break
    names = [each.decode(errors="replace") for each in records.fields(header)]
    if names.count(field) != 1:
        shown = ", ".join(f'"{each:.40}"' for each in names[:8])
        problem = f"{names.count(field) or 'no'} column{'s' * (names.count(field) > 1)}"
        other = any(each in names[0] for each in ";\t|,") if len(names) == 1 else False
        advice = " If another character separates its columns, convert it to .csv or .tsv"
        raise SourceError(
            f'{file.name} has {problem} "{field}"; its first line names {shown}. Name the '
            "column that holds the text with field= (--field) of penstock.build. If the first line "
            "is no list of names, add it."
            + f"{advice} of penstock.build, or write the file again with commas."
            * other
        )
    valid = rb'(?:%b|[^",\n][^,\n]*+|)' % _QUOTED if records.is_quoted else _UNQUOTED
    before, after = names.index(field), len(names) - names.index(field) - 1
    pattern = rb"(?:%b%b){%d}(%b)(?:%b%b){%d}"
    column = re.compile(pattern % (valid, delimiter, before, valid, delimiter, valid, after))
    return Column(records, column, len(names), place)


def read_fields(
    data: bytes, spans: Spans, column: Column, *, file: int, start: int, reading: ReadSettings
) -> Batch:
    """The documents of a block of records, without the header."""
    full = spans.starts + start >= column.start
    starts, stops = spans.starts[full], spans.stops[full]
    rows = zip(starts.tolist(), stops.tolist(), strict=True)
    found = [column.field.fullmatch(data, first, last) for first, last in rows]

    def why_null(row: int) -> Reason:
        number = len(column.records.fields(data[starts[row] : stops[row]]))
        if number != column.num_columns:
            return "bad_csv", f"{number} fields, and the header has {column.num_columns}"
        return "bad_csv", "text follows a closing quote"

    return validate(
        binary_array([match and column.records.text(match[1]) for match in found]),
        file=file,
        places=(starts + start).astype(np.uint64),
        record_bytes=stops - starts,
        reading=reading,
        why_null=why_null,
    )
