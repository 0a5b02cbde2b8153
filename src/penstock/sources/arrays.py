"""JSON arrays: one document per element, which is an object as in JSON Lines.

Commas at the top level of the array separate its elements. To find them, strings are skipped and
brackets are counted, so a file is read in order, and no more of it than a slice is in memory. The
elements are then parsed like lines.
"""

import re

import numpy as np

from penstock.sources.splitters import Spans, Splitter

_WHITE = b" \t\r\n"
_HEAD = re.compile(rb"(?:\xef\xbb\xbf)?[ \t\r\n]*\[")
_STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
# An object without others inside is matched as a whole: most records are such objects, and each
# match is a step of a loop in Python. A quote alone is a string that the data ends in.
_TOKEN = re.compile(
    rb'%b|\{[^][{}"]*+(?:%b[^][{}"]*+)*+\}|[][{},"]' % (_STRING, _STRING), re.DOTALL
)


class Elements(Splitter):
    """The elements of a JSON array; data begins after the `[` or after a comma."""

    in_order = True

    def head(self, data: bytes) -> int:
        """How many bytes come before the first element."""
        found = _HEAD.match(data)
        if found is None:
            raise ValueError("it does not begin with [", 0)
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
    """The places of the commas between elements, and the place where the array ends, or None."""
    depth, commas = 0, []
    for found in _TOKEN.finditer(data):
        place = found.start()
        byte = data[place]
        if found.end() - place > 1:  # a string or a whole object
            continue
        if byte == ord(",") and depth == 0:
            commas.append(place)
        elif byte in b"[{":
            depth += 1
        elif byte in b"]}":
            depth -= 1
            if depth < 0:
                return commas, place
        elif byte == ord('"'):
            break
    return commas, None


def as_lines(data: bytes, spans: Spans) -> tuple[bytes, Spans]:
    """The elements joined by line ends, and their places in that text.

    Each is an object with balanced brackets, so Arrow finds as many objects as there are elements
    if and only if each of them is exactly one.
    """
    ends = np.cumsum(spans.stops - spans.starts + 1)
    pieces = zip(spans.starts.tolist(), spans.stops.tolist(), strict=True)
    lines = b"\n".join(data[start:stop] for start, stop in pieces)
    return lines, Spans(ends - (spans.stops - spans.starts + 1), ends - 1, 0, 0)
