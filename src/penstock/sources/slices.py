"""Inputs cut into slices, by a rule that depends on the inputs and the tokenizer alone.

A slice is about 64 MB of text and becomes one part of the store, whoever processes
it and however often the build was killed before. Files are laid end to end in the
order of their names:

    small files     a.txt b.txt c.txt      grouped until they make a slice
    a big file      │ d.txt │ d.txt │      cut at the first record border past each
                                           n-th part of it, found by a short look
    a compressed    │ e.gz │ e.gz │ e.     read in order and cut whenever a slice is
                                           full, because nobody can look ahead
    one document    │ f.txt ┆ f.txt │      longer than a slice, without a record border: cut
                                           into pieces where the token ids stay the same

The first two kinds are ranges that a worker reads by itself; the third comes with its
bytes. A table (Parquet, Arrow) is cut between row groups or record batches.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import BinaryIO

from penstock.sources.decompress import Expanded
from penstock.sources.listing import InputFile, open_file
from penstock.sources.settings import RULE_BYTES, SLICE_BYTES, ReadSettings
from penstock.sources.splitters import Splitter, splitter_for
from penstock.sources.tables import table_spans
from penstock.sources.texts import text_spans
from penstock.sources.whole import IsCutSafe, file_pieces, file_rule, rule_of, stream_pieces

__all__ = ["InputSpan", "Slice", "cut"]

# What a compressed file is taken to hold when small ones are grouped.
_NOMINAL_EXPANSION = 4
_LOOK_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class InputSpan:
    """A piece of one input: bytes, row groups, record batches or texts `[start, stop)`."""

    file: int
    start: int
    stop: int
    disk_bytes: int
    """Its share of the file on disk, for showing progress."""
    data: bytes | None = field(default=None, repr=False)
    """The text itself where it had to be read to be cut."""
    documents: str | None = None
    """The rule that "auto" found for the file; None where the reader is to find it."""
    begins: bool = True
    """Whether no document continues in this span that began in the one before."""
    ends: bool = True
    """Whether no document of this span continues in the next one."""


@dataclass(frozen=True, slots=True)
class Slice:
    """What becomes one part of the store."""

    index: int
    spans: tuple[InputSpan, ...]

    @property
    def disk_bytes(self) -> int:
        """Its share of the files on disk."""
        return sum(span.disk_bytes for span in self.spans)


def cut(
    files: Sequence[InputFile],
    reading: ReadSettings,
    *,
    slice_bytes: int = SLICE_BYTES,
    is_cut_safe: IsCutSafe | None = None,
    border: int | None = None,
) -> Iterator[Slice]:
    """The slices of `files`, in order.

    Not safe to advance from two threads at once.

    Args:
        files: The inputs.
        reading: How they are read.
        slice_bytes: About how much text a slice holds.
        is_cut_safe: Whether a document that is longer than a slice may be cut at a place. Without
            it such a document is refused.
        border: Where to divide the one document of the one file, whose parts are then two
            documents.
    """
    cutter = _Cutter(reading, slice_bytes, is_cut_safe, border)
    index = 0
    for group in _groups(files, slice_bytes):
        for spans in _cut_group(files, group, cutter):
            yield Slice(index, tuple(spans))
            index += 1


@dataclass(frozen=True, slots=True)
class _Cutter:
    """The arguments of `cut`."""

    reading: ReadSettings
    slice_bytes: int
    is_cut_safe: IsCutSafe | None
    border: int | None

    def cuts(self, rule: str, found: str | None) -> bool:
        """Whether a file is one document that is stored in pieces if it is long.

        One that "auto" `found`, or that is divided in any case. A limit below a slice is meant:
        the document is then read in one piece and rejected.
        """
        is_limited = self.reading.max_document_bytes < self.slice_bytes
        return rule == "file" and not is_limited and (found == rule or self.border is not None)


def _groups(files: Sequence[InputFile], slice_bytes: int) -> Iterator[list[int]]:
    """Numbers of files that are cut together: one big file, or several small neighbours."""
    group: list[int] = []
    held = 0
    for number, file in enumerate(files):
        size = file.size * (_NOMINAL_EXPANSION if file.compression else 1)
        if size > slice_bytes and group:
            yield group
            group, held = [], 0
        group.append(number)
        held += size
        if held >= slice_bytes:
            yield group
            group, held = [], 0
    if group:
        yield group


def _cut_group(
    files: Sequence[InputFile], group: list[int], cutter: _Cutter
) -> Iterator[list[InputSpan]]:
    held: list[InputSpan] = []
    size = 0
    for number in group:
        # Small plain files were grouped by their size; the others show theirs only now.
        ranged = files[number].compression is None and files[number].format in ("text", "jsonl")
        for span, num_bytes in _cut_file(files[number], number, cutter):
            held.append(span)
            size += num_bytes
            # Three quarters: a span ends at the last border before a full slice.
            is_full = size * 4 >= cutter.slice_bytes * 3 and (len(group) == 1 or not ranged)
            if is_full or not span.ends:
                yield held
                held, size = [], 0
    if held:
        yield held


def _cut_file(file: InputFile, number: int, cutter: _Cutter) -> Iterator[tuple[InputSpan, int]]:
    """The spans of one file with the bytes each holds."""
    if file.format in ("parquet", "arrow"):
        spans = list(table_spans(file, cutter.reading.field, cutter.slice_bytes))
        for start, stop, num_bytes in spans:
            yield InputSpan(number, start, stop, file.size // len(spans)), num_bytes
    elif file.texts is not None:
        for start, stop, num_bytes in text_spans(file.texts, cutter.slice_bytes):
            yield InputSpan(number, start, stop, num_bytes), num_bytes
    else:
        cut_text = _cut_compressed if file.compression else _cut_plain
        for span in cut_text(file, number, cutter):
            yield span, span.stop - span.start


def _cut_plain(file: InputFile, number: int, cutter: _Cutter) -> Iterator[InputSpan]:
    """Spans of a file that can be read at any place."""
    reading = cutter.reading
    num_slices = max(1, round(file.size / cutter.slice_bytes))
    is_auto = reading.documents == "auto" and file.format == "text"
    if is_auto and num_slices == 1 and cutter.border is None:
        yield InputSpan(number, 0, file.size, file.size)  # whoever reads it finds the rule
        return
    rule = file_rule(file, reading) if is_auto else reading.documents
    splitter = splitter_for("lines" if file.format == "jsonl" else rule)
    found = rule if is_auto else None
    if file.format == "text" and cutter.cuts(rule, found):
        pieces = file_pieces(file, cutter.slice_bytes, cutter.is_cut_safe, cutter.border)
        for start, stop, begins, ends in pieces:
            size = stop - start
            yield InputSpan(number, start, stop, size, None, rule, begins, ends)
    elif num_slices > 1 and not splitter.cuts_anywhere and splitter.separator:
        stream = Expanded(file, reading.max_expansion)
        yield from _cut_stream(stream, number, splitter, cutter, found)
    else:
        ranges = _cut_range(file, splitter, 1 if rule == "file" else num_slices)
        for start, stop in ranges:
            yield InputSpan(number, start, stop, stop - start, None, found)


def _cut_compressed(file: InputFile, number: int, cutter: _Cutter) -> Iterator[InputSpan]:
    """Spans of a file that must be read in order, with their text."""
    reading = cutter.reading
    stream = Expanded(file, reading.max_expansion)
    rule = "lines" if file.format == "jsonl" else reading.documents
    found = None
    if rule == "auto":
        rule = found = rule_of([stream.peek(RULE_BYTES)], reading.separators)
    if not cutter.cuts(rule, found):
        yield from _cut_stream(stream, number, splitter_for(rule), cutter, found)
        return
    on_disk = 0
    pieces = stream_pieces(file, stream, cutter.slice_bytes, cutter.is_cut_safe, cutter.border)
    for data, start, begins, ends in pieces:
        seen, on_disk = stream.disk_position - on_disk, stream.disk_position
        yield InputSpan(number, start, start + len(data), seen, data, rule, begins, ends)


def _cut_range(file: InputFile, splitter: Splitter, num_slices: int) -> Iterator[tuple[int, int]]:
    """Byte ranges of a plain file; each begins where a record begins."""
    start = 0
    if num_slices > 1:
        with open_file(file) as stream:
            for k in range(1, num_slices):
                wanted = k * file.size // num_slices
                if wanted <= start:
                    continue  # one record is longer than a slice
                border = _border_after(stream, splitter, wanted, file.size)
                if border >= file.size:
                    break  # the last record goes on to the end: no use in looking again
                if border > start:
                    yield start, border
                    start = border
    yield start, file.size


def _border_after(stream: BinaryIO, splitter: Splitter, wanted: int, size: int) -> int:
    """The first place at or past `wanted` where a record begins, or `size`."""
    begin = wanted - min(splitter.lead, wanted)
    stream.seek(begin)
    seen = b""
    look = _LOOK_BYTES
    while True:
        more = _read_fully(stream, look)
        seen += more
        found = splitter.first_border(seen)
        if found >= 0:
            return min(begin + found, size)
        if not more:
            return size
        # Of a long record only the end is kept, where a separator may have begun.
        begin += max(0, len(seen) - _LOOK_BYTES)
        seen = seen[-_LOOK_BYTES:]
        look = min(2 * look, 64 * _LOOK_BYTES)


def _read_fully(stream: BinaryIO, num_bytes: int) -> bytes:
    pieces = []
    while num_bytes:
        piece = stream.read(num_bytes)
        if not piece:
            break
        pieces.append(piece)
        num_bytes -= len(piece)
    return b"".join(pieces)


def _cut_stream(
    stream: Expanded, number: int, splitter: Splitter, cutter: _Cutter, rule: str | None
) -> Iterator[InputSpan]:
    """Spans with their bytes, from a file that can only be read in order."""
    slice_bytes = cutter.slice_bytes
    limit = cutter.reading.max_document_bytes + slice_bytes
    try:
        held = b""
        start = 0
        on_disk = 0
        while True:
            more = stream.read(max(slice_bytes, min(len(held), limit)))
            held += more
            border = splitter.last_border(held) if more else len(held)
            if border:
                seen, on_disk = stream.disk_position - on_disk, stream.disk_position
                yield InputSpan(number, start, start + border, seen, held[:border], rule)
                start += border
                held = held[border:]
            if not more:
                return
    finally:
        stream.close()
