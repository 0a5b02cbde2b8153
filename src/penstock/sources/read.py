"""A slice of the input to batches of documents.

This is the one place that knows all formats. Text is read in blocks that fit the
cache; a block ends at a record border, so nothing is ever seen in halves, and a
record longer than a block makes the block longer.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np

from penstock.errors import SourceError
from penstock.sources.document import Batch, Reject, Tally, compact, gather
from penstock.sources.jsonl import read_lines
from penstock.sources.listing import InputFile, open_file, refuse_changed
from penstock.sources.reading import BLOCK_BYTES, Reading
from penstock.sources.screen import screen
from penstock.sources.slices import Slice, Span
from penstock.sources.split import Spans, Splitter, splitter_for
from penstock.sources.tables import read_table
from penstock.sources.texts import read_texts

__all__ = ["read_slice"]

_BOM = b"\xef\xbb\xbf"
_FOREIGN_BOMS = {
    b"\xff\xfe\x00\x00": "UTF-32",
    b"\x00\x00\xfe\xff": "UTF-32",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}


def read_slice(files: Sequence[InputFile], piece: Slice, reading: Reading) -> Iterator[Batch]:
    """The documents of one slice, in batches of at least a block where there is that much."""
    return gather(_read_spans(files, piece, reading), BLOCK_BYTES)


def _read_spans(files: Sequence[InputFile], piece: Slice, reading: Reading) -> Iterator[Batch]:
    for span in piece.spans:
        file = files[span.file]
        if file.texts is not None:
            yield from read_texts(file.texts, span.file, span.start, span.stop, reading)
        elif file.format in ("parquet", "arrow"):
            yield from read_table(file, span.file, span.start, span.stop, reading)
        elif span.data is not None:
            yield from _read_text(_Held(span.data), file, span, reading)
        else:
            with open_file(file) as stream:
                stream.seek(span.start)
                yield from _read_text(stream, file, span, reading)
        refuse_changed(file)


class _Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


class _Held:
    """Bytes that were read already, as a stream without a copy of the whole."""

    def __init__(self, data: bytes) -> None:
        self._data = memoryview(data)
        self._place = 0

    def read(self, size: int, /) -> bytes:
        """The next `size` bytes."""
        piece = bytes(self._data[self._place : self._place + size])
        self._place += len(piece)
        return piece


def _read_text(stream: _Readable, file: InputFile, span: Span, reading: Reading) -> Iterator[Batch]:
    """The documents of a byte range that begins and ends at record borders."""
    splitter = splitter_for("lines" if file.format == "jsonl" else reading.documents)
    place, held = span.start, b""
    while place + len(held) < span.stop:
        # Reading as much again as is held keeps a 1 GB line linear.
        wanted = min(max(BLOCK_BYTES, len(held)), span.stop - place - len(held))
        more = stream.read(wanted)
        if not more:
            raise SourceError(
                f"{file.name} ended at byte {place + len(held):,} and not at {span.stop:,}, where "
                "it ended when the build began. Run the build again when nothing writes to it."
            )
        held = held + more if held else more
        ended = place + len(held) == span.stop
        border = len(held) if ended else splitter.last_border(held)
        if border:
            block = held if border == len(held) else held[:border]
            yield _read_block(block, splitter, file, span.file, place, reading)
            held = held[border:]
            place += border
        elif len(held) > reading.max_document_bytes + BLOCK_BYTES:
            rest = _skip_record(stream, splitter, held, span.stop - place)
            yield _too_long(span.file, place, rest[0], reading)
            place += rest[0]
            held = rest[1]


def _read_block(
    block: bytes, splitter: Splitter, file: InputFile, number: int, place: int, reading: Reading
) -> Batch:
    lead = _byte_order_mark(block, file) if place == 0 else 0
    body = block[lead:] if lead else block
    spans = splitter.spans(body)
    if file.format == "jsonl":
        batch = read_lines(body, spans, file=number, start=place + lead, reading=reading)
    else:
        batch = screen(
            compact(body, spans.starts, spans.stops),
            file=number,
            places=(spans.starts + (place + lead)).astype(np.uint64),
            record_bytes=spans.stops - spans.starts,
            reading=reading,
        )
    _account(batch.tally, spans, len(block))
    return batch


def _account(tally: Tally, spans: Spans, num_bytes: int) -> None:
    """Book what lies between the records, so that the bytes add up."""
    tally.skipped += spans.num_skipped
    tally.skipped_bytes += spans.skipped_bytes
    tally.separator_bytes = num_bytes - tally.total_bytes


def _byte_order_mark(block: bytes, file: InputFile) -> int:
    """The length of a UTF-8 mark at the start of a file; another encoding is refused."""
    if block.startswith(_BOM):
        return len(_BOM)
    for mark, name in _FOREIGN_BOMS.items():
        if block.startswith(mark):
            raise SourceError(
                f"{file.name} begins with the mark of {name}; penstock reads UTF-8. Convert it: "
                f"iconv -f {name} -t UTF-8 {file.name} > converted.txt"
            )
    return 0


def _skip_record(
    stream: _Readable, splitter: Splitter, held: bytes, missing: int
) -> tuple[int, bytes]:
    """Read to the end of a record that is too long to hold.

    Returns how many bytes it has with its separator, and what follows it.
    """
    skipped, tail = len(held), held[-(splitter.lead + 1) :]
    while skipped < missing:
        more = stream.read(min(BLOCK_BYTES, missing - skipped))
        if not more:
            break
        border = splitter.first_border(tail + more)
        if border >= 0:
            border -= len(tail)
            return skipped + border, more[border:]
        skipped += len(more)
        tail = (tail + more)[-(splitter.lead + 1) :]
    return skipped, b""


def _too_long(file: int, place: int, num_bytes: int, reading: Reading) -> Batch:
    detail = f"{num_bytes:,} bytes are more than max_document_bytes={reading.max_document_bytes:,}"
    reject = Reject(file=file, offset=place, num_bytes=num_bytes, reason="too_long", detail=detail)
    none = np.zeros(0, np.uint64)
    tally = Tally(rejected=1, rejected_bytes=num_bytes)
    return Batch(
        compact(b"", none.astype(np.int64), none.astype(np.int64)), none, none, tally, [reject]
    )
