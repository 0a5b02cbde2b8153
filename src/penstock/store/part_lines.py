"""The parts that a manifest lists, read many lines at a time.

A JSON parser makes 20 objects of each line, and takes 26 µs with all checks. But the lines of one
store differ in their digits only:

    {"part": 7, "documents": 91, "tokens": 1352, "files": {"tokens": [2832, "5f0c…"], …}}
    {"part": 8, "documents": 64, "tokens": 1290, "files": {"tokens": [2708, "09ab…"], …}}

So one line is parsed, and NumPy converts all lines that equal it outside of numbers and digests, in
about 2 µs each. Then the next line of another form is parsed: for example, that of the first part
with two digits in its number.

Nothing is accepted here that the JSON parser and `check_part` would not accept. Lines of many
forms, and lines that are wrong, are left to them: they also explain what is wrong.
"""

import json
import re

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from penstock.ranges import Integers
from penstock.store.manifest_checks import TABLE_VERSION, check_contents
from penstock.store.part_table import ALL_KINDS, KINDS, JsonObject, PartTable

_COUNTS = ("part", "documents", "continued", "tokens")
# At most 18 digits, so that a number fits into int64. JSON does not allow zeros before a number.
_NUMBER = "(?P<{0}>0|[1-9][0-9]{{0,17}})"
_FILE = r'"{0}": \[(?P<{0}_bytes>0|[1-9][0-9]{{0,17}}), "(?P<{0}_digest>[0-9a-f]{{64}})"\]'
_part, _documents, _continued, _tokens = (f'"{each}": {_NUMBER.format(each)}' for each in _COUNTS)
_files = [_FILE.format(kind) for kind in ALL_KINDS]
_needed, _others = ", ".join(_files[: len(KINDS)]), _files[len(KINDS) :]
_LINE = re.compile(
    (
        rf"\{{{_part}, {_documents}, (?:{_continued}, )?{_tokens}, "
        rf'"files": \{{{_needed}{"".join(f"(?:, {each})?" for each in _others)}\}}\}}'
    ).encode()
)
_END = b"\n ]\n}\n"
_MOST_FORMS = 64  # each takes about 0.2 ms


def parse_lines(data: bytes) -> tuple[JsonObject, PartTable] | None:
    """The manifest in `data` without its parts, and its parts; None if it must be parsed as JSON.

    Args:
        data: The whole manifest, whose digest is right.
    """
    # Strings of JSON have no line breaks, and objects inside of the manifest are further to the
    # right. In a forged manifest, the text may be elsewhere: then what is before it is not JSON.
    head, _, lines = data.partition(b',\n "parts": [\n  ')
    try:
        contents = json.loads(head + b"\n}")
        check_contents(contents)
        if "parts" in contents or contents["version"] == TABLE_VERSION:
            return None
        if not lines.endswith(_END):
            return None
        table = listed_parts(lines.removesuffix(_END), np.dtype(contents["dtype"]).itemsize)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None  # the caller finds the same error, and explains it
    return None if table is None else (contents, table)


def listed_parts(lines: bytes, item_size: int) -> PartTable | None:
    """The table of the parts in some lines of a manifest; None if they must be parsed as JSON.

    Args:
        lines: The lines, separated by a comma, a line break and two spaces.
        item_size: The bytes of a token.

    Raises:
        ValueError: they must be parsed as JSON, too.
    """
    buffer = np.frombuffer(lines, np.uint8)
    breaks = np.flatnonzero(buffer == ord("\n"))
    if lines.count(b",\n  ") != len(breaks):
        return None
    starts = np.concatenate(([0], breaks + 3))
    widths = np.append(breaks - 1, len(buffer)) - starts
    fields: dict[str, Integers] = {}
    left = np.arange(len(starts))
    for _ in range(_MOST_FORMS):
        first, width = int(starts[left[0]]), int(widths[left[0]])
        form = _LINE.fullmatch(lines, first, first + width)
        if form is None:
            return None
        same = left[widths[left] == width]
        rows = sliding_window_view(buffer, width)[starts[same]]
        spans = {name: form.span(name) for name, text in form.groupdict().items() if text}
        is_digit = np.zeros(width, bool)
        for start, stop in spans.values():
            is_digit[start - first : stop - first] = True
        alike = ((rows == rows[0]) | is_digit).all(axis=1)
        if not alike.all():
            same, rows = same[alike], rows[alike]
        for name, (start, stop) in spans.items():
            columns = rows[:, start - first : stop - first]
            values = _converted(columns, is_digest=name.endswith("_digest"))
            known = fields.setdefault(name, np.zeros((len(starts), *values.shape[1:]), np.int64))
            known[same] = values
        left = left[~np.isin(left, same)]
        if not len(left):
            return _checked(fields, item_size)
    return None


def _converted(columns: NDArray[np.uint8], *, is_digest: bool) -> Integers:
    """The numbers or digests in the same columns of many lines.

    Raises:
        ValueError: one is not a number as JSON has it, or not a digest.
    """
    if is_digest:
        text = columns.tobytes()
        data = bytes.fromhex(text.decode())
        if data.hex().encode() != text:  # it accepts upper case and white space
            raise ValueError
        return np.frombuffer(data, "<i8").reshape(len(columns), -1)
    digits = columns - np.uint8(ord("0"))
    width = columns.shape[1]
    if (digits > 9).any() or (width > 1 and not digits[:, 0].all()):
        raise ValueError
    numbers: Integers = digits @ 10 ** np.arange(width)[::-1]
    return numbers


def _checked(fields: dict[str, Integers], item_size: int) -> PartTable | None:
    """The table with these columns; None if they do not fit together."""
    none = np.zeros(len(fields["part"]), np.int64)
    counts = [fields.get(name, none) for name in _COUNTS]
    digests = [fields.get(f"{kind}_digest", np.stack([none] * 4, axis=1)) for kind in ALL_KINDS]
    words = np.vstack([*counts, *(each.T for each in digests)]).view("<u8")
    table = PartTable(words, item_size, is_file=False)
    if table.problem():
        return None
    # Sizes follow from counts. A digest of zeros would say that there is no such file.
    sizes = (fields.get(f"{kind}_bytes", none) for kind in ALL_KINDS)
    pairs = zip(ALL_KINDS, sizes, strict=True)
    return table if all((table.sizes(kind) == size).all() for kind, size in pairs) else None
