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

__all__ = ["borders", "cu_seqlens"]


def borders(
    stream: Stream, starts: NDArray[np.int64], numbers: NDArray[np.int64], length: int
) -> dict[str, NDArray[Any]]:
    """Document and position numbers for rows that begin at `starts`, in pieces `numbers`."""
    begins = np.zeros((len(starts), length), bool)
    for row, (start, number) in enumerate(zip(starts.tolist(), numbers.tolist(), strict=True)):
        place = start
        while place < min(start + length, stream.num_tokens):
            offset = int(stream.starts[number])
            bounds = stream.bounds(number)
            low, high = np.searchsorted(
                bounds, [place - offset, start + length - offset], side="right"
            )
            inside = bounds[low:high].astype(np.int64) + offset - start
            begins[row, inside[(inside > 0) & (inside < length)]] = True
            place = int(stream.ends[number])
            number += 1
    begins[:, 0] = False
    document_ids = np.cumsum(begins, axis=1, dtype=np.int32)
    columns = np.arange(length, dtype=np.int32)
    last_begin = np.maximum.accumulate(np.where(begins, columns, 0), axis=1)
    return {"document_ids": document_ids, "position_ids": columns - last_begin}


def cu_seqlens(position_ids: NDArray[np.int32]) -> NDArray[np.int32]:
    """Where documents begin in a batch laid end to end, and its end, for varlen attention.

    >>> cu_seqlens(np.array([[0, 1, 0], [0, 1, 2]], np.int32)).tolist()
    [0, 2, 3, 6]
    """
    starts = np.flatnonzero(position_ids.reshape(-1) == 0)
    return np.append(starts, position_ids.size).astype(np.int32)
