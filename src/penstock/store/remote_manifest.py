"""The manifest of a remote store.

It is downloaded when the store is opened, and kept in the cache under its digest. A worker process
that gets a pickled store uses the kept one: if the store was appended to in between, the new
manifest would be that of other data.
"""

import logging
import re
from pathlib import Path

from penstock.errors import MissingStoreError, StoreError
from penstock.remote.address import StoreUrl
from penstock.remote.objects import Objects, open_objects
from penstock.store.files import cache_directory, read_file, write_file
from penstock.store.manifest import FILE_NAME, Manifest, parse_manifest

_log = logging.getLogger("penstock")
_DIGEST = re.compile(r"[0-9a-f]{64}")


def read_remote_manifest(url: StoreUrl, digest: str | None = None) -> Manifest:
    """The manifest of the store at `url`, checked.

    Args:
        url: The URL of the store.
        digest: If a manifest with this digest was read before, it is returned instead.

    Raises:
        MissingStoreError: there is no store at this URL.
        RemoteError: the server refuses, or does not answer before the deadline.
        StoreError: the manifest is damaged, or its kind or version is not supported.
    """
    if digest is not None and (known := _kept(digest)) is not None:
        return known
    objects, path = open_objects(url.address), url / FILE_NAME
    try:
        data = objects.read(FILE_NAME)
    except MissingStoreError:
        raise _absent(objects, url) from None
    try:
        manifest = parse_manifest(data, path)
    except StoreError:
        # A byte may have changed on its way. The manifest has its own digest, so the second answer
        # is as good as the first one.
        data = objects.read(FILE_NAME)
        manifest = parse_manifest(data, path)
    _keep(manifest.digest, data)
    return manifest


def _absent(objects: Objects, url: StoreUrl) -> StoreError:
    for side in ("train", "val"):
        try:
            objects.head(f"{side}/{FILE_NAME}")
        except MissingStoreError:
            continue
        return StoreError(f"{url} was built with a split. Open {url / side} instead.")
    return MissingStoreError(
        f"{url} has no {FILE_NAME}, so there is no store. Name a URL that a store was written to."
    )


def _path(digest: str) -> Path:
    return cache_directory() / "manifests" / f"{digest}.json"


def _kept(digest: str) -> Manifest | None:
    path = _path(digest)
    if not _DIGEST.fullmatch(digest) or not path.is_file():
        return None
    try:
        found = parse_manifest(read_file(path), path)
    except (OSError, StoreError) as error:
        _log.debug("%s cannot be used: %r", path, error)
        return None
    return found if found.digest == digest else None


def _keep(digest: str, data: bytes) -> None:
    path = _path(digest)
    try:
        if not path.exists():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_file(path, [data])
    except OSError as error:  # read-only, or full
        _log.debug("The manifest %s is not kept: %s", digest[:8], error)
