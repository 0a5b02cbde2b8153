"""Token files without a store: `.npy`, and raw ids as nanoGPT writes them."""

import os
from functools import cached_property
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np

from penstock.digest import digest_bytes, digest_json
from penstock.errors import MissingStoreError, StoreError
from penstock.formats.member import Integers, LocalTokens
from penstock.formats.open import recognised
from penstock.formats.raw import check_raw
from penstock.paths import expand_user, naming
from penstock.rows.protocol import Array

_DTYPES = ("uint8", "uint16", "uint32", "int32", "int64")
# A digest reads 17 blocks of 64 KiB (16 and the last), which takes milliseconds. Reading a whole
# file of 100 GB would take a minute.
_SAMPLED_BLOCK = 1 << 16
_NUM_SAMPLED = 16


class ArrayFile(LocalTokens):
    """A token file without a store: `.npy`, or raw ids of a given dtype.

    Its digest covers the size and 17 blocks that are spread over the file. It is weaker than the
    digest of a store: a change between the blocks is not noticed. The file does not record where
    documents end. An `ArrayFile` can be pickled, and used from several threads and after a fork.
    """

    def __init__(self, path: str | os.PathLike[str], dtype: str | None = None) -> None:
        self.path: Path = expand_user(path)
        self._opened = self.path.absolute()  # its size is read later, perhaps in another directory
        if not self.path.exists():
            where = f"working directory: {Path.cwd()}"
            raise MissingStoreError(f"{self.path} does not exist ({where}).")
        if not self.path.is_file():
            raise StoreError(f"{self.path} is not a file (working directory: {Path.cwd()}).")
        self._size = self.path.stat().st_size
        with naming(self.path):
            self._array = self._map_npy() if self.path.suffix == ".npy" else self._map_raw(dtype)
        self.dtype: np.dtype[Any] = self._array.dtype.newbyteorder("=")

    def __repr__(self) -> str:
        return f"ArrayFile({str(self.path)!r}: {self.num_tokens:,} tokens, {self.dtype})"

    def __getstate__(self) -> dict[str, object]:
        return {"path": self._opened, "dtype": self.dtype.name, "digest": self.digest}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # The file is mapped again. A worker process must not read another file of the same name.
        self.__init__(state["path"], state["dtype"])  # type: ignore[misc]
        if self.digest != state["digest"]:
            raise StoreError(f"{self.path} was changed after it was pickled. Open it again.")

    @property
    def num_tokens(self) -> int:
        """The number of ids."""
        return len(self._array)

    @property
    def part_tokens(self) -> Integers:
        """The number of ids, as of a store with one part."""
        return np.array([self.num_tokens])

    def part_ids(self, part: int) -> Array:
        """Return the ids, mapped into memory."""
        return self.array()

    @cached_property
    def digest(self) -> str:
        """A digest of the size, the dtype and 17 sampled blocks, computed once."""
        size = self._checked_size()
        # Evenly spread. The set removes duplicates, which a file of less than 16 bytes has.
        offsets = sorted({size * k // _NUM_SAMPLED for k in range(_NUM_SAMPLED)})
        with naming(self._opened), self._opened.open("rb") as stream:
            blocks = []
            for offset in [*offsets, max(0, size - _SAMPLED_BLOCK)]:
                stream.seek(offset)
                blocks.append(digest_bytes(stream.read(_SAMPLED_BLOCK)))
        return digest_json(["array", size, self.dtype.str, blocks])

    def array(self) -> Array:
        """Return the ids, mapped into memory."""
        # Reading a page that the file no longer has raises SIGBUS, which ends the process
        # without a message. So the size is checked before every read.
        self._checked_size()
        return self._array

    def _checked_size(self) -> int:
        size = os.stat(self._opened).st_size  # noqa: PTH116  (twice as fast, and at every read)
        if size != self._size:
            raise StoreError(
                f"{self.path} has {size:,} bytes, but had {self._size:,} when it was opened. It "
                "was overwritten in between. Open it again, and start a new run."
            )
        return size

    def _map_npy(self) -> Array:
        try:
            array = np.lib.format.open_memmap(self.path, mode="r")
        # NumPy parses the header as a Python literal: a damaged one fails as source code does.
        except (ValueError, SyntaxError, TokenError) as error:
            raise StoreError(
                f"{self.path} cannot be read as an array: {error}. dolma and OLMo write arrays "
                'without a header: open_tokens(path, format="olmo", vocab_size=…).'
            ) from error
        if array.ndim != 1 or array.dtype.name not in _DTYPES:
            raise StoreError(
                f"{self.path} holds {array.dtype} of shape {array.shape}; a token file holds a "
                f"one-dimensional array of integers ({', '.join(_DTYPES)})."
            )
        return np.asarray(array)

    def _map_raw(self, dtype: str | None) -> Array:
        if dtype not in _DTYPES:
            raise StoreError(
                f"{self.path} does not record its dtype, and dtype={dtype!r} is not one of "
                f'{", ".join(_DTYPES)}. nanoGPT writes uint16: ArrayFile(path, dtype="uint16").'
            )
        size = self._size
        if size % np.dtype(dtype).itemsize or not size:
            raise StoreError(
                f"{self.path} has {size:,} bytes, which is not a whole number of {dtype} ids."
            )
        # The files of Megatron and datatrove are recognised by an index; they have no header.
        found = [each for each in recognised(self.path) if each not in ("megatron", "datatrove")]
        if found:
            raise StoreError(
                f"{self.path} has the contents of the format {found[0]!r}, so its header would "
                "become tokens. Use open_tokens(path)."
            )
        ids = np.asarray(np.memmap(self.path, np.dtype(dtype), "r"))
        check_raw(ids, self.path)
        return ids
