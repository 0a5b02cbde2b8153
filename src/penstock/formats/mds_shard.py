"""One shard of MDS: where the ids of each document are, and whether its headers agree.

docs/formats.md and `mds` describe the format. All places are computed from the offsets of the
documents, which are inside the file. Headers are compared with them, and are never followed.
"""

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.lib.stride_tricks import as_strided

from penstock.errors import StoreError
from penstock.formats.mapped import MappedBytes
from penstock.formats.member import Array, Integers
from penstock.formats.sample import check_ids, check_not_halves, spread_blocks
from penstock.formats.scattered import ScatteredArray
from penstock.formats.token_files import FilePart, checked_bounds

DTYPE_CODES = {8: "u1", 9: "i1", 16: "<u2", 17: "<i2", 32: "<u4", 33: "<i4", 64: "<u8", 65: "<i8"}
"""The dtypes of integers by their codes in documents; 18, 34 and 66 are floats."""
_CHECKED = 1024


class MdsColumn(NamedTuple):
    """The column of a shard that holds the ids."""

    number: int
    dtype: np.dtype[Any] | None
    """None if each document records it."""
    has_header: bool
    """Whether a document begins with its shape, and its dtype if `dtype` is None."""
    vocab_size: int | None = None
    """Of a column of bytes: its dtype is the caller's, and is checked."""


