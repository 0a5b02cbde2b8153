"""JSON Lines: one object per line, with the text in a named field.

Arrow parses a whole block at once, but it is more lenient than the format: it accepts two
objects on a line, NaN, and objects that span several lines. So a block goes to Arrow only if
every line begins with `{` and ends with `}`. Then no object can span lines: after `}` at the end
of a line, only `,`, `]` or `}` could continue it, and the next line begins with `{`. And if there
are as many rows as lines, every line has one object.

Every other block is parsed line by line with Python's json, and so is a block that is not UTF-8 or
that Arrow refuses. Python's json also gives the reason for each rejected line. Both parsers give
the same documents; only the speed differs. A line that is longer than two blocks is parsed in
pieces (`penstock.sources.long_lines`), which takes less memory.
"""

import json
from collections.abc import Iterator
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.json as pj
from numpy.typing import NDArray

from penstock.options import ReadSettings
from penstock.sources.document import (
    ArrowArray,
    Batch,
    binary_array,
    bool_array,
    compute,
    is_utf8,
)
from penstock.sources.json_errors import is_too_deep, portable_error
from penstock.sources.long_lines import without_long_strings
from penstock.sources.settings import BLOCK_BYTES
from penstock.sources.splitters import Spans, find_bytes
from penstock.sources.validate import Reason, validate

# Arrow counts the bytes of a block in 32 bits.
_MAX_BLOCK = (1 << 31) - 1024
_BEFORE_WORD, _AFTER_WORD = np.zeros(256, bool), np.zeros(256, bool)
_BEFORE_WORD[list(b":,[- \t\r")] = True
_AFTER_WORD[list(b",]} \t\r")] = True


def read_lines(
    data: bytes, spans: Spans, *, file: int, places: NDArray[np.uint64], reading: ReadSettings
) -> Batch:
    """The documents of a block of lines; `spans` are the lines that are not blank.

    `places` are their offsets in the file.
    """
    path = reading.field.split(".")

    def line(row: int) -> bytes:
        return data[spans.starts[row] : spans.stops[row]]

    replaced, is_checked = 0, True
    # A line that is longer than a block is a block of its own.
    is_long = len(spans.starts) == 1 and len(data) > 2 * BLOCK_BYTES
    texts, reasons = _long_text(data, path) if is_long else (None, {})
    if texts is None and _regular(data, spans):
        texts, is_checked = _arrow_texts(data, spans, path), False
    if texts is None:
        texts, reasons, replaced = _python_texts(map(line, range(len(spans.starts))), path, reading)
    elif not is_checked:
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


def _long_text(data: bytes, path: list[str]) -> tuple[ArrowArray | None, dict[int, Reason]]:
    """The text of one long line, or why it has none; None if the other parsers have to decide."""
    if not is_utf8(binary_array([data])):
        return None, {}
    try:
        line, strings = without_long_strings(data)
        found, _ = _text_of(line, path, replace=False)
    except ValueError:
        return None, {}
    except _RefusedLine as refusal:
        # The place of an error in the short line is not its place in the line.
        is_known = refusal.args[0] != "bad_json"
        return (binary_array([None]), {0: refusal.args}) if is_known else (None, {})
    text = pa.py_buffer(strings.get(found, found))
    ends = pa.py_buffer(np.array([0, len(text)], np.int64))
    return pa.Array.from_buffers(pa.large_binary(), 1, [None, ends, text]), {}


def _python_texts(
    lines: Iterator[bytes] | list[bytes], path: list[str], reading: ReadSettings
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


def _text_of(line: bytes, path: list[str], replace: bool) -> tuple[bytes, bool]:
    """The text in `line`, and whether a part of it was replaced by U+FFFD."""
    try:
        value, repaired = _parse(line, replace)
    except RecursionError:
        return _deep_text(line, path), False
    for depth, name in enumerate(path):
        if not isinstance(value, _Object):
            inside = ".".join(path[:depth]) or "the record"
            raise _RefusedLine(
                "not_an_object", f"{inside} holds {_kind(value)}{_advice(value, depth)}"
            )
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
        full = ".".join(path)
        raise _RefusedLine(
            "not_a_string", f'"{full}" holds {_kind(value)}{_inner_field(value, full)}'
        )
    try:
        return value.encode(), repaired and "\ufffd" in value
    except UnicodeEncodeError as error:
        if not replace:
            raise _RefusedLine(
                "lone_surrogate", f"at character {error.start:,} of the text"
            ) from None
        # Converted through UTF-16, where two surrogates that belong together become one character.
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode(), True


def _deep_text(line: bytes, path: list[str]) -> bytes:
    """The text of a line that is nested too deeply for Python's json; Arrow has no such limit."""
    whole = Spans(np.zeros(1, np.int64), np.array([len(line)]), 0, 0)
    regular = _regular(line, whole) and not _suspects(line, whole)
    texts = _arrow_texts(line, whole, path) if regular else None
    text: bytes | None = texts[0].as_py() if texts is not None else None
    if text is None:
        raise _RefusedLine("nested_too_deep", "more levels than the parser allows")
    return text


class _Object(list[tuple[str, Any]]):
    """A JSON object with its keys in order, including repeated ones."""


def _parse(line: bytes, replace: bool) -> tuple[Any, bool]:
    """The JSON value of `line`, and whether bytes of the line were replaced by U+FFFD.

    Raises RecursionError if the line is nested too deeply.
    """
    repaired = False
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        if not replace:
            raise _RefusedLine("invalid_utf8", f"{error.reason} at byte {error.start:,}") from None
        text, repaired = line.decode(errors="replace"), True
    if is_too_deep(text):
        raise RecursionError
    try:
        # The values of numbers are not needed, so `len` stands in for int(): int() refuses numbers
        # of 5,000 digits, which are valid JSON.
        value = json.loads(
            text, object_pairs_hook=_Object, parse_constant=_refuse_constant, parse_int=len
        )
    except json.JSONDecodeError as error:
        portable = portable_error(error)
        detail = f"{portable.msg.removesuffix(' at')} at character {portable.pos:,}"
        if text.strip() == "{":
            detail += "; write each object on one line, or the whole file as an array"
        raise _RefusedLine("bad_json", detail) from None
    return value, repaired


def _refuse_constant(name: str) -> NoReturn:
    raise _RefusedLine("bad_json", f"{name} is not JSON")


def _advice(value: Any, depth: int) -> str:
    """How to read records that are not objects; empty for a field inside of an object."""
    if depth == 0 and type(value) is list:
        return '; if the file is one array, use format="json" (--format json) of penstock.build'
    if depth == 0 and type(value) is str:
        return '; write it as {"text": "…"}, or give the strings as penstock.Texts in Python'
    return ""


def _inner_field(value: Any, path: str) -> str:
    """How to name a string inside an object; empty if there is none."""
    items = value if isinstance(value, _Object) else ()
    names = (key for key, item in items if isinstance(item, str) and key and "." not in key)
    name = next(names, None)
    if name is None:
        return ""
    full = f"{path}.{name}"
    return f'; name the text in it with field="{full}" (--field {full}) of penstock.build'


def _kind(value: Any) -> str:
    kinds = {_Object: "an object", list: "a list", str: "a string", bool: "a boolean"}
    return "null" if value is None else kinds.get(type(value), "a number")
