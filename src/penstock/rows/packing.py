"""Packing: which pieces of documents go into which row, computed from their lengths alone.

    length=8        a a a a a  b b  c c c c c c c c c c c c  d d d  e

    row 0           a a a a a d d d        pieces in the order of their documents
    row 1           b b c c c c c e        a long document fills rows, with one token
    row 2           c c c c c c c c        of overlap: c has 12 tokens, here 8 and 5

A document of at most `length` tokens stays whole. A longer one is cut every `length - 1` tokens,
and each piece begins with the last token of the piece before it. So every token but a document's
first has its predecessor in the same piece, and is a target exactly once. Pieces that do not fill
a row are packed best-fit, longest first: each goes into the row where it leaves the least space.
Rows with the same space left are equivalent, so the algorithm works on the histogram of lengths
and handles many rows at a time: a few thousand steps for any number of documents. Rows are
numbered by their first document. docs/packing.md has measurements of the time and the padding.

The computation uses integers only, so every machine gets the same result. Golden values in the
tests pin it: a change here would change the rows of every run.
"""

import mmap
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from penstock.disk import naming
from penstock.errors import StoreError
from penstock.ranges import ranges
from penstock.rows.protocol import Array, Integers

PACKING_FORMAT = 1
"""Part of every digest. Increased when the same lengths are packed differently."""


LONGEST = (1 << 24) - 1
"""The longest row that an index can describe."""
WORD = np.dtype("<u8")
Words = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class RowIndex:
    """The rows of a store, or of several, as lists of pieces."""

    part_rows: Words
    """Rows of each part."""
    edges: Words
    """The index of the first piece of each row, and then the number of all pieces."""
    pieces: Words
    """The offset of each piece in its part, and its size, in one word."""
    num_empty: int
    """Documents without tokens, which are in no row."""
    num_long: int
    """Documents longer than a row."""
    num_cut: int
    """Tokens that are in no row, because their documents were truncated."""
    file: tuple[Path, mmap.mmap] | None = None
    """The file that is mapped; None if the index is in memory."""

    def check_size(self) -> None:
        """Raise if the mapped file was truncated: reading it would end the process (SIGBUS)."""
        if self.file is None:
            return
        path, mapping = self.file
        with naming(path):
            size = mapping.size()
        if size != len(mapping):
            raise StoreError(
                f"{path} has {size:,} bytes, but had {len(mapping):,} when it was opened. "
                "Run this again: the file is in a cache and will be made again."
            )

    @property
    def num_rows(self) -> int:
        """Rows of all parts."""
        return len(self.edges) - 1

    @property
    def num_pieces(self) -> int:
        """Pieces of all rows."""
        return len(self.pieces)

    def spans(self, samples: Integers) -> tuple[Integers, Integers, Integers]:
        """Return the pieces per row, and the offset (in its part) and the size of each piece."""
        self.check_size()
        first = self.edges[samples].astype(np.int64)
        counts = self.edges[samples + 1].astype(np.int64) - first
        words = self.pieces[ranges(first, counts)]
        return counts, offsets_of(words), sizes_of(words)

    def row_sizes(self, samples: Integers) -> Integers:
        """Return the size of the first piece of each row: that of the row if it has one piece."""
        self.check_size()
        return sizes_of(self.pieces[self.edges[samples]])

    @property
    def num_tokens(self) -> int:
        """Tokens in all pieces; the overlap of split documents counts twice."""
        step = 1 << 20  # words at a time, so that a mapped index is never in memory as a whole
        blocks = (self.pieces[start : start + step] for start in range(0, len(self.pieces), step))
        return sum(int(sizes_of(block).sum()) for block in blocks)


EMPTY = RowIndex(np.zeros(0, WORD), np.zeros(1, WORD), np.zeros(0, WORD), 0, 0, 0)
"""An index without parts."""


def offsets_of(words: Words) -> Integers:
    """Return the offset of each piece in its part."""
    return (words >> np.uint64(24)).view(np.int64)


def sizes_of(words: Words) -> Integers:
    """Return the number of tokens of each piece."""
    return (words & np.uint64(LONGEST)).view(np.int64)


