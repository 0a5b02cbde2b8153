"""Splitters: where documents begin and end in text.

A splitter works on bytes and not on lines as Python defines them: U+2028, form feed and a lone
carriage return are ordinary text. It has two tasks. `spans` returns the documents of a block
that ends at a record border; everything between two spans is separator or blank, so spans and
gaps cover the block. `first_border` finds a place where a record begins, without reading the
text before it. So several threads can read different ranges of one large file.
"""

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.options import separator_in

_BLANK = np.zeros(256, bool)
_BLANK[list(b" \t\r\n")] = True
# Bytes of text and code, from rare to common. A byte that is not listed counts as the rarest,
# because `find` returns -1 for it.
_COMMON = bytes(reversed(b"etaoinsrhldcu\n mfpgwybvkxjqz,._-()=\"'/:;0123456789<>TSAIC"))
# Bytes searched at a time; so few that they and the result of the comparison stay in the cache.
_CHUNK = 1 << 18
_SPARSE = 1 << 9  # a byte is rare if there is at most one in so many bytes
_BLANK_LINE = re.compile(rb"\n[ \t\r]*\n")


@dataclass(frozen=True, slots=True)
class Spans:
    """The documents of a block: `[starts[i], stops[i])`, in order."""

    starts: NDArray[np.int64]
    stops: NDArray[np.int64]
    num_skipped: int
    """How many pieces between separators are empty or blank."""
    skipped_bytes: int


class Splitter:
    """A rule for where documents begin and end; this base class makes a file one document."""

    cuts_anywhere: bool = False
    """Whether `first_border` finds the right border without the text before the wanted place."""
    separator: bytes | None = None
    """The bytes between documents, if they are always the same."""
    lead: int = 0
    """How many bytes before the wanted place `first_border` needs."""
    in_order: bool = False
    """Whether a border depends on everything since the border before it, as in CSV. Then
    `first_border` is not used, and `spans` raises ValueError with a reason and a place if the data
    is damaged."""

    def head(self, data: bytes) -> int:
        """How many bytes at the beginning of a file come before its first record."""
        return 0

    def is_end(self, data: bytes) -> bool:
        """Whether a file may end with `data`, which follows its last border."""
        return True

    def spans(self, data: bytes) -> Spans:
        """The documents of `data`, which begins and ends at a record border."""
        return without_blank(data, np.zeros(1, np.int64), np.array([len(data)]))

    def last_border(self, data: bytes) -> int:
        """The last place in `data` where a record begins, or 0."""
        return 0

    def first_border(self, data: bytes) -> int:
        """The first place in `data[1:]` where a record begins, or -1.

        `data` begins `lead` bytes before the wanted place, so that a separator that ends
        exactly there is found.
        """
        return -1


class _Paragraphs(Splitter):
    r"""Documents between blank lines (`\n[ \t\r]*\n`)."""

    cuts_anywhere = True
    lead = 1

    def spans(self, data: bytes) -> Spans:
        """The paragraphs of `data`; line ends inside a paragraph belong to it."""
        starts, stops = _pieces(data, find_all(data, b"\n"), 1)
        # A paragraph begins at a line with text after a blank line, and ends at a line with text
        # before a blank line.
        full = ~blank(data, starts, stops)
        before = np.concatenate(([False], full[:-1]))
        after = np.concatenate((full[1:], [False]))
        # Blank lines are the separator here, so nothing counts as skipped.
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


class _Separated(Splitter):
    """Documents between occurrences of a separator, found from left to right."""

    def __init__(self, separator: str) -> None:
        self._between = separator.encode()
        self.separator = self._between
        self.lead = len(self._between)
        # "\n\n" occurs in "\n\n\n" in two places, and which one counts depends on everything
        # before it. Files with such a separator are read in order, and are cut as they are read.
        self.cuts_anywhere = not any(
            self._between.startswith(self._between[cut:]) for cut in range(1, self.lead)
        )

    def spans(self, data: bytes) -> Spans:
        """The pieces of `data` between separators, without blank pieces."""
        return without_blank(data, *_pieces(data, self._places(data), self.lead))

    def last_border(self, data: bytes) -> int:
        """The place after the last separator, if separators are searched from left to right."""
        if self.cuts_anywhere:
            place = data.rfind(self._between)
        else:
            place = int(self._places(data)[-1:].sum()) if self._between in data else -1
        return place + self.lead if place >= 0 else 0

    def first_border(self, data: bytes) -> int:
        """The place after the first separator, or -1."""
        found = data.find(self._between)
        return found + self.lead if found >= 0 else -1

    def _places(self, data: bytes) -> NDArray[np.int64]:
        """Where the separator occurs, from left to right, without overlap."""
        places = find_all(data, self._between)
        if self.cuts_anywhere:  # then two occurrences cannot overlap
            return places
        # From left to right: an occurrence that overlaps the one before does not count.
        free, kept = 0, []
        for place in places.tolist():
            if place >= free:
                kept.append(place)
                free = place + self.lead
        return np.array(kept, np.int64)


