"""Uses tokenizers of any library, through their method `encode`.

`penstock.build` adds nothing to a text and takes special tokens in it as text. A hand-written
Dataset stores what `tokenizer.encode(text)` returns, with everything that the object adds. So an
object is called as it is, unless penstock's engine is known to return the same ids.

A digest is given only to tokenizers whose settings are all known. Any other object may return
other ids tomorrow, so its store is never reused by another process.
"""

import os
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

from penstock.digest import digest_json
from penstock.errors import TokenizerError
from penstock.tokenize.definition import Definition, find_definition, from_object
from penstock.tokenize.engines import (
    ObjectDescription,
    describe_object,
    ids_of,
    read_attribute,
)
from penstock.tokenize.tokenizer import SpecialTokens, Tokenizer, load_tokenizer

UNKNOWN_VOCABULARY = 2**32
"""The vocabulary size of an object that may return any id; ids have 32 bits."""

AnyTokenizer: TypeAlias = Any
"""A name, a path, or a tokenizer object of any package."""

_PAD_TOKENS = ("<pad>", "[PAD]", "<|pad|>", "<|padding|>")


@dataclass(frozen=True)
class GivenTokenizer:
    """A tokenizer as the user gave it, and as `penstock.build` uses it.

    An existing store is found by the digest alone. Loading an engine from a definition takes 0.2 s,
    so it is loaded only when something is encoded.
    """

    source: AnyTokenizer
    """The user's object, name or path."""
    encodes: Definition | Tokenizer
    """Returns the same ids as the object's `encode`."""
    special_tokens: SpecialTokens = "text"

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that `penstock.build` uses."""
        if isinstance(self.encodes, Tokenizer):
            return self.encodes
        return load_tokenizer(self.encodes, special_tokens=self.special_tokens)

    @property
    def given(self) -> AnyTokenizer:
        """The user's object, or the tokenizer that a name was loaded as."""
        return self.tokenizer if isinstance(self.source, str | os.PathLike) else self.source

    def end_id(self, eos: bool | int | str) -> int | None:
        """The id of the end token that `eos` names; None for no end token.

        Args:
            eos: False, True for the tokenizer's end token, the id of a token, or its text.
        """
        if eos is False:
            return None
        if isinstance(eos, str):
            return _token_id(self.given, eos)
        found = self.tokenizer.eos_id if eos is True else int(eos)
        if found is None:
            raise TokenizerError(
                f"{self.tokenizer.name} does not say which of its tokens ends a document. Give its "
                "id: eos=ID, or leave eos out."
            )
        return found


def as_given(tokenizer: AnyTokenizer) -> GivenTokenizer:
    """Return the tokenizer for a name, a path or an object with `encode`."""
    if isinstance(tokenizer, GivenTokenizer):
        return tokenizer
    if isinstance(tokenizer, str | os.PathLike):
        name = os.fspath(tokenizer)
        has_definition = name != "bytes" and not name.startswith("tiktoken:")
        found = find_definition(name) if has_definition else load_tokenizer(name)
        return GivenTokenizer(tokenizer, found)
    if isinstance(tokenizer, Tokenizer):
        return GivenTokenizer(tokenizer, tokenizer, tokenizer.special_tokens)
    package = type(tokenizer).__module__.partition(".")[0]
    if "encode" in (read_attribute(tokenizer, "__dict__") or ()):
        package = ""  # the user replaced `encode` on this object: nothing is known about it
    # tiktoken's `encode` raises an error for special tokens in a text; the engine takes them as
    # text, and is otherwise the same.
    if package == "tiktoken":
        return GivenTokenizer(tokenizer, load_tokenizer(tokenizer))
    definition = from_object(tokenizer) if package in ("tokenizers", "transformers") else None
    digest = None
    if definition is not None:
        theirs = package == "transformers"
        backend = tokenizer.backend_tokenizer if theirs else tokenizer
        as_text = bool(backend.encode_special_tokens)
        # In this case the engine with special_tokens="parse" returns the same ids as `encode`, a
        # hundred times as fast.
        if not theirs and not as_text and _adds_nothing(definition):
            return GivenTokenizer(tokenizer, definition, "parse")
        # The JSON of a `transformers` tokenizer does not contain `split_special_tokens`.
        split = theirs and bool(tokenizer.split_special_tokens)
        kind = [package, type(tokenizer).__qualname__, as_text, split]
        digest = None if _dropout(definition) else digest_json([*kind, definition.text])
    loaded = load_tokenizer(_Encoder(tokenizer, describe_object(tokenizer), definition))
    return GivenTokenizer(tokenizer, _ObjectTokenizer(**{**vars(loaded), "digest": digest}))


