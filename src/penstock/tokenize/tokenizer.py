"""A tokenizer as the rest of penstock sees it.

It knows its name and digest (so that two stores can be told to belong together), how
wide ids must be stored, and the ids that begin and end a document. The canary is a
digest of the ids of a fixed text: a library that starts to split differently changes
it, even if every file stays the same.
"""

import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from penstock.digest import digest_bytes, digest_json
from penstock.errors import TokenizerError
from penstock.sources.arrow import binary_array
from penstock.sources.document import Batch
from penstock.tokenize.definition import (
    Definition,
    find_definition,
    from_object,
    padded_vocab_size,
)
from penstock.tokenize.engines import (
    ByteEngine,
    Encoded,
    Engine,
    GigatokenEngine,
    ObjectEngine,
    TokenizersEngine,
)
from penstock.tokenize.extend import (
    checked_tokens,
    extended_definition,
    extended_encoding,
    log_added,
    numbered,
)
from penstock.tokenize.objects import (
    end_id,
    is_tiktoken,
    object_digest,
    special_tokens_known,
    tiktoken_encoding,
    vocab_size_of,
)
from penstock.tokenize.special_tokens import PlainText
from penstock.tokenize.supported import refusal

__all__ = ["SpecialTokens", "Tokenizer", "load_tokenizer", "with_special"]

SpecialTokens = Literal["text", "parse"]

_CANARY = (
    "Penstock: 3.14159 tokens/s, isn't it?  <|endoftext|></s>\n\n"
    "\tdef f(x):\r\n    return x**2  # ok\n"
    "naïve café, Straße, ΑΒΓ, Привет, שלום, مرحبا, नमस्ते, 你好世界, こんにちは, 한국어, "
    "👩‍👩‍👧‍👦🏳️‍🌈\u200b\u2028\ufeff"
    "aaaaaaaaaaaaaaaaaaaaaaaa 1234567890123 http://a.b/c?d=e&f#g \u0301e\u0301 \x00\x7f"
)

_log = logging.getLogger("penstock")
_told_slow: set[str] = set()  # digests of tokenizers of which it was said in this process


@dataclass(frozen=True)
class Tokenizer:
    """Text to ids and back, always the same way."""

    name: str
    digest: str | None
    """None where the object cannot be digested; such a tokenizer is known by its canary alone."""
    vocab_size: int
    eos_id: int | None
    bos_id: int | None
    special_tokens: SpecialTokens
    engine: Engine
    reference: Engine | None
    """What the engine is compared with, where there is another implementation."""
    definition: Definition | None = None
    added_tokens: Mapping[str, int] = field(default_factory=dict)
    """Tokens that `add_tokens` added, and their ids."""

    @property
    def padded_vocab_size(self) -> int:
        """The next multiple of 64 from `vocab_size` on, a fast size for a model's embedding."""
        return padded_vocab_size(self.vocab_size)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The narrowest type that holds every id: uint16 up to 65,536 of them, else uint32."""
        return np.dtype("<u2" if self.vocab_size <= 65_536 else "<u4")

    def encode(self, text: str | bytes) -> NDArray[np.uint32]:
        """The ids of one text, nothing added.

        >>> load_tokenizer("gpt2").encode("Hello world").tolist()
        [15496, 995]
        """
        data = text.encode() if isinstance(text, str) else text
        return self.encode_documents(binary_array([data]))[0]

    def encode_documents(self, texts: Any) -> Encoded:
        """Ids of many texts (a large_binary array): all of them end to end, and the offsets."""
        ids, offsets = self.engine.encode(texts)
        self._refuse_outside(ids, offsets)
        return ids, offsets

    def encode_batch(self, batch: Batch) -> Encoded:
        """Ids of a batch of documents, without a copy of the text where the engine can."""
        block = batch.separated
        if block is not None and isinstance(self.engine, GigatokenEngine):
            ids, offsets = self.engine.encode_separated(block.data, block.separator)
            if len(offsets) == len(batch) + 1:
                self._refuse_outside(ids, offsets)
                return ids, offsets
        return self.encode_documents(batch.texts)

    def decode(self, ids: Any) -> bytes:
        """The bytes that `ids` stand for, special tokens included.

        >>> load_tokenizer("gpt2").decode([15496, 995, 50256])
        b'Hello world<|endoftext|>'
        """
        return self.engine.decode(np.ascontiguousarray(ids, dtype=np.uint32))

    def token_id(self, token: str) -> int:
        """The id of a token that the vocabulary has."""
        found = self.definition.token_id(token) if self.definition else None
        if found is None:
            raise TokenizerError(f"The vocabulary of {self.name} has no token {token!r}.")
        return found

    @property
    def eos_token(self) -> str | None:
        """The text of the token that ends a document, where that is known."""
        if self.definition is not None:
            return self.definition.eos_token
        found = self.engine.eos_token if isinstance(self.engine, ObjectEngine) else None
        return None if found is None else str(found)

    @property
    def canary(self) -> str:
        """A digest of the ids of a fixed text."""
        return digest_bytes(self.encode(_CANARY).astype("<u4").tobytes())

    def describe(self) -> dict[str, Any]:
        """What a manifest records of this tokenizer."""
        told = {
            "name": self.name,
            "digest": self.digest,
            "canary": self.canary,
            "vocab_size": self.vocab_size,
            "eos_id": self.eos_id,
            "bos_id": self.bos_id,
            "special_tokens": self.special_tokens,
        }
        return {**told, "added_tokens": dict(self.added_tokens)} if self.added_tokens else told

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write tokenizer.json and tokenizer_config.json, which `transformers` reads too.

        `load_tokenizer(directory)` gives the same ids and the same digest.

        Raises:
            TokenizerError: the tokenizer is not one of a tokenizer.json.
        """
        if self.definition is None:
            raise TokenizerError(
                f"{self.name} is not one of a tokenizer.json, so it cannot be saved as one."
            )
        self.definition.save(Path(directory))

    def _refuse_outside(self, ids: NDArray[np.uint32], offsets: NDArray[np.int64]) -> None:
        """Raise where an id is not in the vocabulary, instead of storing it cut to size."""
        if self.engine.vocab_size is not None and self.engine.vocab_size <= self.vocab_size:
            return  # the engine has no such id to give
        if len(ids) and int(ids.max()) >= self.vocab_size:
            place = int(ids.argmax())
            document = int(np.searchsorted(offsets, place, side="right")) - 1
            raise TokenizerError(
                f"{self.name} gave the id {int(ids[place]):,} (document {document} of a batch), "
                f"but says that its vocabulary has {self.vocab_size:,}. Stored in "
                f"{self.dtype.itemsize * 8} bits it could turn into another token."
            )


