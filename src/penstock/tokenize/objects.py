"""Tokenizers that are Python objects of other libraries, and not a tokenizer.json.

An object needs only a method `encode`. `describe_object` asks it once for all that penstock uses:
the names of the attributes differ between tiktoken, `transformers` and the user's own classes, and
only this module knows them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from penstock.digest import digest_bytes
from penstock.errors import MissingExtraError, TokenizerError
from penstock.tokenize.engines import Encoded, concatenated

if TYPE_CHECKING:
    import tiktoken


@dataclass(frozen=True, slots=True)
class ObjectDescription:
    """The properties that a tokenizer object reports; None or empty if it does not report one."""

    name: str
    is_tiktoken: bool
    vocab_size: int | None
    eos_id: int | None
    bos_id: int | None
    pad_id: int | None
    eos_token: str | None
    special_tokens: dict[str, int]
    """The special tokens and their ids, without the unknown token."""
    ranks: Mapping[bytes, int] | None
    """The ordinary tokens of a tiktoken encoding, as bytes, and their ids."""

    def digest(self, tokenizer: Any) -> str | None:
        """A digest of a tiktoken encoding; None for other objects, whose settings are unknown."""
        if self.ranks is None:
            return None
        # Sorted, so that the digest does not depend on the order of a dict.
        special = sorted(self.special_tokens.items())
        lines = [tokenizer._pat_str.encode(), repr(special).encode()]
        lines += [
            token.hex().encode() + b" %d" % rank for token, rank in sorted(self.ranks.items())
        ]
        return digest_bytes(b"\n".join(lines))


def describe_object(tokenizer: object) -> ObjectDescription:
    """The properties of a tokenizer object that penstock needs; each is read once.

    Raises:
        TokenizerError: the object has no method `encode`.
    """
    if not callable(read_attribute(tokenizer, "encode")):
        raise TokenizerError(
            f"{tokenizer!r:.80} is not a tokenizer: it is neither a name nor a path, and it has no "
            'method encode. Use a name such as "gpt2", a path, or an object with encode(text).'
        )
    read = partial(read_attribute, tokenizer)
    is_tiktoken = type(tokenizer).__module__.partition(".")[0] == "tiktoken"
    # The size has another name in each library, and is a property in some and a method in others.
    size = read("n_vocab", "vocab_size", "get_vocab_size", "__len__")
    # `transformers` has `eos_token_id`, tiktoken has `eot_token`.
    eos_id, eos_token = read("eos_token_id", "eot_token"), read("eos_token")
    return ObjectDescription(
        name=str(read("name") or type(tokenizer).__name__),
        is_tiktoken=is_tiktoken,
        vocab_size=None if size is None else int(size() if callable(size) else size),
        eos_id=None if eos_id is None else int(eos_id),
        bos_id=read("bos_token_id"),
        pad_id=read("pad_token_id"),
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
    known = read("_special_tokens")
    if isinstance(known, dict):  # tiktoken
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

    def __init__(self, tokenizer: Any, description: ObjectDescription) -> None:
        self.tokenizer = tokenizer
        self.description = description
        # An object is not trusted to treat special tokens as text; see `encode`.
        self._special = np.array(sorted(description.special_tokens.values()), np.int64)
        # tiktoken's `encode` raises if a text holds a special token; `encode_ordinary` does not.
        self._encode: Callable[..., Any] = read_attribute(tokenizer, "encode_ordinary", "encode")
        self._options: dict[str, bool] = {}
        if any(each.__module__.startswith("transformers.") for each in type(tokenizer).__mro__):
            # By default, a tokenizer of transformers parses special tokens in a text and adds
            # others around it.
            self._options = {"add_special_tokens": False, "split_special_tokens": True}

    def encode(self, texts: pa.LargeBinaryArray) -> Encoded:
        """The ids of `texts`.

        Raises:
            TokenizerError: the object returned the id of a special token.
        """
        strings = [text.decode() for text in texts.to_pylist()]
        encoded = concatenated([ids_of(self._encode(each, **self._options)) for each in strings])
        ids, offsets = encoded
        found = np.flatnonzero(np.isin(ids, self._special))
        if len(found):
            text = strings[int(np.searchsorted(offsets, found[0], side="right")) - 1]
            raise TokenizerError(
                f"{type(self.tokenizer).__name__}.encode gave the special token {ids[found[0]]:,} "
                f"for {text[:60]!r}. Text must not contain special tokens. Change encode() so that "
                "it treats them as text and adds none, or use a tokenizer.json."
            )
        return encoded

    def decode(self, ids: NDArray[np.uint32]) -> bytes:
        """The result of the object's own `decode_bytes` or `decode`."""
        # tiktoken's `decode` replaces incomplete characters; `decode_bytes` is exact.
        decode_bytes = read_attribute(self.tokenizer, "decode_bytes")
        if decode_bytes is not None:
            return bytes(decode_bytes(ids.tolist()))
        return str(self.tokenizer.decode(ids.tolist())).encode()


def ids_of(encoded: Any) -> Sequence[int]:
    """The ids in the result of an `encode` method: a list, an array, a tensor or an Encoding."""
    ids = read_attribute(encoded, "ids")
    ids = encoded if ids is None else ids
    to_list = read_attribute(ids, "tolist")
    return list(ids) if to_list is None else to_list()


def tiktoken_encoding(name: str) -> "tiktoken.Encoding":
    """The tiktoken encoding with this name, from tiktoken's cache or the network."""
    try:
        import tiktoken
    except ImportError:
        raise MissingExtraError(
            f"The tokenizer tiktoken:{name} needs tiktoken, which is not installed.\n"
            'Install it with: pip install "penstock[tiktoken]"'
        ) from None
    known = tiktoken.list_encoding_names()
    if name not in known:
        raise TokenizerError(f"tiktoken has no encoding {name!r}; it has: {', '.join(known)}.")
    try:
        return tiktoken.get_encoding(name)
    except (OSError, ValueError) as error:  # no network, or a damaged file
        raise TokenizerError(
            f"tiktoken could not fetch the encoding {name!r}: {error}\n"
            "On a machine with a network, set TIKTOKEN_CACHE_DIR, load the encoding once, and copy "
            "that directory here; then set TIKTOKEN_CACHE_DIR here too. Or use a tokenizer.json. "
            '"gpt2" needs no network.'
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
    if not known.is_tiktoken:
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
