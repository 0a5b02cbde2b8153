"""A digest for the first parts of a store.

    chain(0) = digest(build settings)       chain(n) = digest(chain(n - 1), record of part n - 1)

The digest of a store is that of its manifest, which is written last. A state that was taken
while the store grew binds to what was there: how it is built, and the parts up to its position.
"""

from weakref import WeakKeyDictionary

from penstock.digest import digest_json
from penstock.store.manifest import JsonObject, builds, shared_settings
from penstock.store.reader import TokenStore

__all__ = ["chain", "describe_build"]

_chains: "WeakKeyDictionary[TokenStore, list[str]]" = WeakKeyDictionary()


def chain(store: TokenStore, num_parts: int) -> str:
    """The digest of how `store` is built and of its first parts, which must be there."""
    links = _chains.setdefault(store, [digest_json(_settings(store))])
    while len(links) <= num_parts:
        part = store.manifest.parts[len(links) - 1]
        links.append(digest_json([links[-1], part.to_json()]))
    return links[num_parts]


def describe_build(store: TokenStore) -> JsonObject:
    """How a store is built, in words that are short enough for a state."""
    settings = _settings(store)
    tokenizer, inputs = settings["tokenizer"], settings["inputs"]
    size = sum(each["bytes"] for each in inputs)
    files = f"{len(inputs):,} file{'s' * (len(inputs) != 1)} of {size:,} bytes"
    return {
        "tokenizer": f"{tokenizer['name']} {(tokenizer['digest'] or tokenizer['canary'])[:8]}"[
            -60:
        ],
        "eos_id": settings["eos_id"],
        "bos_id": settings["bos_id"],
        "reading": settings["reading"],
        "inputs": f"{files}, digest {digest_json(inputs)[:8]}",
    }


def _settings(store: TokenStore) -> JsonObject:
    contents = store.manifest.contents
    first = builds(store.manifest)[0]
    return {**shared_settings(contents), "reading": first["reading"], "inputs": first["inputs"]}
