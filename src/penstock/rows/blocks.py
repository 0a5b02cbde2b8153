"""The blocks of files that rows are read from: checked when first read, and loaded ahead of time.

    piece          0                    1              2
    tokens      │ … row … │ … row … │ … ro│w … │ … │ … row … │
    blocks      │    0    │    1    │  2  │ 3  │ 4 │    5    │     64 KiB of a file each

A bitmap for all pieces of a stream says which blocks were checked. So a batch whose blocks are
known to be good costs a few NumPy calls, however many pieces and stores it is read from. It has one
bit for each block: 57 MB for 15 trillion tokens of two bytes.
"""

import mmap
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.disk import BLOCK_BYTES, HEADER_BYTES
from penstock.formats.mapped import Ids
from penstock.ranges import distinct, group_rows, ranges
from penstock.rows.protocol import Integers
from penstock.store.reader import TokenStore

_BLOCK_BITS = BLOCK_BYTES.bit_length() - 1
_BITS = np.left_shift(1, np.arange(8)).astype(np.uint8)
_SHORTEST_BLOCK = BLOCK_BYTES // 4  # items of uint32, the widest dtype of a store
_FIRST_BLOCKS = 128
# The operating system Windows has no madvise, so rows are not loaded ahead of time there.
_WILL_NEED: int | None = getattr(mmap, "MADV_WILLNEED", None)


