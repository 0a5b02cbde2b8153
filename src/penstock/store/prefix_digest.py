"""Digests of the first parts of a store.

    chain(0) = digest(build settings)       chain(n) = digest(chain(n - 1), record of part n - 1)

The digest of a store is that of its manifest, which is written last. A loader state that was
saved while the store grew contains a digest of what existed then: the settings of the build, and
the parts up to the state's position.
"""

from weakref import WeakKeyDictionary

from penstock.digest import digest_json
from penstock.store.manifest import JsonObject, builds, shared_settings
from penstock.store.reader import TokenStore

__all__ = ["chain", "describe_build"]

_chains: "WeakKeyDictionary[TokenStore, list[str]]" = WeakKeyDictionary()


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
