"""Keeps the tokenizers that a user loads, so that a store's tokenizer can be found by its digest.

    ~/.cache/penstock/tokenizers/DIGEST.json        (or $PENSTOCK_CACHE/tokenizers)

A manifest is written by whoever built the store, so nothing in it may decide which file is opened
or which server is asked. It identifies its tokenizer by a digest, and `kept_tokenizer` finds the
tokenizer with this digest among those that the user has loaded before. The directory may be
deleted at any time: then the user names the tokenizer once more.
"""

import json
import logging
import re
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import PenstockError
from penstock.store.files import cache_directory, write_file
from penstock.tokenize.definition import Config, Definition, parse_definition

if TYPE_CHECKING:
    from penstock.tokenize.engines import Engine

_log = logging.getLogger("penstock")
_DIGEST = re.compile(r"[0-9a-f]{64}")


def keep_tokenizer(digest: str | None, source: "Definition | Engine") -> None:
    """Write a tokenizer to the user's cache, unless it is there already.

    Bundled tokenizers are not written, and neither are objects whose settings are unknown. If the
    cache is not writable, the tokenizer is not kept: it can be used all the same.
    """
    contents = _contents(source)
    if digest is None or contents is None:
        return
    path = _path(digest)
    try:
        if not path.exists():
            # Only this user can put a file there.
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_file(path, [json.dumps(contents).encode()])
    except OSError as error:  # read-only, or full
        _log.debug("The tokenizer %s is not kept: %s", digest[:8], error)


def kept_tokenizer(digest: str, name: str) -> object | None:
    """The tokenizer with this digest, as `load_tokenizer` takes it; None if it was not kept.

    Args:
        digest: The digest, which may come from any manifest.
        name: The name that messages show.
    """
    # The digest becomes part of a path, so "../x" must not be one.
    if not _DIGEST.fullmatch(digest) or not (path := _path(digest)).is_file():
        return None
    try:
        found = _parse(json.loads(path.read_bytes()), name)
    except (OSError, PenstockError, ValueError, LookupError, TypeError, ImportError) as error:
        _log.debug("%s cannot be used: %r", path, error)
        found = None
    is_intact = found is not None and _digest_of(found) == digest
    if not is_intact:  # damaged, so the tokenizer is written again when it is loaded again
        with suppress(OSError):
            path.unlink()
    return found if is_intact else None


def _path(digest: str) -> Path:
    return cache_directory() / "tokenizers" / f"{digest}.json"


def _contents(source: "Definition | Engine") -> Config | None:
    """The JSON of a tokenizer; None if it need not be kept, or cannot be."""
    if isinstance(source, Definition):
        tokens = {"eos_token": source.eos_token, "bos_token": source.bos_token}
        more = {"other_special": list(source.other_special), "tokenizer": source.config}
        return None if source.origin == "bundled" else {**tokens, **more}
    # Imported here, with the engines' packages, because most stores need `kept_tokenizer` alone.
    from penstock.tokenize.engines import ObjectEngine

    # An encoding of tiktoken has no tokenizer.json, but its three settings are known.
    if not isinstance(source, ObjectEngine) or source.description.ranks is None:
        return None
    return {
        "tiktoken": source.tokenizer.name,
        "pattern": source.tokenizer._pat_str,
        "ranks": {token.hex(): rank for token, rank in source.description.ranks.items()},
        "special_tokens": source.description.special_tokens,
    }


def _parse(contents: Config, name: str) -> Any:
    if "tiktoken" not in contents:
        return parse_definition(contents, name)
    import tiktoken  # an optional package

    return tiktoken.Encoding(
        contents["tiktoken"],
        pat_str=contents["pattern"],
        mergeable_ranks={bytes.fromhex(token): rank for token, rank in contents["ranks"].items()},
        special_tokens=contents["special_tokens"],
    )


def _digest_of(found: Any) -> str | None:
    if isinstance(found, Definition):
        return found.digest
    from penstock.tokenize.engines import describe_object

    return describe_object(found).digest(found)
