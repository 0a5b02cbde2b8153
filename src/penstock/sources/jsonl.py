"""JSON Lines and JSON arrays: one object per line or element, with the text in a named field.

Arrow parses a whole block at once, but it is more lenient than the format: it accepts two
objects on a line, NaN, and objects that span several lines. So a block goes to Arrow only if
every line begins with `{` and ends with `}`. Then no object can span lines: after `}` at the end
of a line, only `,`, `]` or `}` could continue it, and the next line begins with `{`. And if there
are as many rows as lines, every line has one object.

Every other block is parsed line by line with Python's json, and so is a block that is not UTF-8 or
that Arrow refuses. Python's json also gives the reason for each rejected line. Both parsers give
the same documents; only the speed differs.

An array is decoded element by element to find where each ends, so a file is read in order, and no
more of it than a slice is in memory. The elements are then parsed like lines.
"""

import json
import re
from collections.abc import Iterable
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.json as pj
from numpy.typing import NDArray

from penstock.options import ReadSettings
from penstock.sources.batch import (
    ArrowArray,
    Batch,
    Reason,
    binary_array,
    bool_array,
    compute,
    is_utf8,
    validate,
)
from penstock.sources.text import Spans, Splitter, find_bytes

# Arrow counts the bytes of a block in 32 bits.
_MAX_BLOCK = (1 << 31) - 1024
_BEFORE_WORD, _AFTER_WORD = np.zeros(256, bool), np.zeros(256, bool)
_BEFORE_WORD[list(b":,[- \t\r")] = True
_AFTER_WORD[list(b",]} \t\r")] = True
_HEAD = re.compile(rb"(?:\xef\xbb\xbf)?[ \t\r\n]*\[")
_BLANKS = re.compile(r"[ \t\r\n]*+")
# The values of numbers are not needed, so `len` stands in for int(): int() refuses numbers of 5,000
# digits, which are valid JSON. `strict` would refuse a whole array for a tab in one string.
_decode_element = json.JSONDecoder(parse_int=len, strict=False).raw_decode
# What Python's json says, by its first words; versions of Python use other words.
_PROBLEMS = {
    "Expecting ',' delimiter": "a comma or bracket is missing",
    "Expecting ':' delimiter": "a colon is missing",
    "Expecting": "a value or name is missing",
    "Illegal trailing comma": "a value or name is missing",
    "Unterminated string": "a string is not closed",
    "Invalid control": "a string has a control character",
    "Invalid": "a string has an invalid escape",
    "Extra data": "more follows",
    "Unexpected UTF-8 BOM": "there is a byte order mark",
}


def json_problem(error: json.JSONDecodeError) -> str:
    """What is wrong, and where; the same with every version of Python.

    The log of rejected records is a part of a store, and a store must not depend on the Python that
    built it.
    """
    # For a comma before a bracket, some versions name the place of the comma, others the bracket.
    before = error.doc[: error.pos].rstrip(" \t\r\n,")
    return f"{_problem(error)} after character {len(before):,}"


def _problem(error: json.JSONDecodeError) -> str:
    return next(word for begin, word in _PROBLEMS.items() if error.msg.startswith(begin))


def read_lines(
    data: bytes, spans: Spans, *, file: int, places: NDArray[np.uint64], reading: ReadSettings
) -> Batch:
    """The documents of a block of lines; `spans` are the lines that are not blank.

    `places` are their offsets in the file.
    """
    path = reading.field.split(".")

    def line(row: int) -> bytes:
        return data[spans.starts[row] : spans.stops[row]]

    reasons: dict[int, Reason] = {}
    replaced = 0
    texts = _arrow_texts(data, spans, path) if _regular(data, spans) else None
    if texts is None:
        lines = map(line, range(len(spans.starts)))
        texts, reasons, replaced = _python_texts(lines, path, reading)
    else:
        for row in _suspects(data, spans):
            refused = _python_texts([line(row)], path, reading)[1]
            if refused:
                reasons[row] = refused[0]
        if reasons:
            bad = np.zeros(len(texts), bool)
            bad[list(reasons)] = True
            texts = compute().if_else(bool_array(bad), pa.nulls(len(bad), texts.type), texts)

    def why_null(row: int) -> Reason:
        # Arrow gives null both for a missing field and for a null, so Python parses the line again.
        return reasons.get(row) or _python_texts([line(row)], path, reading)[1][0]

    batch = validate(
        texts,
        file=file,
        places=places,
        record_bytes=spans.stops - spans.starts,
        reading=reading,
        why_null=why_null,
    )
    batch.tally.replaced += replaced
    return batch


def _regular(data: bytes, spans: Spans) -> bool:
    """Whether Arrow can parse `data`: UTF-8, not too large, and each line is `{…}`.

    Arrow ignores line ends between objects, so on other data its rows might not be the lines.
    """
    if not len(spans.starts) or len(data) > _MAX_BLOCK:
        return False
    text = np.frombuffer(data, np.uint8)
    last = text[spans.stops - 1]
    if (last == 13).any():  # a carriage return may come before the line end
        last = np.where(last == 13, text[np.maximum(spans.stops - 2, spans.starts)], last)
    if (text[spans.starts] != ord("{")).any() or (last != ord("}")).any():
        return False
    return is_utf8(binary_array([data]))


