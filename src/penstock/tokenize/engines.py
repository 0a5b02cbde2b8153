"""The engines that turn text into ids.

Every engine takes an Arrow array of documents and returns one flat array of ids and `len + 1`
offsets. A tokenizer.json is encoded by gigatoken (the module `gigatoken`) or by `tokenizers`, the
reference; ids never depend on the choice. Two more engines need no tokenizer.json: one for bytes,
below, and one for Python objects, in the module `objects`.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import ArrayLike, NDArray

from penstock.errors import TokenizerError
from penstock.tokenize.definition import Definition
from penstock.tokenize.special_tokens import PlainText, load_reference

if TYPE_CHECKING:
    import tokenizers

Encoded = tuple[NDArray[np.uint32], NDArray[np.int64]]
"""Ids of all documents, concatenated, and the offsets where each document begins and ends."""
NO_DOCUMENTS: Encoded = (np.zeros(0, np.uint32), np.zeros(1, np.int64))
"""The result for no documents."""


class Engine(Protocol):
    """Encodes many documents at once; safe to call from several threads."""

    name: str

    @property
    def vocab_size(self) -> int | None:
        """One more than the largest id that `encode` can return, or None if unknown."""

    def encode(self, texts: pa.LargeBinaryArray) -> Encoded:
        """Ids of `texts`, which are valid UTF-8."""

    def decode(self, ids: NDArray[np.uint32]) -> bytes:
        """The bytes that `ids` stand for."""


class TokenizersEngine:
    """Hugging Face `tokenizers`: the reference, and slower."""

    name = "tokenizers"
    vocab_size = None

    def __init__(self, definition: Definition, *, parse: bool) -> None:
        self._definition = definition
        self.plain = None if parse else PlainText(definition)

    def __getstate__(self) -> dict[str, object]:
        # A pickled `tokenizers.Tokenizer` loses the setting that special tokens are text.
        plain = None if self.plain is None else PlainText(self._definition)
        return {"_definition": self._definition, "plain": plain}

    @cached_property
    def _tokenizer(self) -> "tokenizers.Tokenizer":
        # The reference is loaded on first use: with gigatoken as the engine, many processes never
        # need it.
        if self.plain is not None and not self.plain.hidden:
            return self.plain.tokenizer(())  # has the same vocabulary; load it once
        return load_reference(self._definition.text, self._definition.name)

    def load(self) -> None:
        """Load the definition now instead of at first use.

        Raises:
            TokenizerError: `tokenizers` cannot load the definition.
        """
        assert self._tokenizer is not None
        if self.plain:
            self.plain.tokenizer(())

    def encode(self, texts: pa.LargeBinaryArray) -> Encoded:
        """Ids of `texts`, without the tokens that a post-processor would add around them."""
        strings = [text.decode() for text in texts.to_pylist()]
        tokenizer = self.plain.tokenizer(strings) if self.plain else self._tokenizer
        # The fast variant does not compute positions in the text.
        encodings = tokenizer.encode_batch_fast(strings, add_special_tokens=False)
        ids, offsets = concatenated([encoding.ids for encoding in encodings])
        if self.plain:
            self.plain.check(ids)
        return ids, offsets

    def splits(self, left: str, right: str) -> bool:
        """Whether the pre-tokenizer splits `left + right` between the two texts.

        Also requires that the ids of `left + right` are the ids of `left`, then those of `right`.
        """
        texts = [left, right, left + right]
        # The tokenizer that encodes the text: one that parses "</s>" as a special token would
        # split there, and Unigram's ids may depend on everything since the last split.
        tokenizer = self.plain.tokenizer(texts) if self.plain else self._tokenizer
        one, two, both = tokenizer.encode_batch(texts, add_special_tokens=False)
        if one.ids + two.ids != both.ids:
            return False
        # The last token of `left` and the first of `right` must be of different pre-tokens.
        words = both.word_ids[max(0, len(one.ids) - 1) : len(one.ids) + 1]
        return len(set(words)) == len(words)

    def decode(self, ids: NDArray[np.uint32]) -> bytes:
        """The text that `ids` stand for; equal to the original only if the model is reversible."""
        return str(self._tokenizer.decode(ids.tolist(), skip_special_tokens=False)).encode()


class ByteEngine:
    """Each byte is a token. 256 ends a document, and added tokens follow."""

    name = "bytes"
    vocab_size = 256

    def __init__(self, added: Mapping[str, int] | None = None) -> None:
        self._added = {number: token.encode() for token, number in (added or {}).items()}

    def encode(self, texts: pa.LargeBinaryArray) -> Encoded:
        """The bytes themselves."""
        if not len(texts):  # Arrow may then have no buffer of offsets
            return NO_DOCUMENTS
        data, offsets = text_buffers(texts)
        return data.astype(np.uint32), offsets

    def decode(self, ids: NDArray[np.uint32]) -> bytes:
        """The bytes and the added tokens, without the end token."""
        # Without added tokens, one array operation; with them, a loop over ids.
        if not self._added or not (ids > 256).any():
            return bytes(ids[ids < 256].astype(np.uint8))
        words = [bytes((each,)) if each < 256 else self._added.get(each, b"") for each in ids]
        return b"".join(words)


def text_buffers(texts: pa.LargeBinaryArray) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """The bytes of an array of texts, and where each text begins and ends in them."""
    edges = np.frombuffer(texts.buffers()[1], np.int64, count=len(texts) + 1)
    return np.frombuffer(texts.buffers()[2] or b"", np.uint8, count=int(edges[-1])), edges


def concatenated(rows: list[Sequence[int]]) -> Encoded:
    """The ids of some documents in one array.

    Raises:
        TokenizerError: an id does not fit into 32 bits.
    """
    offsets = offsets_of([len(row) for row in rows])
    # int64 first: an id that does not fit must raise, and not wrap around to another token.
    ids = np.fromiter(chain.from_iterable(rows), np.int64, count=int(offsets[-1]))
    if len(ids) and (ids.min() < 0 or ids.max() > 0xFFFF_FFFF):
        raise TokenizerError(
            f"The tokenizer returned ids from {ids.min():,} to {ids.max():,}, but a store "
            f"holds only ids from 0 to {0xFFFF_FFFF:,}. Use another tokenizer."
        )
    return ids.astype(np.uint32), offsets


def offsets_of(lengths: ArrayLike) -> NDArray[np.int64]:
    """Where each of several texts begins, and where the last one ends.

    >>> offsets_of([3, 0, 2])
    array([0, 3, 3, 5])
    """
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)))
