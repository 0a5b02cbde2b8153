"""Arrays that are mapped from files, after their offsets were compared with the file's size."""

import os
from pathlib import Path
from typing import Any

import numpy as np

from penstock.errors import MissingStoreError, StoreError
from penstock.formats.member import Array
from penstock.paths import naming


def size_of(path: Path) -> int:
    """Return the size of a file.

    Raises:
        MissingStoreError: it does not exist.
        StoreError: it is not a regular file.
    """
    if not path.exists():
        raise MissingStoreError(f"{path} does not exist (working directory: {Path.cwd()}).")
    # A FIFO would block the reader, and a device has no size.
    if not path.is_file():
        raise StoreError(f"{path} is not a file (working directory: {Path.cwd()}).")
    with naming(path):
        return path.stat().st_size


def first_bytes(path: Path, count: int) -> bytes:
    """Return the first `count` bytes of a file, or all of a shorter file."""
    size_of(path)
    with naming(path), path.open("rb") as stream:
        return stream.read(count)


class MappedArray:
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
        self.path = path.absolute()  # the size is read later, perhaps in another directory
        self._size = size_of(path)
        left = self._size - offset
        if count is None:
            count, rest = divmod(left, dtype.itemsize)
            if left < 0 or rest:
                raise StoreError(
                    f"{path} has {self._size:,} bytes, which is not a whole number of {dtype} ids "
                    f"after byte {offset:,}. The file is truncated, or has another dtype."
                )
        # Python's integers do not overflow, so a count of 2^63 is refused here too.
        if count < 0 or offset < 0 or count * dtype.itemsize > left:
            raise StoreError(
                f"{path} has {self._size:,} bytes, but {count:,} items of {dtype} from byte "
                f"{offset:,} on would need {offset + count * dtype.itemsize:,}. It is truncated or "
                "damaged."
            )
        with naming(path):
            # An empty file cannot be mapped.
            self._array: Array = (
                np.asarray(np.memmap(path, dtype, "r", offset, (count,)))
                if count
                else np.zeros(0, dtype)
            )

    def array(self) -> Array:
        """Return the items, mapped into memory; the array is read-only."""
        # Reading a page that the file no longer has raises SIGBUS, which ends the process
        # without a message. So the size is checked before every read.
        size = os.stat(self.path).st_size  # noqa: PTH116  (twice as fast, and at every read)
        if size != self._size:
            raise StoreError(
                f"{self.path} has {size:,} bytes, but had {self._size:,} when it was opened. It "
                "was overwritten in between. Open it again, and start a new run."
            )
        return self._array


class HeldArray:
    """An array in memory, with the interface of `MappedArray`."""

    def __init__(self, array: Array) -> None:
        # A view that cannot be written, so that rows cannot change the caller's array.
        self._array = array.view()
        self._array.flags.writeable = False

    def array(self) -> Array:
        """Return the items; the array is read-only."""
        return self._array
