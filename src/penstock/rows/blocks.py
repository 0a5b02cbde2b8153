"""The blocks of files that rows are read from: checked when first read, and loaded ahead of time.

    piece          0                    1              2
    tokens      │ … row … │ … row … │ … ro│w … │ … │ … row … │
    blocks      │    0    │    1    │  2  │ 3  │ 4 │    5    │     64 KiB of a file each

A bitmap for all pieces of a stream says which blocks were checked. So a batch whose blocks are
known to be good costs a few NumPy calls, however many pieces and stores it is read from.
"""

import mmap
from collections.abc import Callable, Sequence
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from penstock.ranges import group_rows, ranges
from penstock.rows.protocol import Array, Integers
from penstock.store.blocks import BLOCK_BYTES, num_blocks
from penstock.store.files import HEADER_BYTES
from penstock.store.reader import TokenStore

_BLOCK_BITS = BLOCK_BYTES.bit_length() - 1
_SHORTEST_BLOCK = BLOCK_BYTES // 4  # items of uint32, the widest dtype of a store
_FIRST_BLOCKS = 128
# The operating system Windows has no madvise, so rows are not loaded ahead of time there.
_WILL_NEED: int | None = getattr(mmap, "MADV_WILLNEED", None)


class BlockChecks:
    """Which blocks of one kind of file of a stream were checked. Safe to use from several threads.

    Args:
        pieces: The store and part of each piece; None for a piece that has no checks.
        starts: The offset in the stream of each piece.
        kind: "tokens" or "loss".
    """

    def __init__(
        self, pieces: Sequence[tuple[TokenStore, int] | None], starts: Integers, kind: str
    ) -> None:
        self._pieces, self._kind = pieces, kind
        file_sizes = [self._file_size(piece) for piece in pieces]
        counts = np.array([num_blocks(size) for size in file_sizes], np.int64)
        self._ends = np.cumsum(counts)
        is_checked = [size > 0 for size in file_sizes]
        # Bytes of an item. Stores of one stream may have different dtypes, but usually have one.
        items = [_item_size(piece, kind) for piece in pieces]
        found = {item for item, checked in zip(items, is_checked, strict=True) if checked}
        self._items: Integers | int = found.pop() if len(found) == 1 else np.array(items, np.int64)
        # The byte at which the stream would begin, if the files of all pieces were concatenated,
        # each padded to whole blocks. An offset in the stream then is at shift + offset * item.
        first_bytes = (self._ends - counts) * BLOCK_BYTES
        self._shifts = first_bytes + HEADER_BYTES - starts * self._items
        self._is_checked = None if all(is_checked) else np.array(is_checked, bool)
        self._good = np.zeros(int(counts.sum()), bool)
        self._num_good = 0
        self.is_complete = not len(self._good)
        """Whether no block is left to be checked."""

    def _file_size(self, piece: tuple[TokenStore, int] | None) -> int:
        """The size of the file of a piece; 0 if it is not checked."""
        if piece is None or not piece[0].files.is_checked:
            return 0
        return piece[0].manifest.parts[piece[1]].files.get(self._kind, (0, ""))[0]

    def check(self, numbers: Integers, starts: Integers, sizes: Integers | int) -> None:
        """Check the blocks of `sizes` items from each of `starts`, which are in pieces `numbers`.

        Raises:
            StoreError: a block is damaged.
        """
        if self.is_complete or not len(numbers):
            return
        if self._is_checked is not None:
            chosen = self._is_checked[numbers]
            numbers, starts = numbers[chosen], starts[chosen]
            sizes = sizes if isinstance(sizes, int) else sizes[chosen]
        first, last = self._blocks(numbers, starts, sizes)
        # Rows are usually shorter than a block, so these are all blocks of most rows.
        longest = sizes if isinstance(sizes, int) else int(sizes.max(initial=0))
        if longest > _SHORTEST_BLOCK and (last - first > 1).any():
            blocks = ranges(first, last - first + 1)
            if not self._good[blocks].all():
                self._check(blocks)
        elif not (self._good[first].all() and self._good[last].all()):
            self._check(np.concatenate((first, last)))

    def are_new(self, numbers: Integers, starts: Integers, size: int) -> NDArray[np.bool_]:
        """Return which rows of `size` items have a first or last block that was not checked."""
        new = np.zeros(len(numbers), bool)
        chosen = slice(None) if self._is_checked is None else self._is_checked[numbers]
        first, last = self._blocks(numbers[chosen], starts[chosen], size)
        # A row that reaches into the next file ends in a block that this file may not have.
        last = np.minimum(last, self._ends[numbers[chosen]] - 1)
        new[chosen] = ~(self._good[first] & self._good[last])
        return new

    def _blocks(
        self, numbers: Integers, starts: Integers, sizes: Integers | int
    ) -> tuple[Integers, Integers]:
        """Return the first and the last block of each row."""
        items = self._items if isinstance(self._items, int) else self._items[numbers]
        first = starts * items
        first += self._shifts[numbers]
        last = first + (sizes * items - 1)
        # A shift is several times as fast as a division.
        first >>= _BLOCK_BITS
        last >>= _BLOCK_BITS
        return first, last

    def _check(self, blocks: Integers) -> None:
        """Check the blocks that were not checked yet."""
        new = np.unique(blocks[~self._good[blocks]])
        numbers = np.searchsorted(self._ends, new, side="right")
        before = self._ends - np.diff(self._ends, prepend=0)
        # One call for each store, because one call checks blocks of several parts at once.
        found = [self._pieces[number] for number in numbers.tolist()]
        stores = {id(piece[0]): piece[0] for piece in found if piece is not None}
        keys = np.array([0 if piece is None else id(piece[0]) for piece in found], np.int64)
        parts = np.array([0 if piece is None else piece[1] for piece in found], np.int64)
        for key, rows in group_rows(keys):
            stores[key].files.check(self._kind, parts[rows], (new - before[numbers])[rows])
        self._good[new] = True
        self._num_good += len(new)
        # Two threads may have counted the same block, so this number may be too large.
        if self._num_good >= len(self._good):
            self.is_complete = bool(self._good.all())