def load_tokenizer(
    tokenizer: Any,
    *,
    special_tokens: SpecialTokens = "text",
    engine: Literal["auto", "gigatoken", "tokenizers"] = "auto",
    add_tokens: Iterable[str] | None = None,
) -> Tokenizer:
    """The tokenizer that `tokenizer` means.

    Args:
        tokenizer: "gpt2", "bytes", a tokenizer.json, a directory with one, "tiktoken:NAME",
            "hf:NAME" or "ORGANISATION/NAME" on the Hugging Face Hub, or any object with an
            `encode` method. The network is used by tiktoken for an encoding that is not in its
            cache, and for the Hub.
        special_tokens: Whether text that spells a special token is text, or that token.
        engine: Which program encodes; the ids are those of `tokenizers` in any case. "auto" is
            gigatoken for tokenizers for which it is known to give these ids, else `tokenizers`,
            with a message in the log "penstock" that says why. Documents with characters that
            both treat differently are encoded by `tokenizers` even then.
        add_tokens: Special tokens to add, such as the markers of a chat template. Their ids follow
            the vocabulary; those that it has keep theirs.

    >>> load_tokenizer("bytes").encode("hé").tolist()
    [104, 195, 169]
    >>> load_tokenizer("gpt2", add_tokens=["<|im_start|>", "<|im_end|>"]).vocab_size
    50259
    """
    if special_tokens not in ("text", "parse"):
        raise TokenizerError(f'special_tokens={special_tokens!r} is not "text" or "parse".')
    more = checked_tokens(add_tokens or ())
    if isinstance(tokenizer, str) and tokenizer == "bytes":
        tokenizer = _bytes({})
    if isinstance(tokenizer, Tokenizer):
        if special_tokens == "parse" and tokenizer.special_tokens == "text":
            raise TokenizerError(f"{tokenizer.name} takes special tokens in a text as text.")
        return _told(_extended(tokenizer, more)) if more else tokenizer
    if isinstance(tokenizer, str) and tokenizer.startswith("tiktoken:"):
        tokenizer = tiktoken_encoding(tokenizer.removeprefix("tiktoken:"))
    definition: Definition | None
    if isinstance(tokenizer, str) or hasattr(tokenizer, "__fspath__"):
        definition = find_definition(str(tokenizer))
    else:  # an object, or one of ours under the names of `transformers`
        inner = getattr(tokenizer, "tokenizer", None)
        ours = inner.definition if isinstance(inner, Tokenizer) else None
        definition = ours or from_object(tokenizer)
    if definition is None:
        return _told(_from_object(tokenizer, special_tokens, more))
    return _told(_from_definition(extended_definition(definition, more), special_tokens, engine))


def _told(tokenizer: Tokenizer) -> Tokenizer:
    if tokenizer.added_tokens:
        log_added(tokenizer.name, tokenizer.added_tokens, tokenizer.vocab_size)
    return tokenizer


def _bytes(added: Mapping[str, int]) -> Tokenizer:
    digest = digest_json(["bytes", dict(added)]) if added else digest_bytes(b"bytes")
    size = 257 + len(added)
    engine = ByteEngine(added)
    return Tokenizer("bytes", digest, size, 256, None, "text", engine, None, added_tokens=added)


