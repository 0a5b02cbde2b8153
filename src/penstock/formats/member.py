"""What a stream of tokens needs from each of its members: stores and token files alike.

A member has parts. A part is an array of ids, with the offsets at which its documents end and a
loss mask where the member records them. `TokenStore`, `ArrayFile` and `TokenFiles` are members.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.errors import MissingTokenizerError, StoreError

if TYPE_CHECKING:
    from penstock.tokenize.tokenizer import Tokenizer

Array = NDArray[Any]
Integers = NDArray[np.int64]


class Ids(Protocol):
    """Token ids: an array of NumPy, or a `ScatteredArray`, whose slices are arrays."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the ids."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: slice, /) -> Array: ...


class Member(Protocol):
    """Tokens in parts, as `penstock.rows.tokens.Stream` reads them."""

    @property
    def path(self) -> object:
        """The path, for messages."""
        ...

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the ids."""
        ...

    @property
    def digest(self) -> str:
        """A digest of the contents."""
        ...

    @property
    def sealed(self) -> bool:
        """Whether these are all parts; False for a snapshot of a store that is being written."""
        ...

    @property
    def num_coming(self) -> int:
        """The next part has at least this many tokens; 0 if the member is sealed."""
        ...

    @property
    def fetches_parts(self) -> bool:
        """Whether files are downloaded when they are first used."""
        ...

    @property
    def has_documents(self) -> bool:
        """Whether the ends of documents are recorded."""
        ...

    @property
    def has_loss(self) -> bool:
        """Whether a part has a loss mask."""
        ...

    @property
    def tokenizer_record(self) -> Mapping[str, Any] | None:
        """The name, digest and canary of the tokenizer, if it is known."""
        ...

    def load_tokenizer(self, tokenizer: object = None) -> "Tokenizer":
        """Return the tokenizer, which is `tokenizer` if it is not known."""
        ...

    @property
    def part_tokens(self) -> Integers:
        """The number of ids of each part."""
        ...

    def part_ids(self, part: int) -> Ids:
        """Return the ids of one part, mapped into memory."""
        ...

    def part_bounds(self, part: int) -> Array:
        """Return the offsets, within one part, at which its documents end."""
        ...

    def part_continues(self, part: int) -> bool:
        """Return whether the last document of one part continues in the next part."""
        ...

    def part_loss(self, part: int) -> Array | None:
        """Return the loss mask of one part, 1 where a token is trained on; None if all are."""
        ...

    def want(self, parts: Sequence[int], kinds: Sequence[str]) -> int:
        """Begin to download files of some parts that are not here; return how many bytes."""
        ...


class LocalTokens:
    """The answers that are the same for all token files on this machine; a base of members."""

    path: object
    sealed = True
    num_coming = 0
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