class _ObjectTokenizer(Tokenizer):
    """A tokenizer that calls a user's object, without the digest of a fixed text.

    The fixed text has characters of many scripts. An object with a small vocabulary, such as one
    id per letter of its training text, raises an error for it.
    """

    @property
    def canary(self) -> str:
        """Empty, because the object may refuse the fixed text."""
        return ""


class _Encoder:
    """An object with `encode`, with the attributes that `load_tokenizer` asks of a tokenizer."""

    def __init__(
        self, given: AnyTokenizer, known: ObjectDescription, definition: Definition | None
    ) -> None:
        self._given = given
        self.name, self.eos_token_id = known.name, known.eos_id
        # The vocabulary size that an object reports may leave out added tokens, so it is not used.
        self.vocab_size = UNKNOWN_VOCABULARY
        if definition is not None:
            self.name, self.vocab_size = definition.name, definition.vocab_size
            if definition.eos_token:
                self.eos_token_id = definition.token_id(definition.eos_token)

    def encode(self, text: str) -> list[int]:
        """The ids that the object returns: a list, an array, a tensor or an Encoding."""
        # NumPy would turn -1, 0.5 or "a" into some id without an error; so ids are checked.
        encoded = self._given.encode(text)
        ids = ids_of(encoded)
        if not ids.size:
            return []
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise TokenizerError(
                f"encode() returned {ids.dtype} of shape {ids.shape}: {encoded!r:.60}. It must "
                "return one row of integers."
            )
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= UNKNOWN_VOCABULARY:
            raise TokenizerError(
                f"encode() returned ids from {low:,} to {high:,}; ids are stored in 32 bits."
            )
        numbers: list[int] = ids.tolist()
        return numbers

    def decode(self, ids: list[int]) -> str:
        """The text of some ids."""
        return str(self._given.decode(ids))


def _adds_nothing(definition: Definition) -> bool:
    """Whether `encode` returns exactly the ids of the text, the same at every call."""
    config = definition.config
    # GPT-2's ByteLevel post-processor only trims offsets.
    after = config.get("post_processor")
    adds = after is not None and after.get("type") != "ByteLevel"
    return not (adds or config.get("truncation") or config.get("padding") or _dropout(definition))


def _dropout(definition: Definition) -> bool:
    return bool(definition.config["model"].get("dropout"))


def _token_id(tokenizer: AnyTokenizer, token: str) -> int:
    """The id of a token, by whichever method the object has for it."""
    # penstock, tokenizers, transformers and tiktoken, in this order.
    for name in ("token_id", "token_to_id", "convert_tokens_to_ids", "encode_single_token"):
        find = read_attribute(tokenizer, name)
        if find is not None and (found := find(token)) is not None:
            return int(found)
    raise TokenizerError(
        f"{type(tokenizer).__name__} gives no id for {token!r}. Pass the id instead: eos=ID."
    )


class SpecialIds(NamedTuple):
    """The ids that begin, end and pad a row; None if the tokenizer has no such token."""

    bos_id: int | None
    eos_id: int | None
    pad_id: int | None


def special_ids(tokenizer: AnyTokenizer) -> SpecialIds:
    """The special ids of a tokenizer, with the end token as pad token if it has no other.

    >>> special_ids("gpt2")
    SpecialIds(bos_id=50256, eos_id=50256, pad_id=50256)
    """
    pad = None
    package = type(tokenizer).__module__.partition(".")[0]
    if package == "tokenizers":
        # The id that padding is set to, or else the first usual name that the vocabulary has.
        named = [tokenizer.token_to_id(name) for name in _PAD_TOKENS]
        pad = next((each for each in named if each is not None), None)
        pad = int(tokenizer.padding["pad_id"]) if tokenizer.padding else pad
    if isinstance(tokenizer, str | os.PathLike) or package == "tokenizers":
        tokenizer = load_tokenizer(tokenizer, engine="tokenizers")  # nothing is encoded
    if isinstance(tokenizer, Tokenizer):
        bos, eos = tokenizer.bos_id, tokenizer.eos_id
    else:
        bos = read_attribute(tokenizer, "bos_token_id")
        eos = read_attribute(tokenizer, "eos_token_id", "eot_token")
        pad = read_attribute(tokenizer, "pad_token_id")
    return SpecialIds(bos, eos, eos if pad is None else pad)