def _extended(tokenizer: Tokenizer, tokens: list[str]) -> Tokenizer:
    """A tokenizer that was loaded before, with more tokens."""
    if tokenizer.definition is not None:
        definition = extended_definition(tokenizer.definition, tokens)
        if definition is tokenizer.definition:
            return tokenizer
        return _reloaded(tokenizer, definition)
    if isinstance(tokenizer.engine, ByteEngine):
        known = dict(tokenizer.added_tokens)
        return _bytes(known | numbered([t for t in tokens if t not in known], 257 + len(known)))
    source = getattr(tokenizer.engine, "_tokenizer", None)
    made = _from_object(source, tokenizer.special_tokens, tokens)
    return replace(made, added_tokens={**tokenizer.added_tokens, **made.added_tokens})


def with_special(tokenizer: Tokenizer, tokens: Iterable[str]) -> Tokenizer:
    """`tokenizer`, to which these of its tokens are special, so that no text can write them.

    Its digest stays: all ids mean what they meant.
    """
    definition = tokenizer.definition
    assert definition is not None  # all tokens of others are special, if they are known at all
    return _reloaded(tokenizer, replace(definition, named=(*definition.named, *tokens)))


def _reloaded(tokenizer: Tokenizer, definition: Definition) -> Tokenizer:
    """The same tokenizer by another definition, with the engine that it had if that can load it."""
    engine = "tokenizers" if isinstance(tokenizer.engine, TokenizersEngine) else "auto"
    return _from_definition(definition, tokenizer.special_tokens, engine)


def _from_definition(
    definition: Definition, special_tokens: SpecialTokens, engine: str
) -> Tokenizer:
    if dropout := definition.config["model"].get("dropout"):
        raise TokenizerError(
            f"{definition.name} has dropout={dropout}: it would give other ids at every call, and "
            "no store could be built twice. Set it to null in its tokenizer.json."
        )
    if engine not in ("auto", "gigatoken", "tokenizers"):
        raise TokenizerError(f'engine={engine!r} is not "auto", "gigatoken" or "tokenizers".')
    parse = special_tokens == "parse"
    fast, reason = (None, "") if engine == "tokenizers" else _fast_engine(definition, parse=parse)
    if fast is None and engine == "gigatoken":
        raise TokenizerError(f"gigatoken is not used for {definition.name}: {reason}.")
    slow = TokenizersEngine(definition, parse=parse)
    if fast is None:
        slow.load()
        if engine == "auto":
            _tell_slow(definition, reason)
    return Tokenizer(
        name=definition.name,
        digest=definition.digest,
        vocab_size=definition.vocab_size,
        eos_id=definition.token_id(definition.eos_token) if definition.eos_token else None,
        bos_id=definition.token_id(definition.bos_token) if definition.bos_token else None,
        special_tokens=special_tokens,
        engine=fast or slow,
        reference=fast and fast.reference,
        definition=definition,
        added_tokens=definition.added,
    )


def _fast_engine(definition: Definition, *, parse: bool) -> tuple[GigatokenEngine | None, str]:
    """gigatoken, or None and why it is not used."""
    # As text, special tokens are hidden from gigatoken, so what it gets is judged.
    config = definition.config if parse else PlainText(definition).config()
    if reason := refusal(config, parse=parse):
        return None, reason
    try:
        return GigatokenEngine(definition, parse=parse), ""
    except Exception as error:  # noqa: BLE001  (gigatoken raises various ones)
        # A place in gigatoken's own code may follow the first line.
        return None, f"it cannot load it: {error}".partition("\n")[0]


def _tell_slow(definition: Definition, reason: str) -> None:
    """Log that the fast engine is not used, once for each tokenizer."""
    if definition.digest in _told_slow:
        return
    _told_slow.add(definition.digest)
    _log.warning(
        "gigatoken is not used for %s: %s. tokenizers encodes instead; its ids are the ones that "
        'count, and it takes about 100 times as long. engine="tokenizers" chooses it without this '
        "message.",
        definition.name,
        reason,
    )


def _from_object(tokenizer: Any, special_tokens: SpecialTokens, add_tokens: list[str]) -> Tokenizer:
    """A tokenizer around an object that only promises `encode`."""
    if not callable(getattr(tokenizer, "encode", None)):
        raise TokenizerError(
            f"{tokenizer!r} is no tokenizer: neither a name nor a path, and has no method encode."
        )
    if special_tokens == "parse":
        raise TokenizerError(
            'special_tokens="parse" needs a tokenizer.json; '
            f"{type(tokenizer).__name__} decides by itself."
        )
    tokenizer, added = extended_encoding(tokenizer, add_tokens)
    eos = end_id(tokenizer)
    name = str(getattr(tokenizer, "name", None) or type(tokenizer).__name__)
    return Tokenizer(
        name=f"tiktoken:{name}" if is_tiktoken(tokenizer) else name,
        digest=object_digest(tokenizer),
        vocab_size=vocab_size_of(tokenizer),
        eos_id=eos,
        bos_id=getattr(tokenizer, "bos_token_id", None),
        special_tokens=special_tokens,
        engine=ObjectEngine(tokenizer, special_tokens_known(tokenizer).values()),
        reference=None,
        added_tokens=added,
    )
