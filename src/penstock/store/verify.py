"""Checks of a store: `verify`, digests of its first parts, and differences between builds.

`verify` compares every byte of a store with its manifest.

A single flipped bit is found: in the manifest by its own digest, in every other file by the digest
that the manifest or its table records. The meaning of the bytes is checked too: the ends of
documents ascend to the end of the tokens, ids are in the vocabulary, and origins name inputs that
exist.

The digest of a store is that of its manifest, which is written last. So a loader state that is
saved before the store is finished contains another digest. `chain` computes it from the settings
of the build and the parts up to the state's position:

    chain(0) = digest(build settings)       chain(n) = digest(chain(n - 1), record of part n - 1)

`differences` lists at most five differences between the settings of two builds, so that the
message about a directory of a thousand files stays readable:

    eos_id: 256 -> None                       a field
    reading.documents: 'lines' -> 'file'      a field of a field
    inputs: a.txt: 12 bytes -> 17             an input that both have
    inputs: b.txt is left out                 an input that only the old build has
    inputs: c.txt is new                      an input that only the new build has
    stamps: d.txt was changed or replaced     an input of the same length
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from weakref import WeakKeyDictionary

import numpy as np

from penstock.digest import digest_json
from penstock.disk import digest_file
from penstock.errors import MissingStoreError, StoreError
from penstock.paths import StoreUrl
from penstock.store.manifest import (
    CHECKED_KINDS,
    INPUT_DIGEST,
    JsonObject,
    PartRecord,
    part_file,
    rejects_file,
)
from penstock.store.parts import REPAIR_ADVICE
from penstock.store.reader import TokenStore
from penstock.store.sides import stores_at

_SHOWN = 5
_FILES_SHOWN = 20
# The digests of `chain` that were computed. A loader saves its state often, so they are kept.
_chains: "WeakKeyDictionary[TokenStore, list[str]]" = WeakKeyDictionary()


def verify(
    path: str | os.PathLike[str] | StoreUrl, progress: Callable[[int, int], None] | None = None
) -> TokenStore:
    """Check the whole store in `path`, and open it.

    Of a store that was built with a split, checks both sides and opens the first. Of a remote
    store, all files are downloaded, also those that are on this machine.

    Args:
        path: The store.
        progress: Called with the number of checked parts and the number of all parts.

    Raises:
        StoreError: something is wrong; the message names the files and their problems.
    """
    stores = [verify_store(TokenStore(each), progress) for each in stores_at(path).values()]
    return stores[0]


def verify_store(
    store: TokenStore, progress: Callable[[int, int], None] | None = None
) -> TokenStore:
    """Check the whole of an open store; see `verify`."""
    damaged: list[str] = []
    for number, done in enumerate(store.manifest.builds):
        log = (rejects_file(number), done["rejects"]["bytes"], done["rejects"]["xxh3_128"])
        damaged += _damage(store, *log)
    for number, part in enumerate(store.manifest.parts):
        found = [
            problem
            for kind, (size, digest) in part.files.items()
            for problem in _damage(store, part_file(part.number, kind), size, digest)
        ]
        damaged += found
        if not found:
            _check_meaning(store, number, part)
        if progress:
            progress(number + 1, len(store.manifest.parts))
    if damaged:
        more = len(damaged) - _FILES_SHOWN
        rest = f"; and {more:,} more files" if more > 0 else ""
        kind = (
            MissingStoreError if all(each.endswith("missing") for each in damaged) else StoreError
        )
        raise kind(f"{'; '.join(damaged[:_FILES_SHOWN])}{rest}. {REPAIR_ADVICE}")
    return store


def _damage(store: TokenStore, name: str, size: int, digest: str) -> list[str]:
    """What is wrong with a file of the store; empty if it is intact."""
    path = store.path / name
    if isinstance(path, StoreUrl):
        store.files.download_anew(name, size, digest)
        return []
    problem = file_problem(path, size, digest)
    return [f"{path} {problem}"] if problem else []


def file_problem(path: Path, size: int, digest: str, *, says: str = "the manifest") -> str | None:
    """What is wrong with a file that `says` records with this size and digest, or None."""
    try:
        found = path.stat().st_size
    except FileNotFoundError:
        return "is missing"
    # The size is compared before the digest: it is known at once, and says more about the cause.
    if found != size:
        return f"has {found:,} bytes, but {says} says {size:,}"
    actual = digest_file(path)
    if actual != digest:
        return f"is damaged: its XXH3-128 is {actual[:8]}…, but {says} says {digest[:8]}…"
    return None


def _check_meaning(store: TokenStore, number: int, part: PartRecord) -> None:
    """Check that the arrays fit together, which their digests do not show."""
    arrays = {k: store.files.open(number, k).array for k in CHECKED_KINDS if k in part.files}
    largest_id = int(arrays["tokens"].max(initial=0))
    vocab_size = store.vocab_size
    last_file, num_files = int(arrays["origin"][:, 0].max(initial=0)), len(store.manifest.inputs)
    problem = None
    # Strictly ascending: a document without tokens would make `document()` return nothing.
    edges = np.concatenate((np.zeros(1, np.uint64), arrays["bounds"]))
    if int(edges[-1]) != part.num_tokens or (edges[1:] <= edges[:-1]).any():
        problem = f": its bounds do not ascend to {part.num_tokens:,}, the number of its tokens"
    elif largest_id >= vocab_size:  # it would be an index error in the embedding
        problem = f" holds the token id {largest_id:,}, but the vocabulary has {vocab_size:,} ids"
    elif "chat" in store.manifest.contents and "loss" not in arrays:
        problem = " has no loss mask, but it is a store of chats"
    elif "loss" in arrays and int(arrays["loss"].max()) > 1:
        problem = " has a loss mask with values other than 0 and 1"
    elif last_file >= num_files:
        problem = f" names input file {last_file}, but the store has {num_files}, counted from 0"
    if problem:
        raise StoreError(f"{store.path}, part {part.number}{problem}. {REPAIR_ADVICE}")
    for kind in arrays:  # a reader would refuse a block whose checksum is wrong
        store.part_array(number, kind)


def chain(store: TokenStore, num_parts: int) -> str:
    """The digest of the settings of `store` and of its first `num_parts` parts."""
    links = _chains.setdefault(store, [digest_json(store.manifest.settings)])
    while len(links) <= num_parts:
        part = store.manifest.parts[len(links) - 1]
        links.append(digest_json([links[-1], part.to_json()]))
    return links[num_parts]


def describe_build(store: TokenStore) -> JsonObject:
    """A short description of how a store was built, for a loader state."""
    settings = store.manifest.settings
    tokenizer, inputs = settings["tokenizer"], settings["inputs"]
    size = sum(each["bytes"] for each in inputs)
    files = f"{len(inputs):,} file{'s' * (len(inputs) != 1)} of {size:,} bytes"
    return {
        "tokenizer": _named(tokenizer)[-60:],
        "eos_id": settings["eos_id"],
        "bos_id": settings["bos_id"],
        "reading": settings["reading"],
        "inputs": f"{files}, digest {digest_json(inputs)[:8]}",
    }


def differences(old: JsonObject, new: JsonObject) -> str:
    """The fields that differ between the settings of two builds, as `name: old -> new`."""
    return ", ".join(_fields(old, new, "")[:_SHOWN])


def _fields(old: JsonObject, new: JsonObject, prefix: str) -> list[str]:
    found = []
    for key in sorted({*old, *new}):
        before, after = old.get(key), new.get(key)
        if before == after:
            continue
        if key == "stamps":
            # Modification times are listed in the order of the inputs, so they can be compared
            # only if the inputs are equal. If the inputs differ, another entry reports that.
            if old.get("inputs") == new.get("inputs"):
                files = zip(old["inputs"], old["stamps"], new["stamps"], strict=True)
                changed = [file["name"] for file, then, now in files if then != now]
                found += [f"stamps: {name} was changed or replaced" for name in changed]
        elif key == "tokenizer" and before and after and _named(before) != _named(after):
            found.append(f"{prefix}tokenizer: {_named(before)} -> {_named(after)}")
        elif isinstance(before, dict) and isinstance(after, dict):
            found += _fields(before, after, f"{prefix}{key}.")
        elif key == "inputs" and isinstance(before, list) and (named := _inputs(before, new[key])):
            found += [f"inputs: {each}" for each in named]
        else:
            found.append(f"{prefix}{key}: {_short(before)} -> {_short(after)}")
    return found


def _named(tokenizer: JsonObject) -> str:
    """The name of a tokenizer, and the beginning of its digest."""
    # A tokenizer without a digest is recognised by its ids of a test text.
    return f"{tokenizer['name']} {(tokenizer['digest'] or tokenizer['canary'])[:8]}"


def _short(value: object) -> str:
    """At most 60 characters of a value, with its closing quote."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:58]}…{text[-1]}"


