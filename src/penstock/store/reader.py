"""Reading a store: any token, any document, in place.

Opening reads the manifest and nothing else. A part is mapped into memory when it is
first touched, after its size and header were found to be what the manifest says; the
number of parts mapped at once is bounded, so a store of 10,000 parts opens in a blink
and reads with 256 file descriptors, faster with more. NumPy is all it takes to train
from a store: the tokenizer is loaded only to decode.
"""

import mmap
import os
import sys
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from penstock.errors import StoreError
from penstock.store.manifest import Manifest, PartRecord, part_file, read_manifest
from penstock.store.npy import HEADER_BYTES, header

if TYPE_CHECKING:
    from penstock.tokenize.tokenizer import Tokenizer

__all__ = ["Origin", "TokenStore", "tokenizer_of"]


def tokenizer_of(manifest: Manifest, tokenizer: Any = None) -> "Tokenizer":
    """The tokenizer that the store was built with.

    Raises:
        StoreError: `tokenizer`, or what the recorded name means today, is another one.
    """
    from penstock.tokenize.tokenizer import load_tokenizer

    told = manifest.contents["tokenizer"]
    added = tuple(told.get("added_tokens", ()))
    if tokenizer is None:
        found = _by_name(told["name"], added)
    else:
        found = load_tokenizer(tokenizer, add_tokens=added)
    undigested = told["digest"] is None
    if found.digest != told["digest"] or (undigested and found.canary != told["canary"]):
        raise StoreError(
            f"The store was tokenized with {told['name']} (digest {str(told['digest'])[:8]}), and "
            f"{found.name} has the digest {str(found.digest)[:8]}. The same id would mean other "
            "text. Give the tokenizer of the store with tokenizer=."
        )
    return found


@lru_cache(maxsize=8)
def _by_name(name: str, added: tuple[str, ...]) -> "Tokenizer":
    from penstock.tokenize.tokenizer import load_tokenizer

    return load_tokenizer(name, add_tokens=added)


