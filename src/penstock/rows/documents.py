"""Where documents begin and end inside rows, from the store's bounds.

    row            b b b <eos> c c c c        (row begins inside document b)
    document_ids   0 0 0   0   1 1 1 1        numbered within the row
    position_ids   0 1 2   3   0 1 2 3        restart where a document begins

Never by looking for end tokens: text may hold them, and a store may have none.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.rows.stream import Stream

__all__ = ["begins", "borders", "cu_seqlens"]


def borders(
    stream: Stream, starts: NDArray[np.int64], numbers: NDArray[np.int64], length: int
) -> dict[str, NDArray[Any]]:
    """Document and position numbers for rows that begin at `starts`, in pieces `numbers`.

    What fills up a row after the last token of the stream counts as one more document.
    """
    found = begins(stream, starts, numbers, length)
    document_ids = np.cumsum(found, axis=1, dtype=np.int32)
    columns = np.arange(length, dtype=np.int32)
    last_begin = np.maximum.accumulate(np.where(found, columns, np.int32(0)), axis=1)
    return {"document_ids": document_ids, "position_ids": columns - last_begin}


def begins(
    stream: Stream, starts: NDArray[np.int64], numbers: NDArray[np.int64], width: int
) -> NDArray[np.bool_]:
    """Whether a document begins at each place after the first of a row, (rows, `width`).

    A document that is stored in pieces (see `penstock.sources.whole`) begins once.
    """
    found = np.zeros((len(starts), width), bool)
    stops = np.minimum(starts + width, stream.num_tokens)
    numbers = numbers.copy()
    rows = np.arange(len(starts))
    while len(rows):  # once, and again for the few rows that reach into the next piece
        for number in np.unique(numbers[rows]).tolist():
            _mark(found, stream, starts, rows[numbers[rows] == number], number)
        rows = rows[stream.ends[numbers[rows]] < stops[rows]]
        numbers[rows] += 1
    return found


def _mark(
    begins: NDArray[np.bool_],
    stream: Stream,
    starts: NDArray[np.int64],
    rows: NDArray[np.int64],
    number: int,
) -> None:
    """Mark where documents begin in `rows`, as far as one piece knows."""
    bounds = stream.bounds(number)
    if stream.continues(number):
        bounds = bounds[:-1]
    # As unsigned as the bounds are: otherwise the search would turn all of them into floats.
    first = starts[rows] - stream.starts[number]
    low = np.searchsorted(bounds, np.maximum(first, 0).astype(bounds.dtype), side="right")
    stop = (first + begins.shape[1]).astype(bounds.dtype)
    counts = np.searchsorted(bounds, stop, side="left") - low
    # Bounds 5 and 6 of one row, 9 of the next: [0, 1, 2] + [5, 5, 9 - 2].
    found = np.arange(counts.sum()) + np.repeat(low - np.cumsum(counts) + counts, counts)
    columns = bounds[found].astype(np.int64) - np.repeat(first, counts)
    begins[np.repeat(rows, counts), columns] = True


def cu_seqlens(position_ids: NDArray[np.int32]) -> NDArray[np.int32]:
    """Where documents begin in a batch laid end to end, and its end, for varlen attention.

    >>> cu_seqlens(np.array([[0, 1, 0], [0, 1, 2]], np.int32)).tolist()
    [0, 2, 3, 6]
    """
    starts = np.flatnonzero(position_ids.reshape(-1) == 0)
    return np.append(starts, position_ids.size).astype(np.int32)