def _suspects(data: bytes, spans: Spans) -> list[int]:
    """Rows with the number NaN or Infinity, which Arrow accepts and JSON forbids.

    A row that is not valid JSON may be listed by mistake. That only costs time: Python parses the
    listed rows again.
    """
    found = _bare_words(data)
    lines = np.searchsorted(spans.starts, found, side="right") - 1
    suspects, line, at, quotes = set(), -1, 0, 0
    for row, place in zip(lines.tolist(), found.tolist(), strict=True):
        if row != line:
            line, at, quotes = row, int(spans.starts[row]), 0
        # Backslashes occur in strings only. Without escaped backslashes, a quote is escaped if it
        # follows a backslash. `place` follows none, so it does not separate a pair.
        between = data[at:place].replace(b"\\\\", b"")
        quotes += between.count(b'"') - between.count(b'\\"')
        at = place
        if quotes % 2 == 0:  # outside of every string
            suspects.add(row)
    return sorted(suspects)


def _bare_words(data: bytes) -> NDArray[np.int64]:
    """The places of NaN, Inf and Infinity that may be values, in ascending order.

    The byte before a value ends a token, and so does the byte after it. Inside a string, the words
    mostly begin after a letter or a quote, or go on: "Inf" is nearly always the "Inf" of "Info".
    """
    text = np.frombuffer(data, np.uint8)
    found = find_bytes(text, b"NI")
    found = found[_BEFORE_WORD[text[found - 1]]]
    # A value is followed by at least `}`, so a word that is cut off by the end of the data is none.
    found = found[found + 3 < len(text)]
    first, second, third, after = (text[found + offset] for offset in range(4))
    is_nan = (first == ord("N")) & (second == ord("a")) & (third == ord("N"))
    is_inf = (first == ord("I")) & (second == ord("n")) & (third == ord("f"))
    is_whole = _AFTER_WORD[after]
    words: NDArray[np.int64] = found[is_nan & is_whole | is_inf & (is_whole | (after == ord("i")))]
    return words


def _arrow_texts(data: bytes, spans: Spans, path: list[str]) -> ArrowArray | None:
    """The text of each line as a large_binary array; None if Arrow refuses the block."""
    # Arrow converts only the fields of the schema, so other fields may have any types.
    kind: Any = pa.large_string()
    for name in reversed(path[1:]):
        kind = pa.struct([(name, kind)])
    try:
        table = pj.read_json(
            pa.BufferReader(data),
            # One block for all data: with several blocks, Arrow would decide where to cut the data.
            read_options=pj.ReadOptions(use_threads=False, block_size=max(len(data) + 1, 1024)),
            parse_options=pj.ParseOptions(
                explicit_schema=pa.schema([(path[0], kind)]), unexpected_field_behavior="ignore"
            ),
        )
    except pa.ArrowInvalid:
        return None
    # Fewer or more rows than lines: an object spans lines, or a line has two.
    if table.num_rows != len(spans.starts):
        return None
    column = table.column(0).combine_chunks()
    for name in path[1:]:
        column = compute().struct_field(column, name)
    return column.cast(pa.large_binary())


def _python_texts(
    lines: Iterable[bytes], path: list[str], reading: ReadSettings
) -> tuple[ArrowArray, dict[int, Reason], int]:
    """The texts, the reason for each line without text, and how many texts had bytes replaced."""
    texts: list[bytes | None] = []
    reasons: dict[int, Reason] = {}
    replaced = 0
    for row, line in enumerate(lines):
        try:
            text, repaired = _text_of(line, path, reading.errors == "replace")
        except _RefusedLine as refusal:
            text, repaired = None, False
            reasons[row] = refusal.args
        texts.append(text)
        replaced += repaired
    return binary_array(texts), reasons, replaced


class _RefusedLine(Exception):  # noqa: N818  (carries a reason, and is always caught)
    """A line without text; its arguments are the reason and a detail."""

    args: Reason


class _Object(list[tuple[str, Any]]):
    """A JSON object with its keys in order, including repeated ones."""


def _text_of(line: bytes, path: list[str], replace: bool) -> tuple[bytes, bool]:
    """The text in `line`, and whether a part of it was replaced by U+FFFD."""
    repaired = False
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        if not replace:
            raise _RefusedLine("invalid_utf8", f"{error.reason} at byte {error.start:,}") from None
        text, repaired = line.decode(errors="replace"), True
    try:
        value = json.loads(
            text, object_pairs_hook=_Object, parse_constant=_refuse_constant, parse_int=len
        )
    except json.JSONDecodeError as error:
        hint = "; write each object on one line, or the whole file as an array"
        is_open = text.strip() == "{"
        raise _RefusedLine("bad_json", json_problem(error) + hint * is_open) from None
    except RecursionError:
        return _deep_text(line, path), False
    value = _field(value, path)
    try:
        return value.encode(), repaired and "\ufffd" in value
    except UnicodeEncodeError as error:
        if not replace:
            detail = f"a lone surrogate at character {error.start:,} of the text"
            raise _RefusedLine("invalid_utf8", detail) from None
        # Converted through UTF-16, where two surrogates that belong together become one character.
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode(), True


