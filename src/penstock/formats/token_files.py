"""`TokenFiles`: token files of another tool, open for reading; and what a stream needs of them.

A member of a stream has parts. A part is an array of ids, with the offsets at which its documents
end and a loss mask where the member records them. `TokenStore`, `ArrayFile` and `TokenFiles` are
members.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from penstock.digest import digest_json
from penstock.errors import MissingTokenizerError, StoreError
from penstock.formats.arrays import all_blocks, check_dtype, check_ids
from penstock.formats.mapped import Array, FilePart, Ids, Integers, spread_blocks

if TYPE_CHECKING:
    from penstock.tokenize.tokenizer import Tokenizer


class Member(Protocol):
    """Tokens in parts, as `penstock.rows.tokens.Stream` reads them."""

    @property
    def path(self) -> object:
        """The path, for messages."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the ids."""

    @property
    def digest(self) -> str:
        """A digest of the contents."""

    @property
    def sealed(self) -> bool:
        """Whether these are all parts; False for a snapshot of a store that is being written."""

    @property
    def fetches_parts(self) -> bool:
        """Whether files are downloaded when they are first used."""

    @property
    def has_documents(self) -> bool:
        """Whether the ends of documents are recorded."""

    @property
    def has_loss(self) -> bool:
        """Whether a part has a loss mask."""

    @property
    def tokenizer_record(self) -> Mapping[str, Any] | None:
        """The name, digest and canary of the tokenizer, if it is known."""

    def load_tokenizer(self, tokenizer: object = None) -> "Tokenizer":
        """Return the tokenizer, which is `tokenizer` if it is not known."""

    @property
    def part_tokens(self) -> Integers:
        """The number of ids of each part."""

    def part_ids(self, part: int) -> Ids:
        """Return the ids of one part, mapped into memory."""

    def part_bounds(self, part: int) -> Array:
        """Return the offsets, within one part, at which its documents end."""

    def part_continues(self, part: int) -> bool:
        """Return whether the last document of one part continues in the next part."""

    def part_loss(self, part: int) -> Array | None:
        """Return the loss mask of one part, 1 where a token is trained on; None if all are."""

    def want(self, parts: Sequence[int], kinds: Sequence[str]) -> int:
        """Begin to download files of some parts that are not here; return how many bytes."""


class LocalTokens:
    """The answers that are the same for all token files on this machine; a base of members."""

    path: object
    sealed = True
    fetches_parts = False
    has_documents = False
    has_loss = False
    tokenizer: "Tokenizer | None" = None
    """The tokenizer, if it was given."""

    @property
    def tokenizer_record(self) -> Mapping[str, Any] | None:
        """The name, digest and canary of the tokenizer, if it was given."""
        known = self.tokenizer
        if known is None:
            return None
        return {"name": known.name, "digest": known.digest, "canary": known.canary}

    def load_tokenizer(self, tokenizer: object = None) -> "Tokenizer":
        """Return the tokenizer with which the files were opened, or else `tokenizer`, loaded.

        Raises:
            MissingTokenizerError: neither was given.
        """
        if self.tokenizer is not None:
            return self.tokenizer
        if tokenizer is None:
            raise MissingTokenizerError(
                f"{self.path} does not record its tokenizer. Give it: tokenizer= of open_tokens, "
                "--tokenizer on the command line, or data.tokens.tokenizer in a recipe."
            )
        from penstock.tokenize.tokenizer import load_tokenizer

        return load_tokenizer(tokenizer)

    def part_bounds(self, part: int) -> Array:
        """Return the offsets, within one part, at which its documents end."""
        raise StoreError(f"{self.path} does not record where documents end; a store does.")

    def part_continues(self, part: int) -> bool:
        """Return False: documents of token files are in one file each."""
        return False

    def part_loss(self, part: int) -> Array | None:
        """Return the loss mask of one part; None if all tokens are trained on."""
        return None

    def want(self, parts: Sequence[int], kinds: Sequence[str]) -> int:
        """Return 0: no file has to be downloaded."""
        return 0


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
            for block in spread_blocks(array):
                check_ids(block, self.part_name(number), vocab_size)
            dtypes.add(array.dtype)
            sizes.append(len(array))
        self.dtype: np.dtype[Any] = np.result_type(*dtypes)
        check_dtype(self.dtype, path)  # int64 and uint64 have no common dtype of integers
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


def verify_tokens(files: TokenFiles, report: Callable[[int, int], None] | None = None) -> int:
    """Read all ids, and return how many were compared with the vocabulary size.

    Without a vocabulary size, only negative ids are found. Token files have no checksums, so a
    changed id that is in the vocabulary is not found.

    Args:
        files: The files that `open_tokens` opened.
        report: Called with the number of files that are done, and of all files.

    Raises:
        StoreError: an id is negative or not below the vocabulary size, or a mask is not 0 or 1.
    """
    num_parts = len(files.part_tokens)
    for part in range(num_parts):
        check_all(files.part_ids(part), files.part_name(part), files.vocab_size)
        files.check_part(part)
        mask = files.part_loss(part)
        for block in () if mask is None else all_blocks(mask):
            check_mask(block, files.path)
        if report is not None:
            report(part + 1, num_parts)
    return files.num_tokens


def check_all(ids: Ids, path: object, vocab_size: int | None) -> None:
    """Raise StoreError if one of all ids is negative, or not below the vocabulary size."""
    for block in all_blocks(ids):
        check_ids(block, path, vocab_size)


def check_mask(mask: Array, path: object) -> None:
    """Raise StoreError if a value of a loss mask is not 0 or 1."""
    if len(mask) and int(mask.max()) > 1:
        raise StoreError(f"{path} has a loss mask of {int(mask.max())}, not 0 or 1.")
