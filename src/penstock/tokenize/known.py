"""Finds the tokenizer of a store among the tokenizers that this user has."""

from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING

from penstock.errors import MissingTokenizerError, StoreError, TokenizerError
from penstock.tokenize.gpt2 import GPT2_DIGEST, Decoder, Gpt2Decoder
from penstock.tokenize.kept import kept_tokenizer

if TYPE_CHECKING:
    from penstock.tokenize.definition import Config
    from penstock.tokenize.tokenizer import Tokenizer

_GPT2_SIZE, _BYTES_SIZE = 50_257, 257


def known_tokenizer(recorded: "Config") -> "Tokenizer":
    """The tokenizer that a manifest records, found by its digest.

    The recorded name appears in messages only. It is never opened and never asked for: a store
    that came from somebody else must not name files or servers.

    Args:
        recorded: The entry `tokenizer` of a manifest.

    Raises:
        MissingTokenizerError: this user has no tokenizer with the recorded digest.
    """
    if not recorded["digest"] and recorded.get("canary") == "":
        raise MissingTokenizerError(
            "The store was imported without a tokenizer, so it records none. Give the tokenizer of "
            "its ids each time with tokenizer= (--tokenizer)."
        )
    if not recorded["digest"]:
        raise MissingTokenizerError(
            f"The store was tokenized with {recorded['name']!r:.80} (digest "
            f"{recorded['canary']:.8}), an object that penstock cannot keep. Pass the same object "
            "again each time, with tokenizer= in Python; commands cannot load it."
        )
    added = tuple(recorded.get("added_tokens", ()))
    return _find(recorded["digest"], recorded["name"], added, recorded["vocab_size"])


def tokenizer_of(recorded: "Config", given: object = None) -> "Tokenizer":
    """The tokenizer that a manifest records.

    If `given` is None, it is found by its digest, as by `known_tokenizer`. Otherwise it is loaded
    from `given`, and compared with the record.

    Raises:
        MissingTokenizerError: `given` is None, and this user has no such tokenizer.
        StoreError: `given` is another tokenizer.
    """
    if given is None:
        return known_tokenizer(recorded)
    from penstock.tokenize.special_tokens import checked_tokens
    from penstock.tokenize.tokenizer import load_tokenizer, with_added

    found = load_tokenizer(given)
    if added := recorded.get("added_tokens"):
        found = load_tokenizer(with_added(found, checked_tokens(added)))
    digest = recorded["digest"]
    if not digest and not recorded["canary"]:  # imported without a tokenizer
        return found
    # A tokenizer without a digest is recognised by its ids of a test text.
    if found.digest != digest or (digest is None and found.canary != recorded["canary"]):
        recorded_digest, found_digest = digest or recorded["canary"], found.digest or found.canary
        raise StoreError(
            f"The store was tokenized with {recorded['name']} (digest {recorded_digest[:8]}), and "
            f"{found.name} has the digest {found_digest[:8]}. The same id would mean other text. "
            "Give the tokenizer of the store with tokenizer=."
        )
    return found


def known_decoder(recorded: "Config") -> Decoder:
    """The tokenizer that a manifest records, or a decoder that gives the same text.

    It may load faster than the tokenizer, and decodes long texts more slowly.

    Raises:
        MissingTokenizerError: this user has no tokenizer with the recorded digest.
    """
    if recorded["digest"] == GPT2_DIGEST:
        return _gpt2_decoder()
    return known_tokenizer(recorded)


_gpt2_decoder = lru_cache(maxsize=1)(Gpt2Decoder)


# An error is not cached: the tokenizer may be loaded later.
@lru_cache(maxsize=8)
def _find(digest: str, name: str, added: tuple[str, ...], vocab_size: int) -> "Tokenizer":
    if (kept := kept_tokenizer(digest, name)) is not None:
        from penstock.tokenize.tokenizer import load_tokenizer

        return load_tokenizer(kept)
    # The sizes are compared first: the imports and the digest of a vocabulary take 0.2 s.
    sizes = (_BYTES_SIZE, _GPT2_SIZE)
    if any(size <= vocab_size <= size + len(added) for size in sizes):
        with suppress(TokenizerError):  # the recorded tokens cannot be added to it
            if (bundled := _bundled(digest, added, vocab_size)) is not None:
                return bundled
    raise MissingTokenizerError(
        f"The store was tokenized with {name!r:.80} (digest {digest:.8}), which is not a bundled "
        "tokenizer and not one that you loaded before. A name that a store contains is never "
        "opened or downloaded. Give the tokenizer of the store with tokenizer= (--tokenizer), "
        "once: after that it is found by its digest."
    )


def _bundled(digest: str, added: tuple[str, ...], vocab_size: int) -> "Tokenizer | None":
    """The bundled tokenizer with this digest, after these tokens were added."""
    from penstock.tokenize.definition import find_definition
    from penstock.tokenize.special_tokens import checked_tokens, extended_definition
    from penstock.tokenize.tokenizer import load_tokenizer, with_added

    tokens = checked_tokens(added)
    if vocab_size == _BYTES_SIZE + len(tokens):
        loaded = with_added(load_tokenizer("bytes"), tokens)
        if loaded.digest == digest:
            return loaded
    if _GPT2_SIZE <= vocab_size <= _GPT2_SIZE + len(tokens):
        definition = extended_definition(find_definition("gpt2"), tokens)
        if definition.digest == digest:
            return load_tokenizer(definition)
    return None