def _field(value: Any, path: list[str]) -> str:
    """The string in the field `path` of a record."""
    for depth, name in enumerate(path):
        if not isinstance(value, _Object):
            inside = ".".join(path[:depth]) or "the record"
            raise _RefusedLine("not_an_object", f"{inside} holds {_kind(value)}")
        # If a key occurs twice, Arrow uses one value and other parsers use the other value. So such
        # a line is refused.
        found = [item for key, item in value if key == name]
        if not found:
            known = ", ".join(f'"{key}"' for key, _ in value[:5]) or "no fields"
            raise _RefusedLine("missing_field", f'no field "{".".join(path)}"; it has {known}')
        if len(found) > 1:
            raise _RefusedLine("duplicate_field", f'"{name}" is given {len(found)} times')
        value = found[0]
    if not isinstance(value, str):
        raise _RefusedLine("not_a_string", f'"{".".join(path)}" holds {_kind(value)}')
    return value


def _deep_text(line: bytes, path: list[str]) -> bytes:
    """The text of a line that is nested too deeply for Python's json; Arrow has no such limit."""
    whole = Spans(np.zeros(1, np.int64), np.array([len(line)]), 0, 0)
    regular = _regular(line, whole) and not _suspects(line, whole)
    texts = _arrow_texts(line, whole, path) if regular else None
    text: bytes | None = texts[0].as_py() if texts is not None else None
    if text is None:
        raise _RefusedLine("nested_too_deep", "more levels than the parser allows")
    return text


def _refuse_constant(name: str) -> NoReturn:
    raise _RefusedLine("bad_json", f"{name} is not JSON")


def _kind(value: Any) -> str:
    kinds = {_Object: "an object", list: "a list", str: "a string", bool: "a boolean"}
    return "null" if value is None else kinds.get(type(value), "a number")


class Elements(Splitter):
    """The elements of a JSON array; data begins after the `[` or after a comma."""

    in_order = True

    def head(self, data: bytes) -> int:
        """How many bytes come before the first element."""
        found = _HEAD.match(data)
        if found is None:
            raise ValueError(
                "it does not begin with [; records that are not in an array are read with "
                'format="jsonl" (--format jsonl) of penstock.build',
                0,
            )
        return found.end()

    def is_end(self, data: bytes) -> bool:
        """Whether the end of the file closes the array."""
        return data.rstrip(b" \t\r\n").endswith(b"]")

    def spans(self, data: bytes) -> Spans:
        """The elements of `data`, without the white space around them."""
        starts, stops, _, problem = _elements(data)
        if problem is not None:
            raise ValueError(*problem)
        return Spans(np.array(starts, np.int64), np.array(stops, np.int64), 0, 0)

    def last_border(self, data: bytes) -> int:
        """The place after the last comma between elements, or 0."""
        return _elements(data)[2]


def _elements(data: bytes) -> tuple[list[int], list[int], int, tuple[str, int] | None]:
    """Where elements begin and end, the place after the last comma, and what is wrong, and where.

    If the data is cut off inside an element, that is wrong.
    """
    text = data.decode("latin-1")  # a character for each byte, so places stay the same
    starts: list[int] = []
    stops: list[int] = []
    border, problem = 0, None
    while (begin := _skip_blanks(text, border)) < len(text):
        place = begin
        if text[begin] != "]":
            try:
                _, end = _decode_element(text, begin)
            except json.JSONDecodeError as error:
                problem = _problem(error), begin
                break
            except RecursionError:
                problem = "a record has too many levels", begin
                break
            place = _skip_blanks(text, end)
            if text[place : place + 1] not in (",", "]"):
                problem = "no comma or ] follows this record", begin
                break
            starts.append(begin)
            stops.append(end)
        if text[place] == "]":
            if _skip_blanks(text, place + 1) < len(text):
                problem = "the array ends here, and more follows", place
            break
        border = place + 1
    return starts, stops, border, problem


def _skip_blanks(text: str, place: int) -> int:
    found = _BLANKS.match(text, place)
    return found.end() if found else place


def as_lines(data: bytes, spans: Spans) -> tuple[bytes, Spans]:
    """The elements joined by line ends, and their places in that text.

    Each is an object with balanced brackets, so Arrow finds as many objects as there are elements
    if and only if each of them is exactly one.
    """
    ends = np.cumsum(spans.stops - spans.starts + 1)
    pieces = zip(spans.starts.tolist(), spans.stops.tolist(), strict=True)
    lines = b"\n".join(data[start:stop] for start, stop in pieces)
    return lines, Spans(ends - (spans.stops - spans.starts + 1), ends - 1, 0, 0)
