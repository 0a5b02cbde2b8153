"""Arrays that are mapped from files, after their offsets were compared with the file's size.

A set may have thousands of files, and a process may have few descriptors. So the files that were
not used for the longest time are unmapped, together with those of stores (`store.maps`).
"""

import mmap
import os
from itertools import count
from pathlib import Path
from typing import Any, NoReturn
from weakref import finalize

import numpy as np
from numpy.typing import NDArray

from penstock.errors import MissingStoreError, StoreError
from penstock.formats.member import Array
from penstock.paths import naming
from penstock.store.maps import MappedFile, Maps, explained

_maps = Maps()
_numbers = count()


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
            mapping = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
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
    """

    def __init__(
        self, path: Path, dtype: np.dtype[Any], offset: int = 0, count: int | None = None
    ) -> None:
        super().__init__(path)
        size = self.size
        left = size - offset
        if count is None:
            count, rest = divmod(left, dtype.itemsize)
            if left < 0 or rest:
                raise StoreError(
                    f"{path} has {size:,} bytes, which is not a whole number of {dtype} ids "
                    f"after byte {offset:,}. The file is truncated, or has another dtype."
                )
        # Python's integers do not overflow, so a count of 2^63 is refused here too.
        if count < 0 or offset < 0 or count * dtype.itemsize > left:
            raise StoreError(
                f"{path} has {size:,} bytes, but {count:,} items of {dtype} from byte "
                f"{offset:,} on would need {offset + count * dtype.itemsize:,}. It is truncated or "
                "damaged."
            )
        self._dtype, self._start, self._stop = dtype, offset, offset + count * dtype.itemsize

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
