"""Tokens end to end, wherever they lie.

A stream is a list of pieces, each an array of ids that is mapped into memory when it is
touched: the parts of a store, a bare `.npy` or `.bin` file, or several of these one after
the other. Rows are cut from it without knowing which. Of a store that is still being written
(`penstock.streaming`) it holds the parts that are sealed; `grow` adds those that were since.
"""

import mmap
import os
import threading
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.digest import digest_bytes, digest_json
from penstock.errors import StoreError
from penstock.store.reader import TokenStore

__all__ = ["GROWING", "ArrayFile", "Stream", "StreamLike", "open_stream"]

StreamLike = str | os.PathLike[str] | TokenStore

GROWING = threading.Lock()
"""Held while rows take up new parts: two threads at once could go back behind each other."""

_DTYPES = ("uint8", "uint16", "uint32", "int32", "int64")
_SAMPLED_BLOCK = 1 << 16
_NUM_SAMPLED = 16


class ArrayFile:
    """A file of ids that no store describes: `.npy`, or raw with the dtype given.

    Its digest is of the size and of 16 blocks spread over the file, so it is weaker than a
    store's: a change between the blocks goes unseen. There are no document borders. Safe to
    use from several threads, to pickle, and to use after a fork.
    """

    def __init__(self, path: str | os.PathLike[str], dtype: str | None = None) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise StoreError(f"{self.path} is not a file.")
        self._size = self.path.stat().st_size
        self._array = self._map_npy() if self.path.suffix == ".npy" else self._map_raw(dtype)
        self.dtype: np.dtype[Any] = self._array.dtype.newbyteorder("=")

    def __repr__(self) -> str:
        return f"ArrayFile({str(self.path)!r}: {self.num_tokens:,} tokens, {self.dtype})"

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "dtype": self.dtype.name, "digest": self.digest}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["path"], state["dtype"])  # type: ignore[misc]
        if self.digest != state["digest"]:
            raise StoreError(f"{self.path} is not the file it was when it was pickled.")

    @property
    def num_tokens(self) -> int:
        """How many ids there are."""
        return len(self._array)

    @cached_property
    def digest(self) -> str:
        """A digest of the file's size, dtype and 16 sampled blocks, taken once."""
        size = self._checked_size()
        places = sorted({size * k // _NUM_SAMPLED for k in range(_NUM_SAMPLED)})
        with self.path.open("rb") as stream:
            blocks = []
            for place in [*places, max(0, size - _SAMPLED_BLOCK)]:
                stream.seek(place)
                blocks.append(digest_bytes(stream.read(_SAMPLED_BLOCK)))
        return digest_json(["array", size, self.dtype.str, blocks])

    def array(self) -> NDArray[Any]:
        """The ids, mapped."""
        # Touching a place that a file no longer has ends the process, without a word.
        self._checked_size()
        return self._array

    def _checked_size(self) -> int:
        size = os.stat(self.path).st_size  # noqa: PTH116  (twice as fast, and at every read)
        if size != self._size:
            raise StoreError(
                f"{self.path} has {size:,} bytes, and had {self._size:,} when it was opened. It "
                "was written again meanwhile. Open it again, and start a new run."
            )
        return size

    def _map_npy(self) -> NDArray[Any]:
        try:
            array = np.lib.format.open_memmap(self.path, mode="r")
        except ValueError as error:
            raise StoreError(f"{self.path} cannot be read as an array: {error}.") from error
        if array.ndim != 1 or array.dtype.name not in _DTYPES:
            raise StoreError(
                f"{self.path} holds {array.dtype} of shape {array.shape}; a token file holds "
                f"one row of whole numbers ({', '.join(_DTYPES)})."
            )
        return np.asarray(array)

    def _map_raw(self, dtype: str | None) -> NDArray[Any]:
        if dtype not in _DTYPES:
            raise StoreError(
                f"{self.path} does not say how wide its ids are, and dtype={dtype!r} is none of "
                f'{", ".join(_DTYPES)}. nanoGPT writes uint16: ArrayFile(path, dtype="uint16").'
            )
        size = self._size
        if size % np.dtype(dtype).itemsize or not size:
            raise StoreError(f"{self.path} has {size:,} bytes, which are not whole {dtype} ids.")
        return np.asarray(np.memmap(self.path, np.dtype(dtype), "r"))


class Stream:
    """The ids of one or more stores and files, one after the other."""

    def __init__(self, members: Sequence[TokenStore | ArrayFile]) -> None:
        if not members:
            raise StoreError("No store was given to read rows from.")
        self.members = tuple(members)
        _refuse_mixed(self.members)
        self.growing = any(isinstance(each, TokenStore) and each.growing for each in self.members)
        """Whether it is a store that may still be written."""
        if self.growing and len(self.members) > 1:
            raise StoreError(
                "A store that is still being written is read alone: where the next one would begin "
                "is not known yet. Give ps.stream all inputs, or build this store first."
            )
        self.dtype: np.dtype[Any] = np.result_type(*(member.dtype for member in self.members))
        self._lay()

    def _lay(self) -> None:
        """Lay the pieces end to end."""
        pieces: list[tuple[int, int]] = []
        lengths: list[int] = []
        for number, member in enumerate(self.members):
            if isinstance(member, ArrayFile):
                pieces.append((number, -1))
                lengths.append(member.num_tokens)
            else:
                parts = member.manifest.parts
                pieces += [(number, part) for part in range(len(parts))]
                lengths += [part.num_tokens for part in parts]
        ends: NDArray[np.int64] = np.cumsum(lengths, dtype=np.int64)
        # The ends last: whoever reads meanwhile finds all that they lead to.
        self._pieces = pieces
        self.starts: NDArray[np.int64] = ends - np.array(lengths, np.int64)
        self.ends = ends

    def grow(self) -> bool:
        """Take up the parts that were sealed since; whether these are all there will be."""
        if not self.growing:
            return True
        store: Any = self.members[0]
        sealed: bool = store.poll()
        with GROWING:
            if len(store.manifest.parts) > len(self._pieces):
                self._lay()
        return sealed

    @property
    def least_tokens(self) -> int:
        """Ids in all pieces, and in the one that is being written as many as are known of."""
        store: Any = self.members[0]
        return max(self.num_tokens, store.least_tokens if self.growing else 0)

    def await_tokens(self, number: int) -> None:
        """Wait until there are so many ids, or it is known that there will not be."""
        store: Any = self.members[0]
        while self.num_tokens < number and not self.grow():
            if self.num_tokens < number:
                store.await_parts(len(self._pieces) + 1)

    @property
    def num_tokens(self) -> int:
        """Ids in all pieces."""
        return int(self.ends[-1]) if len(self.ends) else 0

    @property
    def digest(self) -> str:
        """A digest of the members' digests, in order."""
        return digest_json([member.digest for member in self.members])

    @property
    def tokenizer_digest(self) -> str | None:
        """The digest of the tokenizer of the first store, where there is one."""
        for member in self.members:
            if isinstance(member, TokenStore):
                told = member.manifest.contents["tokenizer"]
                return str(told["digest"] or told["canary"])
        return None

    @property
    def has_documents(self) -> bool:
        """Whether every member knows where its documents end."""
        return all(isinstance(member, TokenStore) for member in self.members)

    def piece(self, number: int) -> NDArray[Any]:
        """The ids of one piece, mapped into memory."""
        member, part = self._pieces[number]
        source = self.members[member]
        if isinstance(source, ArrayFile):
            return source.array()
        return source.part_array(part, "tokens")

    def bounds(self, number: int) -> NDArray[Any]:
        """Where the documents of one piece end, within the piece."""
        member, part = self._pieces[number]
        source = self.members[member]
        if isinstance(source, ArrayFile):
            raise StoreError(f"{source.path} does not record where documents end; a store does.")
        return source.part_array(part, "bounds")

    def continues(self, number: int) -> bool:
        """Whether the last document of one piece goes on in the next piece."""
        member, part = self._pieces[number]
        source = self.members[member]
        return isinstance(source, TokenStore) and source.manifest.parts[part].num_continued > 0

    @cached_property
    def has_loss(self) -> bool:
        """Whether some token of a store is marked as not to be trained on, or may be."""
        stores = [member for member in self.members if isinstance(member, TokenStore)]
        return any("loss" in part.files for each in stores for part in each.manifest.parts)

    def loss(self, number: int) -> NDArray[Any] | None:
        """1 where a token of one piece is trained on; None where all are."""
        member, part = self._pieces[number]
        source = self.members[member]
        if isinstance(source, ArrayFile) or "loss" not in source.manifest.parts[part].files:
            return None
        return source.part_array(part, "loss")

    def tokens(self, start: int, stop: int) -> NDArray[Any]:
        """Ids `[start, stop)` of the stream; a view where they lie in one piece."""
        number = int(np.searchsorted(self.ends, start, side="right"))
        pieces = []
        while start < stop:
            upto = min(stop, int(self.ends[number]))
            begin = int(self.starts[number])
            pieces.append(self.piece(number)[start - begin : upto - begin])
            start = upto
            number += 1
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def read_ahead(self, starts: NDArray[np.int64], length: int) -> None:
        """Tell the kernel which ids will be wanted soon; for a disk that is not in memory yet."""
        numbers = np.searchsorted(self.ends, starts, side="right")
        order = np.argsort(numbers, kind="stable")
        for rows in np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1):
            if len(rows):
                number = int(numbers[rows[0]])
                _will_need(self.piece(number), starts[rows] - self.starts[number], length)


def open_stream(source: StreamLike | ArrayFile | Sequence[StreamLike | ArrayFile]) -> Stream:
    """A stream over a store, a token file, or a list of them."""
    if isinstance(source, str | os.PathLike | TokenStore | ArrayFile):
        return Stream([_open(source)])
    return Stream([_open(each) for each in source])


def _open(source: StreamLike | ArrayFile) -> TokenStore | ArrayFile:
    if isinstance(source, TokenStore | ArrayFile):
        return source
    path = Path(source)
    if path.suffix in (".npy", ".bin") and not path.is_dir():
        return ArrayFile(path)
    return TokenStore(path)


def _refuse_mixed(members: tuple[TokenStore | ArrayFile, ...]) -> None:
    """Raise where two stores were made by different tokenizers."""
    stores = [member for member in members if isinstance(member, TokenStore)]
    for store in stores[1:]:
        first, other = (each.manifest.contents["tokenizer"] for each in (stores[0], store))
        if first["canary"] != other["canary"] or first["digest"] != other["digest"]:
            digests = [(told["digest"] or told["canary"])[:8] for told in (other, first)]
            raise StoreError(
                f"{store.path} was tokenized with {other['name']!r} (digest {digests[0]}), "
                f"{stores[0].path} with {first['name']!r} (digest {digests[1]}). The same id would "
                "mean different text, so they cannot share a row. Build them with one tokenizer."
            )


def _will_need(array: NDArray[Any], starts: NDArray[np.int64], length: int) -> None:
    """Ask for `length` ids from each of `starts` on, as far as they lie in this piece."""
    mapping: Any = array
    while isinstance(mapping, np.ndarray):
        mapping = mapping.base
    if not isinstance(mapping, mmap.mmap) or not hasattr(mmap, "MADV_WILLNEED"):
        return
    address = np.frombuffer(mapping, np.uint8, count=1).ctypes.data
    first_bytes = array.ctypes.data - address + starts * array.itemsize
    stops = np.minimum(first_bytes + length * array.itemsize, len(mapping))
    pages = first_bytes // mmap.PAGESIZE * mmap.PAGESIZE
    for page, stop in zip(pages.tolist(), stops.tolist(), strict=True):
        mapping.madvise(mmap.MADV_WILLNEED, page, stop - page)
