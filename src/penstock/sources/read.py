"""Reading of one slice of the input as batches of documents.

This module knows all formats. Text is read in blocks that fit into the processor's cache. A
block ends at a record border, so no record is ever cut; a record that is longer than a block
makes its block longer.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from io import BytesIO
from typing import BinaryIO

import numpy as np

from penstock.errors import SourceError
from penstock.sources.document import (
    Batch,
    Reject,
    SeparatedTexts,
    Tally,
    binary_array,
    compact,
    gather,
    is_utf8,
)
from penstock.sources.jsonl import read_lines
from penstock.sources.listing import InputFile, open_file, read_fully, refuse_changed
from penstock.sources.settings import BLOCK_BYTES, ReadSettings
from penstock.sources.slices import InputSpan, Slice
from penstock.sources.splitters import Spans, Splitter, splitter_for
from penstock.sources.tables import read_table, read_texts
from penstock.sources.validate import validate
from penstock.sources.whole import IsCutSafe, read_whole, rule_of

_LOOK_BYTES = 1 << 16
BOM = b"\xef\xbb\xbf"
_FOREIGN_BOMS = {
    b"\xff\xfe\x00\x00": "UTF-32",
    b"\x00\x00\xfe\xff": "UTF-32",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}

# How far back to search for the line end before a blank line that is full of spaces.
_LOOK_BACK = 1 << 12


def read_slice(
    files: Sequence[InputFile],
    piece: Slice,
    reading: ReadSettings,
    is_cut_safe: IsCutSafe | None = None,
) -> Iterator[Batch]:
    """The documents of one slice, in batches of at least half a block, except the last.

    Args:
        files: The inputs.
        piece: The slice to read.
        reading: The settings of the build.
        is_cut_safe: Says where a long document may be divided into several texts. Without it, a
            document that ends in this slice is one text.
    """
    return gather(_read_spans(files, piece, reading, is_cut_safe), BLOCK_BYTES // 2)


def _read_spans(
    files: Sequence[InputFile], piece: Slice, reading: ReadSettings, is_cut_safe: IsCutSafe | None
) -> Iterator[Batch]:
    for span in piece.spans:
        file = files[span.file]
        if file.texts is not None:
            yield from read_texts(file.texts, span.file, span.start, span.stop, reading)
        elif file.format in ("parquet", "arrow"):
            yield from read_table(file, span.file, span.start, span.stop, reading)
        else:
            # The text of a compressed file was read to cut it. It begins at `span.start`.
            origin = 0 if span.data is None else span.start
            with open_file(file) if span.data is None else BytesIO(span.data) as stream:
                read_at = partial(_read_at, stream, origin)
                yield from _read_span(read_at, file, span, reading, is_cut_safe)
        # After each span: a file that is written while it is read must not give a store.
        refuse_changed(file)


def _read_span(
    read_at: "_ReadAt",
    file: InputFile,
    span: InputSpan,
    reading: ReadSettings,
    is_cut_safe: IsCutSafe | None,
) -> Iterator[Batch]:
    """The documents of a span of text, by the rule of the settings or of the file."""
    if file.format == "jsonl":
        yield from _read_text(read_at, file, span, reading, "lines")
        return
    if reading.documents != "auto" and span.documents is None:
        yield from _read_text(read_at, file, span, reading, reading.documents)
        return
    data, rule = b"", span.documents
    if rule is None:
        data, rule = _find_rule(read_at, span, reading)
    size, lead = span.stop - span.start, 0
    # A whole document above the limit is rejected by `_read_text`, without reading all of it.
    is_rejected = span.begins and span.ends and size > reading.max_document_bytes
    if rule != "file" or is_rejected or not size:
        batches = _read_text(read_at, file, span, reading, rule)
    else:
        if len(data) < size:
            data += read_at(span.start + len(data), size - len(data))
        _refuse_short(file, span.start + len(data), span.stop)
        lead = byte_order_mark(data, file) if span.start == 0 else 0
        batches = read_whole(
            data[lead:] if lead else data,
            file=span.file,
            name=file.name,
            start=span.start + lead,
            edges=(span.begins, span.ends),
            reading=reading,
            is_cut_safe=is_cut_safe,
        )
    for number, batch in enumerate(batches):
        if number == 0:  # the byte order mark counts as separator, so that the bytes add up
            batch.tally.separator_bytes += lead
            if span.start == 0 and reading.documents == "auto":
                batch.rules.append((span.file, rule))
        yield batch


def _find_rule(read_at: "_ReadAt", span: InputSpan, reading: ReadSettings) -> tuple[bytes, str]:
    """The rule of a file, and the beginning of it that was read to find the rule."""
    blocks: list[bytes] = []

    def read_blocks() -> Iterator[bytes]:
        for place in range(span.start, span.stop, BLOCK_BYTES):
            blocks.append(read_at(place, min(BLOCK_BYTES, span.stop - place)))
            yield blocks[-1]

    # The blocks are kept: a file that is one document is not read a second time.
    rule = rule_of(read_blocks(), reading.separators)
    return b"".join(blocks), rule


_ReadAt = Callable[[int, int], bytes]
"""`read_at(place, size)` returns `size` bytes from `place` on, fewer only at the end."""


def _read_at(stream: BinaryIO, origin: int, place: int, size: int) -> bytes:
    """Bytes of the file at `place`, from a stream that begins at the offset `origin`."""
    stream.seek(place - origin)
    return read_fully(stream, size)


def _read_text(
    read_at: _ReadAt, file: InputFile, span: InputSpan, reading: ReadSettings, documents: str
) -> Iterator[Batch]:
    """The documents of a byte range that begins and ends at record borders."""
    splitter = splitter_for(documents)
    place, size = span.start, BLOCK_BYTES
    if span.start == span.stop and documents == "file":
        yield _empty(Tally(skipped=1))  # an empty file is a document without text
    while place < span.stop:
        size = min(size, span.stop - place)
        ended = place + size == span.stop
        data = read_at(place, size if ended else _whole_records(read_at, splitter, place, size))
        if ended:
            _refuse_short(file, place + len(data), span.stop)
        border = size if ended else splitter.last_border(data)
        if border:
            block = data if border == len(data) else data[:border]
            yield _read_block(block, splitter, file, span.file, place, reading)
            place, size = place + border, BLOCK_BYTES
        # No border in `size` bytes, so the record is longer than that.
        elif size > reading.max_document_bytes + BLOCK_BYTES:
            length = _record_bytes(read_at, splitter, place, size, span.stop)
            yield _too_long(span.file, place, length, reading)
            place, size = place + length, BLOCK_BYTES
        else:
            size *= 2  # reads the record again: at most twice the work, also for a line of 1 GB


def _refuse_short(file: InputFile, end: int, expected: int) -> None:
    if end < expected:
        raise SourceError(
            f"{file.name} ended at byte {end:,}, not at {expected:,} as when the build began. Run "
            "the build again when nothing writes to the file."
        )


def _whole_records(read_at: _ReadAt, splitter: Splitter, place: int, size: int) -> int:
    """How many of the next `size` bytes are whole records, judged by their end.

    Reading only these saves a copy of the whole block without the rest. Returns `size` if the
    end contains no border.
    """
    if not splitter.cuts_anywhere:
        return size
    tail = min(_LOOK_BYTES, size)
    border = splitter.last_border(read_at(place + size - tail, tail))
    return size - tail + border if border else size


def _read_block(
    block: bytes,
    splitter: Splitter,
    file: InputFile,
    number: int,
    place: int,
    reading: ReadSettings,
) -> Batch:
    # Only at the start of a file; anywhere else U+FEFF is an ordinary character.
    lead = byte_order_mark(block, file) if place == 0 else 0
    body = block[lead:] if lead else block
    spans = splitter.spans(body)
    if file.format == "jsonl":
        batch = read_lines(body, spans, file=number, start=place + lead, reading=reading)
    else:
        batch = _text_batch(body, spans, splitter, number, place + lead, reading)
    _account(batch.tally, spans, len(block))
    return batch


def _text_batch(
    body: bytes, spans: Spans, splitter: Splitter, file: int, place: int, reading: ReadSettings
) -> Batch:
    """The documents of a block of text; not copied if no part of it has to be left out."""
    places = (spans.starts + place).astype(np.uint64)
    lengths = spans.stops - spans.starts
    # Documents are used in place only if the whole block can be given to the tokenizer as it is:
    # a constant separator, no blank pieces with bytes in them, no long documents, valid UTF-8.
    fits = not len(lengths) or int(lengths.max()) <= reading.max_document_bytes
    if splitter.separator and not spans.skipped_bytes and fits and is_utf8(binary_array([body])):
        texts = SeparatedTexts(body, splitter.separator, spans.starts, spans.stops)
        size = int(lengths.sum())
        tally = Tally(documents=len(places), document_bytes=size, text_bytes=size)
        return Batch(texts, np.full(len(places), file, np.uint64), places, tally)
    return validate(
        compact(body, spans.starts, spans.stops),
        file=file,
        places=places,
        reading=reading,
    )


def _account(tally: Tally, spans: Spans, num_bytes: int) -> None:
    """Count the bytes between the records, so that the sum is complete."""
    # Separators are the rest: what is neither document, nor reject, nor blank piece.
    tally.skipped += spans.num_skipped
    tally.skipped_bytes += spans.skipped_bytes
    tally.separator_bytes = num_bytes - tally.total_bytes


def byte_order_mark(block: bytes, file: InputFile) -> int:
    """The length of a UTF-8 byte order mark at the start of a file; 0 if there is none.

    Raises:
        SourceError: the mark is that of another encoding.
    """
    if block.startswith(BOM):
        return len(BOM)
    for mark, name in _FOREIGN_BOMS.items():
        if block.startswith(mark):
            raise SourceError(
                f"{file.name} begins with the byte order mark of {name}, and penstock reads UTF-8. "
                f"Convert it: "
                f"iconv -f {name} -t UTF-8 {file.name} > converted.txt"
            )
    return 0


def _record_bytes(read_at: _ReadAt, splitter: Splitter, place: int, seen: int, stop: int) -> int:
    """The length of a record that does not fit into memory, including its separator."""
    # Searched block by block and not kept: memory stays small however long the record is.
    end = place + seen
    while end < stop:
        # Overlaps the bytes before, because a separator may span the two reads.
        begin = max(place, end - max(splitter.lead, _LOOK_BACK))
        more = min(end + BLOCK_BYTES, stop)
        border = splitter.first_border(read_at(begin, more - begin))
        if border >= 0:
            return begin + border - place
        end = more
    return stop - place


def _too_long(file: int, place: int, num_bytes: int, reading: ReadSettings) -> Batch:
    detail = f"{num_bytes:,} bytes are more than max_document_bytes={reading.max_document_bytes:,}"
    reject = Reject(file=file, offset=place, num_bytes=num_bytes, reason="too_long", detail=detail)
    return _empty(Tally(rejected=1, rejected_bytes=num_bytes), reject)


def _empty(tally: Tally, *rejects: Reject) -> Batch:
    """A batch without documents, for its counts."""
    none = np.zeros(0, np.uint64)
    texts = compact(b"", none.astype(np.int64), none.astype(np.int64))
    return Batch(texts, none, none, tally, list(rejects))
