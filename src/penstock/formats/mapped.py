"""Ids in place: arrays that are mapped from files, and copies of files that cannot be mapped.

    MappedArray       ids          [5 6 7 8 8 1 2 3 4]
    ScatteredArray    ids in runs  [header][5 6 7][header][8 8][header][1 2 3 4]
    HeldArray         ids in memory

A set may have thousands of files, and a process may have few descriptors. So the files that were
not used for the longest time are unmapped, together with those of stores (`penstock.disk`).

Files that cannot be mapped are decoded once, into the cache, which can be deleted at any time:

    ~/.cache/penstock/tokens/KEY.ids …      (or $PENSTOCK_CACHE/tokens)
    ~/.cache/penstock/tokens/KEY.json       what was decoded, written last

The key is computed from the size, the time and 17 blocks of the original file, so a changed file is
decoded again. So is one whose copy has another size than was written.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, NoReturn
from weakref import finalize

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from penstock.digest import digest_json
from penstock.disk import (
    MappedFile,
    Maps,
    cache_directory,
    explained,
    locked,
    map_file,
    naming,
    sync_directory,
    write_file,
)
from penstock.errors import MissingStoreError, PenstockError, StoreError
from penstock.ranges import ranges

Array = NDArray[Any]
Integers = NDArray[np.int64]

_maps = Maps()
_numbers = count()
_BLOCK_BYTES = 1 << 16
_NUM_SPREAD = 16
_AT_ONCE = 1 << 20
_LONGEST_NAME = 255


def size_of(path: Path) -> int:
    """Return the size of a file.

    Raises:
        MissingStoreError: it does not exist.
        StoreError: it is not a regular file.
    """
    if not path.exists():
        if path.is_symlink():
            raise MissingStoreError(
                f"{path} is a link to {path.readlink()}, which does not exist. Restore that file, "
                "or delete the link."
            )
        raise MissingStoreError(f"{path} does not exist (working directory: {Path.cwd()}).")
    # A FIFO would block the reader, and a device has no size.
    if not path.is_file():
        raise StoreError(f"{path} is not a file (working directory: {Path.cwd()}).")
    with naming(path):
        return path.stat().st_size


def is_listed(path: Path) -> bool:
    """Return whether there is a file, or a link whose file is missing, which is an error to read.

    Without this, a disk that is not mounted would look like a file that was never written.
    """
    return path.is_file() or (path.is_symlink() and not path.exists())


def first_bytes(path: Path, count: int) -> bytes:
    """Return the first `count` bytes of a file, or all of a shorter file."""
    size_of(path)
    with naming(path), path.open("rb") as stream:
        return stream.read(count)


def beside(index: Path, name: str) -> Path:
    """Return the path of a file that an index names, which must be in its directory."""
    if Path(name).name != name or len(name.encode()) > _LONGEST_NAME:
        raise StoreError(f"{index} names the file {name[:200]!r}, which is not in its directory.")
    return index.parent / name


@contextmanager
def parsing(path: Path, format: str) -> Iterator[None]:
    """Turn any error about the contents of a file into a StoreError that names it.

    json, struct, NumPy and Arrow raise a dozen kinds of errors for damaged files. Errors of the
    system, such as a missing permission, have a number and stay what they are.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, PenstockError) or getattr(error, "errno", None) is not None:
            raise
        raise StoreError(
            f"{path} cannot be read as {format}: {type(error).__name__}: {str(error)[:200]}. It is "
            "truncated or damaged, or of another format."
        ) from error


