"""Checks of a store: `verify`, and digests of its first parts.

`verify` compares every byte of a store with its manifest.

A single flipped bit is found: in the manifest by its own digest, in every other file by its
SHA-256. The meaning of the bytes is checked too: the ends of documents ascend to the end of the
tokens, ids are in the vocabulary, and origins name inputs that exist.

The digest of a store is that of its manifest, which is written last. A loader state that was
saved while the store grew contains a digest of what existed then, the settings of the build and
the parts up to the state's position:

    chain(0) = digest(build settings)       chain(n) = digest(chain(n - 1), record of part n - 1)
"""

import os
from collections.abc import Callable
from pathlib import Path
from weakref import WeakKeyDictionary

import numpy as np

from penstock.digest import digest_json
from penstock.errors import StoreError
from penstock.store.files import digest_file
from penstock.store.manifest import (
    JsonObject,
    PartRecord,
    builds,
    part_file,
    rejects_file,
    shared_settings,
)
from penstock.store.reader import TokenStore

__all__ = ["chain", "describe_build", "verify"]

# A loader saves its state often, and computes only the links of parts that are new to it.
_chains: "WeakKeyDictionary[TokenStore, list[str]]" = WeakKeyDictionary()


def verify(
    path: str | os.PathLike[str], progress: Callable[[int, int], None] | None = None
) -> TokenStore:
    """Check the whole store in `path`, and open it.

    Args:
        path: The store.
        progress: Called with the number of checked parts and the number of all parts.

    Raises:
        StoreError: something is wrong; the message names the file and the problem.
    """
    store = TokenStore(path)
    for number, done in enumerate(store.manifest.contents["builds"]):
        log = Path(path) / rejects_file(number)
        _check_file(log, done["rejects"]["bytes"], done["rejects"]["sha256"])
    for number, part in enumerate(store.manifest.parts):
        for kind, (size, digest) in part.files.items():
            _check_file(Path(path) / part_file(part.number, kind), size, digest)
        _check_meaning(store, number, part)
        if progress:
            progress(number + 1, len(store.manifest.parts))
    return store


def _check_file(path: Path, size: int, digest: str) -> None:
    try:
        found = path.stat().st_size
    except FileNotFoundError:
        raise StoreError(f"{path} is missing.") from None
    if found != size:
        raise StoreError(f"{path} has {found:,} bytes, and the manifest says {size:,}.")
    # After the size, which is known at once and says more about what happened.
    actual = digest_file(path)
    if actual != digest:
        raise StoreError(
            f"{path} is damaged: its SHA-256 is {actual[:8]}…, the manifest says {digest[:8]}…. "
            "Copy it from a good store, or build this one again."
        )


def _check_meaning(store: TokenStore, number: int, part: PartRecord) -> None:
    """Check that the arrays fit together, which no digest can show."""
    place = f"{store.path}, part {part.number}"
    bounds = store.part_array(number, "bounds")
    tokens = store.part_array(number, "tokens")
    # Strictly ascending: a document without tokens would make `document()` return nothing.
    edges = np.concatenate((np.zeros(1, np.uint64), bounds))
    if int(edges[-1]) != part.num_tokens or (edges[1:] <= edges[:-1]).any():
        raise StoreError(
            f"{place}: its documents do not end in order at token {part.num_tokens:,}."
        )
    # Such an id would be an index error in the embedding, far from its cause.
    vocab_size = store.manifest.contents["tokenizer"]["vocab_size"]
    if len(tokens) and int(tokens.max()) >= vocab_size:
        raise StoreError(
            f"{place} holds the id {tokens.max():,}; the vocabulary has {vocab_size:,}."
        )
    if "chat" in store.manifest.contents and "loss" not in part.files:
        raise StoreError(f"{place} has no loss mask, and the store holds chats.")
    if "loss" in part.files and int(store.part_array(number, "loss").max()) > 1:
        raise StoreError(f"{place} has a loss mask with values other than 0 and 1.")
    origins = store.part_array(number, "origin")
    num_files = sum(len(done["inputs"]) for done in store.manifest.contents["builds"])
    if len(origins) and int(np.max(origins[:, 0])) >= num_files:
        raise StoreError(
            f"{place} names input file {origins[:, 0].max()}, and there are {num_files}."
        )


def chain(store: TokenStore, num_parts: int) -> str:
    """The digest of the settings of `store` and of its first `num_parts` parts."""
    links = _chains.setdefault(store, [digest_json(_settings(store))])
    while len(links) <= num_parts:
        part = store.manifest.parts[len(links) - 1]
        links.append(digest_json([links[-1], part.to_json()]))
    return links[num_parts]


def describe_build(store: TokenStore) -> JsonObject:
    """A short description of how a store was built, for a loader state."""
    settings = _settings(store)
    tokenizer, inputs = settings["tokenizer"], settings["inputs"]
    size = sum(each["bytes"] for each in inputs)
    name = f"{tokenizer['name']} {(tokenizer['digest'] or tokenizer['canary'])[:8]}"
    files = f"{len(inputs):,} file{'s' * (len(inputs) != 1)} of {size:,} bytes"
    return {
        "tokenizer": name[-60:],
        "eos_id": settings["eos_id"],
        "bos_id": settings["bos_id"],
        "reading": settings["reading"],
        "inputs": f"{files}, digest {digest_json(inputs)[:8]}",
    }


def _settings(store: TokenStore) -> JsonObject:
    contents = store.manifest.contents
    first = builds(store.manifest)[0]
    return {**shared_settings(contents), "reading": first["reading"], "inputs": first["inputs"]}
