"""Slices: ranges of the input, which depend only on the inputs and the tokenizer.

A slice is about 64 MB of text and becomes one part of the store. It is the same whichever worker
processes it and however often the build was killed before. Files are cut in the order of their
names:

    small files     a.txt b.txt c.txt      several of them form a slice
    a large file    │ d.txt │ d.txt │      cut into n slices, each at the first record border
                                           after a multiple of 1/n of its size
    a compressed    │ e.gz │ e.gz │ e.     read in order and cut whenever a slice is full,
    file                                   because it cannot be read from the middle
    one document    │ f.txt ┆ f.txt │      longer than a slice and without record borders: cut
                                           into pieces where no token id changes

For plain files, a slice contains byte ranges, which a worker reads itself. A slice of a compressed
file carries its text, and so does a slice of a CSV file or a JSON array, whose records can be found
only in order. A table (Parquet, Arrow) is cut between row groups or record batches.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import BinaryIO

from penstock.errors import SourceError
from penstock.options import ReadSettings
from penstock.sources import whole
from penstock.sources.arrays import Elements
from penstock.sources.decompress import Expanded
from penstock.sources.delimited import DELIMITERS, MAX_HEADER, Column, Records, find_column
from penstock.sources.files import InputFile, byte_order_mark, open_file, read_fully
from penstock.sources.settings import RULE_BYTES, SLICE_BYTES
from penstock.sources.splitters import Splitter, splitter_for
from penstock.sources.tables import table_spans, text_spans
from penstock.sources.whole import IsCutSafe

NOMINAL_EXPANSION = 4
"""The assumed ratio of text to compressed bytes when small files are grouped."""
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
    is_cut_safe: IsCutSafe | None = None,
    border: int | None = None,
) -> Iterator[Slice]:
    """The slices of `files`, in order.

    Not safe to advance from two threads at once.

    Args:
        files: The inputs.
        reading: The settings of the build.
        slice_bytes: About how much text a slice holds.
        is_cut_safe: Says where a document that is longer than a slice may be cut. Without it,
            such a document is an error.
        border: The offset at which an input of one document is divided into two documents.
    """
    cutter = _Cutter(files, reading, slice_bytes, is_cut_safe, border)
    spans = (each for group in cutter.groups() for each in cutter.cut_group(group))
    return (Slice(index, tuple(each)) for index, each in enumerate(spans))


@dataclass(frozen=True, slots=True)
class _Cutter:
    """Cuts files into spans; its fields are the arguments of `cut`."""

    files: Sequence[InputFile]
    reading: ReadSettings
    slice_bytes: int
    is_cut_safe: IsCutSafe | None
    border: int | None

    def groups(self) -> Iterator[list[int]]:
        """The numbers of files that are cut together: one large file, or several small ones."""
        group: list[int] = []
        held = 0
        for number, file in enumerate(self.files):
            # By sizes on disk, which are known without reading: groups must not depend on contents.
            size = file.size * (NOMINAL_EXPANSION if file.compression else 1)
            if size > self.slice_bytes and group:
                yield group
                group, held = [], 0
            group.append(number)
            held += size
            if held >= self.slice_bytes:
                yield group
                group, held = [], 0
        if group:
            yield group

    def cut_group(self, group: list[int]) -> Iterator[list[InputSpan]]:
        """The spans of each slice of a group."""
        held: list[InputSpan] = []
        size = 0
        for number in group:
            file = self.files[number]
            # Plain files were grouped by their size. The size of others is known only when they
            # are read, so a group of them may give several slices.
            ranged = file.compression is None and file.format in ("text", "jsonl")
            for span, num_bytes in self._cut_file(file, number):
                held.append(span)
                size += num_bytes
                # Three quarters, because a span of a compressed file ends at the last border
                # before the slice is full.
                is_full = size * 4 >= self.slice_bytes * 3 and (len(group) == 1 or not ranged)
                # If the next span continues this document, this span must be the last of its part:
                # the next part begins with the rest of the document.
                if is_full or not span.ends:
                    yield held
                    held, size = [], 0
        if held:
            yield held

    def _cut_file(self, file: InputFile, number: int) -> Iterator[tuple[InputSpan, int]]:
        """The spans of one file, and how many bytes of text each holds."""
        if file.format in ("parquet", "arrow"):
            spans = list(table_spans(file, self.reading, self.slice_bytes))
            for start, stop, num_bytes in spans:
                # An equal share of the file for each: progress is shown by bytes on disk.
                yield InputSpan(number, start, stop, file.size // len(spans)), num_bytes
        elif file.texts is not None:
            for start, stop, num_bytes in text_spans(file.texts, self.slice_bytes):
                yield InputSpan(number, start, stop, num_bytes), num_bytes
        else:
            for span in self._cut_text(file, number):
                yield span, span.stop - span.start

    def _cut_text(self, file: InputFile, number: int) -> Iterator[InputSpan]:
        """The spans of a file of text; those of a file that is read in order carry their text."""
        reading = self.reading
        if file.format in IN_ORDER:
            stream = Expanded(file)
            yield from self._cut_stream(stream, number, record_splitter(file.format), None)
            return
        # Rounded, so that a file a little above one slice is not cut into a full and a tiny one.
        num_slices = max(1, round(file.size / self.slice_bytes))
        is_auto = reading.documents == "auto" and file.format == "text"
        if is_auto and num_slices == 1 and self.border is None and file.compression is None:
            yield InputSpan(number, 0, file.size, file.size)  # the reader finds the rule
            return
        opened = Expanded(file) if file.compression is not None else None
        rule, found = "lines" if file.format == "jsonl" else reading.documents, None
        if is_auto and opened is not None:
            # Peeked, because a stream cannot be read from its beginning again.
            rule = found = whole.rule_of([opened.peek(RULE_BYTES)], reading.separators)
        elif is_auto:
            rule = found = whole.file_rule(file, reading)
        splitter = splitter_for(rule)
        # A document is stored in pieces if "auto" found that the file is one document, or if a
        # split divides it anyway.
        if rule == "file" and (found or self.border is not None):
            yield from self._cut_document(file, number, opened, rule)
        elif opened is not None:
            yield from self._cut_stream(opened, number, splitter, found)
        # To find a separator that may overlap itself, the file must be read from its beginning.
        elif num_slices > 1 and not splitter.cuts_anywhere and splitter.separator:
            stream = Expanded(file)
            yield from self._cut_stream(stream, number, splitter, found)
        else:
            is_whole = num_slices == 1 or (found or reading.documents) == "file"
            ranges = [(0, file.size)] if is_whole else _cut_range(file, splitter, num_slices)
            for start, stop in ranges:
                yield InputSpan(number, start, stop, stop - start, None, found)

    def _cut_document(
        self, file: InputFile, number: int, stream: Expanded | None, rule: str
    ) -> Iterator[InputSpan]:
        """The pieces of a file that is one document, or two if it is divided at `border`."""
        how = self.slice_bytes, self.is_cut_safe, self.border
        if stream is None:
            for start, stop, begins, ends in whole.file_pieces(file, *how):
                yield InputSpan(number, start, stop, stop - start, None, rule, begins, ends)
            return
        for data, start, begins, ends in whole.stream_pieces(file, stream, *how):
            stop, on_disk = start + len(data), stream.take_disk_bytes()
            yield InputSpan(number, start, stop, on_disk, data, rule, begins, ends)

    def _cut_stream(
        self, stream: Expanded, number: int, splitter: Splitter, rule: str | None
    ) -> Iterator[InputSpan]:
        """Spans with their text, from a file that can only be read in order."""
        file, held, start = self.files[number], b"", 0
        try:
            head = _head(splitter, stream, file)
            column = None
            if file.format in DELIMITERS:
                column = find_column(stream.peek(MAX_HEADER), file, self.reading.field)
            while True:
                # Reads as much again as is held, so that a long record is searched log(n) times.
                more = stream.read(max(self.slice_bytes, len(held)))
                held += more
                # A span holds whole records. The text after the last border begins the next span.
                border = splitter.last_border(held[head:]) if more else len(held)
                if border and more:
                    border, head = border + head, 0
                if not (more or splitter.is_end(held)):
                    raise damaged(file, start + len(held), "it was cut off; no ] closes the array")
                if splitter.in_order and len(held) - border > _MAX_RECORD:
                    raise damaged(file, start + border, "a record of more than 1 GiB begins here")
                if border:
                    stop, on_disk = start + border, stream.take_disk_bytes()
                    span = InputSpan(number, start, stop, on_disk, held[:border], rule)
                    yield span if column is None else replace(span, column=column)
                    start, held = stop, held[border:]
                if not more:
                    return
        finally:
            stream.close()


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


def _head(splitter: Splitter, stream: Expanded, file: InputFile) -> int:
    """How many bytes come before the first record of a file."""
    if not splitter.in_order:
        return 0
    data = stream.peek(_LOOK_BYTES)
    byte_order_mark(data, file)  # refuses other encodings
    try:
        return splitter.head(data)
    except ValueError as error:
        raise damaged(file, 0, error.args[0]) from None


def _cut_range(file: InputFile, splitter: Splitter, num_slices: int) -> Iterator[tuple[int, int]]:
    """Byte ranges of a plain file; each begins where a record begins."""
    with open_file(file) as stream:
        border_after = partial(_border_after, stream, splitter, file.size)
        yield from whole.equal_ranges(0, file.size, num_slices, border_after)


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
