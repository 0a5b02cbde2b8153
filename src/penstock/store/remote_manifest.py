"""The manifest of a remote store.

It is downloaded when the store is opened, and kept in the cache under its digest. A worker process
that gets a pickled store uses the kept one: if the store was appended to in between, the new
manifest would be that of other data.
"""

import logging
import os
import re
from contextlib import suppress
from pathlib import Path

from penstock.digest import digest_bytes
from penstock.disk import cache_directory, digest_file, read_file, write_file
from penstock.errors import MissingStoreError, RemoteError, StoreError
from penstock.remote.address import StoreUrl
from penstock.remote.objects import Objects, open_objects
from penstock.store.manifest import (
    FILE_NAME,
    JsonObject,
    Manifest,
    parse_manifest,
    table_file,
    with_table,
)

_log = logging.getLogger("penstock")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_ATTEMPTS = 3


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
    objects = open_objects(url.address)
    try:
        data, manifest = read_manifest_object(objects, url)
    except MissingStoreError:
        raise _absent(objects, url) from None
    _keep(manifest.digest, data)
    _mark_used(_path(manifest.digest), manifest)
    return manifest


def read_manifest_object(objects: Objects, url: StoreUrl, side: str = "") -> tuple[bytes, Manifest]:
    """The manifest of one side of the store at `url`: its bytes, and its contents, checked."""
    name, tables = as_name(side, FILE_NAME), _path("").parent
    for attempt in range(_ATTEMPTS):
        data = objects.read(name)
        try:
            contents = parse_manifest(data, url / name)
            fetch_table(objects, side, contents, tables)
            return data, with_table(contents, url / name, tables)
        except StoreError:
            # A byte may have changed on its way, or an append has replaced the manifest. The
            # manifest has its own digest, so a later answer is as good as the first one.
            if attempt == _ATTEMPTS - 1:
                raise
    raise AssertionError


def fetch_table(objects: Objects, side: str, contents: JsonObject, directory: Path) -> None:
    """Download the table of parts that a manifest needs, unless it is in `directory` already.

    Args:
        objects: The files of the store.
        side: The side of the split; "" without one.
        contents: The manifest as JSON.
        directory: Where the table is put. The name of a table contains its digest.
    """
    entry = contents["parts"]
    name = table_file(entry["sha256"])
    with suppress(OSError, StoreError):  # it is not there, or not a file
        if digest_file(directory / name) == entry["xxh3_128"]:
            return
    try:
        table = objects.read(as_name(side, name))
    except MissingStoreError:
        raise RemoteError(
            f"{objects.shown(as_name(side, name))} is missing. It lists the parts of the store. "
            "Copy it from a good store, or build the store again."
        ) from None
    if len(table) != entry["bytes"] or digest_bytes(table) != entry["sha256"]:
        raise RemoteError(
            f"{objects.shown(as_name(side, name))} has other contents than the manifest says. The "
            "store is damaged, or the network changes bytes."
        )
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_file(directory / name, [table])


def as_name(side: str, file: str) -> str:
    """The name of a file of one side of a store, below the URL of the store.

    >>> as_name("train", "penstock.json"), as_name("", "penstock.json")
    ('train/penstock.json', 'penstock.json')
    """
    return f"{side}/{file}" if side else file


def _absent(objects: Objects, url: StoreUrl) -> StoreError:
    for side in ("train", "val"):
        try:
            objects.size(f"{side}/{FILE_NAME}")
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
        found = with_table(parse_manifest(read_file(path), path), path, path.parent)
    except (OSError, StoreError) as error:
        _log.debug("%s cannot be used: %r", path, error)
        return None
    _mark_used(path, found)
    return found if found.digest == digest else None


def _mark_used(path: Path, manifest: Manifest) -> None:
    """Make a manifest and its table the last files to be removed: see `penstock.remote.cache`."""
    for each in (path, path.parent / manifest.table):
        with suppress(OSError):  # it is not kept
            os.utime(each, follow_symlinks=False)


def _keep(digest: str, data: bytes) -> None:
    path = _path(digest)
    try:
        if not path.exists():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_file(path, [data])
    except OSError as error:  # read-only, or full
        _log.debug("The manifest %s is not kept: %s", digest[:8], error)
