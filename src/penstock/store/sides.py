"""The two sides of a split store, opened together.

    stores/owt/train/penstock.json      "generation": "5f0c9a…"
    stores/owt/val/penstock.json        "generation": "5f0c9a…"      the same, or wait

A build commits the two sides one after the other. A reader that opens both in between could get
the training side of one build and the validation side of another, and then a document may be on
both sides. So the manifests of both sides contain the same digest of the parts of both, and
whoever opens both compares them.
"""

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from penstock.digest import digest_bytes, digest_json
from penstock.errors import MissingStoreError, StoreError
from penstock.paths import StorePath, StoreUrl, store_path
from penstock.store.manifest import FILE_NAME, PartTable
from penstock.store.reader import TokenStore

# A build commits the second side a few fsyncs after the first one.
_WAIT_SECONDS = 5.0
_POLL_SECONDS = 0.02


def generation_of(parts: Mapping[str, PartTable]) -> str:
    """The digest of the parts of all sides, which the manifest of each side contains."""
    return digest_json({side: digest_bytes(parts[side].to_bytes()) for side in sorted(parts)})


def open_sides(directory: str | os.PathLike[str]) -> tuple[TokenStore, TokenStore]:
    """Open the training and the validation side of a store that was built with a split.

    Raises:
        StoreError: a side is missing or damaged, or the two are of different builds.
    """
    whole = store_path(directory)
    train, val = open_stores([whole / "train", whole / "val"])
    return train, val


def stores_at(path: str | os.PathLike[str] | StoreUrl) -> dict[str, StorePath]:
    """The two sides of a split store, "train" and "val"; for any other path, the path under "".

    A path without a store is returned too: opening it raises an error that explains it.
    """
    whole = store_path(path)
    sides: dict[str, StorePath] = {side: whole / side for side in ("train", "val")}
    # A directory with ".building.json" is an unfinished store, even if its sides look finished.
    is_whole = has_file(whole, FILE_NAME) or (
        isinstance(whole, Path) and (whole / ".building.json").exists()
    )
    if is_whole or not all(has_file(each, FILE_NAME) for each in sides.values()):
        return {"": whole}
    return sides


def has_file(path: StorePath, name: str) -> bool:
    """Whether a directory, or a URL, has a file of this name."""
    if not isinstance(path, StoreUrl):
        return (path / name).exists()
    from penstock.store.objects import Objects

    try:
        Objects(path.address).size(name)
    except MissingStoreError:
        return False
    return True


def open_stores(paths: Sequence[str | os.PathLike[str] | StoreUrl]) -> list[TokenStore]:
    """Open stores; two sides of the same split store are of the same build.

    While a build replaces the two sides, this function waits for up to five seconds.

    Raises:
        StoreError: a store is missing or damaged, or two sides are of different builds.
    """
    until = time.monotonic() + _WAIT_SECONDS
    while True:
        try:
            stores = [TokenStore(path) for path in paths]
            other = _of_another_build(stores)
            if other is None:
                return stores
            one, two = other
            error = StoreError(
                f"{one.path} and {two.path} are of different builds, so the same document may be "
                "in both. The last build was stopped before it was complete, or one of the two "
                "was copied without the other. Repeat that build, or copy both."
            )
        except MissingStoreError as missing:
            if not any(_is_being_replaced(store_path(path)) for path in paths):
                raise
            error = missing
        if time.monotonic() > until:
            raise error
        time.sleep(_POLL_SECONDS)


def _of_another_build(stores: Sequence[TokenStore]) -> tuple[TokenStore, TokenStore] | None:
    """Two sides of one split store that do not belong together; None if there are none."""
    seen: dict[StorePath, TokenStore] = {}
    for store in stores:
        contents = store.manifest.contents
        if contents["side"] is None:  # stores that were built separately in one directory
            continue
        first = seen.setdefault(store.path.absolute().parent, store)
        if first.manifest.contents.get("generation") != contents.get("generation"):
            return first, store
    return None


def _is_being_replaced(path: StorePath) -> bool:
    """Whether the directory of a side is there again, or a build is about to put it there."""
    if isinstance(path, StoreUrl):
        return False  # a remote store is not replaced
    # `overwrite` renames the old store, and then the new one. See `penstock.store.overwrite`.
    whole = path.absolute().parent
    return path.is_dir() or whole.with_name(f".{whole.name}.old").exists()
