"""Batches of documents, which the readers pass to the tokenizer.

A batch holds its texts in one Arrow array and not as Python strings. The tokenizer reads the
same buffers, so 100,000 short documents need no Python objects. Each text has the file and the
offset it came from. A batch also counts the bytes that did not become documents, so that the
build can check the sum at the end:

    bytes read = documents + separators + skipped blanks + rejected records

This module converts between NumPy and Arrow arrays through their buffers. `pa.array`, `pa.scalar`
and `np.asarray(arrow_array)` would do the same, but they check whether their argument is a pandas
object. If pandas is installed, they import it for that check. The import takes 0.2 s on the first
thread that reads, and Ctrl-C may be lost in that time.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Self, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from penstock.options import ReadSettings

ArrowArray = Any
"""A pyarrow array; `Any`, because pyarrow has no type annotations."""


Reason = tuple[str, str]
"""Why a record is rejected: a fixed word, by which rejects are counted, and a detail for the
reject log."""

_BLANK = np.zeros(256, bool)
_BLANK[list(b" \t\r\n")] = True


@dataclass(frozen=True, slots=True)
class Reject:
    """A record that was rejected, with its location and the reason."""

    file: int
    """Number of the input file in the sorted list of inputs."""
    offset: int
    """Byte offset in the decompressed file; the row number in Parquet and Arrow files; the number
    of the item in a JSON array of conversations and in texts from memory."""
    num_bytes: int
    reason: str
    """One of a few fixed words, such as "bad_json"; the manifest counts rejects by reason."""
    detail: str


@dataclass(slots=True)
class Tally:
    """Counts of documents and bytes; the module docstring says how the bytes add up."""

    documents: int = 0
    skipped: int = 0
    rejected: int = 0
    replaced: int = 0
    """Documents in which invalid UTF-8 was replaced by U+FFFD."""
    document_bytes: int = 0
    separator_bytes: int = 0
    skipped_bytes: int = 0
    rejected_bytes: int = 0
    text_bytes: int = 0
    """Bytes of the texts; fewer than `document_bytes` if a record has other fields too."""
    continued: int = 0
    """Pieces whose document ends in a later piece; not included in `documents`."""

    @property
    def total_bytes(self) -> int:
        """All bytes accounted for."""
        return self.document_bytes + self.separator_bytes + self.skipped_bytes + self.rejected_bytes

    @classmethod
    def total(cls, tallies: Iterable["Tally"]) -> Self:
        """The sum of `tallies`."""
        columns = zip(*(astuple(tally) for tally in tallies), strict=True)
        return cls(*(sum(column) for column in columns))


def allowed_rejects(max_bad: float, num_records: int, *, ended: bool) -> float:
    """How many of `num_records` may be rejected.

    Ten are allowed as long as more records may follow, and if there are at least 1,000: a share
    of fewer records is less than one record.

    Args:
        max_bad: A share of the records if it is between 0 and 1, else a number of records.
        num_records: How many records were read.
        ended: Whether these are all records.

    >>> [allowed_rejects(0.001, num_records, ended=True) for num_records in (999, 1_000, 50_000)]
    [0.999, 10, 50.0]
    """
    if max_bad == 0 or max_bad >= 1:
        return max_bad
    is_small = ended and num_records < 1_000
    return max_bad * num_records if is_small else max(10, max_bad * num_records)


@dataclass(slots=True)
class SeparatedTexts:
    """A block of text with documents in it, and the same separator between all of them.

    Between two separators there is a document or nothing. gigatoken reads such a block in place,
    which saves a copy of all text.
    """

    data: bytes
    separator: bytes
    starts: NDArray[np.int64]
    stops: NDArray[np.int64]


class Edges(NamedTuple):
    """For each text of a batch, whether a document begins or ends there.

    Only batches with texts that are not whole documents have edges.
    """

    begins: NDArray[np.bool_]
    """The text begins a document."""
    ends: NDArray[np.bool_]
    """The text ends a document."""
    closes: NDArray[np.bool_]
    """The text ends a document or a stored piece of one, so its end is written to the bounds."""

    @classmethod
    def of(cls, *, begins: bool, ends: bool, closes: bool, num_texts: int = 1) -> Self:
        """Edges with the same three values for each of `num_texts` texts."""
        return cls(*(np.full(num_texts, each) for each in (begins, ends, closes)))

    @classmethod
    def joined(cls, batches: Sequence["Batch"]) -> Self | None:
        """The edges of all texts of `batches`; None if all are whole documents."""
        if all(batch.edges is None for batch in batches):
            return None
        parts = [
            batch.edges or cls.of(begins=True, ends=True, closes=True, num_texts=len(batch))
            for batch in batches
        ]
        return cls(*map(np.concatenate, zip(*parts, strict=True)))

    def where(self, keep: NDArray[np.bool_]) -> "Edges":
        """The edges of the texts selected by `keep`."""
        return Edges(*(each[keep] for each in self))


@dataclass(eq=False)
class Batch:
    """Documents of one or more files, in order."""

    stored: ArrowArray | SeparatedTexts
    """A large_binary array (valid UTF-8, no nulls, unsliced), or documents inside a block."""
    files: NDArray[np.uint64]
    """The number of the input file of each document."""
    offsets: NDArray[np.uint64]
    """The offset of each document in its file."""
    tally: Tally = field(default_factory=Tally)
    """Counts of everything that was read to find these documents."""
    rejects: list[Reject] = field(default_factory=list)
    edges: Edges | None = None
    """Where documents begin and end; None if every text is a whole document."""
    rules: list[tuple[int, str]] = field(default_factory=list)
    """For each file that begins in this batch and is read with `documents="auto"`: the number of
    the file and the rule that was found for it, which is a separator or "file"."""

    def __len__(self) -> int:
        return len(self.files)

    @property
    def separated(self) -> SeparatedTexts | None:
        """The block that holds the documents; None if they are in an array."""
        return self.stored if isinstance(self.stored, SeparatedTexts) else None

    @cached_property
    def texts(self) -> ArrowArray:
        """The documents as a large_binary array without gaps."""
        # Made on first use: gigatoken reads the block in place and needs no such copy.
        block = self.separated
        return compact(block.data, block.starts, block.stops) if block else self.stored

    @property
    def num_bytes(self) -> int:
        """Bytes of text in this batch."""
        if self.separated:
            return int((self.separated.stops - self.separated.starts).sum())
        return int(text_offsets(self.texts)[-1])

    def where(self, keep: NDArray[np.bool_]) -> "Batch":
        """The documents selected by `keep`; the tally is shared with this batch."""
        texts = self.texts.filter(bool_array(keep))
        edges = self.edges.where(keep) if self.edges else None
        return Batch(texts, self.files[keep], self.offsets[keep], self.tally, edges=edges)


def binary_array(texts: Sequence[bytes | None]) -> ArrowArray:
    """A large_binary array of `texts`; None becomes a null.

    >>> binary_array([b"ab", None, b""]).to_pylist()
    [b'ab', None, b'']
    """
    valid, present = None, cast("Sequence[bytes]", texts)
    if None in texts:
        valid = _bits(np.array([text is not None for text in texts]))
        present = [text or b"" for text in texts]
    # Arrow stores the end of each text as the running sum of the lengths; a null has length 0.
    edges = np.zeros(len(texts) + 1, np.int64)
    np.cumsum(np.fromiter(map(len, present), np.int64, len(present)), out=edges[1:])
    buffers = [valid, pa.py_buffer(edges), pa.py_buffer(b"".join(present))]
    return pa.Array.from_buffers(pa.large_binary(), len(texts), buffers)


def bool_array(flags: NDArray[np.bool_]) -> ArrowArray:
    """An Arrow array of booleans, for Arrow's `filter`.

    >>> bool_array(np.array([True, False])).to_pylist()
    [True, False]
    """
    return pa.Array.from_buffers(pa.bool_(), len(flags), [None, _bits(flags)])


def byte_lengths(texts: ArrowArray) -> NDArray[np.int64]:
    """The length of each text of a large Arrow array, in bytes; 0 for nulls.

    >>> byte_lengths(binary_array([b"ab", None, b"c"])).tolist()
    [2, 0, 1]
    """
    lengths = np.diff(text_offsets(texts))
    lengths[null_rows(texts)] = 0  # Arrow does not define the length of a null
    return lengths


def compute() -> Any:
    """The functions of Arrow; to import them takes as long as the rest of Arrow.

    Text needs none of them, and each worker process of a build would import them.
    """
    import pyarrow.compute

    return pyarrow.compute


def null_rows(array: ArrowArray) -> NDArray[np.intp]:
    """The indices of the nulls in an array.

    >>> null_rows(binary_array([b"ab", None, b"c"])).tolist()
    [1]
    """
    if not array.null_count:
        return np.zeros(0, np.intp)
    rows = compute().indices_nonzero(array.is_null())
    return np.frombuffer(rows.buffers()[1], np.uint64, count=len(rows)).astype(np.intp)


def _bits(flags: NDArray[np.bool_]) -> ArrowArray:
    # Arrow stores eight booleans in a byte, the first one in the lowest bit.
    return pa.py_buffer(np.packbits(flags, bitorder="little"))


def text_offsets(texts: ArrowArray) -> NDArray[np.int64]:
    """The `len + 1` offsets of a large Arrow array, as a view."""
    if not len(texts):
        return np.zeros(1, np.int64)
    # Buffers of a large array: null bitmap, offsets, data. A slice of an array shares its buffers.
    return np.frombuffer(texts.buffers()[1], np.int64, len(texts) + 1, 8 * texts.offset)


def compact(
    data: bytes | memoryview, starts: NDArray[np.int64], stops: NDArray[np.int64]
) -> ArrowArray:
    """The spans `[starts, stops)` of `data` as an Arrow array without gaps.

    The spans are in order and do not overlap, so the spans and the gaps between them cover the
    data. Arrow's filter keeps the spans, at the speed of a memory copy.

    >>> compact(b"ab,c,,d", np.array([0, 3, 6]), np.array([2, 4, 7])).to_pylist()
    [b'ab', b'c', b'd']
    """
    # Spans (2, 5) and (6, 8) give the edges 0 2 5 6 8: gap, span, gap, span. Odd tiles are kept.
    edges = np.empty(2 * len(starts) + 1, np.int64)
    edges[0] = 0
    edges[1::2] = starts
    edges[2::2] = stops
    tiles = pa.Array.from_buffers(
        pa.large_binary(), 2 * len(starts), [None, pa.py_buffer(edges), pa.py_buffer(data)]
    )
    keep = np.zeros(2 * len(starts), bool)
    keep[1::2] = True
    return tiles.filter(bool_array(keep))


def is_utf8(texts: ArrowArray) -> bool:
    """Whether all texts are valid UTF-8; Arrow checks 8 GB/s, Python's decoder 0.4 GB/s."""
    # Arrow can validate the same buffers as an array of strings, without a copy.
    buffers = texts.buffers()
    if buffers[2] is None:
        return True
    as_strings = pa.Array.from_buffers(pa.large_string(), len(texts), buffers, offset=texts.offset)
    try:
        as_strings.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def gather(batches: Iterator[Batch], target_bytes: int) -> Iterator[Batch]:
    """Join small batches into ones of at least `target_bytes`, in order.

    If batches were not joined, a directory of a million tiny files would need a million calls of
    the tokenizer.
    """
    held: list[Batch] = []
    size = 0
    for batch in batches:
        # Counted in bytes, because the tokenizer's time depends on bytes and not on documents.
        held.append(batch)
        size += batch.num_bytes
        if size >= target_bytes:
            yield _joined(held)
            held, size = [], 0
    if held:
        yield _joined(held)


