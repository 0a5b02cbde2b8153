"""Checks the JSON of a tokenizer before native code sees it.

`tokenizers` and gigatoken are written for files that a library saved. They make an array with a
place for each id up to the largest, so one token with the id 600,000,000 takes 9.5 GB, and an id
of 2^31 ends the process. A file that passes this screen needs memory in proportion to its size.
Everything else that is wrong in a file is reported by the libraries, as a `TokenizerError`.
"""

from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from penstock.errors import TokenizerError

MAX_BYTES = 1 << 29
"""The most bytes of a tokenizer.json. The largest public ones have 40 MB."""
_MAX_DEPTH = 64
# Ids may have gaps, as for tokens that are reserved: a quarter of all ids up to the largest one
# must be in use, and a small vocabulary may have 33 million unused ids besides, which take 0.5 GB.
_SPARSE, _UNUSED = 4, 1 << 25
_MAX_ID = (1 << 31) - 1
_STEPS = ("normalizer", "pre_tokenizer", "post_processor", "decoder", "truncation", "padding")
Config = dict[str, Any]
"""A part of a tokenizer.json that is an object."""
_FLAGS = ("special", "single_word", "lstrip", "rstrip", "normalized")


def screen(config: Any, name: str) -> None:
    """Raise if the parsed JSON of a tokenizer.json could harm the process that loads it.

    Raises:
        TokenizerError: a field has a wrong type, an id is out of range, or lists are nested too
            deep.
    """
    if not isinstance(config, dict) or not isinstance(config.get("model"), dict):
        raise TokenizerError(
            f'{name} is JSON but not a tokenizer.json: it has no "model". Files written by '
            "tokenizers.Tokenizer.save() have one."
        )
    for key in _STEPS:
        if not isinstance(config.get(key), dict | None):
            _refuse(name, key, config[key], "an object or null")
    model = config["model"]
    # The vocabulary and the merges have one level each, and are checked below.
    rest = {key: value for key, value in model.items() if key not in ("vocab", "merges")}
    _check_depth([{**config, "model": rest}], name)
    ids = [*_vocab_ids(model, name), *_added_ids(config, name)]
    largest = max(ids, default=-1)
    if largest > min(_MAX_ID, _SPARSE * len(ids) + _UNUSED):
        raise TokenizerError(
            f"{name} has {len(ids):,} tokens, and the id {largest:,} among them. The memory for so "
            "many unused ids could be more than the machine has. Number its tokens without gaps."
        )
    _check_merges(model, name)


@contextmanager
def usable(name: str) -> Iterator[None]:
    """Raise a `TokenizerError` if code that reads a screened tokenizer.json finds an odd value."""
    try:
        yield
    except (LookupError, TypeError, AttributeError, RecursionError) as error:
        raise TokenizerError(
            f"{name} is not a usable tokenizer.json: a field is missing or has the wrong type "
            f"({type(error).__name__}: {error})."
        ) from error


@contextmanager
def without_failures() -> Iterator[None]:
    """Raise a `TokenizerError` in place of a failure of `tokenizers`; can be used as a decorator.

    A model without its unknown token fails at the first unknown word, with a plain `Exception`. The
    class of a panic of Rust code cannot be imported, and is no subclass of `Exception`.
    """
    try:
        yield
    except BaseException as error:
        if type(error) is not Exception and type(error).__name__ != "PanicException":
            raise
        raise TokenizerError(
            f"The tokenizer cannot be used, because tokenizers failed with: {error!s:.200}. Use "
            "another tokenizer."
        ) from None


def _check_charsmap(step: Config, name: str) -> None:
    """Raise if a map of characters says that it is longer than it is."""
    encoded = step.get("precompiled_charsmap")
    if not isinstance(encoded, str):
        return
    try:
        data = b64decode(encoded)
    except ValueError:
        return  # the library refuses it
    # The first four bytes are the size of the trie, for which the library allocates memory.
    if int.from_bytes(data[:4], "little") > len(data):
        _refuse(name, "precompiled_charsmap", encoded, "a map as long as it says")


def _check_depth(level: list[Config | list[object]], name: str) -> None:
    for _ in range(_MAX_DEPTH):
        for each in level:
            if isinstance(each, dict):
                _check_charsmap(each, name)
        items = (each.values() if isinstance(each, dict) else each for each in level)
        level = [value for some in items for value in some if isinstance(value, dict | list)]
        if not level:
            return
    raise TokenizerError(f"{name} is nested more than {_MAX_DEPTH} levels deep. Use another file.")


def _vocab_ids(model: Config, name: str) -> list[int]:
    """The ids of the model's tokens."""
    vocab = model.get("vocab")
    if isinstance(vocab, list):  # Unigram: [token, score], in the order of the ids
        for number, pair in enumerate(vocab):
            is_pair = isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str)
            if not is_pair or type(pair[1]) not in (int, float):
                _refuse(name, f"model.vocab[{number}]", pair, "a token and its score")
        return list(range(len(vocab)))
    if not isinstance(vocab, dict | None):
        _refuse(name, "model.vocab", vocab, "an object or a list")
    for token, number in (vocab or {}).items():
        _check_id(number, f"the id of {token!r:.40}", name)
    return list((vocab or {}).values())


def _added_ids(config: Config, name: str) -> list[int]:
    """The ids of the added tokens."""
    added = config.get("added_tokens")
    if not isinstance(added, list | None):
        _refuse(name, "added_tokens", added, "a list")
    ids = []
    for number, token in enumerate(added or []):
        path = f"added_tokens[{number}]"
        if not isinstance(token, dict) or not isinstance(token.get("content"), str):
            _refuse(name, path, token, "an object with an id and a content")
        for flag in _FLAGS:  # only "special" is needed
            if type(token.get(flag, None if flag == "special" else False)) is not bool:
                _refuse(name, f"{path}.{flag}", token.get(flag), "true or false")
        ids.append(_check_id(token.get("id"), f"{path}.id", name))
    return ids


def _check_id(number: object, path: str, name: str) -> int:
    if type(number) is not int or not 0 <= number <= _MAX_ID:  # True is an instance of int
        _refuse(name, path, number, f"a whole number from 0 to {_MAX_ID:,}")
    return int(number)


def _check_merges(model: Config, name: str) -> None:
    merges, vocab = model.get("merges"), model.get("vocab") or {}
    if not isinstance(merges, list | None):
        _refuse(name, "model.merges", merges, "a list")
    for number, pair in enumerate(merges or []):
        # Files write a merge as "a b" or as ["a", "b"].
        parts = pair.split(" ") if isinstance(pair, str) else pair
        if not isinstance(parts, list) or [type(each) for each in parts] != [str, str]:
            _refuse(name, f"model.merges[{number}]", pair, "two tokens")
        if parts[0] not in vocab or parts[1] not in vocab:
            _refuse(name, f"model.merges[{number}]", pair, "two tokens of the vocabulary")


def _refuse(name: str, path: str, value: object, expected: str) -> NoReturn:
    raise TokenizerError(
        f"{name} is not a usable tokenizer.json: {path} is {value!r:.60}, not {expected}."
    )