class MdsShard:
    """The places of the ids of one shard."""

    def __init__(
        self, data: Path, name: Path, offsets: Integers, sizes: list[int], column: MdsColumn
    ) -> None:
        self._file, self._name = MappedBytes(data), name
        self._offsets, self._sizes = offsets, sizes
        self._variable = [number for number, size in enumerate(sizes) if not size]
        self._column = column
        self._starts, self._lengths = self._column_places()
        self._dtype = column.dtype or self._first_dtype()
        self._headers = self._header_sizes()

    def part(self) -> FilePart:
        """Return the ids and the ends of documents, after some headers were compared."""
        size, column = self._dtype.itemsize, self._column
        counts, rests = np.divmod(self._lengths - self._headers, size)
        least = 1 if column.has_header else 0  # the writer refuses arrays without items
        if rests.any() or (counts < least).any():
            number = int(np.flatnonzero(rests.astype(bool) | (counts < least))[0])
            raise StoreError(
                f"{self._name}: document {number:,} has {int(self._lengths[number]):,} bytes, "
                f"which is not a header and a whole number of {self._dtype} ids. It is damaged, or "
                "of another dtype."
            )
        total, ends = len(counts), np.cumsum(counts)
        spread = np.arange(total)
        # A document whose dtype is in its header may have another one than the first document.
        if total > _CHECKED and column.dtype is not None:
            spread = np.unique(np.linspace(0, total - 1, _CHECKED).astype(np.int64))
        self._compare(spread, counts)
        ids = ScatteredArray(self._file, self._dtype, self._starts + self._headers, ends)
        if column.vocab_size is not None:
            for block in spread_blocks(ids):
                check_not_halves(block, self._name, column.vocab_size, is_chosen=True)
                check_ids(block, self._name, column.vocab_size, is_recorded=False)
        bounds = checked_bounds(ends, len(ids), self._name)
        return FilePart(ids, bounds, check=partial(self._compare, np.arange(total), counts))

    def _column_places(self) -> tuple[Integers, Integers]:
        """Return the byte at which the column of each document begins, and its size."""
        begins, sizes = self._offsets[:-1], np.diff(self._offsets)
        head, fixed = 4 * len(self._variable), sum(self._sizes)
        found: dict[int, Integers | int] = dict(enumerate(self._sizes))
        # The sizes of documents give that of the only column without a fixed size. If there are
        # several, each document has to be read.
        left = sizes - head - fixed
        is_bad = left < 0
        if len(self._variable) == 1:
            found[self._variable[0]] = left
        elif not is_bad.any():
            words = self._words(np.arange(len(begins)))
            found |= {each: words[:, at] for at, each in enumerate(self._variable)}
            is_bad = left != words.sum(axis=1)
        if is_bad.any():
            number = int(np.flatnonzero(is_bad)[0])
            raise StoreError(
                f"{self._name}: document {number:,} has {int(sizes[number]):,} bytes, which is not "
                "the size of its columns. The file is damaged, or its index is of another one."
            )
        starts = begins + head
        for each in range(self._column.number):
            starts += found[each]
        return starts, np.broadcast_to(np.asarray(found[self._column.number]), len(sizes))

    def _words(self, numbers: Integers) -> Integers:
        """Return the sizes at the front of documents, one for each column without a fixed size."""
        if not self._variable:
            return np.zeros((len(numbers), 0), np.int64)
        found = self._bytes(self._offsets[numbers], 4 * len(self._variable))
        return found.view("<u4").astype(np.int64)

    def _bytes(self, starts: Integers, size: int) -> Array:
        """Return `size` bytes from each of `starts` on; refuse those after the end of the file."""
        data = self._file.array()
        if len(starts) and int(starts.max()) + size > len(data):
            raise StoreError(f"{self._name} ends inside the header of a document. It is damaged.")
        shape = max(0, len(data) - size + 1), size
        found: Array = as_strided(data, shape, (1, 1), writeable=False)[starts]
        return found

    def _first_dtype(self) -> np.dtype[Any]:
        """Return the dtype that the first document records."""
        if not len(self._starts):
            return np.dtype("<u2")
        code = int(self._bytes(self._starts[:1], 1)[0, 0])
        if code not in DTYPE_CODES:
            raise StoreError(
                f"{self._name} has the dtype code {code}, which is not one of integers. Nothing "
                "was decoded."
            )
        return np.dtype(DTYPE_CODES[code])

    def _header_sizes(self) -> Integers:
        """Return the size of the header of each document, by the size of its column.

        The writer uses the narrowest dtype for the number of ids. So sizes of columns with a
        narrower one are all smaller, and the size of a column shows which dtype it has.
        """
        if not self._column.has_header:
            return np.zeros(len(self._lengths), np.int64)
        code = 1 if self._column.dtype is None else 0
        sizes, item = self._lengths - code, self._dtype.itemsize
        widths = np.full(len(sizes), 8)
        for width in (4, 2, 1):
            widths[sizes <= 1 + width + ((1 << 8 * width) - 1) * item] = width
        return code + 1 + widths

    def _compare(self, numbers: Integers, counts: Integers) -> None:
        """Raise unless the headers of documents say what their sizes do."""
        if len(self._variable) == 1 and self._variable[0] == self._column.number:
            wrong = self._words(numbers)[:, 0] != self._lengths[numbers]
            if wrong.any():
                self._refuse_header(int(numbers[wrong][0]))
        for size in np.unique(self._headers[numbers]).tolist() if self._column.has_header else ():
            chosen = numbers[self._headers[numbers] == size]
            found = self._bytes(self._starts[chosen], size)
            code = [] if self._column.dtype is not None else [self._dtype_code()]
            width = size - 1 - len(code)
            expected = np.empty_like(found)
            # 4 is one dimension, and the two lowest bits are the dtype of the number of ids.
            expected[:, : len(code) + 1] = [*code, 4 | (width.bit_length() - 1)]
            expected[:, len(code) + 1 :] = (
                counts[chosen].astype(f"<u{width}").view("u1").reshape(-1, width)
            )
            wrong = (found != expected).any(axis=1)
            if wrong.any():
                self._refuse_header(int(chosen[wrong][0]))

    def _dtype_code(self) -> int:
        return next(code for code, each in DTYPE_CODES.items() if np.dtype(each) == self._dtype)

    def _refuse_header(self, number: int) -> NoReturn:
        raise StoreError(
            f"{self._name}: the header of document {number:,} does not describe one row of "
            f"{self._dtype} ids of its size. Arrays must have one dimension, and all the same "
            "dtype. The document is of another kind, or the file is damaged."
        )
