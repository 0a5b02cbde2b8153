"""The engines that turn text into ids.

Every engine takes an Arrow array of documents and returns one flat array of ids and `len + 1`
offsets. A tokenizer.json is encoded by gigatoken (the module `gigatoken`) or by `tokenizers`, the
reference; ids never depend on the choice. Two more engines need no tokenizer.json: one for bytes,
and one for Python objects of other libraries.

An object needs only a method `encode`. `describe_object` reads all other properties that penstock
uses, once. Their names differ between tiktoken, `transformers` and the user's own classes, and only
this module knows these names.
"""

from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from typing import Any, Protocol

import numpy as np
import tokenizers
from numpy.typing import ArrayLike, NDArray

from penstock.digest import digest_bytes
from penstock.errors import MissingExtraError, TokenizerError
from penstock.tokenize.definition import Definition
from penstock.tokenize.special_tokens import PlainText, load_reference

ArrowTexts = Any
"""A `pa.LargeBinaryArray` of documents; `Any`, because pyarrow has no type annotations."""
Encoded = tuple[NDArray[np.uint32], NDArray[np.int64]]
"""Ids of all documents, concatenated, and the offsets where each document begins and ends."""


class Engine(Protocol):
    """Encodes many documents at once; safe to call from several threads."""

    name: str

    @property
    def vocab_size(self) -> int | None:
        """One more than the largest id that `encode` can return, or None if unknown."""

    def encode(self, texts: ArrowTexts) -> Encoded:
        """Ids of `texts`, which are valid UTF-8."""

    def decode(self, ids: NDArray[np.uint32]) -> bytes:
        """The bytes that `ids` stand for."""


class TokenizersEngine:
    """Encodes with Hugging Face `tokenizers`, the reference, which is slower than gigatoken."""

    name = "tokenizers"
    vocab_size = None

    def __init__(self, definition: Definition, *, parse: bool) -> None:
        self._definition = definition
        self.plain = None if parse else PlainText(definition)

    def __reduce__(self) -> tuple[Callable[[], "TokenizersEngine"], tuple[()]]:
        # A pickled `tokenizers.Tokenizer` loses the setting that special tokens are text.
        return partial(TokenizersEngine, self._definition, parse=self.plain is None), ()

    @cached_property
    def _tokenizer(self) -> tokenizers.Tokenizer:
        # Loaded on first use: with gigatoken as the engine, many processes never need it.
        if self.plain is not None and not self.plain.hidden:
            return self.plain.tokenizer(())  # has the same vocabulary; load it once
        return load_reference(self._definition.text, self._definition.name)

    def _loaded_for(self, texts: list[str]) -> tokenizers.Tokenizer:
        """The tokenizer that encodes these texts."""
        return self.plain.tokenizer(texts) if self.plain else self._tokenizer

    def load(self) -> None:
        """Load the definition now instead of at first use; raises if that fails."""
        assert self._tokenizer is not None
        self._loaded_for([])

    def encode(self, texts: ArrowTexts) -> Encoded:
        """Ids of `texts`, without the tokens that a post-processor would add around them."""
        strings = [text.decode() for text in texts.to_pylist()]
        # The fast variant does not compute positions in the text.
        encodings = self._loaded_for(strings).encode_batch_fast(strings, add_special_tokens=False)
        ids, offsets = concatenated([encoding.ids for encoding in encodings])
        if self.plain:
            self.plain.check(ids)
        return ids, offsets

    def splits(self, left: str, right: str) -> bool:
        """Whether the pre-tokenizer splits `left + right` between the two texts.

        Also requires that the ids of `left + right` are the ids of `left`, then those of `right`.
        """
        texts = [left, right, left + right]
        one, two, both = self._loaded_for(texts).encode_batch(texts, add_special_tokens=False)
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

    def encode(self, texts: ArrowTexts) -> Encoded:
        """Ids of `texts`: the values of their bytes."""
        data, offsets = text_buffers(texts)
        return data.astype(np.uint32), offsets

    def decode(self, ids: NDArray[np.uint32]) -> bytes:
        """The bytes and the texts of added tokens; the end token is left out."""
        # Without added tokens, one array operation is enough; with them, a loop over ids is needed.
        if not self._added or not (ids > 256).any():
            return bytes(ids[ids < 256].astype(np.uint8))
        words = [bytes((each,)) if each < 256 else self._added.get(each, b"") for each in ids]
        return b"".join(words)


