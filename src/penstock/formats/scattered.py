"""Ids that are stored in runs, with other bytes between them.

    file      [header][5 6 7][header][8 8][header][1 2 3 4]
    ids               [5 6 7         8 8          1 2 3 4]

A run is the ids of one document in MDS shards, and those of one record batch in Arrow files. Rows
inside one run are copied in one NumPy call for all of them. A row over several runs is copied run
by run.
"""

from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from penstock.formats.mapped import MappedBytes
from penstock.formats.member import Array, Integers
from penstock.ranges import ranges


class ScatteredArray:
    """Ids in runs, as one array that is not in one place: it has a length, slices and rows.

    A slice is a copy.

    Args:
        file: The bytes of the file.
        dtype: The dtype of the ids.
        starts: The byte at which each run begins.
        ends: The number of ids up to the end of each run. All runs must be inside the file.
    """

    def __init__(
        self, file: MappedBytes, dtype: np.dtype[Any], starts: Integers, ends: Integers
    ) -> None:
        self._file, self.dtype = file, dtype
        self._starts, self._ends = starts, ends
        # So many bytes later than its number says is the id of a run: its address is then one
        # multiplication and one sum away.
        self._befores = np.concatenate((np.zeros(1, np.int64), ends))[:-1]
        self._shifts = starts - self._befores * dtype.itemsize

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def array(self) -> "ScatteredArray":
        """Return this, as `MappedArray.array` returns its ids."""
        return self

    def located(self) -> "tuple[ScatteredArray, int]":
        """Return these ids and the address 0: they are not one array."""
        return self, 0

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return self[:].astype(dtype or self.dtype, copy=False)

    def __getitem__(self, index: slice) -> Array:
        start, stop, step = index.indices(len(self))
        found = self._run_by_run(start, max(start, stop), self._file.array())
        return found if step == 1 else found[::step]

    def _run_by_run(self, start: int, stop: int, data: NDArray[np.uint8]) -> Array:
        """Return the ids `[start, stop)`; each run is one copy."""
        found, size = np.empty(stop - start, self.dtype), self.dtype.itemsize
        number = int(np.searchsorted(self._ends, start, side="right"))
        while start < stop:
            upto, shift = min(stop, int(self._ends[number])), int(self._shifts[number])
            run = data[shift + start * size : shift + upto * size]
            found[len(found) - stop + start : len(found) - stop + upto] = run.view(self.dtype)
            start, number = upto, number + 1
        return found

    def rows(self, starts: Integers, width: int) -> Array:
        """Return `width` ids from each of `starts` on; all must be inside the array."""
        data, size = self._file.array(), self.dtype.itemsize
        numbers = np.searchsorted(self._ends, starts, side="right")
        inside = starts + width <= self._ends[numbers]
        found = np.empty((len(starts), width), self.dtype)
        if inside.any():
            begins = self._shifts[numbers[inside]] + starts[inside] * size
            # Bytes, because ids in MDS shards are not aligned.
            shape = int(begins.max()) + 1, width * size
            found[inside] = as_strided(data, shape, (1, 1), writeable=False)[begins].view(
                self.dtype
            )
        if not inside.all():
            self._copy_over_runs(found, np.flatnonzero(~inside), starts, data)
        return found

    def _copy_over_runs(
        self, found: Array, rows: Integers, starts: Integers, data: NDArray[np.uint8]
    ) -> None:
        """Copy rows that reach into several runs, one run after the other.

        All addresses are computed at once. With `_run_by_run` for each row, 64 rows over two runs
        took seven times as long.
        """
        width, size = found.shape[1], self.dtype.itemsize
        begins = starts[rows]
        firsts = np.searchsorted(self._ends, begins, side="right")
        lasts = np.searchsorted(self._ends, begins + width, side="left")
        counts = lasts - firsts + 1
        runs, rows, begins = ranges(firsts, counts), rows.repeat(counts), begins.repeat(counts)
        lows = np.maximum(begins, self._befores[runs])
        highs = np.minimum(begins + width, self._ends[runs])
        sources = self._shifts[runs] + lows * size
        targets = (rows * width + lows - begins) * size
        # Slices of memoryviews are made in half the time of slices of arrays.
        into, out_of = found.reshape(-1).view(np.uint8).data, data.data
        sizes = (highs - lows) * size
        places = zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True)
        for target, source, length in places:
            into[target : target + length] = out_of[source : source + length]
