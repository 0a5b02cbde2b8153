"""The tokenizer that the rest of penstock uses.

A `Tokenizer` has a name and a digest, so that two stores can be compared, the ids that begin and
end a document, and the dtype in which ids are stored. The canary is a digest of the ids of a fixed
text: it changes if a new release of a library splits text differently.

Tokenizers that a user loads are kept, so that a store's tokenizer can be found by its digest:

    ~/.cache/penstock/tokenizers/DIGEST.json        (or $PENSTOCK_CACHE/tokenizers)

A manifest is written by whoever built the store, so the name in it is shown, but never opened and
never asked for. The directory may be deleted at any time: then the user names the tokenizer again.
"""

import json
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.digest import digest_bytes, digest_json
from penstock.disk import cache_directory, write_file
from penstock.errors import MissingTokenizerError, StoreError, TokenizerError
from penstock.paths import expand_user
from penstock.tokenize.definition import (
    Config,
    Definition,
    checked_ids,
    find_definition,
    from_object,
    padded_vocab_size,
    parse_definition,
)
from penstock.tokenize.engines import (
    ArrowTexts,
    ByteEngine,
    Encoded,
    Engine,
    ObjectEngine,
    TokenizersEngine,
    as_texts,
    describe_object,
    extended_encoding,
    tiktoken_encoding,
)
from penstock.tokenize.gigatoken import EngineChoice, GigatokenEngine, choose_engine
from penstock.tokenize.special_tokens import extended_definition, log_added

if TYPE_CHECKING:
    from penstock.sources.batch import Batch

SpecialTokens = Literal["text", "parse"]

_log = logging.getLogger("penstock")
_BUNDLED = {"gpt2": 50_257, "bytes": 257}

# Contractions, digits, blanks, special tokens, many scripts, emoji, control characters: the parts
# of a text at which tokenizers and their versions differ. Stores hold its digest: never change it.
_CANARY = (
    "Penstock: 3.14159 tokens/s, isn't it?  <|endoftext|></s>\n\n"
    "\tdef f(x):\r\n    return x**2  # ok\n"
    "naïve café, Straße, ΑΒΓ, Привет, שלום, مرحبا, नमस्ते, 你好世界, こんにちは, 한국어, "
    "👩‍👩‍👧‍👦🏳️‍🌈\u200b\u2028\ufeff"
    "aaaaaaaaaaaaaaaaaaaaaaaa 1234567890123 http://a.b/c?d=e&f#g \u0301e\u0301 \x00\x7f"
)


