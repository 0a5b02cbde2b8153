"""Text to records: where documents begin and end.

A splitter looks at bytes, never at lines as Python understands them: U+2028, form
feed and a lone carriage return are text. It answers two questions. `spans` gives
the documents of a block that ends at a border; what lies between two spans is
separator or blank, so spans and gaps tile the block by construction. `border`
finds a place in a file where a record begins without reading what came before it,
which is what lets one 11 GB file be cut and read by many threads.
"""

import re
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["Lines", "Paragraphs", "Separated", "Spans", "Splitter", "Whole", "splitter_for"]

_BLANK = np.zeros(256, bool)
_BLANK[list(b" \t\r")] = True
# From rare to common in text and code; a byte that is not listed is rarer still.
_COMMON = bytes(reversed(b"etaoinsrhldcu\n mfpgwybvkxjqz,._-()=\"'/:;0123456789<>TSAIC"))
_BLANK_LINE = re.compile(rb"\n[ \t\r]*\n")


@dataclass(frozen=True, slots=True)
class Spans:
    """The documents of a block: `[starts[i], stops[i])`, in order."""

    starts: NDArray[np.int64]
    stops: NDArray[np.int64]
    num_skipped: int
    """Pieces between separators that are empty or blank."""
    skipped_bytes: int


class Splitter(Protocol):
    """One way of telling documents apart."""

    cuts_anywhere: bool
    """Whether `border` needs no text from before its place."""

    def spans(self, data: bytes) -> Spans:
        """The documents of `data`, which begins and ends at a border or an end of the file."""

    def last_border(self, data: bytes) -> int:
        """The last place in `data` after which a new record begins, or 0."""

    def first_border(self, data: bytes) -> int:
        """The first place in `data[1:]` where a record begins, or -1.

        `data` begins before the place of interest by `lead` bytes, so that a
        separator which ends exactly there is seen.
        """

    @property
    def lead(self) -> int:
        """How many bytes before a place `first_border` has to see."""


class Lines:
    r"""A document a line; only `\n` ends a line, and blank lines are skipped."""

    cuts_anywhere = True
    lead = 1

    def spans(self, data: bytes) -> Spans:
        """The lines of `data` that are not blank, without their line ends."""
        starts, stops = line_edges(data)
        return _without_blank(data, starts, stops)

    def last_border(self, data: bytes) -> int:
        """The place after the last line end."""
        return data.rfind(b"\n") + 1

    def first_border(self, data: bytes) -> int:
        """The place after the first line end, or -1."""
        found = data.find(b"\n")
        return found + 1 if found >= 0 else -1


class Paragraphs:
    r"""Runs of lines between blank ones (`\n[ \t\r]*\n`)."""

    cuts_anywhere = True
    lead = 1

    def spans(self, data: bytes) -> Spans:
        """The paragraphs of `data`; line ends inside a paragraph belong to it."""
        starts, stops = line_edges(data)
        full = ~blank(data, starts, stops)
        before = np.concatenate(([False], full[:-1]))
        after = np.concatenate((full[1:], [False]))
        return Spans(starts[full & ~before], stops[full & ~after], 0, 0)

    def last_border(self, data: bytes) -> int:
        """The place after the last blank line."""
        end = data.rfind(b"\n")
        while end > 0:
            previous = data.rfind(b"\n", 0, end)
            if previous < 0:
                return 0
            if not data[previous + 1 : end].strip(b" \t\r"):
                return end + 1
            end = previous
        return 0

    def first_border(self, data: bytes) -> int:
        """The place after the first blank line, or -1."""
        found = _BLANK_LINE.search(data)
        return found.end() if found else -1