class BlockChecks:
    """Which blocks of one kind of file of a stream were checked. Safe to use from several threads.

    Args:
        stores: The members of the stream; None for a file, which has no checks.
        firsts: The number of the first piece of each member.
        starts: The offset in the stream of each piece.
        kind: "tokens" or "loss".
    """

    def __init__(
        self,
        stores: Sequence[TokenStore | None],
        firsts: Sequence[int],
        starts: Integers,
        kind: str,
    ) -> None:
        self._stores, self._kind = stores, kind
        self._firsts = np.array(firsts, np.int64)
        num_pieces = np.diff(self._firsts, append=len(starts))
        pairs = zip(stores, num_pieces.tolist(), strict=True)
        file_sizes = np.concatenate([_file_sizes(store, number, kind) for store, number in pairs])
        counts = -(-file_sizes // BLOCK_BYTES)
        # The first block of each piece, and the number of all blocks.
        self._edges = np.concatenate((np.zeros(1, np.int64), np.cumsum(counts)))
        is_checked = file_sizes > 0
        # Bytes of an item. Stores of one stream may have different dtypes, but usually have one.
        items = np.array([_item_size(store, kind) for store in stores], np.int64)
        found = {_item_size(store, kind) for store in stores if store is not None}
        self._items: Integers | int = (
            found.pop() if len(found) == 1 else np.repeat(items, num_pieces)
        )
        # The byte at which the stream would begin, if the files of all pieces were concatenated,
        # each padded to whole blocks. An offset in the stream then is at shift + offset * item.
        first_bytes = self._edges[:-1] * BLOCK_BYTES
        self._shifts = first_bytes + HEADER_BYTES - starts * self._items
        self._is_checked = None if is_checked.all() else is_checked
        self._num_blocks = int(self._edges[-1])
        # Block b is bit b % 8 of byte b // 8. Two threads may set bits of one byte at once, and one
        # of these is lost. Then that block is checked once more, which does no harm.
        self._good = np.zeros(-(-self._num_blocks // 8), np.uint8)
        if self._num_blocks % 8:
            self._good[-1] = 0xFF << self._num_blocks % 8 & 0xFF  # bits after the last block
        self._num_good = 0
        self.is_complete = not self._num_blocks
        """Whether no block is left to be checked."""

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
        else:
            blocks = np.concatenate((first, last))
        good = self._are_good(blocks)
        if not good.all():
            self._check(distinct(blocks[good == 0]))

    def _are_good(self, blocks: Integers) -> NDArray[np.uint8]:
        """Return 0 for each block that was not checked."""
        good: NDArray[np.uint8] = self._good[blocks >> 3] & _BITS[blocks & 7]
        return good

    def are_new(self, numbers: Integers, starts: Integers, size: int) -> NDArray[np.bool_]:
        """Return which rows of `size` items have a first or last block that was not checked."""
        new = np.zeros(len(numbers), bool)
        chosen = slice(None) if self._is_checked is None else self._is_checked[numbers]
        first, last = self._blocks(numbers[chosen], starts[chosen], size)
        # A row that reaches into the next file ends in a block that this file may not have.
        last = np.minimum(last, self._edges[numbers[chosen] + 1] - 1)
        new[chosen] = (self._are_good(first) == 0) | (self._are_good(last) == 0)
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

    def _check(self, new: Integers) -> None:
        """Check blocks that were not checked yet, each once, in ascending order."""
        # From the right: a piece without blocks has the same edge as the piece after it.
        numbers = np.searchsorted(self._edges, new, side="right") - 1
        blocks = new - self._edges[numbers]
        # One call for each store, because one call checks blocks of several parts at once.
        members = np.searchsorted(self._firsts, numbers, side="right") - 1
        for member, rows in group_rows(members):
            store = self._stores[member]
            assert store is not None  # a file has no blocks
            store.files.check(self._kind, numbers[rows] - self._firsts[member], blocks[rows])
        np.bitwise_or.at(self._good, new >> 3, _BITS[new & 7])
        self._num_good += len(new)
        # Two threads may have counted the same block, so this number may be too large.
        if self._num_good >= self._num_blocks:
            left = int(np.count_nonzero(self._good != 0xFF))
            self.is_complete = left == 0
            self._num_good -= left  # all bytes are compared again only when these can be done


def _file_sizes(store: TokenStore | None, num_pieces: int, kind: str) -> Integers:
    """Return the size of the file of each piece of a member; 0 if it is not checked."""
    if store is None or not store.files.is_checked:
        return np.zeros(num_pieces, np.int64)
    return store.manifest.parts.sizes()[kind]


def _item_size(store: TokenStore | None, kind: str) -> int:
    return 1 if kind == "loss" or store is None else int(store.dtype.itemsize)


def load_ahead(
    piece: Callable[[int], Ids],
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


def _load(array: Ids, starts: Integers, length: int, unit: int, most: int) -> int:
    """Request the units of ascending rows of a piece; return how many requests were made.

    Rows that are next to each other have one request.
    """
    if not isinstance(array, np.ndarray):  # ids in runs, of token files
        return 0
    mapping: object = array
    while isinstance(mapping, np.ndarray | memoryview):
        mapping = mapping.base if isinstance(mapping, np.ndarray) else mapping.obj
    if not isinstance(mapping, mmap.mmap) or _WILL_NEED is None:
        return 0
    # madvise takes offsets in the mapping that are multiples of the page size. The array begins
    # after the header of the file, so its address is compared with that of the mapping.
    before = _address(array) - _address(np.frombuffer(mapping, np.uint8, count=1))
    size, end = array.itemsize, len(mapping)
    requests: list[tuple[int, int]] = []
    # Numbers of Python: in a full shuffle, most pieces have one row, and calls of NumPy for each of
    # them took ten times as long as the rest of a step.
    for start in starts.tolist():
        first_byte = before + start * size
        first = first_byte // unit * unit
        stop = min(-(-(first_byte + length * size) // unit) * unit, end)
        if requests and first <= requests[-1][1]:
            first = requests.pop()[0]
        requests.append((first, stop))
    for first, stop in requests[:most]:
        mapping.madvise(_WILL_NEED, first, stop - first)
    return min(most, len(requests))


def _address(array: NDArray[Any]) -> int:
    """Return where an array begins in memory, in a fifth of the time of `array.ctypes`."""
    address: int = array.__array_interface__["data"][0]
    return address