def _item_size(piece: tuple[TokenStore, int] | None, kind: str) -> int:
    return 1 if kind == "loss" or piece is None else int(piece[0].dtype.itemsize)


def load_ahead(
    piece: Callable[[int], Array],
    numbers: Integers,
    starts: Integers,
    length: int,
    new: NDArray[np.bool_],
) -> None:
    """Ask the kernel for `length` ids from each of `starts`, up to the end of their pieces.

    Args:
        piece: Returns the ids of a piece.
        numbers: The piece of each row.
        starts: The offset of each row in its piece.
        length: The number of ids in a row.
        new: Which rows have blocks that will be checked, so that the whole blocks are needed.
    """
    # A check requests blocks itself, a few at a time. So the first blocks are enough: they are
    # loaded until the check begins.
    for unit, most, chosen in ((BLOCK_BYTES, _FIRST_BLOCKS, new), (mmap.PAGESIZE, len(new), ~new)):
        rows, left = np.flatnonzero(chosen), most
        # Grouped by piece, so that each piece is opened once.
        for number, group in group_rows(numbers[rows]):
            if left > 0:
                left -= _load(piece(number), np.sort(starts[rows[group]]), length, unit, left)


def _load(array: Array, starts: Integers, length: int, unit: int, most: int) -> int:
    """Request the units of ascending rows of a piece; return how many requests were made.

    Rows that are next to each other have one request.
    """
    mapping: object = array
    while isinstance(mapping, np.ndarray | memoryview):
        mapping = mapping.base if isinstance(mapping, np.ndarray) else mapping.obj
    if not isinstance(mapping, mmap.mmap) or _WILL_NEED is None:
        return 0
    # madvise takes offsets in the mapping that are multiples of the page size. The array begins
    # after the header of the file, so its address is compared with that of the mapping.
    address = np.frombuffer(mapping, np.uint8, count=1).ctypes.data
    first_bytes = array.ctypes.data - address + starts * array.itemsize
    firsts = first_bytes // unit * unit
    stops = -(-(first_bytes + length * array.itemsize) // unit) * unit
    stops = np.minimum(stops, len(mapping))
    # Both arrays ascend. A request begins where the one before it does not reach.
    begins = np.flatnonzero(np.concatenate(([True], firsts[1:] > stops[:-1])))
    ends = np.append(begins[1:], len(firsts)) - 1
    requests = zip(firsts[begins].tolist(), stops[ends].tolist(), strict=True)
    for first, stop in islice(requests, most):
        mapping.madvise(_WILL_NEED, first, stop - first)
    return min(most, len(begins))
