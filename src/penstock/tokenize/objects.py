"""What can be learned from tokenizer objects that are not a tokenizer.json.

tiktoken's encodings are known from the inside; of any other object only what its attributes say.
"""

from typing import Any

from penstock.digest import digest_bytes
from penstock.errors import TokenizerError

__all__ = [
    "end_id",
    "is_tiktoken",
    "object_digest",
    "special_tokens_known",
    "tiktoken_encoding",
    "vocab_size_of",
]


def tiktoken_encoding(name: str) -> Any:
    """The tiktoken encoding of this name, from its cache or the network."""
    try:
        import tiktoken
    except ImportError:
        from penstock.errors import MissingExtraError

        raise MissingExtraError(
            f"The tokenizer tiktoken:{name} needs tiktoken, which is not installed.\n"
            'Install it with: pip install "penstock[tiktoken]"'
        ) from None
    known = tiktoken.list_encoding_names()
    if name not in known:
        raise TokenizerError(f"tiktoken has no encoding {name!r}; it has: {', '.join(known)}.")
    try:
        return tiktoken.get_encoding(name)
    except (OSError, ValueError) as error:  # no network, or a file that came damaged
        raise TokenizerError(
            f"tiktoken could not fetch the encoding {name!r}: {error}\n"
            "Run it once where there is a network with TIKTOKEN_CACHE_DIR set, copy that directory "
            'here and set it again; or use a tokenizer.json. "gpt2" needs no network.'
        ) from error


def end_id(tokenizer: Any) -> int | None:
    """The id that ends a document, by the names that `transformers` and tiktoken give it."""
    for attribute in ("eos_token_id", "eot_token"):
        try:
            found = getattr(tokenizer, attribute, None)
        except KeyError:  # a tiktoken encoding without <|endoftext|>
            continue
        if found is not None:
            return int(found)
    return None


def vocab_size_of(tokenizer: Any) -> int:
    """How many ids the object says it has."""
    for attribute in ("n_vocab", "vocab_size", "get_vocab_size", "__len__"):
        size = getattr(tokenizer, attribute, None)
        if size is not None:
            return int(size() if callable(size) else size)
    raise TokenizerError(
        f"{type(tokenizer).__name__} does not say how large its vocabulary is, so the width of the "
        "stored ids cannot be chosen. Give it an attribute vocab_size."
    )


def is_tiktoken(tokenizer: Any) -> bool:
    """Whether the object is one of tiktoken's encodings."""
    return type(tokenizer).__module__.partition(".")[0] == "tiktoken"


def object_digest(tokenizer: Any) -> str | None:
    """A digest of a tiktoken encoding; None for objects whose inside is not known."""
    ranks = getattr(tokenizer, "_mergeable_ranks", None)
    if not is_tiktoken(tokenizer) or ranks is None:
        return None
    lines = [tokenizer._pat_str.encode(), repr(sorted(tokenizer._special_tokens.items())).encode()]
    lines += [token.hex().encode() + b" %d" % rank for token, rank in sorted(ranks.items())]
    return digest_bytes(b"\n".join(lines))


def special_tokens_known(tokenizer: Any) -> dict[str, int]:
    """The special tokens that the object says it has, and their ids; not its unknown token.

    Known are tiktoken's encodings, `transformers`, and objects that have `get_special_tokens` and
    `encode_special`.
    """
    if isinstance(getattr(tokenizer, "_special_tokens", None), dict):  # tiktoken
        return dict(tokenizer._special_tokens)
    if hasattr(tokenizer, "all_special_tokens") and hasattr(tokenizer, "all_special_ids"):
        pairs = zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True)
        unknown = getattr(tokenizer, "unk_token_id", None)
        return {str(token): int(number) for token, number in pairs if number != unknown}
    names = getattr(tokenizer, "get_special_tokens", None)
    encode = getattr(tokenizer, "encode_special", None)
    if callable(names) and callable(encode):
        return {str(name): int(encode(name)) for name in names()}
    return {}