def joined(indexes: list[RowIndex]) -> RowIndex:
    """Return one index of the parts of several indexes, as a copy in memory."""
    indexes = [each for each in indexes if len(each.part_rows)]
    if len(indexes) <= 1:
        return indexes[0] if indexes else EMPTY
    # The pieces of an index follow those of all earlier indexes, so its edges grow by their number.
    pieces = np.cumsum([0] + [len(each.pieces) for each in indexes]).astype(np.uint64)
    edges = [each.edges[:-1] + first for each, first in zip(indexes, pieces[:-1], strict=True)]
    return RowIndex(
        np.concatenate([each.part_rows for each in indexes]),
        np.concatenate([*edges, pieces[-1:]]),
        np.concatenate([each.pieces for each in indexes]),
        sum(each.num_empty for each in indexes),
        sum(each.num_long for each in indexes),
        sum(each.num_cut for each in indexes),
    )


def _one_part(
    edges: Integers, starts: Integers, piece_sizes: Integers, sizes: Integers, length: int
) -> RowIndex:
    """Return the index of one part, from the pieces of its rows and the sizes of its documents."""
    return RowIndex(
        np.array([len(edges) - 1], WORD),
        edges.astype(WORD),
        (starts << 24 | piece_sizes).astype(WORD),  # 40 bits and 24 bits
        num_empty=int((sizes == 0).sum()),
        num_long=int((sizes > length).sum()),
        num_cut=0,
    )


def pack(bounds: Array, length: int) -> RowIndex:
    """Pack the documents that end at `bounds` into rows of `length` tokens; `length` is 2 or more.

    >>> counts, starts, sizes = pack(np.array([5, 7, 19, 22, 23]), length=8).spans(np.arange(3))
    >>> counts.tolist(), starts.tolist(), sizes.tolist()
    ([2, 3, 1], [0, 19, 5, 14, 22, 7], [5, 3, 2, 5, 1, 8])
    """
    begins, sizes = _documents(bounds)
    rest, num_full = _cut(sizes, length)
    kept = np.flatnonzero(rest)
    bins, num_bins = _binned(rest[kept], length)
    # The first document of each bin: written from last to first, so the first one remains.
    first = np.zeros(num_bins, np.int64)
    first[bins[::-1]] = kept[::-1]
    rows_of = num_full.astype(np.int64)
    rows_of[first] += 1
    upto = np.cumsum(rows_of)
    num_rows = int(upto[-1]) if len(upto) else 0
    # A bin is a row. It follows the full rows of its first document, as that document's last row.
    keys = (upto[first] - 1)[bins]
    del first, bins, rows_of
    # Sorted by row, then by document, as one 64-bit key: both numbers are below 2^32.
    keys <<= 32
    keys |= kept
    keys.sort()
    rows, documents = keys >> 32, keys & 0xFFFF_FFFF
    del keys, kept
    counts = np.bincount(rows, minlength=num_rows)
    # Rows without a piece so far are the full rows of long documents: one piece each.
    full_rows = np.flatnonzero(counts == 0)
    counts[full_rows] = 1
    edges = np.concatenate(([0], np.cumsum(counts)))
    is_full = np.zeros(int(edges[-1]), bool)
    is_full[edges[full_rows]] = True
    starts, piece_sizes = (np.empty(len(is_full), np.int64) for _ in range(2))
    starts[~is_full] = begins[documents] + num_full[documents] * np.int64(length - 1)
    piece_sizes[~is_full] = rest[documents]
    long = np.flatnonzero(num_full)
    # The full rows of a long document begin `length - 1` tokens apart: at 0, 7, 14 for 8.
    times = num_full[long]
    turn = ranges(np.zeros_like(times), times)
    starts[is_full] = np.repeat(begins[long], times) + turn * (length - 1)
    piece_sizes[is_full] = length
    return _one_part(edges, starts, piece_sizes, sizes, length)


def one_each(bounds: Array, length: int, *, split: bool) -> RowIndex:
    """Put each document that ends at one of `bounds` into a row; truncate or split long ones.

    >>> one_each(np.array([3, 9]), length=4, split=True).row_sizes(np.arange(3)).tolist()
    [3, 4, 3]
    >>> one_each(np.array([3, 9]), length=4, split=False).num_cut
    2
    """
    begins, sizes = _documents(bounds)
    if split:
        # Each row begins one token before the end of the row before it: at 0, 7, 14 for 8.
        rest, num_full = _cut(sizes, length)
        times = num_full + (rest > 0)
        turn = ranges(np.zeros_like(times), times)
        starts = np.repeat(begins, times) + turn * (length - 1)
        piece_sizes = np.minimum(np.repeat(begins + sizes, times) - starts, length)
    else:
        starts, piece_sizes = begins[sizes > 0], np.minimum(sizes[sizes > 0], length)
    index = _one_part(np.arange(len(starts) + 1), starts, piece_sizes, sizes, length)
    return index if split else replace(index, num_cut=int(sizes.sum() - piece_sizes.sum()))