class MappedBytes:
    """The bytes of a file. Safe to use from several threads and after a fork."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()  # the size is read later, perhaps in another directory
        self.size = size_of(path)
        self._inode = path.stat().st_ino
        self._key = (next(_numbers), str(self.path))
        # Without this, a file that was deleted would take up disk space until the process ends.
        # No lock: this may be called while the same thread holds that of the maps.
        finalize(self, _maps.files.pop, self._key, None)

    def array(self) -> NDArray[np.uint8]:
        """Return the bytes, mapped into memory; the array is read-only.

        Raises:
            StoreError: the file has another size than before.
        """
        return self.mapped().data

    def mapped(self) -> MappedFile:
        """Return the file, mapped into memory; raises as `array` does."""
        # Reading a page that the file no longer has raises SIGBUS, which ends the process
        # without a message. So the size of the mapped file is checked before every read.
        found = _maps.files.get(self._key)
        if found is None:
            found = _maps.add(self._key, self._map)
        elif _maps.is_crowded:
            _maps.use(self._key, found)
        if (size := found.mapping.size()) != self.size:
            self._refuse(f"has {size:,} bytes, but had {self.size:,} when it was opened")
        return found

    def _map(self) -> MappedFile:
        with naming(self.path), explained(self.path), self.path.open("rb") as stream:
            status = os.fstat(stream.fileno())
            # It may have been unmapped before, and another file may have its name now.
            if (status.st_ino, status.st_size) != (self._inode, self.size):
                self._refuse("is another file than when it was opened")
            mapping = map_file(stream)
        data = np.frombuffer(mapping, np.uint8)
        address = int(data.ctypes.data)
        return MappedFile(data, data, mapping, self.size, address, self.path, str(self.path))

    def _refuse(self, why: str) -> NoReturn:
        raise StoreError(
            f"{self.path} {why}. It was overwritten in between. Open it again, and start a new run."
        )


class MappedArray(MappedBytes):
    """An array in a file. Safe to use from several threads and after a fork.

    Args:
        path: The file.
        dtype: The dtype of the items.
        offset: The byte of the file at which the array begins.
        count: The number of items; all up to the end of the file if None.

    Raises:
        StoreError: the file does not have so many bytes.
    """

    def __init__(
        self, path: Path, dtype: np.dtype[Any], offset: int = 0, count: int | None = None
    ) -> None:
        super().__init__(path)
        left = self.size - offset
        needed = left - left % dtype.itemsize if count is None else count * dtype.itemsize
        # Python's integers do not overflow, so a count of 2^63 is refused here too.
        if not 0 <= needed <= left or (count is None and needed != left):
            why = f"too few for {count} {dtype} numbers"
            if count is None:
                why = f"which is not a whole number of {dtype} ids"
            raise StoreError(
                f"{path} has {self.size:,} bytes, {why} after byte {offset:,}. It is truncated or "
                "damaged, or has another dtype."
            )
        self._dtype, self._start, self._stop = dtype, offset, offset + needed

    def __len__(self) -> int:
        return (self._stop - self._start) // self._dtype.itemsize

    def array(self) -> Array:
        """Return the items, mapped into memory; the array is read-only."""
        return self.located()[0]

    def located(self) -> tuple[Array, int]:
        """Return the items and their address: to ask NumPy for it takes 2 µs for each batch."""
        if self._start == self._stop:  # an empty file cannot be mapped
            return np.zeros(0, self._dtype), 0
        found = self.mapped()
        return found.array, found.address

    def _map(self) -> MappedFile:
        # The array is made here, once for each map, because batches are read from many files.
        found = super()._map()
        items = found.data[self._start : self._stop].view(self._dtype)
        return found._replace(array=items, address=found.address + self._start)


class HeldArray:
    """An array in memory, with the interface of `MappedArray`."""

    def __init__(self, array: Array) -> None:
        # A view that cannot be written, so that rows cannot change the caller's array. An array
        # with gaps, such as every second id of another one, is copied.
        self._array = np.ascontiguousarray(array).view()
        self._array.flags.writeable = False

    def array(self) -> Array:
        """Return the items; the array is read-only."""
        return self._array

    def located(self) -> tuple[Array, int]:
        """Return the items and their address."""
        return self._array, int(self._array.ctypes.data)


class ScatteredArray:
    """Ids in runs, as one array that is not in one place: it has a length, slices and rows.

    A run is the ids of one document in MDS shards, and those of one record batch in Arrow files.
    Rows inside one run are copied in one NumPy call for all of them. A row over several runs is
    copied run by run. A slice is a copy.

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

    def __getitem__(self, index: slice) -> Array:
        start, stop, step = index.indices(len(self))
        data, size = self._file.array(), self.dtype.itemsize
        found = np.empty(max(0, stop - start), self.dtype)
        number, done = int(np.searchsorted(self._ends, start, side="right")), 0
        while done < len(found):  # each run is one copy
            first, upto = start + done, min(stop, int(self._ends[number]))
            shift = int(self._shifts[number])
            run = data[shift + first * size : shift + upto * size]
            found[done : upto - start] = run.view(self.dtype)
            done, number = upto - start, number + 1
        return found[::step]

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

        All addresses are computed at once. With a slice for each row, 64 rows over two runs took
        seven times as long.
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


Ids = Array | ScatteredArray
"""Token ids: an array, or ids in runs, whose slices are arrays."""


