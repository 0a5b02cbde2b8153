"""Text files that are one document, because `documents="auto"` finds no separator in them.

    rule_of      the rule of a file, found in its first 64 MB
    find_cut     a place where a document longer than a slice may be cut
    …_pieces     the pieces of a document that is longer than a slice

Every byte of such a file is kept, and a cut must not change a token id. So a document is cut
only where the tokenizer gives the same ids for the text around the cut as for its two halves;
`IsCutSafe` asks the tokenizer. With GPT-2, a line end between two other characters is such a
place, and a blank line is not. A tokenizer that adds something in front of every text has no
such place.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from penstock.errors import SourceError
from penstock.options import ReadSettings
from penstock.sources.decompress import Expanded
from penstock.sources.document import (
    Batch,
    Edges,
    SeparatedTexts,
    binary_array,
    compact,
    text_offsets,
)
from penstock.sources.files import InputFile, open_file, read_fully
from penstock.sources.settings import BLOCK_BYTES, RULE_BYTES

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
    stream = Expanded(file)
    try:
        return rule_of(iter(lambda: stream.read(BLOCK_BYTES), b""), reading.separators)
    finally:
        stream.close()


def file_pieces(
    file: InputFile, slice_bytes: int, is_cut_safe: IsCutSafe | None, border: int | None
) -> Iterator[tuple[int, int, bool, bool]]:
    """The pieces of a plain file.

    Yields the start and stop of each piece, whether a document begins at its start, and whether
    a document ends at its stop.
    """
    edges = (0, file.size) if border is None else (0, border, file.size)
    for first, last in pairwise(edges):
        # Pieces of equal size, and no tiny one at the end.
        num_pieces = max(1, round((last - first) / slice_bytes))
        border_after = partial(_cut_after, file, last, is_cut_safe)
        for start, stop in equal_ranges(first, last, num_pieces, border_after):
            yield start, stop, start == first, stop == last


def equal_ranges(
    first: int, last: int, num_ranges: int, border_after: Callable[[int], int]
) -> Iterator[tuple[int, int]]:
    """About `num_ranges` ranges of nearly equal size, which together cover `[first, last)`.

    Ranges meet only at allowed borders: `border_after(wanted)` returns the first border at or
    after `wanted`, or `last` if there is none.
    """
    start = first
    for k in range(1, num_ranges):
        # Integer arithmetic is exact for files of any size.
        wanted = first + k * (last - first) // num_ranges
        if wanted <= start:
            continue  # the border before this one was found beyond `wanted`
        border = border_after(wanted)
        if border >= last:
            break  # the last record reaches to the end
        if border > start:
            yield start, border
            start = border
    yield start, last


def _cut_after(file: InputFile, last: int, is_safe: IsCutSafe | None, wanted: int) -> int:
    """The first safe place at or after `wanted`; `last` if the document ends before that."""
    begin = max(0, wanted - CONTEXT_BYTES)
    with open_file(file) as stream:
        stream.seek(begin)
        data = read_fully(stream, min(wanted + RANGE_BYTES + CONTEXT_BYTES, last) - begin)
    found = find_cut(data, wanted - begin, is_safe)
    if found >= 0:
        return begin + found
    if wanted + RANGE_BYTES >= last:
        return last
    raise _no_place(file, wanted, is_safe)


def stream_pieces(
    file: InputFile,
    stream: Expanded,
    slice_bytes: int,
    is_cut_safe: IsCutSafe | None,
    border: int | None,
) -> Iterator[tuple[bytes, int, bool, bool]]:
    """The pieces of a file that is read in order.

    Yields the text and start of each piece, whether a document begins at its start, and whether
    a document ends at its end.
    """
    # A rest of up to one and a half slices is not cut. For plain files, rounding has that effect.
    most = slice_bytes * 3 // 2
    place = 0
    try:
        for last in (border, None) if border is not None else (None,):
            first, held = place, b""
            while True:
                wanted = most + RANGE_BYTES + CONTEXT_BYTES
                if last is not None:
                    wanted = min(wanted, last - place)
                held += stream.read(wanted - len(held))
                is_rest = len(held) < wanted or (last is not None and place + len(held) == last)
                # The document ends in `held`, and the rest is short enough for one piece.
                if is_rest and len(held) <= most:
                    break
                end = find_cut(held, slice_bytes, is_cut_safe)
                # The search came to the end of the document, so the rest is one longer piece.
                if end < 0 and is_rest and len(held) <= slice_bytes + RANGE_BYTES:
                    break
                if end < 0:
                    raise _no_place(file, place + slice_bytes, is_cut_safe)
                yield held[:end], place, place == first, False
                place, held = place + end, held[end:]
            yield held, place, place == first, True
            place += len(held)
    finally:
        stream.close()


def _no_place(file: InputFile, wanted: int, is_safe: IsCutSafe | None) -> SourceError:
    if is_safe is None:
        return SourceError(
            f"{file.name} is one document that is longer than a slice. It cannot be cut without a "
            "tokenizer."
        )
    return SourceError(
        f'No separator was found in {file.name}, so documents="auto" takes it as one document. It '
        "is too long to be tokenized at once, and there is no safe place to cut it in the "
        f"{RANGE_BYTES:,} bytes after byte {wanted:,}: there is no line end or space, or a cut "
        'there would change token ids. Say what separates documents: documents="lines", '
        '"paragraphs" or "sep:SEPARATOR". Or use documents="file", which needs memory for the '
        "whole file."
    )
