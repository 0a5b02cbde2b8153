"""A file that is one document, cut into pieces of about a slice.

    │ piece ┆ piece ┆ piece │        one document
    │ piece ┆ piece │ piece │        two, where a split divides the file in the middle

A piece ends where the ids of the document do not change by it (`find_cut`), at most 1 MiB
after the place that was wanted. Up to one and a half slices stay in one piece.
"""

from collections.abc import Iterator
from itertools import pairwise

from penstock.errors import SourceError
from penstock.sources.expand import Expanded
from penstock.sources.listing import InputFile, open_file
from penstock.sources.reading import BLOCK_BYTES, Reading
from penstock.sources.whole import CONTEXT_BYTES, RANGE_BYTES, IsCutSafe, find_cut, rule_of

__all__ = ["file_pieces", "file_rule", "stream_pieces"]


def file_rule(file: InputFile, reading: Reading) -> str:
    """The rule that "auto" finds for a text file; reads its first 64 MB at most."""
    stream = Expanded(file, reading.max_expansion)
    try:
        return rule_of(iter(lambda: stream.read(BLOCK_BYTES), b""), reading.separators)
    finally:
        stream.close()


def file_pieces(
    file: InputFile, slice_bytes: int, is_cut_safe: IsCutSafe | None, border: int | None
) -> Iterator[tuple[int, int, bool, bool]]:
    """The pieces of a plain file: start, stop, whether a document begins and whether it ends."""
    edges = (0, file.size) if border is None else (0, border, file.size)
    for first, last in pairwise(edges):
        size = last - first
        num_pieces = max(1, round(size / slice_bytes))
        start = first
        for k in range(1, num_pieces):
            wanted = first + k * size // num_pieces
            if wanted <= start:
                continue
            place = _cut_after(file, wanted, last, is_cut_safe)
            if place is None:
                break
            yield start, place, start == first, False
            start = place
        yield start, last, start == first, True


def _cut_after(file: InputFile, wanted: int, last: int, is_safe: IsCutSafe | None) -> int | None:
    """Where to cut; None where the document ends before a place is found."""
    begin = max(0, wanted - CONTEXT_BYTES)
    with open_file(file) as stream:
        stream.seek(begin)
        data = b""
        size = min(wanted + RANGE_BYTES + CONTEXT_BYTES, last) - begin
        while len(data) < size and (more := stream.read(size - len(data))):
            data += more
    found = find_cut(data, wanted - begin, is_safe)
    if found >= 0:
        return begin + found
    if wanted + RANGE_BYTES >= last:
        return None
    raise _no_place(file, wanted, is_safe)


def stream_pieces(
    file: InputFile,
    stream: Expanded,
    slice_bytes: int,
    is_cut_safe: IsCutSafe | None,
    border: int | None,
) -> Iterator[tuple[bytes, int, bool, bool]]:
    """The pieces of a file that is read in order: text, start, and the edges as above."""
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
                if is_rest and len(held) <= most:
                    break
                end = find_cut(held, slice_bytes, is_cut_safe)
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
            f"{file.name} is one document and longer than a slice, and without a tokenizer it "
            "cannot be cut."
        )
    return SourceError(
        f'{file.name} is one document for documents="auto", and too long to be tokenized at once. '
        f"It must be cut near byte {wanted:,}, but in the {RANGE_BYTES:,} bytes that follow there "
        "is no line end or space between two other characters at which the tokenizer gives the "
        "same ids for both sides as for the text across it. Say what separates documents in it: "
        'documents="lines", "paragraphs" or "sep:SEPARATOR"; or documents="file", which needs '
        "memory for all of it."
    )