def _documents(bounds: Array) -> tuple[Integers, Integers]:
    """Return the offset and the size of each document."""
    ends = bounds.astype(np.int64)
    # A document begins where the one before it ends.
    begins = np.zeros_like(ends)
    begins[1:] = ends[:-1]
    return begins, ends - begins


def _cut(sizes: Integers, length: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return each document's number of tokens after its full rows, and its number of full rows.

    A document of 12 tokens in rows of 8: tokens 0-7 fill one row, and 5 tokens, 7-11, are left.
    """
    num_full = np.maximum(sizes - 1, 0) // (length - 1)
    rest = sizes - num_full * (length - 1)
    rest[(rest == 1) & (num_full > 0)] = 0  # only the overlap, which was a target already
    return rest.astype(np.int32), num_full.astype(np.int32)


def _binned(sizes: NDArray[np.int32], length: int) -> tuple[Integers, int]:
    """Return the bin of each piece, and the number of bins."""
    firsts, runs, num_bins = best_fit(np.bincount(sizes, minlength=length), length)
    # Longest first; equal ones in the order of documents. NumPy sorts 16-bit keys by radix.
    narrow = np.uint16 if length <= 0xFFFF else np.uint32
    order = np.argsort((length - sizes).astype(narrow), kind="stable")
    bins = np.empty(len(sizes), np.int64)
    bins[order] = ranges(firsts, runs)
    return bins, num_bins


def best_fit(histogram: Integers, length: int) -> tuple[Integers, Integers, int]:
    """Assign pieces to bins, longest first; a run of equal pieces goes to consecutive bins.

    Returns the first bin of each run, the pieces of each run, and the number of bins. All tokens
    together need at least a certain number of bins. Up to that number, a new bin gets only one
    piece, so that bins have different space left for shorter pieces. After that, a new bin gets
    as many equal pieces as fit.

    >>> firsts, runs, num_bins = best_fit(np.array([0, 0, 3, 0, 1, 1]), length=7)
    >>> firsts.tolist(), runs.tolist(), num_bins
    ([0, 1, 0, 1, 2], [1, 1, 1, 1, 1], 3)
    """
    sizes = np.flatnonzero(histogram)
    # No packing has fewer bins than this: all tokens, divided by the length, rounded up.
    fewest = -(-int((sizes * histogram[sizes]).sum()) // length)
    ranges: dict[int, list[tuple[int, int]]] = {}  # bins by the space they have left
    rooms = 0  # bit r is set if some bin has exactly r tokens of space left
    firsts: list[int] = []
    runs: list[int] = []
    num_bins = 0

    def leave(room: int, first: int, stop: int) -> None:
        nonlocal rooms
        if room:
            ranges.setdefault(room, []).append((first, stop))
            rooms |= 1 << room

    for size in sizes[sizes > 0][::-1].tolist():
        left = int(histogram[size])
        while left:
            if fitting := rooms >> size:
                # The lowest bit that is set is the least space that is enough: best fit.
                room = size - 1 + (fitting & -fitting).bit_length()
                first, stop = ranges[room].pop()
                run, times = min(left, stop - first), 1
                if first + run < stop:
                    ranges[room].append((first + run, stop))
                elif not ranges[room]:
                    rooms ^= 1 << room
            else:
                room, first = length, num_bins
                times = 1 if num_bins < fewest else min(left, length // size)
                run = min(left, fewest - num_bins) if num_bins < fewest else left // times
                num_bins += run
            leave(room - times * size, first, first + run)
            # Each of the bins gets `times` pieces of this size: `times` runs over the same bins.
            firsts += [first] * times
            runs += [run] * times
            left -= times * run
    return np.array(firsts, np.int64), np.array(runs, np.int64), num_bins
