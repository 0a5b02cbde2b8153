"""Long lines of JSON, parsed in pieces, so that a line is not in memory three times.

A line of hundreds of megabytes is mostly one string. Arrow would hold the line, the string as it
was parsed, and the string in a column. Python's json would hold characters, of up to four bytes
each. Here the long strings are decoded in pieces of 1 MiB. What remains is a short line, in which
a short string stands in the place of each long one:

    {"id": 7, "text": "It was the best …"}      ->      {"id": 7, "text": "long-0"}
"""

import json
import re
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

_SHORT = re.compile(rb'"(?:[^"\\]|\\.){0,65536}+"', re.DOTALL)
# After these bytes a string may be cut: not inside an escape, which has at most 5 bytes after its
# backslash, and not between two escapes that are one character (a surrogate pair).
_BEFORE_CUT = re.compile(rb"[^\\]{6}|\\u[0-9A-Fa-f]{4}(?=\\u(?![dD][c-fC-F]))")
_parse = json.JSONDecoder().raw_decode


def without_long_strings(
    line: bytes, *, piece_bytes: int = 1 << 20
) -> tuple[bytes, dict[bytes, NDArray[np.uint8]]]:
    """The line with a short name for each long string, and the strings in UTF-8 by their names.

    `line` is valid UTF-8. Takes as much memory as the strings, in addition to the line.

    Raises:
        ValueError: a string is not valid, or it has no place where it may be cut.
    """
    # In UTF-8 no string is longer than it is in the line. Memory that is not written takes no room.
    texts, rests = np.empty(len(line), np.uint8), list[bytes]()
    ends, place, begin = [0], 0, 0
    while (quote := line.find(b'"', place)) >= 0:
        if short := _SHORT.match(line, quote):
            place = short.end()
            continue
        rests.append(line[begin:quote])
        begin = quote + 1
        end, is_open = ends[-1], True
        while is_open:
            piece, begin, is_open = _piece(line, begin, piece_bytes)
            texts[end : end + len(piece)] = np.frombuffer(piece, np.uint8)
            end += len(piece)
        ends.append(end)
        place = begin
    rests.append(line[begin:])
    name = b"long"
    while any(name in rest for rest in rests):
        name += b"-long"
    names = [b"%s-%d" % (name, number) for number in range(len(ends) - 1)]
    short_line = rests[0] + b"".join(
        b'"%s"%s' % (each, rest) for each, rest in zip(names, rests[1:], strict=True)
    )
    strings = [texts[first:last] for first, last in pairwise(ends)]
    return short_line, dict(zip(names, strings, strict=True))


def _piece(line: bytes, start: int, piece_bytes: int) -> tuple[bytes, int, bool]:
    """The next characters of a string, where they end in the line, and whether more follow."""
    found = _BEFORE_CUT.search(line, start + piece_bytes, start + 2 * piece_bytes)
    if found is None and len(line) - start > 2 * piece_bytes:
        raise ValueError("no place to cut the string")
    stop = found.end() if found else len(line)
    while stop < len(line) and line[stop] & 0xC0 == 0x80:  # inside of a character
        stop += 1
    # With a quote after it, a piece of a string is a string. If the quote is not needed, the string
    # ends in this piece.
    piece = f'"{line[start:stop].decode()}"'
    value, end = _parse(piece)
    if end < len(piece):
        return value.encode(), start + len(piece[1 : end - 1].encode()) + 1, False
    if stop == len(line):
        raise ValueError("the string does not end")
    return value.encode(), stop, True
