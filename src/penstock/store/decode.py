"""The tokenizer that belongs to a store, for turning its ids back into text."""

from functools import lru_cache
from typing import Any

from penstock.errors import StoreError
from penstock.store.manifest import Manifest
from penstock.tokenize.tokenizer import Tokenizer, load_tokenizer

__all__ = ["tokenizer_of"]


def tokenizer_of(manifest: Manifest, tokenizer: Any = None) -> Tokenizer:
    """The tokenizer that the store was built with.

    Raises:
        StoreError: `tokenizer`, or what the recorded name means today, is another one.
    """
    told = manifest.contents["tokenizer"]
    added = tuple(told.get("added_tokens", ()))
    if tokenizer is None:
        found = _by_name(told["name"], added)
    else:
        found = load_tokenizer(tokenizer, add_tokens=added)
    undigested = told["digest"] is None
    if found.digest != told["digest"] or (undigested and found.canary != told["canary"]):
        raise StoreError(
            f"The store was tokenized with {told['name']} (digest {str(told['digest'])[:8]}), and "
            f"{found.name} has the digest {str(found.digest)[:8]}. The same id would mean other "
            "text. Give the tokenizer of the store with tokenizer=."
        )
    return found


@lru_cache(maxsize=8)
def _by_name(name: str, added: tuple[str, ...]) -> Tokenizer:
    return load_tokenizer(name, add_tokens=added)
