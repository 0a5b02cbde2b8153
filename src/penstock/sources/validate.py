"""Validation of records from any kind of file.

Nulls and invalid UTF-8 are rejected with a reason. Empty and
blank texts are skipped and counted. The usual batch has none of these and is checked at memory
speed.
"""

from collections.abc import Callable

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from penstock.options import ReadSettings
from penstock.sources import document
from penstock.sources.document import ArrowArray, Batch, Reject, Tally
from penstock.sources.splitters import blank

Reason = tuple[str, str]
"""Why a record is rejected: a fixed word, by which rejects are counted, and a detail for the
reject log."""


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
        record_bytes = document.byte_lengths(texts)
    reasons: dict[int, Reason] = {}
    if texts.null_count:
        reasons = {int(row): why_null(int(row)) for row in document.null_rows(texts)}
    if not document.is_utf8(texts):
        texts, bad = _decoded(texts, reading, tally)
        reasons |= bad
    keep = np.ones(len(texts), bool)
    keep[list(reasons)] = False
    texts = _plain(texts, keep)
    # Only kept texts are tested for blanks: a rejected record has a reason already.
    edges = document.text_offsets(texts)
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
    tally.text_bytes = int(document.text_offsets(texts)[-1])
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
        texts = document.binary_array(values)
    return texts, bad


def _plain(texts: ArrowArray, keep: NDArray[np.bool_]) -> ArrowArray:
    """The kept texts as gigatoken requires them: unsliced, without a null bitmap."""
    # An array at offset 0 may still share the buffer of a longer array. Then its first text does
    # not begin at byte 0. The filter copies the kept texts to the front of a new buffer.
    if texts.offset or document.text_offsets(texts)[0] or not keep.all():
        texts = texts.filter(document.bool_array(keep))
    buffers = texts.buffers()
    if buffers[0] is not None:
        texts = pa.Array.from_buffers(pa.large_binary(), len(texts), [None, *buffers[1:]])
    return texts
