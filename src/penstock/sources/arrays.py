"""JSON arrays: one document per element, which is an object as in JSON Lines.

Commas at the top level of the array separate its elements. To find them, strings are left out and
brackets are counted, so a file is read in order, and no more of it than a slice is in memory. The
elements are then parsed like lines.
"""

import re

import numpy as np
from numpy.typing import NDArray

from penstock.sources.splitters import Spans, Splitter, find_all

_WHITE = b" \t\r\n"
_HEAD = re.compile(rb"(?:\xef\xbb\xbf)?[ \t\r\n]*\[")
_MARKS = np.zeros(256, bool)
_MARKS[list(b"[]{},")] = True


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
        return data.rstrip(_WHITE).endswith(b"]")

    def spans(self, data: bytes) -> Spans:
        """The elements of `data`, without the white space around them."""
        commas, close = _structure(data)
        last = len(data) if close is None else close
        starts, stops = [], []
        for start, stop in zip([0, *(comma + 1 for comma in commas)], [*commas, last], strict=True):
            element = data[start:stop]
            size = len(element.lstrip(_WHITE))
            if size:
                starts.append(stop - size)
                stops.append(start + len(element.rstrip(_WHITE)))
            elif stop != last:
                raise ValueError("there is nothing between two commas", start)
        # Without the `]`, data ends after a comma.
        if close is None and stops and stops[-1] > (commas[-1] if commas else 0):
            raise ValueError("a record is not closed", starts[-1])
        if close is not None and (data[close] != ord("]") or data[close + 1 :].strip(_WHITE)):
            raise ValueError("the array ends here, and more follows", close)
        return Spans(np.array(starts, np.int64), np.array(stops, np.int64), 0, 0)

    def last_border(self, data: bytes) -> int:
        """The place after the last comma between elements, or 0."""
        commas, _ = _structure(data)
        return commas[-1] + 1 if commas else 0


def _structure(data: bytes) -> tuple[list[int], int | None]:
    """The places of the commas between elements, and the place where the array ends, or None.

    NumPy takes half the time of a pattern that matches strings and brackets one by one.
    """
    text = np.frombuffer(data, np.uint8)
    quotes = find_all(data, b'"')
    quotes = quotes[~_escaped(text, quotes)]
    places = np.flatnonzero(_MARKS[text])
    # After an odd number of quotes, a bracket or comma is inside a string.
    places = places[np.searchsorted(quotes, places) % 2 == 0]
    marks = text[places]
    opens, closes = (np.isin(marks, list(kind)) for kind in (b"[{", b"]}"))
    depth = np.cumsum(opens.astype(np.int64) - closes)
    ends = np.flatnonzero(depth < 0)
    close = int(places[ends[0]]) if len(ends) else None
    commas = places[(marks == ord(",")) & (depth == 0)]
    # Brackets after the end of the array may have any depth.
    return (commas if close is None else commas[commas < close]).tolist(), close


def _escaped(text: NDArray[np.uint8], quotes: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which quotes follow an odd number of backslashes, and so are characters of a string."""
    is_escaped = np.zeros(len(quotes), bool)
    rows, places = np.arange(len(quotes)), quotes - 1
    # One backslash of all quotes per round; few quotes follow more than one.
    while True:
        more = (places >= 0) & (text[places] == ord("\\"))
        rows, places = rows[more], places[more] - 1
        if not len(rows):
            return is_escaped
        is_escaped[rows] ^= True


def as_lines(data: bytes, spans: Spans) -> tuple[bytes, Spans]:
    """The elements joined by line ends, and their places in that text.

    Each is an object with balanced brackets, so Arrow finds as many objects as there are elements
    if and only if each of them is exactly one.
    """
    ends = np.cumsum(spans.stops - spans.starts + 1)
    pieces = zip(spans.starts.tolist(), spans.stops.tolist(), strict=True)
    lines = b"\n".join(data[start:stop] for start, stop in pieces)
    return lines, Spans(ends - (spans.stops - spans.starts + 1), ends - 1, 0, 0)
