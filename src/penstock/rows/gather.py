"""Read many rows in one NumPy call, wherever their pieces are mapped in memory.

    memory    ....[piece 3        ]......[piece 0   ]....[piece 7                ]..
    rows            ----   ----           ----                ----      ----

One view spans all pieces as if they were one array of ids, and NumPy copies the requested rows
from it. The memory between the pieces is never read. A loop over the pieces took twice as long
with 7 pieces, and five times as long with 64 sources of one piece each.
"""

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from penstock.disk import files_at_once
from penstock.formats.mapped import Ids, ScatteredArray
from penstock.ranges import Indices
from penstock.rows.protocol import Array, Integers
from penstock.rows.tokens import Stream

# Pieces that are mapped at the same time for one read, if the process may have so many files. A
# block of a full shuffle has 2,000 rows, each perhaps in another piece.
_TOGETHER = 4096
_FEW_PIECES = 4096


def gather(stream: Stream, numbers: Integers, starts: Integers, width: int) -> Array:
    """Return `width` ids from each of the offsets `starts`, which are in the pieces `numbers`.

    Columns past the end of the stream are 0.
    """
    # Every call on an array of rows may hand the GIL to a reader that waits for it, and back. A
    # stream of one piece, the usual case, needs one comparison.
    inside: NDArray[np.bool_] | None = None
    if len(stream.ends) > 1 or int(starts.max(initial=0)) + width > stream.num_tokens:
        inside = starts + width <= stream.ends[numbers]
    if inside is None or inside.all():
        stream.check("tokens", numbers, starts, width)
        return _inside(stream, numbers, starts, width)
    stream.check("tokens", numbers[inside], starts[inside], width)
    tokens = np.zeros((len(starts), width), stream.dtype)
    tokens[inside] = _inside(stream, numbers[inside], starts[inside], width)
    # Few rows cross a border: at most one per piece if rows do not overlap.
    for row in np.flatnonzero(~inside).tolist():
        start = int(starts[row])
        stop = min(start + width, stream.num_tokens)
        tokens[row, : stop - start] = stream.tokens(start, stop)
    return tokens


def _inside(stream: Stream, numbers: Integers, starts: Integers, width: int) -> Array:
    """Return rows, each of which ends in the piece where it begins."""
    (present, which), dtype = _distinct(stream, numbers), stream.dtype
    together = files_at_once(_TOGETHER)
    if not 0 < len(present) <= together:
        tokens = np.empty((len(starts), width), dtype)
        for first in range(0, len(present), together):
            group = present[first : first + together]
            rows = np.flatnonzero((numbers >= group[0]) & (numbers <= group[-1]))
            tokens[rows] = _inside(stream, numbers[rows], starts[rows], width)
        return tokens
    pieces, addresses = stream.pieces(present)
    same = stream.is_uniform or all(each.dtype == dtype for each in pieces)
    lowest = int(addresses.argmin())
    base = pieces[lowest]
    # A piece that is not one array has the address 0.
    if not same or not isinstance(base, np.ndarray) or (addresses % dtype.itemsize).any():
        tokens = np.empty((len(starts), width), dtype)
        for number, piece in zip(present.tolist(), pieces, strict=True):
            rows = np.flatnonzero(numbers == number)
            tokens[rows] = _rows_of(piece, starts[rows] - int(stream.starts[number]), width)
        return tokens
    # The shift turns an offset in the stream into an offset from the lowest piece in memory.
    shifts = (addresses - addresses[lowest]) // dtype.itemsize - stream.starts[present]
    begins = starts + shifts[which]
    size, step = int(begins.max()) + 1, dtype.itemsize
    # This reads the first id of every row and discards it. The processor looks up the pages of
    # many rows at the same time here, and one by one while it copies rows. It saves a quarter of
    # the time of the gather.
    as_strided(base, (size,), (step,), writeable=False).take(begins)
    # A row is one item of `width * step` bytes; `base` has at least one. NumPy copies items faster
    # than rows of items: by a tenth in random order, and by a third in the order of the file.
    row = base[:width].view(f"V{width * step}")
    rows = as_strided(row, (size,), (step,), writeable=False)[begins]
    found: Array = rows.view(dtype).reshape(len(begins), width)
    return found


def _rows_of(piece: Ids, starts: Integers, width: int) -> Array:
    """Return rows of one piece that is not aligned, has another dtype, or is stored in runs."""
    if isinstance(piece, ScatteredArray):
        return piece.rows(starts, width)
    # NumPy would copy the whole of an array that is not aligned before it takes rows of it. The
    # bytes of an array are aligned.
    size, data = piece.itemsize, piece.view(np.uint8)
    shape = len(data) - width * size + 1, width * size
    rows: Array = as_strided(data, shape, (1, 1), writeable=False)[starts * size].view(piece.dtype)
    return rows


def _distinct(stream: Stream, numbers: Integers) -> tuple[Integers, Indices | slice]:
    """Return the different numbers, ascending, and the index of each number among them."""
    if len(stream.ends) == 1 and len(numbers):
        return numbers[:1], slice(None)
    size = int(numbers.max(initial=0)) + 1
    # A table of all pieces is faster than a sort, if there are few.
    if size > _FEW_PIECES:
        return np.unique(numbers, return_inverse=True)
    present, table = np.flatnonzero(np.bincount(numbers)), np.empty(size, np.intp)
    table[present] = np.arange(len(present))
    return present, table[numbers]


def gather_loss(
    stream: Stream, numbers: Integers, starts: Integers, width: int
) -> NDArray[np.bool_]:
    """Return which of the `width` tokens from each of `starts` are trained on; False past the end.

    `numbers` are the pieces that contain the offsets `starts`.
    """
    masks = np.zeros((len(starts), width), np.uint8)
    # The last row may have no target at all, and then it begins after the last piece.
    inside = starts + width <= stream.ends[np.minimum(numbers, len(stream.ends) - 1)]
    stream.check("loss", numbers[inside], starts[inside], width)
    for row, (start, number) in enumerate(zip(starts.tolist(), numbers.tolist(), strict=True)):
        # A row may reach into the next pieces.
        done = 0
        while done < width and number < len(stream.ends):
            first = start + done - int(stream.starts[number])
            size = min(width - done, int(stream.ends[number]) - start - done)
            if not inside[row]:
                stream.check("loss", np.array([number]), np.array([start + done]), size)
            known = stream.loss(number)
            # A part without a mask trains on every token.
            masks[row, done : done + size] = 1 if known is None else known[first : first + size]
            done += size
            number += 1
    return np.asarray(masks != 0)
