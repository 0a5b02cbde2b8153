"""Whatever a user calls a tokenizer, as a function from texts to ids that may have a name.

What an object's own `encode` gives is what is stored, with all that it adds; a name or a path
means the tokenizer that `load_tokenizer` finds, which adds nothing. A digest is claimed only
where all that decides the ids is known to be in it. Any other object has none: it may have
changed since yesterday, and nothing could tell.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.digest import digest_json
from penstock.errors import SourceError, TokenizerError
from penstock.sources.arrow import binary_array
from penstock.tokenize.definition import Definition, find_definition, from_object
from penstock.tokenize.engines import Encoded
from penstock.tokenize.oracle import compare
from penstock.tokenize.special_tokens import PlainText
from penstock.tokenize.tokenizer import Tokenizer, load_tokenizer

__all__ = ["Encoder", "encoder_of", "end_id"]

# A new release may split text differently; the digest of a vocabulary would not tell.
_PACKAGES = ("gigatoken", "tokenizers", "tiktoken", "transformers")

Ids = NDArray[np.uint32]
Encode = Callable[[list[str]], Encoded]
"""From texts to their ids, end to end, and where each begins and ends."""


@dataclass(frozen=True)
class Encoder:
    """A tokenizer that can be asked for many texts at once."""

    name: str
    digest: str | None
    """A digest of all that decides the ids, or None where that is not known."""
    load: Callable[[], tuple[Any, Encode]]
    """Gives the tokenizer itself and what encodes, when they are needed."""
    vocab_size: int | None = None
    """More than the largest id, where that is certain."""
    eos_id: int | None = None
    described: dict[str, Any] | None = None
    """What the manifest of a store says of it, where more is known than the name."""

    @cached_property
    def _loaded(self) -> tuple[Any, Encode]:
        return self.load()

    @property
    def tokenizer(self) -> Any:
        """The object with `encode` and `decode`."""
        return self._loaded[0]

    @property
    def dtype(self) -> "np.dtype[Any]":
        """How wide ids are stored."""
        narrow = self.vocab_size is not None and self.vocab_size <= 65_536
        return np.dtype("<u2" if narrow else "<u4")

    def encode(self, texts: list[str]) -> Encoded:
        """The ids of all texts end to end, and where each begins and ends."""
        return self._loaded[1](texts)

    def eos(self, wanted: bool | int | str) -> int | None:
        """The id to put after each document, if one is wanted."""
        if wanted is False:
            return None
        if isinstance(wanted, str):
            return _token_id(self.tokenizer, wanted)
        if wanted is not True:
            return int(wanted)
        if self.eos_id is None:
            raise TokenizerError(
                f"{self.name} does not say which of its tokens ends a document. Give its id: "
                "eos=ID, or leave eos out."
            )
        return self.eos_id


def encoder_of(tokenizer: Any) -> Encoder:
    """The encoder that a name, a path or an object with `encode` means."""
    if isinstance(tokenizer, Encoder):
        return tokenizer
    if isinstance(tokenizer, str) or hasattr(tokenizer, "__fspath__"):
        name = str(tokenizer)
        if name != "bytes" and not name.startswith("tiktoken:"):
            return _named(name)
        tokenizer = load_tokenizer(name)
    if isinstance(tokenizer, Tokenizer):
        return _ours(tokenizer)
    return _foreign(tokenizer)


def _foreign(tokenizer: Any) -> Encoder:
    """An encoder around an object of another package, or of the user's own."""
    if not callable(getattr(tokenizer, "encode", None)):
        raise TokenizerError(
            f"{tokenizer!r:.80} is no tokenizer: neither a name nor a path, and has no method "
            "encode."
        )
    home = type(tokenizer).__module__.partition(".")[0]
    if "encode" not in getattr(tokenizer, "__dict__", {}):
        if home == "tiktoken":
            return _ours(load_tokenizer(tokenizer), tokenizer)
        if home in ("tokenizers", "transformers"):
            definition = from_object(tokenizer)
            if definition is not None:
                return _hugging_face(tokenizer, definition, home)
    return _object(tokenizer)


def _named(name: str) -> Encoder:
    """A tokenizer known by its files; it is loaded only if something has to be encoded."""
    definition = find_definition(name)

    def load() -> Any:
        loaded = load_tokenizer(name)
        if loaded.digest != definition.digest:
            raise TokenizerError(f"{name} was changed while it was being read. Start again.")
        return loaded, _by_engine(loaded)

    eos = definition.token_id(definition.eos_token) if definition.eos_token else None
    digest = _digest("text", definition.digest)
    told = {"name": name, "digest": definition.digest}
    return Encoder(definition.name, digest, load, definition.vocab_size, eos, told)


def _ours(loaded: Tokenizer, original: Any = None) -> Encoder:
    digest = _digest(loaded.special_tokens, loaded.digest) if loaded.digest else None
    tokenizer = loaded if original is None else original
    return Encoder(
        loaded.name,
        digest,
        lambda: (tokenizer, _by_engine(loaded)),
        # What a wrapped object says of its vocabulary need not be so.
        loaded.vocab_size if loaded.digest else None,
        loaded.eos_id,
        {"name": loaded.name, "digest": loaded.digest},
    )


