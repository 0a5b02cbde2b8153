"""Text: where documents begin and end in it, and where a long document may be cut.

    Splitter     the documents of a block, and borders between documents
    rule_of      the rule of a file for documents="auto", found in its first 64 MB
    find_cut     a place where a document longer than a slice or a block may be cut
    divided      a batch with its long documents in blocks

A splitter works on bytes and not on lines as Python defines them: U+2028, form feed and a lone
carriage return are ordinary text. It has two tasks. `spans` returns the documents of a block
that ends at a record border; everything between two spans is separator or blank, so spans and
gaps cover the block. `first_border` finds a place where a record begins, without reading the
text before it. So several threads can read different ranges of one large file.

A file without a separator is one document, and every byte of it is kept. A cut must not change a
token id, so a document is cut only where the tokenizer gives the same ids for the text around the
cut as for its two halves; `IsCutSafe` asks the tokenizer. With GPT-2, a line end between two other
characters is such a place, and a blank line is not. A tokenizer that adds something in front of
every text has no such place.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.options import ReadSettings, separator_in
from penstock.sources.batch import (
    Batch,
    Edges,
    SeparatedTexts,
    binary_array,
    blank,
    compact,
    text_offsets,
)
from penstock.sources.files import Expanded, InputFile
from penstock.sources.settings import BLOCK_BYTES, RULE_BYTES

# Bytes of text and code, from rare to common. A byte that is not listed counts as the rarest,
# because `find` returns -1 for it.
_COMMON = bytes(reversed(b"etaoinsrhldcu\n mfpgwybvkxjqz,._-()=\"'/:;0123456789<>TSAIC"))
# Bytes searched at a time; so few that they and the result of the comparison stay in the cache.
_CHUNK = 1 << 18
_SPARSE = 1 << 9  # a byte is rare if there is at most one in so many bytes
_BLANK_LINE = re.compile(rb"\n[ \t\r]*\n")

IsCutSafe = Callable[[str, str], bool]
"""A function of the text before and after a cut; returns whether the cut changes no token id."""

RANGE_BYTES = 1 << 20
"""How far after the wanted place a cut is searched for."""
CONTEXT_BYTES = 2_048
"""How much text on each side `IsCutSafe` receives: 512 characters of at most 4 bytes."""
# Trying one place takes about a millisecond. If there are safe places, one of the first few line
# ends is safe. So the search gives up after this many tries.
_MOST_TRIES = 32
# A line end between two characters that are not white space, or else a single space.
_PLACES = (re.compile(rb"(?<=\S)\r?\n(?=\S)"), re.compile(rb"(?<=\S) (?=\S)"))
# Text without spaces: commas, full stops and similar marks of Chinese and Japanese, in UTF-8. They
# are tried only for blocks: pieces that are stored would be others than those of earlier builds.
_MARKS = re.compile(rb"\xe3\x80[\x81\x82]|\xef\xbc[\x81\x8c\x9a\x9b\x9f]")


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


def without_blank(data: bytes, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> Spans:
    """The pieces of `data` that are not blank, and counts of those that are."""
    is_blank = blank(data, starts, stops)
    if not is_blank.any():
        return Spans(starts, stops, 0, 0)
    skipped = int((stops[is_blank] - starts[is_blank]).sum())
    return Spans(starts[~is_blank], stops[~is_blank], int(is_blank.sum()), skipped)


def rule_of(blocks: Iterable[bytes], separators: Sequence[str]) -> str:
    r"""The first of `separators` that the first 64 MB contain, or "file".

    Reads no more blocks than it needs.

    >>> rule_of([b"one<|endof", b"text|>two"], ["<|endoftext|>"])
    '<|endoftext|>'
    >>> rule_of([b"one\ntwo\n"], ["<|endoftext|>"])
    'file'
    """
    wanted = [each.encode() for each in separators]
    found = len(wanted)
    longest = max(map(len, wanted), default=1)
    seen, tail = 0, b""
    for block in blocks:
        # `tail` is one byte shorter than the longest separator: enough to find one that spans two
        # blocks, and too short to find one twice.
        text = tail + block[: RULE_BYTES - seen]
        # A later block may contain an earlier separator of the list, which takes precedence.
        found = next((number for number in range(found) if wanted[number] in text), found)
        seen += len(block)
        if found == 0 or seen >= RULE_BYTES:
            break
        tail = text[-longest + 1 :] if longest > 1 else b""
    return separators[found] if found < len(wanted) else "file"


def find_cut(
    data: bytes,
    wanted: int,
    is_safe: IsCutSafe | None,
    tries: int = _MOST_TRIES,
    patterns: Sequence[re.Pattern[bytes]] = _PLACES,
) -> int:
    r"""The first place in `data`, at or after `wanted`, where the text may be cut; or -1.

    The place after a line end is tried first, then the place before it. Spaces are tried only if
    no line end is safe.

    >>> data = b"one two\n\nthree\nfour"
    >>> find_cut(data, 4, lambda left, right: True), find_cut(data, 4, None)
    (15, -1)
    """
    if is_safe is None:
        return -1
    for pattern in patterns:
        for number, found in enumerate(pattern.finditer(data, wanted, wanted + RANGE_BYTES)):
            if number == tries:
                break
            # GPT-2 and most others join a space to the word that follows it, so only the place
            # before the space is tried.
            places = (found.end(), found.start()) if found[0] != b" " else (found.start(),)
            for place in places:
                if place > 0 and _is_safe_at(data, place, is_safe):
                    return place
    return -1


def _is_safe_at(data: bytes, place: int, is_safe: IsCutSafe) -> bool:
    begin = max(0, place - CONTEXT_BYTES)
    end = min(len(data), place + CONTEXT_BYTES)
    # The ends of the window may be inside a character: bytes of the form 10xxxxxx continue one.
    while begin < place and data[begin] & 0xC0 == 0x80:
        begin += 1
    while end < len(data) and end > place and data[end] & 0xC0 == 0x80:
        end -= 1
    try:
        return is_safe(data[begin:place].decode(), data[place:end].decode())
    except UnicodeDecodeError:  # ids of invalid text are unknown until the bytes are replaced
        return False


def block_borders(text: Any, is_cut_safe: IsCutSafe | None) -> Iterator[int]:
    """The offsets where blocks of a text begin and end, from 0 to its length."""
    view = memoryview(text)
    start = 0
    yield start
    while is_cut_safe is not None and len(view) - start > 2 * BLOCK_BYTES:
        begin = start + BLOCK_BYTES - CONTEXT_BYTES
        data = bytes(view[max(0, begin) : begin + RANGE_BYTES + 2 * CONTEXT_BYTES])
        begin = max(0, begin)
        wanted, patterns = start + BLOCK_BYTES - begin, (*_PLACES, _MARKS)
        found = find_cut(data, wanted, is_cut_safe, tries=8, patterns=patterns)
        if found < 0:
            break
        start = begin + found
        yield start
    yield len(view)


def divided(batch: Batch, is_cut_safe: IsCutSafe) -> Iterator[Batch]:
    """The batch, with its long documents in blocks, so that the tokenizer needs less memory.

    A document of 400 MB as one text took eight times its size. In blocks, it takes its own size
    and that of a block, and has the same ids.
    """
    texts = batch.stored
    if isinstance(texts, SeparatedTexts):
        view, starts, stops = memoryview(texts.data), texts.starts, texts.stops
    else:
        view, ends = memoryview(texts.buffers()[2] or b""), text_offsets(texts)
        starts, stops = ends[:-1], ends[1:]
    long = np.flatnonzero(stops - starts > 2 * BLOCK_BYTES).tolist()
    if batch.edges is not None or not long:
        yield batch
        return
    # Counts and rejects belong to the whole batch, and come with a batch without documents.
    none = np.zeros(0, np.uint64)
    yield Batch(binary_array([]), none, none, batch.tally, batch.rejects, rules=batch.rules)
    for before, row in pairwise([-1, *long, len(starts)]):
        short = slice(before + 1, row)
        if short.start < short.stop:
            kept = compact(view, starts[short], stops[short])
            yield Batch(kept, batch.files[short], batch.offsets[short])
        if row < len(starts):
            text, place = view[starts[row] : stops[row]], slice(row, row + 1)
            for first, last in pairwise(block_borders(text, is_cut_safe)):
                ends_here = last == len(text)
                edges = Edges.of(begins=first == 0, ends=ends_here, closes=ends_here)
                block = binary_array([bytes(text[first:last])])
                yield Batch(block, batch.files[place], batch.offsets[place], edges=edges)


def file_rule(file: InputFile, reading: ReadSettings) -> str:
    """The rule that "auto" finds for a text file; reads at most its first 64 MB."""
    with closing(Expanded(file)) as stream:
        return rule_of(iter(lambda: stream.read(BLOCK_BYTES), b""), reading.separators)