def as_texts(texts: Sequence[bytes]) -> ArrowTexts:
    """The texts as an Arrow array."""
    from penstock.sources.batch import binary_array  # imports Arrow

    return binary_array(texts)


def text_buffers(texts: ArrowTexts) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """The concatenated bytes of an array of texts, and the offsets where texts begin and end."""
    if not len(texts):  # Arrow may then have no buffer of offsets
        return np.zeros(0, np.uint8), np.zeros(1, np.int64)
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


@dataclass(frozen=True, slots=True)
class ObjectDescription:
    """The properties that a tokenizer object reports; None or empty if it does not report one."""

    name: str
    vocab_size: int | None
    eos_id: int | None
    bos_id: int | None
    eos_token: str | None
    special_tokens: dict[str, int]
    """The special tokens and their ids, without the unknown token."""
    ranks: Mapping[bytes, int] | None
    """The ordinary tokens of a tiktoken encoding, as bytes, and their ids; None for others."""

    def digest(self, tokenizer: Any) -> str | None:
        """A digest of a tiktoken encoding; None for other objects, whose settings are unknown."""
        if self.ranks is None:
            return None
        # Sorted, so that the digest does not depend on the order of a dict.
        special = sorted(self.special_tokens.items())
        lines = [tokenizer._pat_str.encode(), repr(special).encode()]
        lines += [f"{token.hex()} {rank}".encode() for token, rank in sorted(self.ranks.items())]
        return digest_bytes(b"\n".join(lines))


def describe_object(tokenizer: object) -> ObjectDescription:
    """The properties of a tokenizer object that penstock needs; each is read once.

    Raises:
        TokenizerError: the object has no method `encode`.
    """
    read = partial(read_attribute, tokenizer)
    if not callable(read("encode")):
        raise TokenizerError(
            f"{tokenizer!r:.80} is not a tokenizer: it is neither a name nor a path, and it has no "
            'method encode. Use a name such as "gpt2", a path, or an object with encode(text).'
        )
    name = str(read("name") or type(tokenizer).__name__)
    is_tiktoken = type(tokenizer).__module__.partition(".")[0] == "tiktoken"
    # The size has another name in each library, and is a property in some and a method in others.
    size = read("n_vocab", "vocab_size", "get_vocab_size", "__len__")
    # `transformers` has `eos_token_id`, tiktoken has `eot_token`.
    eos_id, eos_token = read("eos_token_id", "eot_token"), read("eos_token")
    return ObjectDescription(
        name=f"tiktoken:{name}" if is_tiktoken else name,
        vocab_size=None if size is None else int(size() if callable(size) else size),
        eos_id=None if eos_id is None else int(eos_id),
        bos_id=read("bos_token_id"),
        eos_token=None if eos_token is None else str(eos_token),
        special_tokens=_special_tokens(tokenizer),
        ranks=read("_mergeable_ranks") if is_tiktoken else None,
    )


def read_attribute(tokenizer: object, *names: str) -> Any:
    """The first of these attributes that an object of another library has and that is not None."""
    for name in names:
        try:
            found = getattr(tokenizer, name, None)
        except KeyError:  # `eot_token` of a tiktoken encoding without <|endoftext|>
            continue
        if found is not None:
            return found
    return None


def _special_tokens(tokenizer: object) -> dict[str, int]:
    read = partial(read_attribute, tokenizer)
    if isinstance(known := read("_special_tokens"), dict):  # tiktoken
        return dict(known)
    tokens, ids = read("all_special_tokens"), read("all_special_ids")
    if tokens is not None and ids is not None:  # transformers
        # Text may produce the unknown token, so it is not forbidden.
        unknown = read("unk_token_id")
        pairs = zip(tokens, ids, strict=True)
        return {str(token): int(number) for token, number in pairs if number != unknown}
    names, encode = read("get_special_tokens"), read("encode_special")
    if callable(names) and callable(encode):  # nanochat
        return {str(name): int(encode(name)) for name in names()}
    return {}