def _joined(batches: list[Batch]) -> Batch:
    if len(batches) == 1:
        return batches[0]
    return Batch(
        pa.concat_arrays([batch.texts for batch in batches]),
        files=np.concatenate([batch.files for batch in batches]),
        offsets=np.concatenate([batch.offsets for batch in batches]),
        tally=Tally.total(batch.tally for batch in batches),
        rejects=[reject for batch in batches for reject in batch.rejects],
        edges=Edges.joined(batches),
        rules=[rule for batch in batches for rule in batch.rules],
    )


def validate(
    texts: ArrowArray,
    *,
    file: int,
    places: NDArray[np.uint64],
    reading: ReadSettings,
    record_bytes: NDArray[np.int64] | None = None,
    keep_blank: bool = False,
    why_null: Callable[[int], Reason] = lambda row: ("not_a_string", "null"),
) -> Batch:
    """A batch of the valid documents in `texts`, a large_binary array.

    Args:
        texts: The text of each record; null if the record has no text.
        file: The number of the input file.
        places: The offset of each record in the file.
        reading: The settings of the build.
        record_bytes: The number of input bytes that each record takes up, if it is more than the
            text.
        keep_blank: Whether blank texts are documents too.
        why_null: Returns the reason why a record has no text.
    """
    tally = Tally()
    if record_bytes is None:  # before invalid bytes are replaced, which changes the lengths
        record_bytes = byte_lengths(texts)
    reasons: dict[int, Reason] = {}
    if texts.null_count:
        reasons = {int(row): why_null(int(row)) for row in null_rows(texts)}
    if not is_utf8(texts):
        texts, bad = _decoded(texts, reading, tally)
        reasons |= bad
    keep = np.ones(len(texts), bool)
    keep[list(reasons)] = False
    texts = _plain(texts, keep)
    # Only kept texts are tested for blanks: a rejected record has a reason already.
    edges = text_offsets(texts)
    is_blank = blank(texts.buffers()[2] or b"", edges[:-1], edges[1:])
    if keep_blank:
        is_blank[:] = False
    # `keep` and `documents` are masks over all records, `is_blank` is one over the kept records.
    documents = keep.copy()
    documents[keep] = ~is_blank
    if is_blank.any():
        texts = _plain(texts, ~is_blank)
    # Each record is counted in exactly one of three groups, by number and by bytes.
    tally.documents = len(texts)
    tally.text_bytes = int(text_offsets(texts)[-1])
    tally.skipped = int(is_blank.sum())
    tally.rejected = len(reasons)
    tally.document_bytes = int(record_bytes[documents].sum())
    tally.rejected_bytes = int(record_bytes[~keep].sum())
    tally.skipped_bytes = int(record_bytes[keep & ~documents].sum())
    rejects = [
        Reject(file, int(places[row]), int(record_bytes[row]), *reasons[row])
        for row in sorted(reasons)
    ]
    files = np.full(len(texts), file, np.uint64)
    return Batch(texts, files, places[documents].astype(np.uint64), tally, rejects)


