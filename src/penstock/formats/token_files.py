"""`TokenFiles`: token files of another tool, open for reading."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from penstock.digest import digest_json
from penstock.errors import StoreError
from penstock.formats.mapped import HeldArray, MappedArray
from penstock.formats.member import Array, Ids, Integers, LocalTokens
from penstock.formats.sample import check_dtype, check_sampled, spread_blocks
from penstock.formats.scattered import ScatteredArray

if TYPE_CHECKING:
    from penstock.tokenize.tokenizer import Tokenizer


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


class Settings(NamedTuple):
    """The arguments of `open_tokens` that say how files are read."""

    dtype: str | None = None
    vocab_size: int | None = None
    column: str | None = None


class TokenFiles(LocalTokens):
    """Token files of another tool, open in place. `open_tokens` returns it.

    `Windows`, `Packs`, `Documents` and lists of stores take it like a store. Its digest covers the
    ends of documents and 17 blocks of 64 KiB of each file. It is weaker than the digest of a
    store: a change between the blocks is not noticed. It can be pickled, and used from several
    threads and after a fork.
    """

    def __init__(
        self,
        path: object,
        format: str,
        parts: Sequence[FilePart],
        vocab_size: int | None,
        tokenizer: "Tokenizer | None",
        reopen: Callable[[], "TokenFiles"],
    ) -> None:
        """Check the ids of sampled blocks; see `open_tokens`, which calls this."""
        self.path = path
        self.format = format
        self.vocab_size = vocab_size
        """The number of ids of the vocabulary; None if it was not given."""
        self.tokenizer = tokenizer
        self._parts, self._reopen = tuple(parts), reopen
        dtypes, sizes = set[np.dtype[Any]](), []
        for number, part in enumerate(self._parts):  # one at a time: each keeps a file open
            array = part.ids.array()
            check_dtype(array.dtype, self.part_name(number))
            check_sampled(array, self.part_name(number), vocab_size)
            dtypes.add(array.dtype)
            sizes.append(len(array))
        self.dtype: np.dtype[Any] = np.result_type(*dtypes)
        if self.dtype.kind not in "iu":  # int64 and uint64 have no common integer dtype
            names = " and ".join(sorted(each.name for each in dtypes))
            raise StoreError(
                f"{path} has {names} files, which have no common dtype of integers. Write all "
                "files with one of them."
            )
        self.is_uniform = dtypes == {self.dtype}
        """Whether the ids of all files have this dtype, in this byte order."""
        self._part_tokens = np.array(sizes, np.int64)
        self.has_documents = all(each.bounds is not None for each in self._parts)
        self.has_loss = any(each.loss is not None for each in self._parts)

    def __repr__(self) -> str:
        documents = f"{len(self):,} documents, " if self.has_documents else ""
        return (
            f"TokenFiles({str(self.path)!r}: {self.format}, {documents}{self.num_tokens:,} tokens, "
            f"{self.dtype})"
        )

    def __reduce__(self) -> tuple[object, ...]:
        # Files are mapped again. A worker process must not read other files of the same name.
        return _reopened, (self._reopen, self.digest)

    def __len__(self) -> int:
        """The number of documents; 0 if the format does not record them."""
        return int(self._document_ends[-1])

    def __iter__(self) -> Iterator[Array]:
        """The tokens of each document, in order."""
        return (self.document(number) for number in range(len(self)))

    @property
    def num_tokens(self) -> int:
        """The number of ids."""
        return int(self._part_tokens.sum())

    @cached_property
    def digest(self) -> str:
        """A digest of the format, the ends of documents and sampled blocks, computed once."""
        parts = []
        for part in self._parts:
            ids = part.ids.array()
            sampled = [_sha256(block) for block in spread_blocks(ids)]
            bounds = None if part.bounds is None else _sha256(part.bounds)
            masks = None if part.loss is None else [*map(_sha256, spread_blocks(part.loss.array()))]
            parts.append([len(ids), ids.dtype.str, bounds, sampled, masks])
        return digest_json(["token files", self.format, parts])

    @property
    def part_tokens(self) -> Integers:
        """The number of ids of each file."""
        return self._part_tokens

    def part_name(self, part: int) -> str:
        """Return the path, and the number of one file if there are several, for messages."""
        count = len(self._parts)
        return f"{self.path} (file {part + 1:,} of {count:,})" if count > 1 else str(self.path)

    def part_ids(self, part: int) -> Ids:
        """Return the ids of one file, mapped into memory."""
        return self._parts[part].ids.array()

    def part_located(self, part: int) -> tuple[Ids, int]:
        """Return the ids of one file, and where they begin in memory; 0 if they have gaps."""
        return self._parts[part].ids.located()

    def part_bounds(self, part: int) -> Array:
        """Return the offsets, within one file, at which its documents end."""
        bounds = self._parts[part].bounds
        return super().part_bounds(part) if bounds is None else bounds

    def part_loss(self, part: int) -> Array | None:
        """Return the loss mask of one file; None if all tokens are trained on."""
        mask = self._parts[part].loss
        return None if mask is None else mask.array()

    def check_part(self, part: int) -> None:
        """Compare the headers of all documents of one file, if the format has such headers."""
        check = self._parts[part].check
        if check is not None:
            check()

    def document(self, index: int) -> Array:
        """Return the tokens of one document; negative numbers count from the end."""
        size = len(self)
        if not -size <= index < size:
            raise IndexError(f"document {index:,} is not among the {size:,} documents")
        index %= size
        number = int(np.searchsorted(self._document_ends, index, side="right"))
        bounds = self.part_bounds(number)
        index -= int(self._document_ends[number]) - len(bounds)
        start = int(bounds[index - 1]) if index else 0
        return self.part_ids(number)[start : int(bounds[index])]

    @cached_property
    def _document_ends(self) -> Integers:
        """The number of documents up to the end of each file."""
        counts = [0 if part.bounds is None else len(part.bounds) for part in self._parts]
        return np.cumsum(counts, dtype=np.int64)

    def decode(self, index: int) -> str:
        """Return the text of one document, with its special tokens.

        Raises:
            MissingTokenizerError: `open_tokens` was called without `tokenizer=`.
        """
        return self.load_tokenizer().decode(self.document(index))


def _reopened(reopen: Callable[[], TokenFiles], digest: str) -> TokenFiles:
    opened = reopen()
    if opened.digest != digest:
        raise StoreError(f"{opened.path} was changed after it was pickled. Open it again.")
    return opened


def _sha256(array: Array) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()


def checked_bounds(bounds: Array, num_tokens: int, path: object) -> Array:
    """Return ends of documents as `<u8`, after a check that they ascend and cover all tokens.

    Raises:
        StoreError: an end is before the one before it, or after the last token.
    """
    if not len(bounds):
        if num_tokens:
            raise StoreError(f"{path} lists no documents, but there are {num_tokens:,} tokens.")
        return np.zeros(0, "<u8")
    # Compared, and not subtracted: a difference of unsigned numbers wraps around.
    falls = np.flatnonzero(bounds[1:] < bounds[:-1])
    if int(bounds[0]) < 0 or len(falls):
        number = int(falls[0]) + 1 if len(falls) else 0
        raise StoreError(
            f"{path}: document {number:,} ends at token {int(bounds[number]):,}, before it begins. "
            "The file is damaged."
        )
    if int(bounds[-1]) != num_tokens:
        raise StoreError(
            f"{path}: the last document ends at token {int(bounds[-1]):,}, but there are "
            f"{num_tokens:,} tokens. A file is truncated, or the two do not belong together."
        )
    return bounds.astype("<u8", copy=False)