@dataclass(frozen=True, repr=False)
class Tokenizer:
    """Encodes text to ids and decodes ids; deterministic, and safe to use from threads."""

    name: str
    digest: str | None
    """A digest of the tokenizer's settings. It is None for an object whose settings are unknown;
    then only the canary identifies the tokenizer."""
    vocab_size: int
    eos_id: int | None
    bos_id: int | None
    special_tokens: SpecialTokens
    engine: Engine
    reference: Engine | None
    """The engine whose ids are right by definition; None if `engine` has no second engine to
    compare with."""
    definition: Definition | None = None
    added_tokens: Mapping[str, int] = field(default_factory=dict)
    """The tokens that `add_tokens` added, and their ids."""

    def __repr__(self) -> str:
        digest = f"digest {self.digest[:8]}" if self.digest else "no digest"
        return f"Tokenizer({self.name!r}: {self.vocab_size:,} ids, {digest})"

    @property
    def padded_vocab_size(self) -> int:
        """`vocab_size`, rounded up to a multiple of 64: a fast size for a model's embedding."""
        return padded_vocab_size(self.vocab_size)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The narrowest type for all ids: uint16 for a vocabulary up to 65,536, else uint32."""
        return np.dtype("<u2" if self.vocab_size <= 65_536 else "<u4")

    def encode(self, text: str | bytes) -> NDArray[np.uint32]:
        """The ids of one text, with nothing added.

        >>> load_tokenizer("gpt2").encode("Hello world").tolist()
        [15496, 995]
        """
        data = text.encode() if isinstance(text, str) else text
        return self.encode_documents(as_texts([data]))[0]

    def encode_documents(self, texts: ArrowTexts) -> Encoded:
        """The ids of many texts, concatenated, and the offsets where each text begins and ends."""
        return self._checked(self.engine.encode(texts))

    def encode_batch(self, batch: "Batch") -> Encoded:
        """The ids of a batch of documents; the text is copied only if the engine needs a copy."""
        block = batch.separated
        if block is not None and isinstance(self.engine, GigatokenEngine):
            encoded = self.engine.encode_separated(block.data, block.separator)
            # Another number of documents means that the engine skipped an empty one.
            if len(encoded[1]) == len(batch) + 1:
                return self._checked(encoded)
        return self.encode_documents(batch.texts)

    def decode(self, ids: ArrayLike, errors: str = "replace") -> str:
        """The text that `ids` stand for, special tokens included.

        Ids that begin or end inside a character are not UTF-8; `errors` says what happens to
        these bytes, as in `bytes.decode`.

        >>> load_tokenizer("gpt2").decode([15496, 995, 50256])
        'Hello world<|endoftext|>'
        """
        return self.decode_bytes(ids).decode(errors=errors)

    def decode_bytes(self, ids: ArrayLike) -> bytes:
        """The exact bytes that `ids` stand for, special tokens included."""
        return self.engine.decode(checked_ids(ids, self.vocab_size, self.name))

    def token_id(self, token: str) -> int:
        """The id of a token of the vocabulary."""
        found = self.definition.token_id(token) if self.definition else None
        if found is None:
            raise TokenizerError(f"The vocabulary of {self.name} has no token {token!r}.")
        return found

    @property
    def eos_token(self) -> str | None:
        """The text of the token that ends a document, if known."""
        if self.definition is not None:
            return self.definition.eos_token
        engine = self.engine
        return engine.description.eos_token if isinstance(engine, ObjectEngine) else None

    @property
    def canary(self) -> str:
        """A digest of the ids of a fixed text."""
        # Little-endian uint32 on every machine and for every vocabulary.
        return digest_bytes(self.encode(_CANARY).astype("<u4").tobytes())

    def describe(self) -> Config:
        """The entry of this tokenizer in a store's manifest."""
        added = {"added_tokens": dict(self.added_tokens)} if self.added_tokens else {}
        return {
            "name": self.definition.recorded_name if self.definition else self.name,
            "digest": self.digest,
            "canary": self.canary,
            "vocab_size": self.vocab_size,
            "eos_id": self.eos_id,
            "bos_id": self.bos_id,
            "special_tokens": self.special_tokens,
            **added,
        }

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write tokenizer.json and tokenizer_config.json, which `transformers` can read too.

        `load_tokenizer(directory)` then returns a tokenizer with the same ids and digest.

        Raises:
            TokenizerError: the tokenizer was not made from a tokenizer.json.
        """
        if self.definition is None:
            raise TokenizerError(
                f"{self.name} was not made from a tokenizer.json, so it cannot be saved as one."
            )
        self.definition.save(expand_user(directory))

    def _checked(self, encoded: Encoded) -> Encoded:
        """Return `encoded`, or raise if an id is outside the vocabulary.

        Token ids are never truncated to a narrower dtype: 65,536 stored in 16 bits would be 0.
        """
        ids = encoded[0]
        if self.engine.vocab_size is not None and self.engine.vocab_size <= self.vocab_size:
            return encoded  # the engine cannot return such an id
        if len(ids) and (largest := int(ids.max())) >= self.vocab_size:
            raise TokenizerError(
                f"{self.name} returned the id {largest:,}, but reports a vocabulary of "
                f"{self.vocab_size:,} ids. Stored in {self.dtype.itemsize * 8} bits, the id could "
                "become another token. Correct the vocab_size that the tokenizer reports."
            )
        return encoded


def load_tokenizer(
    tokenizer: object,
    *,
    special_tokens: SpecialTokens = "text",
    engine: EngineChoice = "auto",
    add_tokens: Iterable[str] | None = None,
) -> Tokenizer:
    """Load a tokenizer by its name, from a file, or from an object.

    Args:
        tokenizer: "gpt2", "bytes", a tokenizer.json, a directory with one, "tiktoken:NAME",
            "hf:NAME" or "ORGANISATION/NAME" on the Hugging Face Hub, or any object with an
            `encode` method. Only the Hub, and a tiktoken encoding that is not in tiktoken's cache,
            use the network.
        special_tokens: Whether "<|endoftext|>" in a text is text ("text") or the special token
            ("parse").
        engine: The library that encodes; the ids are those of `tokenizers` in any case. "auto"
            uses gigatoken if it is known to give these ids, else `tokenizers`, and logs the reason
            to the logger "penstock". With gigatoken, `tokenizers` still encodes the documents with
            characters that the two treat differently.
        add_tokens: Special tokens to add, such as the markers of a chat template. Their ids follow
            the vocabulary; a token that is already in the vocabulary keeps its id.

    Raises:
        TokenizerError: there is no such tokenizer, or it cannot be used as asked.

    >>> load_tokenizer("bytes").encode("hé").tolist()
    [104, 195, 169]
    >>> load_tokenizer("gpt2", add_tokens=["<|im_start|>", "<|im_end|>"]).vocab_size
    50259
    """
    if special_tokens not in ("text", "parse"):
        raise TokenizerError(f'special_tokens={special_tokens!r} is not "text" or "parse".')
    if isinstance(add_tokens, str):
        raise TokenizerError(f"add_tokens={add_tokens!r} is one string; give a list of strings.")
    more = list(dict.fromkeys(add_tokens or ()))
    if isinstance(tokenizer, str) and tokenizer == "bytes":
        # "bytes" has no definition, so it is treated like a `Tokenizer` that was loaded before.
        tokenizer = _bytes({})
    elif isinstance(tokenizer, str) and tokenizer.startswith("tiktoken:"):
        tokenizer = tiktoken_encoding(tokenizer.removeprefix("tiktoken:"))
    elif isinstance(tokenizer, str | os.PathLike):
        tokenizer = find_definition(os.fspath(tokenizer))
    if isinstance(tokenizer, Tokenizer):
        if special_tokens == "parse" and tokenizer.special_tokens == "text":
            raise TokenizerError(
                f"{tokenizer.name} was loaded to treat special tokens in a text as text, so "
                'special_tokens="parse" cannot be used with it. Leave it out.'
            )
        loaded = with_added(tokenizer, more)
    elif (definition := _definition_of(tokenizer)) is None:
        loaded = _from_object(tokenizer, special_tokens, more)
    else:
        definition = extended_definition(definition, more)
        loaded = _from_definition(definition, special_tokens, engine)
    if more and loaded.added_tokens:  # not of a store that is read: its build has logged them
        log_added(loaded.name, tuple(loaded.added_tokens.items()), loaded.vocab_size)
    _keep(loaded)
    return loaded


def _definition_of(tokenizer: object) -> Definition | None:
    return tokenizer if isinstance(tokenizer, Definition) else from_object(tokenizer)


def _bytes(added: Mapping[str, int]) -> Tokenizer:
    digest = digest_json(["bytes", dict(added)]) if added else digest_bytes(b"bytes")
    size = 257 + len(added)
    engine = ByteEngine(added)
    return Tokenizer("bytes", digest, size, 256, None, "text", engine, None, added_tokens=added)


def with_added(tokenizer: Tokenizer, tokens: Sequence[str]) -> Tokenizer:
    """Return a tokenizer like `tokenizer`, which was loaded before, with `tokens` added."""
    known = tokenizer.added_tokens
    if tokenizer.definition is not None:
        definition = extended_definition(tokenizer.definition, tokens)
        is_same = definition is tokenizer.definition
        return tokenizer if is_same else _reloaded(tokenizer, definition)
    if not tokens:
        return tokenizer
    if isinstance(tokenizer.engine, ObjectEngine):
        # The object has the tokens that were added before; `made` only knows the new ones.
        made = _from_object(tokenizer.engine.tokenizer, tokenizer.special_tokens, tokens)
        return replace(made, added_tokens={**known, **made.added_tokens})
    new = [token for token in tokens if token not in known]
    return _bytes({**known, **{token: 257 + len(known) + at for at, token in enumerate(new)}})


def with_special(tokenizer: Tokenizer, tokens: Iterable[str]) -> Tokenizer:
    """A tokenizer that treats these ordinary tokens as special, so that no text is encoded to them.

    The digest stays the same, because all ids keep their meaning.
    """
    definition = tokenizer.definition
    assert definition is not None  # all known tokens of other tokenizers are special already
    other = (*definition.other_special, *tokens)
    return _reloaded(tokenizer, replace(definition, other_special=other))


def _reloaded(tokenizer: Tokenizer, definition: Definition) -> Tokenizer:
    """The tokenizer of a changed definition, with the same engine if it can load the definition."""
    is_slow = isinstance(tokenizer.engine, TokenizersEngine)
    choice: EngineChoice = "tokenizers" if is_slow else "auto"
    return _from_definition(definition, tokenizer.special_tokens, choice)


def _from_definition(
    definition: Definition, special_tokens: SpecialTokens, engine: EngineChoice
) -> Tokenizer:
    if dropout := definition.config["model"].get("dropout"):
        raise TokenizerError(
            f"{definition.name} has dropout={dropout}: every call would give other ids, and "
            "no store could be built twice. Set it to null in its tokenizer.json."
        )
    chosen = choose_engine(definition, engine, parse=special_tokens == "parse")
    return Tokenizer(
        name=definition.name,
        digest=definition.digest,
        vocab_size=definition.vocab_size,
        eos_id=definition.token_id(definition.eos_token),
        bos_id=definition.token_id(definition.bos_token),
        special_tokens=special_tokens,
        engine=chosen,
        reference=chosen.reference if isinstance(chosen, GigatokenEngine) else None,
        definition=definition,
        added_tokens=definition.extra_tokens,
    )


def _from_object(
    tokenizer: object, special_tokens: SpecialTokens, add_tokens: Sequence[str]
) -> Tokenizer:
    """A tokenizer around an object that has a method `encode`."""
    tokenizer, added = extended_encoding(tokenizer, add_tokens)
    if special_tokens == "parse":
        raise TokenizerError(
            'special_tokens="parse" needs a tokenizer.json; '
            f"{type(tokenizer).__name__} has its own rule for special tokens."
        )
    known = (engine := ObjectEngine(tokenizer)).description
    if known.vocab_size is None:
        raise TokenizerError(
            f"{type(tokenizer).__name__} does not say how large its vocabulary is, so penstock "
            "cannot choose the dtype of stored ids. Give it an attribute vocab_size."
        )
    return Tokenizer(
        name=known.name,
        digest=known.digest(tokenizer),
        vocab_size=known.vocab_size,
        eos_id=known.eos_id,
        bos_id=known.bos_id,
        special_tokens=special_tokens,
        engine=engine,
        reference=None,
        added_tokens=added,
    )


def tokenizer_of(recorded: Config, given: object = None) -> Tokenizer:
    """The tokenizer that a manifest records.

    If `given` is None, it is searched by its digest. Otherwise it is loaded from `given`, and
    compared with the record.

    Args:
        recorded: The entry `tokenizer` of the manifest.
        given: Whatever `load_tokenizer` takes.

    Raises:
        MissingTokenizerError: `given` is None, and this user has no such tokenizer.
        StoreError: `given` is another tokenizer.
    """
    digest, added = recorded["digest"], tuple(recorded.get("added_tokens", ()))
    is_unknown = not digest and not recorded["canary"]  # imported without a tokenizer
    if given is not None:
        # Loaded once more, so that the extended tokenizer is kept.
        found = load_tokenizer(with_added(load_tokenizer(given), added))
        # A tokenizer without a digest is recognised by its ids of a test text.
        is_same = found.digest == digest and (digest or found.canary == recorded["canary"])
        if is_same or is_unknown:
            return found
        wanted, other = digest or recorded["canary"], found.digest or found.canary
        raise StoreError(
            f"The store was tokenized with {recorded['name']} (digest {wanted[:8]}), and "
            f"{found.name} has the digest {other[:8]}. The same id would mean other text. "
            "Give the tokenizer of the store with tokenizer=."
        )
    if is_unknown:
        raise MissingTokenizerError(
            "The store was imported without a tokenizer, so it records none. Give the tokenizer "
            "of its ids each time with tokenizer= (--tokenizer)."
        )
    if not digest:
        raise MissingTokenizerError(
            f"The store was tokenized with {recorded['name']!r:.80} (digest "
            f"{recorded['canary']:.8}), an object that penstock cannot keep. Pass the same object "
            "again each time, with tokenizer= in Python; commands cannot load it."
        )
    return _find(digest, recorded["name"], added, recorded["vocab_size"])


# An error is not cached: the tokenizer may be loaded later.
@lru_cache(maxsize=8)
def _find(digest: str, name: str, added: tuple[str, ...], vocab_size: int) -> Tokenizer:
    """The bundled or kept tokenizer with this digest."""
    if (kept := _kept(digest, name)) is not None:
        return load_tokenizer(kept)
    for bundled, size in _BUNDLED.items():
        # The sizes are compared first: to load a tokenizer and to compute its digest is slow.
        if size <= vocab_size <= size + len(added):
            found = with_added(load_tokenizer(bundled), added)
            if found.digest == digest:
                return found
    raise MissingTokenizerError(
        f"The store was tokenized with {name!r:.80} (digest {digest:.8}), which is not a bundled "
        "tokenizer and not one that you loaded before. A name that a store contains is never "
        "opened or downloaded. Give the tokenizer of the store with tokenizer= (--tokenizer), "
        "once: after that it is found by its digest."
    )


def _keep(loaded: Tokenizer) -> None:
    """Write a tokenizer to the user's cache, unless it is there, is bundled or unknown."""
    contents = _kept_contents(loaded)
    if loaded.digest is None or contents is None:
        return
    path = _kept_path(loaded.digest)
    try:
        if not path.exists():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_file(path, [json.dumps(contents).encode()])
    except OSError as error:  # read-only, or full: the tokenizer can be used all the same
        _log.debug("The tokenizer %s is not kept: %s", loaded.digest[:8], error)