def _inputs(before: list[JsonObject], after: list[JsonObject]) -> list[str]:
    """The differences between two lists of inputs, by name; [] if only their order differs."""
    # URLs are recorded without their queries, so two inputs may have one name.
    old, new = ({each["name"]: each for each in inputs} for inputs in (before, after))
    found = []
    for name in sorted({*old, *new}):
        if name not in new:
            found.append(f"{name} is left out")
        elif name not in old:
            found.append(f"{name} is new")
        elif old[name]["bytes"] != new[name]["bytes"]:
            found.append(f"{name}: {old[name]['bytes']:,} bytes -> {new[name]['bytes']:,}")
        else:
            found += [f"{name}: {each}" for each in _fields(old[name], new[name], "")]
    return found


def recorded_names(names: Sequence[str]) -> list[str]:
    """The names of inputs below their common root; addresses of other machines stay as they are.

    >>> recorded_names(["/data/web/a.txt", "/data/code/b.txt", "s3://bucket/c.txt"])
    ['web/a.txt', 'code/b.txt', 's3://bucket/c.txt']
    >>> recorded_names(["../text/a.txt"])
    ['a.txt']
    """
    paths = {
        name: os.path.abspath(name.removeprefix("file://"))  # noqa: PTH100  (links are kept)
        for name in names
        if "://" not in name.removeprefix("file://")
    }
    root = os.path.commonpath(map(os.path.dirname, paths.values())) if paths else ""
    return [
        Path(paths[name]).relative_to(root).as_posix() if name in paths else name for name in names
    ]


def comparable(inputs: Sequence[JsonObject]) -> list[JsonObject]:
    """The inputs of a manifest as a new build describes them: without digests."""
    return [{key: each[key] for key in each if key != INPUT_DIGEST} for each in inputs]