class Separated:
    """Documents between occurrences of a separator, found from left to right."""

    def __init__(self, separator: str) -> None:
        self._separator = separator.encode()
        # "\n\n" in "\n\n\n" can be found in two places; which one counts depends on
        # everything before it, so such files are read in order and never cut blindly.
        self.cuts_anywhere = not any(
            self._separator.startswith(self._separator[cut:])
            for cut in range(1, len(self._separator))
        )

    @property
    def lead(self) -> int:
        """The length of the separator."""
        return len(self._separator)

    def spans(self, data: bytes) -> Spans:
        """The pieces of `data` between separators that are not blank."""
        ends = np.array(self._places(data), np.int64)
        starts = np.concatenate((np.zeros(1, np.int64), ends + len(self._separator)))
        if starts[-1] == len(data):
            return _without_blank(data, starts[:-1], ends, also=b"\n")
        return _without_blank(data, starts, np.concatenate((ends, [len(data)])), also=b"\n")

    def last_border(self, data: bytes) -> int:
        """The place after the last separator, counted from the left."""
        if self.cuts_anywhere:
            place = data.rfind(self._separator)
        else:
            place = max(self._places(data), default=-1)
        return place + len(self._separator) if place >= 0 else 0

    def _places(self, data: bytes) -> list[int]:
        """Where the separator occurs, from left to right, without overlap."""
        # Comparing one rare byte at a time with NumPy is three times as fast as bytes.find,
        # as long as that byte really is rare.
        rare = min(range(len(self._separator)), key=lambda i: _COMMON.find(self._separator[i]))
        candidates = np.flatnonzero(np.frombuffer(data, np.uint8) == self._separator[rare])
        places: list[int] = []
        free = 0
        if len(candidates) < len(data) // 256:
            for place in (candidates - rare).tolist():
                if place >= free and data.startswith(self._separator, place):
                    places.append(place)
                    free = place + len(self._separator)
            return places
        place = data.find(self._separator)
        while place >= 0:
            places.append(place)
            place = data.find(self._separator, place + len(self._separator))
        return places

    def first_border(self, data: bytes) -> int:
        """The place after the first separator, or -1."""
        found = data.find(self._separator)
        return found + len(self._separator) if found >= 0 else -1


class Whole:
    """One document a file."""

    cuts_anywhere = False
    lead = 0

    def spans(self, data: bytes) -> Spans:
        """All of `data`, unless it is blank."""
        return _without_blank(data, np.zeros(1, np.int64), np.array([len(data)]), also=b"\n")

    def last_border(self, data: bytes) -> int:
        """0: a file has no borders inside."""
        return 0

    def first_border(self, data: bytes) -> int:
        """-1: a file has no borders inside."""
        return -1


def splitter_for(documents: str) -> Splitter:
    r"""The splitter that `documents` names.

    >>> data = b"one\ntwo\n\nthree"
    >>> [splitter_for(name).spans(data).starts.tolist() for name in ("lines", "paragraphs")]
    [[0, 4, 9], [0, 9]]
    """
    named: dict[str, type[Lines] | type[Paragraphs] | type[Whole]] = {
        "lines": Lines,
        "paragraphs": Paragraphs,
        "file": Whole,
    }
    return named[documents]() if documents in named else Separated(documents)


def line_edges(data: bytes) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where each line of `data` starts and stops, line ends left out.

    The piece after the last line end counts only if it is not empty.
    """
    ends = np.flatnonzero(np.frombuffer(data, np.uint8) == 10)
    starts = np.concatenate((np.zeros(1, np.int64), ends + 1))
    if starts[-1] == len(data):
        return starts[:-1], ends
    return starts, np.concatenate((ends, [len(data)]))


def blank(
    data: Any, starts: NDArray[np.int64], stops: NDArray[np.int64], also: bytes = b""
) -> NDArray[np.bool_]:
    """Which pieces hold nothing but spaces, tabs, carriage returns (and the bytes `also`)."""
    table = _BLANK
    if also:
        table = _BLANK.copy()
        table[list(also)] = True
    text = np.frombuffer(data, np.uint8)
    is_blank = np.ones(len(starts), bool)
    open_pieces = np.arange(len(starts))
    place = starts
    # Most pieces are decided by their first byte, indented ones by a few more.
    for _ in range(32):
        inside = place < stops[open_pieces]
        open_pieces, place = open_pieces[inside], place[inside]
        white = table[text[place]]
        is_blank[open_pieces[~white]] = False
        open_pieces, place = open_pieces[white], place[white] + 1
        if not len(open_pieces):
            return is_blank
    for piece in open_pieces:
        if text[starts[piece] : stops[piece]].tobytes().strip(b" \t\r" + also):
            is_blank[piece] = False
    return is_blank


def _without_blank(
    data: bytes, starts: NDArray[np.int64], stops: NDArray[np.int64], also: bytes = b""
) -> Spans:
    is_blank = blank(data, starts, stops, also)
    if not is_blank.any():
        return Spans(starts, stops, 0, 0)
    skipped = int((stops[is_blank] - starts[is_blank]).sum())
    return Spans(starts[~is_blank], stops[~is_blank], int(is_blank.sum()), skipped)