def _kept(digest: str, name: str) -> Any:
    """The tokenizer with this digest, as `load_tokenizer` takes it; None if it was not kept."""
    path = _kept_path(digest)
    try:
        contents = json.loads(path.read_bytes())
        if "tiktoken" in contents:
            found = _kept_encoding(contents)
            found_digest = describe_object(found).digest(found)
        else:
            found = parse_definition(contents, name)
            found_digest = found.digest
        if found_digest == digest:
            return found
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, TypeError, ImportError) as error:
        _log.debug("%s cannot be used: %r", path, error)
    with suppress(OSError):  # damaged, so it is written again when the tokenizer is loaded again
        path.unlink()
    return None


def _kept_path(digest: str) -> Path:
    # A manifest decides the digest, which becomes a name in this directory and nowhere else.
    return cache_directory() / "tokenizers" / Path(f"{digest}.json").name


def _kept_contents(loaded: Tokenizer) -> Config | None:
    """The JSON of a tokenizer; None if it need not be kept, or cannot be."""
    if (source := loaded.definition) is not None:
        tokens = {"eos_token": source.eos_token, "bos_token": source.bos_token}
        more = {"other_special": list(source.other_special), "tokenizer": source.config}
        return None if source.origin == "bundled" else {**tokens, **more}
    # An encoding of tiktoken has no tokenizer.json, but its three settings are known.
    engine = loaded.engine
    if not isinstance(engine, ObjectEngine) or engine.description.ranks is None:
        return None
    return {
        "tiktoken": engine.tokenizer.name,
        "pattern": engine.tokenizer._pat_str,
        "ranks": {token.hex(): rank for token, rank in engine.description.ranks.items()},
        "special_tokens": engine.description.special_tokens,
    }


def _kept_encoding(contents: Config) -> Any:
    import tiktoken  # an optional package

    return tiktoken.Encoding(
        contents["tiktoken"],
        pat_str=contents["pattern"],
        mergeable_ranks={bytes.fromhex(token): rank for token, rank in contents["ranks"].items()},
        special_tokens=contents["special_tokens"],
    )
