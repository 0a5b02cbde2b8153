r"""CSV and TSV: one document per record, with the text in a named column.

The first record is the header. In TSV, a field is what is between two tabs, and a quote is an
ordinary character. In CSV, a field that begins with a quote ends at the next single quote, may
contain line ends and commas, and writes a quote as two; a quote inside any other field is an
ordinary character. So where a record ends depends on all quotes before it, and a file is read in
order. Python's `csv` refuses fields above 128 KB unless a setting of the whole process is
changed, and Arrow does not say where in the file a row is; the two patterns below do both.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from penstock.errors import SourceError
from penstock.options import ReadSettings
from penstock.sources.document import Batch, binary_array
from penstock.sources.files import BOM, InputFile, byte_order_mark
from penstock.sources.splitters import Spans, Splitter, without_blank
from penstock.sources.validate import Reason, validate

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
        place = 0
        for end in self.ends(data):
            if data[end - 1] == ord("\n"):  # the last match may be the beginning of a record
                place = end
        return place

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
    found = [number for number, name in enumerate(names) if name == field]
    if len(found) != 1:
        shown = ", ".join(f'"{each:.40}"' for each in names[:8])
        problem = "no column" if not found else f"{len(found)} columns"
        raise SourceError(
            f'{file.name} has {problem} "{field}"; its first line names {shown}. Name the '
            "column that holds the text with field= (--field) of penstock.build. If the first line "
            f"is no list of names, add it.{_other_delimiter(names, file)}"
        )
    valid = rb'(?:%b|[^",\n][^,\n]*+|)' % _QUOTED if records.is_quoted else _UNQUOTED
    before, after = found[0], len(names) - found[0] - 1
    pattern = rb"(?:%b%b){%d}(%b)(?:%b%b){%d}"
    column = re.compile(pattern % (valid, delimiter, before, valid, delimiter, valid, after))
    return Column(records, column, len(names), place)


def _other_delimiter(names: list[str], file: InputFile) -> str:
    """Advice, if the only name in a header seems to contain the names of several columns."""
    known = {";": "semicolons", "\t": "tabs", "|": "bars", ",": "commas"}
    used = next((each for each in known if len(names) == 1 and each in names[0]), None)
    if used is None:
        return ""
    between = known[DELIMITERS[file.format].decode()]
    if other := {"\t": "tsv", ",": "csv"}.get(used):
        advice = f'use format="{other}" (--format {other}) of penstock.build'
    else:
        advice = f"write it again with {between}"
    return f" Its columns seem to be separated by {known[used]} and not by {between}: {advice}."


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
