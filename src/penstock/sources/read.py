"""Reading of one slice of the input as batches of documents.

This module knows all formats. Text is read in blocks that fit into the processor's cache. A
block ends at a record border, so no record is ever cut; a record that is longer than a block
makes its block longer.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from io import BytesIO
from itertools import pairwise
from typing import BinaryIO

import numpy as np
import xxhash

from penstock.errors import SourceError
from penstock.options import ReadSettings
from penstock.sources.batch import (
    Batch,
    Edges,
    SeparatedTexts,
    Tally,
    binary_array,
    compact,
    gather,
    is_utf8,
    validate,
)
from penstock.sources.files import (
    InputFile,
    byte_order_mark,
    open_file,
    read_fully,
    refuse_changed,
)
from penstock.sources.jsonl import as_lines, read_lines
from penstock.sources.settings import BLOCK_BYTES
from penstock.sources.slices import InputSpan, Slice, damaged, record_splitter
from penstock.sources.tables import read_fields, read_rows
from penstock.sources.text import IsCutSafe, Spans, Splitter, block_borders, divided, rule_of

_LOOK_BYTES = 1 << 16


@dataclass(slots=True)
class SpanDigests:
    """The XXH3-128 of spans, computed from the blocks that were just read; not for several threads.

    A block that was just read is still in the processor's cache, so to digest it there saves
    reading all inputs a second time. The bytes of a span are added from the first to the last. A
    span of which some bytes are missing has no digest here, and the file has to be read again.
    """

    _spans: dict[tuple[int, int], "_Span"] = field(default_factory=dict)

    def add(self, span: InputSpan, place: int, data: bytes) -> None:
        """Add the bytes of a file that begin at `place`."""
        known = self._spans.setdefault((span.file, span.start), _Span(span.start))
        if known.place == place:
            known.place += len(data)
            known.digest.update(data)

    def digest(self, span: InputSpan) -> str | None:
        """The XXH3-128 of a span as hexadecimal digits; None if some of its bytes are missing."""
        known = self._spans.get((span.file, span.start))
        return known.digest.hexdigest() if known and known.place == span.stop else None


@dataclass(slots=True)
class _Span:
    """A span of which the bytes before `place` were added."""

    place: int
    digest: xxhash.xxh3_128 = field(default_factory=xxhash.xxh3_128)


def read_slice(
    files: Sequence[InputFile],
    piece: Slice,
    reading: ReadSettings,
    is_cut_safe: IsCutSafe | None = None,
    digests: SpanDigests | None = None,
) -> Iterator[Batch]:
    """The documents of one slice, in batches of at least half a block, except the last.

    Args:
        files: The inputs.
        piece: The slice to read.
        reading: The settings of the build.
        is_cut_safe: Says where a long document may be divided into several texts. Without it, a
            document that ends in this slice is one text.
        digests: Receives the bytes of plain files.
    """
    batches = _read_spans(files, piece, reading, is_cut_safe, digests)
    if is_cut_safe is not None:
        batches = (each for batch in batches for each in divided(batch, is_cut_safe))
    return gather(batches, BLOCK_BYTES // 2)


def _read_spans(
    files: Sequence[InputFile],
    piece: Slice,
    reading: ReadSettings,
    is_cut_safe: IsCutSafe | None,
    digests: SpanDigests | None,
) -> Iterator[Batch]:
    for span in piece.spans:
        file = files[span.file]
        if file.format in ("parquet", "arrow", "texts"):
            yield from read_rows(file, span.file, span.start, span.stop, reading)
        else:
            # A compressed file was read when it was cut. The span carries its text, which begins
            # at `span.start`.
            origin = 0 if span.data is None else span.start
            with open_file(file) if span.data is None else BytesIO(span.data) as stream:
                reader = _SpanReader(file, span, reading, stream, origin, digests)
                yield from reader.batches(is_cut_safe)
        # Checked after each span: if a file changes while it is read, the build must fail.
        refuse_changed(file)


@dataclass(frozen=True, slots=True)
class _SpanReader:
    """Reads the documents of one span of text."""

    file: InputFile
    span: InputSpan
    reading: ReadSettings
    stream: BinaryIO
    origin: int
    """The offset in the file at which `stream` begins."""
    digests: SpanDigests | None

    def batches(self, is_cut_safe: IsCutSafe | None) -> Iterator[Batch]:
        """The documents of the span, split by the rule of the settings or of the file."""
        span, is_text = self.span, self.file.format == "text"
        is_auto = is_text and self.reading.documents == "auto"
        data, rule = b"", span.documents or self.reading.documents
        if is_auto and span.documents is None:
            data, rule = self._find_rule()
        size = span.stop - span.start
        is_cut = is_auto or span.documents is not None
        if rule == "file" and is_cut and size:
            batches = self._whole(data, is_cut_safe)
        else:
            batches = self._records(rule)
        for number, batch in enumerate(batches):
            if number == 0 and span.start == 0 and is_auto:
                batch.rules.append((span.file, rule))
            yield batch

    def _read_at(self, place: int, size: int) -> bytes:
        """Exactly `size` bytes of the file from `place` on; raises if the file is shorter."""
        self.stream.seek(place - self.origin)
        data = read_fully(self.stream, size)
        if len(data) < size:
            raise SourceError(
                f"{self.file.name} ended at byte {place + len(data):,}, not at {self.span.stop:,} "
                "as when the build began. Run the build again when nothing writes to the file."
            )
        return data

    def _digest(self, place: int, data: bytes) -> None:
        # The text that a span carries is digested as a whole, and remote files have an ETag.
        if self.digests is not None and self.span.data is None and not self.file.remote:
            self.digests.add(self.span, place, data)

    def _find_rule(self) -> tuple[bytes, str]:
        """The beginning of the file, as far as it was read to find the rule, and the rule."""
        blocks: list[bytes] = []

        def read_blocks() -> Iterator[bytes]:
            for place in range(self.span.start, self.span.stop, BLOCK_BYTES):
                blocks.append(self._read_at(place, min(BLOCK_BYTES, self.span.stop - place)))
                yield blocks[-1]

        # The blocks are kept: a file that is one document is not read a second time.
        rule = rule_of(read_blocks(), self.reading.separators)
        return b"".join(blocks), rule

    def _whole(self, data: bytes, is_cut_safe: IsCutSafe | None) -> Iterator[Batch]:
        """A document, or a piece of one, in blocks of about 4 MiB.

        `data` are its first bytes, which were read already. The tokenizer is 1.4 times as fast on
        blocks as on one text of 64 MB. Blocks are cut only where the cut changes no token id. If
        there is no such place, a block is longer.

        Raises:
            SourceError: a piece is not UTF-8. Other pieces may be stored already, so the document
                can't be rejected as a whole, and it must not be stored with a gap.
        """
        span, is_document = self.span, self.span.begins and self.span.ends
        start = span.start + len(data)
        if start < span.stop:
            data += self._read_at(start, span.stop - start)
        self._digest(span.start, data)
        lead = byte_order_mark(data, self.file) if span.start == 0 else 0
        # All blocks have the same origin: the offset where the document or piece begins.
        place = np.array([span.start + lead], np.uint64)
        texts = binary_array([data[lead:] if lead else data])
        batch = validate(texts, file=span.file, places=place, reading=self.reading)
        text = batch.texts.buffers()[2] if len(batch) else texts.buffers()[2]
        if not is_document:
            self._count_piece(batch, len(data) - lead, len(text))
        # The byte order mark counts as separator, so that the bytes add up.
        batch.tally.separator_bytes += lead
        is_left_out = is_document and not len(batch)
        borders = [] if is_left_out else list(block_borders(text, is_cut_safe))
        if is_document and len(borders) <= 2:
            yield batch
            return
        view = memoryview(text)
        for first, last in pairwise(borders):
            is_first, is_last = first == 0, last == len(view)
            begins, ends = span.begins and is_first, span.ends and is_last
            yield Batch(
                binary_array([bytes(view[first:last])]),
                np.array([span.file], np.uint64),
                place,
                batch.tally if is_first else Tally(),
                edges=Edges.of(begins=begins, ends=ends, closes=is_last),
            )

    def _count_piece(self, batch: Batch, num_bytes: int, text_bytes: int) -> None:
        """Set the counts of `batch`, which holds one piece of a document that is stored in pieces.

        The bytes count even if the piece is blank. The document is counted with its last piece.

        Raises:
            SourceError: the piece was rejected.
        """
        if batch.rejects:
            reject = batch.rejects[0]
            raise SourceError(
                f"{self.file.name} is one document that is stored in pieces, and the piece from "
                f"byte {reject.offset:,} on cannot be stored: {reject.reason}, {reject.detail}. "
                'With penstock.build, documents="lines" (--documents lines) rejects only the line, '
                'and errors="replace" (--errors replace) puts U+FFFD where bytes are not UTF-8.'
            )
        batch.tally = replace(
            batch.tally,
            documents=int(self.span.ends),
            continued=int(not self.span.ends),
            skipped=0,
            skipped_bytes=0,
            document_bytes=num_bytes,
            text_bytes=text_bytes,
        )

    def _records(self, documents: str) -> Iterator[Batch]:
        """The documents of a span that begins and ends at record borders."""
        splitter = record_splitter(self.file.format, documents)
        place, stop, size = self.span.start, self.span.stop, BLOCK_BYTES
        if place == stop and documents == "file" and self.file.format == "text":
            yield _empty(Tally(skipped=1))  # an empty file is a document without text
        if splitter.in_order and place == 0:
            place = splitter.head(self._read_at(0, min(_LOOK_BYTES, stop)))
            yield _empty(Tally(separator_bytes=place))
        while place < stop:
            size = min(size, stop - place)
            ended = place + size == stop
            wanted = size if ended else self._whole_records(splitter, place, size)
            data = self._read_at(place, wanted)
            border = size if ended else splitter.last_border(data)
            if border:
                data = data if border == len(data) else data[:border]
                self._digest(place, data)
                batch = self._block(data, splitter, place)
                # The consumer may take minutes, and a long record should not be held twice.
                del data
                yield batch
                place, size = place + border, BLOCK_BYTES
            else:
                del data
                size *= 2  # a record is longer than that

    def _whole_records(self, splitter: Splitter, place: int, size: int) -> int:
        """How many of the next `size` bytes form whole records; searches the last 64 KiB of them.

        The caller then reads whole records only, and need not copy the block to remove an
        incomplete one. Returns `size` if the last 64 KiB contain no border.
        """
        if not splitter.cuts_anywhere:
            return size
        tail = min(_LOOK_BYTES, size)
        border = splitter.last_border(self._read_at(place + size - tail, tail))
        return size - tail + border if border else size

    def _block(self, block: bytes, splitter: Splitter, place: int) -> Batch:
        # A byte order mark is at the start of a file; elsewhere U+FEFF is an ordinary character.
        lead = byte_order_mark(block, self.file) if place == 0 else 0
        body = block[lead:] if lead else block
        start, number = place + lead, self.span.file
        try:
            spans = splitter.spans(body)
        except ValueError as error:
            raise damaged(self.file, start + error.args[1], error.args[0]) from None
        if self.file.format in ("jsonl", "json"):
            places = (spans.starts + start).astype(np.uint64)
            lines = (body, spans) if self.file.format == "jsonl" else as_lines(body, spans)
            batch = read_lines(*lines, file=number, places=places, reading=self.reading)
        elif self.span.column is not None:
            column, reading = self.span.column, self.reading
            batch = read_fields(body, spans, column, file=number, start=start, reading=reading)
        else:
            batch = self._text_batch(body, spans, splitter, place + lead)
        # All bytes that are not in a document, a reject or a blank piece belong to separators.
        batch.tally.skipped += spans.num_skipped
        batch.tally.skipped_bytes += spans.skipped_bytes
        batch.tally.separator_bytes = len(block) - batch.tally.total_bytes
        return batch

    def _text_batch(self, body: bytes, spans: Spans, splitter: Splitter, place: int) -> Batch:
        """The documents of a block of text; not copied if no part of it has to be left out."""
        file, reading = self.span.file, self.reading
        places = (spans.starts + place).astype(np.uint64)
        lengths = spans.stops - spans.starts
        # Documents are used in place only if the whole block can be given to the tokenizer as it
        # is: a constant separator, no blank pieces with bytes in them, UTF-8.
        is_whole = not spans.skipped_bytes and is_utf8(binary_array([body]))
        if splitter.separator and is_whole:
            texts = SeparatedTexts(body, splitter.separator, spans.starts, spans.stops)
            size = int(lengths.sum())
            tally = Tally(documents=len(places), document_bytes=size, text_bytes=size)
            return Batch(texts, np.full(len(places), file, np.uint64), places, tally)
        texts = compact(body, spans.starts, spans.stops)
        return validate(texts, file=file, places=places, reading=reading)


def _empty(tally: Tally) -> Batch:
    """A batch without documents, which carries only counts."""
    none = np.zeros(0, np.uint64)
    return Batch(binary_array([]), none, none, tally, [])
