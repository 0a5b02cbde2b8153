"""Token files without a store: `.npy`, and raw ids as nanoGPT writes them."""

import json
import os
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from penstock.digest import digest_bytes, digest_json
from penstock.errors import StoreError
from penstock.formats.arrays import RAW_DTYPES, check_ids, check_raw, map_npy
from penstock.formats.mapped import Integers, MappedArray, size_of, spread_blocks
from penstock.formats.open import recognised, refuse_member
from penstock.formats.token_files import LocalTokens
from penstock.paths import expand_user
from penstock.rows.protocol import Array

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
        size_of(self.path)  # raises if there is no such file
        is_npy = self.path.suffix == ".npy"
        self._ids = map_npy(self.path) if is_npy else _open_raw(self.path, dtype)
        for block in spread_blocks(self._ids.array()):
            check_ids(block, self.path, None)
        self.dtype: np.dtype[Any] = self._ids.array().dtype.newbyteorder("=")

    def __repr__(self) -> str:
        return f"ArrayFile({str(self.path)!r}: {self.num_tokens:,} tokens, {self.dtype})"

    def __getstate__(self) -> dict[str, object]:
        return {"path": self._ids.path, "dtype": self.dtype.name, "digest": self.digest}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # The file is mapped again. A worker process must not read another file of the same name.
        self.__init__(state["path"], state["dtype"])  # type: ignore[misc]
        if self.digest != state["digest"]:
            raise StoreError(f"{self.path} was changed after it was pickled. Open it again.")

    @property
    def num_tokens(self) -> int:
        """The number of ids."""
        return len(self._ids)

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
        data = self._ids.mapped().data
        size = len(data)
        # Evenly spread. The set removes duplicates, which a file of less than 16 bytes has.
        offsets = sorted({size * k // _NUM_SAMPLED for k in range(_NUM_SAMPLED)})
        blocks = [
            digest_bytes(data[offset : offset + _SAMPLED_BLOCK].tobytes())
            for offset in [*offsets, max(0, size - _SAMPLED_BLOCK)]
        ]
        return digest_json(["array", size, self.dtype.str, blocks])

    def array(self) -> Array:
        """Return the ids, mapped into memory."""
        return self._ids.array()


def part_ends(path: Path, num_tokens: int) -> Integers:
    """Return after how many tokens of an array file each part ends; without a list, it is one part.

    Raises:
        StoreError: the list is not of this file.
    """
    try:
        parts = json.loads(parts_file(path).read_bytes())
    except FileNotFoundError:
        parts = [num_tokens]
    except ValueError:
        parts = []  # damaged
    ends = np.cumsum(np.array(parts, np.int64))
    if (listed := int(ends[-1]) if len(ends) else 0) != num_tokens:
        raise StoreError(
            f"{parts_file(path)} lists {listed:,} tokens, but {path} has {num_tokens:,}: they "
            "are of different texts. Make both again with `python -m penstock.preprocess`, or "
            "remove the list, to shuffle the file as one part."
        )
    return ends


def parts_file(path: Path) -> Path:
    """Return where `penstock.preprocess` lists how many tokens each part of an array file has."""
    return path.with_suffix(".parts.json")


def _open_raw(path: Path, dtype: str | None) -> MappedArray:
    """Return the ids of a file without a header."""
    if dtype not in RAW_DTYPES:
        raise StoreError(
            f"{path} does not record its dtype, and dtype={dtype!r} is not one of "
            f'{", ".join(RAW_DTYPES)}. nanoGPT writes uint16: ArrayFile(path, dtype="uint16").'
        )
    # The files of Megatron and datatrove are recognised by an index; they have no header.
    found = [each for each in recognised(path) if each not in ("megatron", "datatrove")]
    if found:
        raise StoreError(
            f"{path} has the contents of the format {found[0]!r}, so its header would become "
            "tokens. Use open_tokens(path)."
        )
    refuse_member(path)
    ids = MappedArray(path, np.dtype(dtype).newbyteorder("<"))
    if not ids.size:
        raise StoreError(f"{path} is empty.")
    check_raw(ids.array(), path)
    return ids