class ObjectEngine:
    """Encodes with an object's own `encode(str)`, one call for each document."""

    name = "object"
    vocab_size = None

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.description = describe_object(tokenizer)
        # An object is not trusted to treat special tokens as text; see `encode`.
        self._special = np.array(sorted(self.description.special_tokens.values()), np.int64)
        # tiktoken's `encode` raises if a text holds a special token; `encode_ordinary` does not.
        self._encode: Callable[..., Any] = read_attribute(tokenizer, "encode_ordinary", "encode")
        self._options: dict[str, bool] = {}
        if any(each.__module__.startswith("transformers.") for each in type(tokenizer).__mro__):
            # By default, transformers parses special tokens in a text and adds others around it.
            self._options = {"add_special_tokens": False, "split_special_tokens": True}

    def encode(self, texts: ArrowTexts) -> Encoded:
        """The ids of `texts`.

        Raises:
            TokenizerError: the object returned the id of a special token.
        """
        strings = [text.decode() for text in texts.to_pylist()]
        rows = [ids_of(self._encode(each, **self._options)).tolist() for each in strings]
        ids, offsets = concatenated(rows)
        found = np.flatnonzero(np.isin(ids, self._special))
        if len(found):
            text = strings[int(np.searchsorted(offsets, found[0], side="right")) - 1]
            raise TokenizerError(
                f"{type(self.tokenizer).__name__}.encode gave the special token {ids[found[0]]:,} "
                f"for {text[:60]!r}. Text must not contain special tokens. Change encode() so that "
                "it treats them as text and adds none, or use a tokenizer.json."
            )
        return ids, offsets

    def decode(self, ids: NDArray[np.uint32]) -> bytes:
        """The result of the object's own `decode_bytes` or `decode`."""
        # tiktoken's `decode` replaces incomplete characters; `decode_bytes` is exact.
        decoded = read_attribute(self.tokenizer, "decode_bytes", "decode")(ids.tolist())
        return decoded.encode() if isinstance(decoded, str) else bytes(decoded)


def ids_of(encoded: Any) -> NDArray[Any]:
    """The ids in the result of an `encode` method: a list, an array, a tensor or an Encoding."""
    found = read_attribute(encoded, "ids")
    ids = encoded if found is None else found
    return np.asarray(ids if isinstance(ids, Sized) else list(ids))


def tiktoken_encoding(name: str) -> Any:
    """The tiktoken encoding with this name, from tiktoken's cache or the network."""
    try:
        import tiktoken
    except ImportError:
        raise MissingExtraError(
            f"The tokenizer tiktoken:{name} needs tiktoken, which is not installed.\n"
            'Install it with: pip install "penstock[tiktoken]"'
        ) from None
    try:
        return tiktoken.get_encoding(name)
    except OSError as error:  # no network
        raise TokenizerError(
            f"tiktoken could not fetch the encoding {name!r}: {error}\n"
            "On a machine with a network, set TIKTOKEN_CACHE_DIR, load the encoding once, and copy "
            'that directory here. Or use a tokenizer.json. "gpt2" needs no network.'
        ) from error


def extended_encoding(tokenizer: Any, tokens: Sequence[str]) -> tuple[Any, dict[str, int]]:
    """A tiktoken encoding with special tokens added, and the ids of the new ones.

    Raises:
        TokenizerError: the object is not a tiktoken encoding and lacks some of `tokens`.
    """
    known = describe_object(tokenizer)
    new = [token for token in tokens if token not in known.special_tokens]
    if not new:
        return tokenizer, {}
    if known.ranks is None:
        raise TokenizerError(
            f"{type(tokenizer).__name__} is an object that penstock cannot extend by "
            f"{', '.join(new[:5])}. Add the tokens to the object yourself, or use a tokenizer.json."
        )
    ids = {token: tokenizer.n_vocab + number for number, token in enumerate(new)}
    # An encoding cannot be changed, but a new one with the same ranks gives the same ids.
    made = type(tokenizer)(
        tokenizer.name,
        pat_str=tokenizer._pat_str,
        mergeable_ranks=tokenizer._mergeable_ranks,
        special_tokens={**known.special_tokens, **ids},
    )
    return made, ids
