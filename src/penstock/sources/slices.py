"""Slices: ranges of the input, which depend only on the inputs and the tokenizer.

A slice becomes one part of the store. It is the same whichever worker processes it and however
often the build was killed before. The first slice of a build holds about 4 MB of text, the second
about 16 MB, and all others about 64 MB: the first part is ready early, and a run that streams can
begin. Files are cut in the order of their names:

    small files     a.txt b.txt c.txt      several of them form a slice
    a large file    │ d.txt │ d.txt │      cut at the first record border after 4 MB and 20 MB
                                           if it begins the build, and then into equal slices
    a compressed    │ e.gz │ e.gz │ e.     read in order and cut whenever a slice is full,
    file                                   because it cannot be read from the middle
    one document    │ f.txt ┆ f.txt │      longer than a slice and without record borders: cut
                                           into pieces where no token id changes

For plain files, a slice contains byte ranges, which a worker reads itself. A slice of a compressed
file carries its text, and so does a slice of a CSV file or a JSON array, whose records can be found
only in order. A table (Parquet, Arrow) is cut between row groups or record batches.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import BinaryIO

from penstock.errors import SourceError
from penstock.options import ReadSettings
from penstock.sources.files import Expanded, InputFile, byte_order_mark, open_file, read_fully
from penstock.sources.jsonl import Elements
from penstock.sources.settings import RULE_BYTES, SLICE_BYTES
from penstock.sources.tables import (
    DELIMITERS,
    MAX_HEADER,
    Column,
    Records,
    find_column,
    row_group_sizes,
    text_spans,
)
from penstock.sources.text import (
    CONTEXT_BYTES,
    RANGE_BYTES,
    IsCutSafe,
    Splitter,
    file_rule,
    find_cut,
    rule_of,
    splitter_for,
)

NOMINAL_EXPANSION = 4
"""The assumed ratio of text to compressed bytes when small files are grouped."""
RAMP = (4_000_000, 16_000_000)
"""The most bytes of text that the first slices of a build should hold."""
_LOOK_BYTES = 1 << 16
# A longer record of a format that is read in order is a quote or bracket that is never closed.
_MAX_RECORD = 1 << 30


@dataclass(frozen=True, slots=True)
class InputSpan:
    """A range of one input: bytes, row groups, record batches or texts `[start, stop)`."""

    file: int
    start: int
    stop: int
    disk_bytes: int
    """How many bytes of the file on disk it stands for, to show progress."""
    data: bytes | None = field(default=None, repr=False)
    """The text, if the file had to be read to cut it."""
    documents: str | None = None
    """The rule that "auto" found for the file; None if the reader has to find it."""
    begins: bool = True
    """False if the span continues a document of the span before it."""
    ends: bool = True
    """False if the next span continues a document of this one."""
    column: Column | None = None
    """Where the text is in the records of a CSV or TSV file."""


@dataclass(frozen=True, slots=True)
class Slice:
    """The input of one part of the store."""

    index: int
    spans: tuple[InputSpan, ...]

    @property
    def disk_bytes(self) -> int:
        """How many bytes of the files on disk it stands for."""
        return sum(span.disk_bytes for span in self.spans)


def cut(
    files: Sequence[InputFile],
    reading: ReadSettings,
    *,
    slice_bytes: int = SLICE_BYTES,
    ramp: Sequence[int] = RAMP,
    is_cut_safe: IsCutSafe | None = None,
    border: int | None = None,
) -> Iterator[Slice]:
    """The slices of `files`, in order.

    Not safe to advance from two threads at once.

    Args:
        files: The inputs.
        reading: The settings of the build.
        slice_bytes: About how much text a slice holds.
        ramp: About how much the first ones hold, where that is less.
        is_cut_safe: Says where a document that is longer than a slice may be cut. Without it,
            such a document is an error.
        border: The offset at which an input of one document is divided into two documents.
    """
    return _Cutter(files, reading, slice_bytes, ramp, is_cut_safe, border).slices()


@dataclass(slots=True)
class _Cutter:
    """Cuts files into slices; all fields but the last are the arguments of `cut`."""

    files: Sequence[InputFile]
    reading: ReadSettings
    slice_bytes: int
    ramp: Sequence[int]
    is_cut_safe: IsCutSafe | None
    border: int | None
    made: int = 0
    """How many slices were cut."""

    def wanted(self, ahead: int = 0) -> int:
        """How many bytes of text the next slice should hold, or the one that is `ahead` of it."""
        number = self.made + ahead
        return min((self.slice_bytes, *self.ramp[number : number + 1]))

    def slices(self) -> Iterator[Slice]:
        """The slices of all files."""
        for group in self._groups():
            held: list[InputSpan] = []
            size = 0
            for number in group:
                file = self.files[number]
                # Plain files were grouped by their size. The size of others is known only when
                # they are read, so a group of them may give several slices.
                ranged = file.compression is None and file.format in ("text", "jsonl")
                for span, num_bytes in self._spans(file, number):
                    held.append(span)
                    size += num_bytes
                    # Three quarters, because a span of a compressed file ends at the last border
                    # before the slice is full.
                    is_full = size * 4 >= self.wanted() * 3 and (len(group) == 1 or not ranged)
                    # If the next span continues this document, this span must be the last of its
                    # part: the next part begins with the rest of the document.
                    if is_full or not span.ends:
                        yield self._slice(held)
                        held, size = [], 0
            if held:
                yield self._slice(held)

    def _slice(self, spans: list[InputSpan]) -> Slice:
        self.made += 1
        return Slice(self.made - 1, tuple(spans))

    def _groups(self) -> Iterator[list[int]]:
        """The numbers of files that are cut together: one large file, or several small ones."""
        group: list[int] = []
        held = 0
        for number, file in enumerate(self.files):
            # By sizes on disk, which are known without reading: groups must not depend on contents.
            size = file.size * (NOMINAL_EXPANSION if file.compression else 1)
            if size > self.wanted() and group:
                yield group
                group, held = [], 0
            group.append(number)
            held += size
            if held >= self.wanted():
                yield group
                group, held = [], 0
        if group:
            yield group

    def _spans(self, file: InputFile, number: int) -> Iterator[tuple[InputSpan, int]]:
        """The spans of one file, and how many bytes of text each holds."""
        if file.texts is not None:
            for start, stop, num_bytes in text_spans(file.texts, self.wanted):
                yield InputSpan(number, start, stop, num_bytes), num_bytes
        elif file.format in ("parquet", "arrow"):
            sizes = row_group_sizes(file, self.reading.field)
            for start, stop, num_bytes in self._joined(sizes):
                # The same share of the file: progress is shown by bytes on disk.
                on_disk = file.size * num_bytes // max(1, sum(sizes))
                yield InputSpan(number, start, stop, on_disk), num_bytes
        else:
            for span in self._text_spans(file, number):
                yield span, span.stop - span.start

    def _joined(self, sizes: Sequence[int]) -> Iterator[tuple[int, int, int]]:
        """Ranges of row groups of about a slice: the first, the one after the last, the size."""
        start, held, left = 0, 0, sum(sizes)
        for number, size in enumerate(sizes):
            # A quarter above a slice is allowed: row groups are often close to a slice in size.
            if held and held + size > self.wanted() * 5 // 4 and left * 2 > self.wanted():
                yield start, number, held
                start, held = number, 0
            held += size
            left -= size
        yield start, len(sizes), held

    def _text_spans(self, file: InputFile, number: int) -> Iterator[InputSpan]:
        """The spans of a file of text; those of a file that is read in order carry their text."""
        reading = self.reading
        if file.format in IN_ORDER:
            yield from self._stream_spans(Expanded(file), number, record_splitter(file.format))
            return
        is_small = not self._places(0, file.size)
        is_plain = file.compression is None
        rule, found = "lines" if file.format == "jsonl" else reading.documents, None
        is_auto = rule == "auto" and file.format == "text"
        if is_auto and is_plain and is_small and self.border is None:
            yield InputSpan(number, 0, file.size, file.size)  # the reader finds the rule
            return
        stream = None if is_plain else Expanded(file)
        if is_auto and stream is None:
            rule = found = file_rule(file, reading)
        elif is_auto and stream is not None:
            # Peeked, because a stream cannot be read from its beginning again.
            rule = found = rule_of([stream.peek(RULE_BYTES)], reading.separators)
        splitter = splitter_for(rule)
        # A document is stored in pieces if "auto" found that the file is one document, or if a
        # split divides it anyway.
        if rule == "file" and (found or self.border is not None):
            pieces = self._stream_pieces(file, stream) if stream else self._plain_pieces(file)
            for start, stop, on_disk, data, begins, ends in pieces:
                yield InputSpan(number, start, stop, on_disk, data, rule, begins, ends)
        elif is_plain and (is_small or rule == "file"):
            yield InputSpan(number, 0, file.size, file.size, None, found)
        elif is_plain and splitter.cuts_anywhere:
            with open_file(file) as opened:
                border_after = partial(_border_after, opened, splitter, file.size)
                for start, stop in self._ranges(0, file.size, border_after):
                    yield InputSpan(number, start, stop, stop - start, None, found)
        else:
            # To find a separator that may overlap itself, a plain file is read in order too.
            yield from self._stream_spans(stream or Expanded(file), number, splitter, found)

    def _ranges(
        self, first: int, last: int, border_after: Callable[[int], int]
    ) -> Iterator[tuple[int, int]]:
        """Ranges of about a slice and of nearly equal size, which together cover `[first, last)`.

        Ranges meet only at allowed borders: `border_after(wanted)` returns the first border at or
        after `wanted`, or `last` if there is none.
        """
        start = first
        for wanted in self._places(first, last):
            if wanted <= start:
                continue  # the border before this one was found beyond `wanted`
            border = border_after(wanted)
            if border >= last:
                break  # the last record reaches to the end
            yield start, border
            start = border
        yield start, last

    def _places(self, first: int, last: int) -> list[int]:
        """Where the ranges of `[first, last)` should meet; there is no tiny one at the end."""
        places: list[int] = []
        start, size = first, self.wanted()
        while size < self.slice_bytes and last - start > size * 3 // 2:
            start += size
            places.append(start)
            size = self.wanted(len(places))
        # If a slice of the ramp holds the rest, it is below one and a half slices too.
        num_ranges = max(1, round((last - start) / self.slice_bytes))
        # Integer arithmetic is exact for files of any size.
        return places + [start + k * (last - start) // num_ranges for k in range(1, num_ranges)]

    def _plain_pieces(self, file: InputFile) -> Iterator["_Piece"]:
        """The pieces of a document, or of two if it is divided at `border`."""
        with open_file(file) as stream:
            for first, last in pairwise((0, *self._borders, file.size)):
                cut_after = partial(self._cut_after, file, stream, last)
                for start, stop in self._ranges(first, last, cut_after):
                    yield start, stop, stop - start, None, start == first, stop == last

    @property
    def _borders(self) -> tuple[int, ...]:
        return () if self.border is None else (self.border,)

    def _cut_after(self, file: InputFile, stream: BinaryIO, last: int, wanted: int) -> int:
        """The first safe place at or after `wanted`; `last` if the document ends before that."""
        begin = max(0, wanted - CONTEXT_BYTES)
        stream.seek(begin)
        data = read_fully(stream, min(wanted + RANGE_BYTES + CONTEXT_BYTES, last) - begin)
        found = find_cut(data, wanted - begin, self.is_cut_safe)
        if found < 0 and wanted + RANGE_BYTES < last:
            raise _no_place(file, wanted)
        return begin + found if found >= 0 else last

    def _stream_pieces(self, file: InputFile, stream: Expanded) -> Iterator["_Piece"]:
        """The pieces of a document that is read in order."""
        place = 0
        with closing(stream):
            for last in (*self._borders, None):
                first, held = place, b""
                while True:
                    # A rest of up to one and a half slices is not cut. For plain files, rounding
                    # has that effect.
                    size = self.wanted()
                    most = size * 3 // 2
                    wanted = most + RANGE_BYTES + CONTEXT_BYTES
                    if last is not None:
                        wanted = min(wanted, last - place)
                    held += stream.read(wanted - len(held))
                    is_rest = len(held) < wanted or place + len(held) == last
                    if is_rest and len(held) <= most:
                        break
                    end = find_cut(held, size, self.is_cut_safe)
                    if end < 0:
                        # The search came to the end of the document: the rest is one longer piece.
                        if is_rest and len(held) <= size + RANGE_BYTES:
                            break
                        raise _no_place(file, place + size)
                    on_disk = stream.take_disk_bytes()
                    yield place, place + end, on_disk, held[:end], place == first, False
                    place, held = place + end, held[end:]
                stop = place + len(held)
                yield place, stop, stream.take_disk_bytes(), held, place == first, True
                place = stop

    def _stream_spans(
        self, stream: Expanded, number: int, splitter: Splitter, rule: str | None = None
    ) -> Iterator[InputSpan]:
        """Spans with their text, from a file that can only be read in order."""
        file, held, start = self.files[number], b"", 0
        with closing(stream):
            head, column = 0, None
            if splitter.in_order:
                byte_order_mark(stream.peek(_LOOK_BYTES), file)  # refuses other encodings
                try:
                    head = splitter.head(stream.peek(_LOOK_BYTES))
                except ValueError as error:
                    raise damaged(file, 0, error.args[0]) from None
            if file.format in DELIMITERS:
                column = find_column(stream.peek(MAX_HEADER), file, self.reading.field)
            ended = False
            while not ended:
                # Reads as much again as is held, so that a long record is searched log(n) times.
                held += stream.read(max(self.wanted(), len(held)))
                # A short rest of the file belongs to this slice.
                most = max(1, self.wanted() // 2)
                ended = len(stream.peek(most)) < most
                if ended:
                    held += stream.read(most)
                # A span holds whole records. The text after the last border begins the next span.
                border = len(held) if ended else splitter.last_border(held[head:])
                if border and not ended:
                    border, head = border + head, 0
                if ended and not splitter.is_end(held):
                    raise damaged(file, start + len(held), "it was cut off; no ] closes the array")
                if splitter.in_order and len(held) - border > _MAX_RECORD:
                    raise damaged(file, start + border, "a record of more than 1 GiB begins here")
                if border:
                    stop, on_disk = start + border, stream.take_disk_bytes()
                    data, held = held[:border], held[border:]
                    yield InputSpan(number, start, stop, on_disk, data, rule, column=column)
                    start = stop


_Piece = tuple[int, int, int, bytes | None, bool, bool]
"""A piece of a document: start, stop, its bytes on disk, its text if the file is read in order,
whether the document begins with this piece, and whether it ends with it."""

IN_ORDER = ("csv", "tsv", "json")
"""Formats whose records can be found only from the beginning of the file."""


def record_splitter(format: str, documents: str = "lines") -> Splitter:
    """The splitter for a file; `documents` counts for text only."""
    if format in DELIMITERS:
        return Records(DELIMITERS[format])
    if format == "json":
        return Elements()
    return splitter_for(documents if format == "text" else "lines")


def damaged(file: InputFile, place: int, reason: str) -> SourceError:
    """The error for a file whose records cannot be found from `place` on."""
    kind = "a JSON array" if file.format == "json" else file.format.upper()
    return SourceError(
        f"{file.name} cannot be read as {kind} from byte {place:,} on: {reason}. Repair the file, "
        "or name its format with format= (--format) of penstock.build."
    )


def _no_place(file: InputFile, wanted: int) -> SourceError:
    return SourceError(
        f'No separator was found in {file.name}, so documents="auto" takes it as one document. It '
        "is too long to be tokenized at once, and there is no safe place to cut it in the "
        f"{RANGE_BYTES:,} bytes after byte {wanted:,}: there is no line end or space, or a cut "
        'there would change token ids. Say what separates documents: documents="lines", '
        '"paragraphs" or "sep:SEPARATOR". Or use documents="file", which needs memory for the '
        "whole file."
    )


def _border_after(stream: BinaryIO, splitter: Splitter, size: int, wanted: int) -> int:
    """The first place at or past `wanted` where a record begins, or `size`."""
    # With "\n" and lead 1: if byte wanted - 1 is a line end, a record begins exactly at `wanted`.
    begin = wanted - min(splitter.lead, wanted)
    stream.seek(begin)
    seen = b""
    look = _LOOK_BYTES
    while True:
        more = read_fully(stream, look)
        seen += more
        found = splitter.first_border(seen)
        if found >= 0:
            return min(begin + found, size)
        if not more:
            return size
        # Only the end of a long record is kept; a separator may have begun there.
        begin += max(0, len(seen) - _LOOK_BYTES)
        seen = seen[-_LOOK_BYTES:]
        # Doubling keeps the number of searches small when a record has hundreds of megabytes.
        look = min(2 * look, 64 * _LOOK_BYTES)