def _decoded(
    texts: ArrowArray, reading: ReadSettings, tally: Tally
) -> tuple[ArrowArray, dict[int, Reason]]:
    """Replace invalid bytes by U+FFFD, or with `errors="strict"` find the rows to reject."""
    # Slow, one Python object per text, but only batches with invalid bytes come here.
    values = texts.to_pylist()
    bad: dict[int, Reason] = {}
    for row, value in enumerate(values):
        try:
            (value or b"").decode()
        except UnicodeDecodeError as error:
            if reading.errors == "strict":
                bad[row] = ("invalid_utf8", f"{error.reason} at byte {error.start:,} of the text")
            else:
                values[row] = value.decode(errors="replace").encode()
                tally.replaced += 1
    if reading.errors == "replace":
        texts = binary_array(values)
    return texts, bad


def _plain(texts: ArrowArray, keep: NDArray[np.bool_]) -> ArrowArray:
    """The kept texts as gigatoken requires them: unsliced, without a null bitmap."""
    # An array at offset 0 may still share the buffer of a longer array. Then its first text does
    # not begin at byte 0. The filter copies the kept texts to the front of a new buffer.
    if texts.offset or text_offsets(texts)[0] or not keep.all():
        texts = texts.filter(bool_array(keep))
    buffers = texts.buffers()
    if buffers[0] is not None:
        texts = pa.Array.from_buffers(pa.large_binary(), len(texts), [None, *buffers[1:]])
    return texts


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