def _hugging_face(tokenizer: Any, definition: Definition, home: str) -> Encoder:
    """An object of `tokenizers` or `transformers`, whose settings are all in its JSON."""
    backend = getattr(tokenizer, "backend_tokenizer", None) or tokenizer
    as_text = bool(getattr(backend, "encode_special_tokens", False))
    split = bool(getattr(tokenizer, "split_special_tokens", False))
    told = [home, type(tokenizer).__qualname__, definition.text, as_text, split]
    dropout = definition.config["model"].get("dropout")
    own_class = type(tokenizer).__module__.startswith((f"{home}.", home))
    eos = definition.token_id(definition.eos_token) if definition.eos_token else None

    def load() -> Any:
        own = _by_object(tokenizer)
        if home != "tokenizers" or dropout or not _adds_nothing(definition):
            return tokenizer, own
        if PlainText(definition).hidden:  # the object finds them in a text, the engine does not
            return tokenizer, own
        specials = definition.special_tokens
        fast = _by_engine(load_tokenizer(tokenizer))

        def encode(texts: list[str]) -> Encoded:
            # The object parses special tokens in a text; the engine takes them as text.
            parsed = not as_text and any(each in text for each in specials for text in texts)
            return own(texts) if parsed else fast(texts)

        return tokenizer, encode

    return Encoder(
        definition.name,
        _digest(*told) if own_class and not dropout else None,
        load,
        definition.vocab_size,
        eos,
    )


def _object(tokenizer: Any) -> Encoder:
    eos = end_id(tokenizer)
    name = str(getattr(tokenizer, "name", None) or type(tokenizer).__name__)
    return Encoder(
        name,
        None,
        lambda: (tokenizer, _by_object(tokenizer)),
        eos_id=eos,
    )


def end_id(tokenizer: Any) -> int | None:
    """The id that an object says ends a document: `eos_token_id`, or tiktoken's `eot_token`."""
    for name in ("eos_token_id", "eot_token"):
        try:
            found = getattr(tokenizer, name, None)
        except KeyError:  # a tiktoken encoding without one
            continue
        if isinstance(found, int):
            return found
    return None


def _digest(*parts: Any) -> str:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return digest_json([*parts, found])


def _adds_nothing(definition: Definition) -> bool:
    """Whether `encode` gives the ids of the text and no others, in full."""
    config = definition.config
    after = config.get("post_processor")
    around = after is not None and after.get("type") != "ByteLevel"
    return not (around or config.get("truncation") or config.get("padding"))


def _by_engine(loaded: Tokenizer) -> Encode:
    compared = False

    def encode(texts: list[str]) -> Encoded:
        nonlocal compared
        try:
            array = binary_array([text.encode() for text in texts])
        except UnicodeEncodeError as error:
            raise SourceError(
                f"A text holds half of a surrogate pair ({error.object[error.start]!r} in "
                f"{error.object[max(0, error.start - 20) : error.start + 20]!r}), which is no "
                "character and has no ids."
            ) from None
        if not compared:
            compare(loaded, array)
            compared = True
        return loaded.encode_documents(array)

    return encode


def _by_object(tokenizer: Any) -> Encode:
    def encode(texts: list[str]) -> Encoded:
        each = [_ids(tokenizer.encode(text)) for text in texts]
        offsets = np.zeros(len(each) + 1, np.int64)
        np.cumsum([len(ids) for ids in each], out=offsets[1:])
        return np.concatenate(each), offsets

    return encode


def _ids(encoded: Any) -> Ids:
    """What an `encode` method returned: a list, an array, a tensor or an Encoding."""
    encoded = getattr(encoded, "ids", encoded)
    ids = np.asarray(encoded if hasattr(encoded, "__array__") else list(encoded))
    if not ids.size:
        return np.zeros(0, np.uint32)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise TokenizerError(
            f"encode() gave {ids.dtype} of shape {ids.shape}: {encoded!r:.60}. It must give one "
            "row of whole numbers."
        )
    if int(ids.min()) < 0 or int(ids.max()) > 0xFFFF_FFFF:
        raise TokenizerError(
            f"encode() gave ids from {ids.min():,} to {ids.max():,}; they are stored in 32 bits."
        )
    return ids.astype(np.uint32)


def _token_id(tokenizer: Any, token: str) -> int:
    if isinstance(tokenizer, Tokenizer):
        return tokenizer.token_id(token)
    for name in ("token_to_id", "convert_tokens_to_ids", "encode_single_token"):
        find = getattr(tokenizer, name, None)
        if find is not None and (found := find(token)) is not None:
            return int(found)
    raise TokenizerError(
        f"{type(tokenizer).__name__} cannot be asked for the id of {token!r}. Give it: eos=ID."
    )