class FilePart(NamedTuple):
    """The tokens of one file."""

    ids: MappedArray | HeldArray | ScatteredArray
    bounds: Array | None = None
    """The offsets at which documents end, `<u8`; None if the format does not record them."""
    loss: MappedArray | None = None
    """1 for each token that is trained on, uint8; None if all are."""
    check: Callable[[], None] | None = None
    """Compares what `verify_tokens` must, and takes too long when the file is opened."""
    path: Path | None = None
    """The file, if it may have masks."""
    masks: tuple[str, ...] = ()
    """The names of its masks, also of those that exclude nothing."""


def spread_blocks(array: Ids) -> Iterator[Array]:
    """Yield 17 blocks of 64 KiB of an array, evenly spread; all of an array that has no more."""
    per_block = _BLOCK_BYTES // array.dtype.itemsize
    if len(array) <= per_block * (_NUM_SPREAD + 1):
        yield array[:]
        return
    for k in range(_NUM_SPREAD):
        # A multiple of 8 ids, so that halves of wider ids stay at odd offsets.
        start = len(array) * k // _NUM_SPREAD // 8 * 8
        yield array[start : start + per_block]
    yield array[(len(array) - per_block) // 8 * 8 :]


def checked_bounds(ends: Array, num_tokens: int, path: object) -> Array:
    """Return ends of documents as `<u8`, after a check that they ascend and cover all tokens.

    Raises:
        StoreError: an end is before the one before it, or the last one is not the last token.
    """
    last = int(ends[-1]) if len(ends) else 0
    # Compared, and not subtracted: a difference of unsigned numbers wraps around.
    is_ascending = not len(ends) or (int(ends[0]) >= 0 and bool((ends[1:] >= ends[:-1]).all()))
    if last != num_tokens or not is_ascending:
        raise StoreError(
            f"{path}: documents must end one after the other, and the last one at token "
            f"{num_tokens:,}; it ends at {last:,}. A file is truncated or damaged, or the two do "
            "not belong together."
        )
    return ends.astype("<u8")


def decoded(
    source: Path, settings: object, write: Callable[[Path], dict[str, Any]]
) -> tuple[Path, dict[str, Any]]:
    """Return the path of a decoded copy of a file, without its endings, and its record.

    Several processes may call this at once: one of them writes.

    Args:
        source: The file.
        settings: What else decides about the contents of the copy.
        write: Called with the path if there is no whole copy. Writes the files of the copy, whose
            names are the path and an ending, and returns what is recorded.

    Raises:
        StoreError: the cache cannot be written.
    """
    folder = cache_directory() / "tokens"
    blocks = spread_blocks(MappedArray(source, np.dtype("u1")).array())
    sampled = [hashlib.sha256(np.ascontiguousarray(each).data).hexdigest() for each in blocks]
    state = source.stat()
    key = digest_json(["decoded", 2, state.st_size, state.st_mtime_ns, sampled, settings])[:32]
    path = folder / key
    if (record := _record_of(path)) is not None:
        return path, record
    with ExitStack() as held:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            held.enter_context(locked(folder, wait=-1))  # until another process has decoded it
        except OSError as error:
            raise StoreError(
                f"{folder} cannot be written ({error.strerror}), and this file has to be decoded "
                "there before it can be mapped. Set PENSTOCK_CACHE to a directory that can be "
                "written."
            ) from error
        if (record := _record_of(path)) is None:
            record = write(path)
            files = [each for each in folder.glob(f"{key}.*") if each.suffix != ".json"]
            record |= {"sizes": {each.suffix: size_of(each) for each in files}}
            write_file(path.with_suffix(".json"), [json.dumps(record).encode()])
            sync_directory(folder)
    return path, record


def _record_of(path: Path) -> dict[str, Any] | None:
    """Return the record of a decoded copy; None unless all of its files have their sizes."""
    try:
        record: dict[str, Any] = json.loads(path.with_suffix(".json").read_bytes())
        sizes = {ending: path.with_suffix(ending).stat().st_size for ending in record["sizes"]}
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return record if sizes == record["sizes"] else None


def decompressed(source: Path) -> Path:
    """Return the path of the contents of a zstd file, in the cache."""

    def expanded() -> Iterator[bytes]:
        import pyarrow as pa

        with parsing(source, "zstd"), pa.CompressedInputStream(str(source), "zstd") as stream:
            while block := stream.read(_AT_ONCE):
                yield block

    def write(path: Path) -> dict[str, Any]:
        write_file(path.with_suffix(".raw"), expanded())
        return {}

    return decoded(source, "zstd", write)[0].with_suffix(".raw")
