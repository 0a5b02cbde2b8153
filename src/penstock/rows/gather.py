"""Many rows in one call, wherever their pieces are mapped.

    memory    ....[piece 3        ]......[piece 0   ]....[piece 7                ]..
    rows            ----   ----           ----                ----      ----

A view spans all of it as if it were one array of ids, and NumPy copies from it the rows
asked for; of what lies between the pieces nothing is touched. Piece by piece, the same took
twice as long with 7 pieces, and with 64 sources of one piece each five times.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from penstock.rows.tokens import Stream

__all__ = ["JoinedWindows", "gather"]

# Pieces that are open at the same time for one read, of 256 files that a process may open.
_TOGETHER = 64


def gather(
    stream: Stream, numbers: NDArray[np.int64], starts: NDArray[np.int64], width: int
) -> NDArray[Any]:
    """The `width` ids from each of `starts` on, which lie in the pieces `numbers`.

    Past the end of the stream they are 0.
    """
    crossing = np.flatnonzero(starts + width > stream.ends[numbers])
    if not len(crossing):
        return _inside(stream, numbers, starts, width)
    if len(crossing) == len(starts):
        tokens = np.empty((len(starts), width), stream.dtype)
    else:  # any other row in the place of those that end in the next piece, for now
        other = np.delete(np.arange(len(starts)), crossing)[0]
        numbers, begins = numbers.copy(), starts.copy()
        numbers[crossing], begins[crossing] = numbers[other], begins[other]
        tokens = _inside(stream, numbers, begins, width)
    for row in crossing.tolist():
        start = int(starts[row])
        stop = min(start + width, stream.num_tokens)
        tokens[row, : stop - start] = stream.tokens(start, stop)
        tokens[row, stop - start :] = 0
    return tokens


def _inside(
    stream: Stream, numbers: NDArray[np.int64], starts: NDArray[np.int64], width: int
) -> NDArray[Any]:
    """Rows that end in the piece where they begin."""
    present = np.flatnonzero(np.bincount(numbers))
    if 0 < len(present) <= _TOGETHER:
        return _together(stream, present, numbers, starts, width)
    tokens = np.empty((len(starts), width), stream.dtype)
    for first in range(0, len(present), _TOGETHER):
        group = present[first : first + _TOGETHER]
        rows = np.flatnonzero((numbers >= group[0]) & (numbers <= group[-1]))
        tokens[rows] = _together(stream, group, numbers[rows], starts[rows], width)
    return tokens


def _together(
    stream: Stream,
    present: NDArray[np.int64],
    numbers: NDArray[np.int64],
    starts: NDArray[np.int64],
    width: int,
) -> NDArray[Any]:
    """Rows of the pieces `present`, which are few enough to be mapped at the same time."""
    dtype = stream.dtype
    pieces = [stream.piece(number) for number in present.tolist()]
    places = np.array([each.__array_interface__["data"][0] for each in pieces], np.int64)
    lowest = int(places.argmin())
    # Of an array that is not aligned NumPy copies all before it takes some.
    odd = places % dtype.itemsize
    if odd.any() or any(each.dtype != dtype for each in pieces):
        return _apart(stream, present, pieces, numbers, starts, width)
    shifts = np.zeros(int(present[-1]) + 1, np.int64)
    shifts[present] = (places - places[lowest]) // dtype.itemsize - stream.starts[present]
    begins = starts + shifts[numbers]
    size, step = int(begins.max()) + 1, dtype.itemsize
    # The first id of every row, read for nothing: the processor looks up the pages of many at a
    # time here, and one by one while it copies rows. It saves a quarter of the gather.
    as_strided(pieces[lowest], (size,), (step,), writeable=False).take(begins)
    windows = as_strided(pieces[lowest], (size, width), (step, step), writeable=False)
    rows: NDArray[Any] = windows[begins]
    return rows


def _apart(
    stream: Stream,
    present: NDArray[np.int64],
    pieces: list[NDArray[Any]],
    numbers: NDArray[np.int64],
    starts: NDArray[np.int64],
    width: int,
) -> NDArray[Any]:
    """The same piece by piece, where ids are of different widths, or do not lie as NumPy's do."""
    tokens = np.empty((len(starts), width), stream.dtype)
    columns = np.arange(width)
    for number, piece in zip(present.tolist(), pieces, strict=True):
        rows = np.flatnonzero(numbers == number)
        within = starts[rows] - int(stream.starts[number])
        tokens[rows] = piece[within[:, None] + columns]
    return tokens


class JoinedWindows:
    """The windows of several sources as one stream, so that a batch of all is one gather."""

    def __init__(self, sources: Sequence[Any]) -> None:
        self._stream = Stream([member for each in sources for member in each.stream.members])
        self._width = sources[0].length + 1
        self._strides = np.array([each.stride for each in sources], np.int64)
        sizes = [each.stream.num_tokens for each in sources]
        self._before = np.cumsum([0, *sizes[:-1]], dtype=np.int64)

    def read(self, sources: NDArray[np.int64], samples: NDArray[np.int64]) -> NDArray[Any]:
        """The tokens of row `samples[i]` of source `sources[i]`."""
        starts = samples * self._strides[sources] + self._before[sources]
        numbers = np.searchsorted(self._stream.ends, starts, side="right")
        return gather(self._stream, numbers, starts, self._width)