# Every mapped file holds a descriptor, and all open stores share half of those that the
# process may have. Opening a part again takes 60 µs, as long as a whole batch from open ones.
_open_stores: "WeakSet[TokenStore]" = WeakSet()
_MOST_MAPPED = 16_384  # of the 65,530 maps that Linux lets a process have


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a document came from."""

    file: str
    offset: int
    """Byte offset in the decompressed text, or row number in a table."""


class TokenStore:
    """A sealed store, open for reading.

    Safe to use from several threads, to pickle, and to use after a fork. Arrays are
    views of the files where they lie in one part, so they are read-only and stay valid
    as long as you keep them.
    """

    sealed: bool = True
    """Whether these are all parts; False for a snapshot of a store that is being written."""
    num_coming: int = 0
    """Tokens that the next part is known to have; 0 if the store is sealed."""

    def __init__(self, path: str | os.PathLike[str], manifest: Manifest | None = None) -> None:
        self.path = Path(path)
        self.manifest: Manifest = read_manifest(self.path) if manifest is None else manifest
        self.dtype = np.dtype(self.manifest.contents["dtype"]).newbyteorder("<")
        parts = self.manifest.parts
        self._token_ends = np.cumsum([part.num_tokens for part in parts], dtype=np.int64)
        self._document_ends = np.cumsum([part.num_documents for part in parts], dtype=np.int64)
        self._mapped: OrderedDict[tuple[int, str], NDArray[Any]] = OrderedDict()
        self._lock = Lock()
        _open_stores.add(self)

    def __repr__(self) -> str:
        return (
            f"TokenStore({str(self.path)!r}: {self._counted()}, {self.num_tokens:,} tokens, "
            f"{self.manifest.contents['tokenizer']['name']})"
        )

    def _counted(self) -> str:
        documents = self.manifest.num_documents
        pieces = f" in {len(self):,} pieces" if len(self) != documents else ""
        return f"{documents:,} documents{pieces}"

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "digest": self.digest}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["path"])  # type: ignore[misc]
        if self.digest != state["digest"]:
            raise StoreError(f"{self.path} is not the store it was when it was pickled.")

    def __len__(self) -> int:
        """Documents; one that is stored in pieces counts as often as it has pieces."""
        return int(self._document_ends[-1]) if len(self._document_ends) else 0

    def __iter__(self) -> Iterator[NDArray[Any]]:
        """The tokens of each document, in order."""
        for number in range(len(self.manifest.parts)):
            tokens = self.part_array(number, "tokens")
            start = 0
            for stop in self.part_array(number, "bounds").tolist():
                yield tokens[start:stop]
                start = stop

    @property
    def digest(self) -> str:
        """The digest of the manifest, and so of every byte of the store."""
        return self.manifest.digest

    @property
    def num_tokens(self) -> int:
        """Tokens in all documents, end and begin tokens included."""
        return int(self._token_ends[-1]) if len(self._token_ends) else 0

    @property
    def part_tokens(self) -> NDArray[np.int64]:
        """How many tokens each part has."""
        return np.diff(self._token_ends, prepend=0)

    def document(self, index: int) -> NDArray[Any]:
        """The tokens of one document, its end token included.

        Negative indices count from the end, as in a list.
        """
        part, within = self._find_document(index)
        bounds = self.part_array(part, "bounds")
        start = int(bounds[within - 1]) if within else 0
        return self.part_array(part, "tokens")[start : int(bounds[within])]

    def tokens(self, start: int, stop: int) -> NDArray[Any]:
        """The tokens `[start, stop)` of all documents laid end to end, across parts.

        A view where they lie in one part, else a copy.
        """
        if not 0 <= start <= stop <= self.num_tokens:
            raise IndexError(
                f"tokens [{start:,}, {stop:,}) are not in a store of {self.num_tokens:,} tokens"
            )
        part = int(np.searchsorted(self._token_ends, start, side="right"))
        # Copied part by part: to hold a view of each would be to hold all their files open.
        joined = np.empty(stop - start, self.dtype)
        done = 0
        while done < len(joined):
            begin = int(self._token_ends[part]) - self.manifest.parts[part].num_tokens
            piece = self.part_array(part, "tokens")[start + done - begin : stop - begin]
            if len(piece) == len(joined):
                return piece
            joined[done : done + len(piece)] = piece
            done += len(piece)
            part += 1
        return joined

    def origin(self, index: int) -> Origin:
        """The file and place that document `index` came from."""
        part, within = self._find_document(index)
        file, offset = self.part_array(part, "origin")[within].tolist()
        if file >= len(self._input_names):
            raise StoreError(
                f"{self.path}: document {index:,} says that it came from input file {file}, the "
                f"manifest lists {len(self._input_names)}. Copy or build the store again."
            )
        return Origin(self._input_names[file], offset)

    @cached_property
    def _input_names(self) -> list[str]:
        builds = self.manifest.contents["builds"]
        return [each["name"] for done in builds for each in done["inputs"]]

    def edges(self, index: int) -> tuple[bool, bool]:
        """Whether a document begins at `index`, and whether it ends there.

        Both for a whole document; a piece of one lacks the edges that other pieces have.
        """
        part, within = self._find_document(index)
        parts = self.manifest.parts
        begins = within > 0 or part == 0 or not parts[part - 1].num_continued
        ends = within < parts[part].num_documents - 1 or not parts[part].num_continued
        return begins, ends

    def decode(self, index: int, tokenizer: Any = None) -> bytes:
        """The bytes of document `index`, without the tokens that were put around it.

        A document that is stored in pieces has several indices, one a piece.

        Args:
            index: Number of the document.
            tokenizer: What the store was built with, where its name alone does not find it.
        """
        tokens = self.document(index)
        edges = self.manifest.contents
        begins, ends = self.edges(index)
        if ends and edges["eos_id"] is not None and len(tokens) and tokens[-1] == edges["eos_id"]:
            tokens = tokens[:-1]
        if begins and edges["bos_id"] is not None and len(tokens) and tokens[0] == edges["bos_id"]:
            tokens = tokens[1:]
        return tokenizer_of(self.manifest, tokenizer).decode(tokens)

    def text(self, index: int, tokenizer: Any = None) -> str:
        """The text of document `index`; see `decode`."""
        return self.decode(index, tokenizer).decode(errors="replace")

    def part_array(self, part: int, kind: str) -> NDArray[Any]:
        """One array of one part, mapped into memory and checked on first touch."""
        key = (part, kind)
        with self._lock:
            array = self._mapped.get(key)
            if array is not None:
                self._mapped.move_to_end(key)
                return array
            array = self._map(self.manifest.parts[part], kind)
            self._mapped[key] = array
            while len(self._mapped) > _most_mapped():
                self._mapped.popitem(last=False)
            return array

    def _map(self, part: PartRecord, kind: str) -> NDArray[Any]:
        path = self.path / part_file(part.number, kind)
        dtype, shape = expected_array(part, kind, self.dtype)
        with _opened(path) as stream:
            size = os.fstat(stream.fileno()).st_size
            if size != part.files[kind][0]:
                raise StoreError(
                    f"{path} has {size:,} bytes, and its manifest says {part.files[kind][0]:,}. It "
                    "was cut off or overwritten, perhaps while copying. Copy or build it again."
                )
            if stream.read(HEADER_BYTES) != header(dtype, shape):
                raise StoreError(
                    f"{path} does not begin as a {kind} file of part {part.number} does: another "
                    "file stands in its place, or it is damaged. Copy or build it again."
                )
            if 0 in shape:
                return np.zeros(shape, dtype)
            # A plain array over the map: NumPy's memmap class costs ten times as much to slice.
            mapped = np.memmap(stream, dtype, "r", HEADER_BYTES, shape)
            if kind == "tokens" and self._exceeds_memory:
                _read_no_more_than_asked(mapped)
            return mapped.view(np.ndarray)

    @cached_property
    def _exceeds_memory(self) -> bool:
        """Whether the tokens cannot all stay in memory once they were read."""
        return self.num_tokens * int(self.dtype.itemsize) > _memory_bytes() // 2

    def _find_document(self, index: int) -> tuple[int, int]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"document {index:,} is not in a store of {len(self):,} documents")
        index %= len(self)
        part = int(np.searchsorted(self._document_ends, index, side="right"))
        before = int(self._document_ends[part - 1]) if part else 0
        return part, index - before


def expected_array(
    part: PartRecord, kind: str, dtype: "np.dtype[Any]"
) -> tuple["np.dtype[Any]", tuple[int, ...]]:
    """The type and shape that one file of a part must have."""
    return {
        "tokens": (dtype, (part.num_tokens,)),
        "bounds": (np.dtype("<u8"), (part.num_documents,)),
        "origin": (np.dtype("<u8"), (part.num_documents, 2)),
        "loss": (np.dtype("u1"), (part.num_tokens,)),
    }[kind]


def _most_mapped() -> int:
    """How many files each open store may keep mapped."""
    try:
        import resource

        descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    except ImportError:  # Windows, where a map holds none
        descriptors = _MOST_MAPPED
    if descriptors < 0:  # without limit
        descriptors = _MOST_MAPPED
    return max(1, min(descriptors // 2, _MOST_MAPPED) // max(1, len(_open_stores)))


def _memory_bytes() -> int:
    if not hasattr(os, "sysconf"):  # Windows
        return sys.maxsize
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _read_no_more_than_asked(mapped: "np.memmap[Any, Any]") -> None:
    """Tell the kernel that what lies beside a row is not wanted next.

    It fetches some 100 KB around every page by default. That warms up a store which fits into
    memory, and is thrown away again where it does not: 32 rows took 54 ms so, and 3 without.
    """
    mapping = mapped._mmap  # type: ignore[attr-defined]
    if hasattr(mmap, "MADV_RANDOM"):
        mapping.madvise(mmap.MADV_RANDOM)


def _opened(path: Path) -> Any:
    try:
        return path.open("rb", buffering=0)
    except FileNotFoundError:
        raise StoreError(f"{path} is missing. Copy or build the store again.") from None