def splitter_for(documents: str) -> Splitter:
    r"""The splitter that `documents` names.

    >>> data = b"one\ntwo\n\nthree"
    >>> [splitter_for(name).spans(data).starts.tolist() for name in ("lines", "paragraphs")]
    [[0, 4, 9], [0, 9]]
    """
    # Lines are pieces between line ends; a blank one is skipped like any blank piece.
    named = {"lines": _Separated("\n"), "paragraphs": _Paragraphs(), "file": Splitter()}
    separator = separator_in(documents)
    return named[documents] if separator is None else _Separated(separator)


def find_all(data: bytes, wanted: bytes) -> NDArray[np.int64]:
    """Every place where `wanted` begins in `data`, also overlapping ones.

    NumPy searches the rarest byte of `wanted`, and then compares the others. That takes half the
    time of `bytes.find`.

    >>> find_all(b"abababa", b"aba").tolist()
    [0, 2, 4]
    """
    if len(wanted) == 1 and (few := _few_places(data, wanted)) is not None:
        return few
    text = np.frombuffer(data, np.uint8)
    rarity = [_COMMON.find(byte) for byte in wanted]
    rare = rarity.index(min(rarity))
    places = find_bytes(text, wanted[rare : rare + 1])
    if len(wanted) == 1:  # line ends, mostly: saves two copies of all places
        return places
    # From the rare byte back to the first byte of `wanted`. Near the ends of the data, some bytes
    # of `wanted` may be missing.
    places = places - rare
    places = places[(places >= 0) & (places + len(wanted) <= len(data))]
    for offset, byte in enumerate(wanted):
        if offset != rare and len(places):
            places = places[text[places + offset] == byte]
    return places


def find_bytes(text: NDArray[np.uint8], wanted: bytes) -> NDArray[np.int64]:
    """Every place of `text` that holds one of the bytes of `wanted`.

    >>> find_bytes(np.frombuffer(b"abcab", np.uint8), b"bc").tolist()
    [1, 2, 4]
    """
    places = []
    for start in range(0, max(1, len(text)), _CHUNK):
        chunk = text[start : start + _CHUNK]
        found = chunk == wanted[0]
        for byte in wanted[1:]:
            found |= chunk == byte
        places.append(np.flatnonzero(found) + start)
    return np.concatenate(places)


def _few_places(data: bytes, wanted: bytes) -> NDArray[np.int64] | None:
    """Every place of a byte that is rare in `data`; None if it is not rare.

    Lines of JSON are often long. With 8 kB per line, `bytes.find` takes a fourth of the time that a
    comparison of all bytes takes.
    """
    # Only a part is counted: `bytes.count` takes longer than the comparison.
    if data.count(wanted, 0, _CHUNK) * _SPARSE > min(len(data), _CHUNK):
        return None
    places, limit = [], len(data) // _SPARSE + 1
    place = data.find(wanted)
    while place >= 0:
        places.append(place)
        if len(places) > limit:
            return None
        place = data.find(wanted, place + 1)
    return np.array(places, np.int64)


def _pieces(
    data: bytes, ends: NDArray[np.int64], separator_bytes: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The start and stop of each piece of `data`, if separators begin at `ends`.

    The text after the last separator is a piece only if it is not empty.
    """
    starts = np.concatenate((np.zeros(1, np.int64), ends + separator_bytes))
    if starts[-1] == len(data):
        return starts[:-1], ends
    return starts, np.concatenate((ends, [len(data)]))


def blank(data: bytes, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which pieces are empty, or contain only spaces, tabs, carriage returns and line ends."""
    text = np.frombuffer(data, np.uint8)
    is_blank = np.ones(len(starts), bool)
    open_pieces = np.arange(len(starts))
    place = starts
    # One byte of all undecided pieces per round. The first byte decides most pieces, and a few
    # more bytes decide those that are indented.
    for _ in range(32):
        inside = place < stops[open_pieces]
        open_pieces, place = open_pieces[inside], place[inside]
        white = _BLANK[text[place]]
        is_blank[open_pieces[~white]] = False
        open_pieces, place = open_pieces[white], place[white] + 1
        if not len(open_pieces):
            return is_blank
    # Few pieces begin with more than 32 blanks, so these are decided one by one.
    for piece in open_pieces:
        if text[starts[piece] : stops[piece]].tobytes().strip(b" \t\r\n"):
            is_blank[piece] = False
    return is_blank


def without_blank(data: bytes, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> Spans:
    """The pieces of `data` that are not blank, and counts of those that are."""
    is_blank = blank(data, starts, stops)
    if not is_blank.any():
        return Spans(starts, stops, 0, 0)
    skipped = int((stops[is_blank] - starts[is_blank]).sum())
    return Spans(starts[~is_blank], stops[~is_blank], int(is_blank.sum()), skipped)
