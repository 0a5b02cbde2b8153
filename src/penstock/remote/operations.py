"""What can be done with the files below a URL: each function sends requests until one succeeds.

A request that fails is repeated by `penstock.remote.failures`, and not by obstore: obstore does not
repeat an answer that ends early, and has no deadline for several requests together.
"""

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.errors import RemoteError
from penstock.paths import redacted
from penstock.remote.clients import make_client
from penstock.remote.failures import WrongBytes, ending, retried
from penstock.store.folders import open_regular

if TYPE_CHECKING:
    from obstore.store import ObjectStore

# The GIL is released while a chunk is received, hashed and written.
_CHUNK_BYTES = 1 << 20
# Larger files are sent in several requests, whose contents are not all in memory.
_MULTIPART_BYTES = 64 << 20
_MULTIPART_CHUNK = 16 << 20
_MULTIPART_RETRIES = 10
# An answer that is read into memory; a manifest has about 500 bytes for each part.
_MOST_BYTES = 2 << 30


class ObjectInfo(NamedTuple):
    """The size of an object, and which version of it this is."""

    size: int
    etag: str | None = None
    version: str | None = None


@dataclass(frozen=True)
class Place:
    """The files below one URL."""

    url: str
    seconds: float

    def shown(self, name: str) -> str:
        """The URL of a file, without secrets."""
        return f"{redacted(self.url).rstrip('/')}/{name}".rstrip("/")

    @cached_property
    def client(self) -> "ObjectStore":
        """The client that sends requests, each of them once."""
        return make_client(self.url, self.seconds, retries=0)

    @cached_property
    def multipart_client(self) -> "ObjectStore":
        """The client that sends large files: it repeats the requests of one file itself."""
        return make_client(self.url, self.seconds, retries=_MULTIPART_RETRIES)


def read(place: Place, name: str) -> tuple[bytes, ObjectInfo]:
    """The contents of a file, and their version."""
    client = place.client

    def attempt() -> tuple[bytes, ObjectInfo]:
        import obstore

        result = obstore.get(client, name)
        found = _info(result.meta)
        if found.size > _MOST_BYTES:
            raise RemoteError(
                f"{place.shown(name)} has {found.size:,} bytes, more than a file that is read "
                f"into memory may have ({_MOST_BYTES:,})."
            )
        data = bytes(result.bytes())
        _check_length(len(data), found.size)
        return data, found

    return retried("read", place.shown(name), place.seconds, attempt)


def read_range(place: Place, name: str, start: int, stop: int) -> bytes:
    """The bytes `[start, stop)` of a file."""
    client = place.client

    def attempt() -> bytes:
        import obstore

        data = bytes(obstore.get_range(client, name, start=start, end=stop))
        _check_length(len(data), stop - start)
        return data

    return retried("read", place.shown(name), place.seconds, attempt)


def head(place: Place, name: str) -> ObjectInfo:
    """The size and version of a file."""
    client = place.client

    def attempt() -> ObjectInfo:
        import obstore

        return _info(obstore.head(client, name))

    return retried("examined", place.shown(name), place.seconds, attempt)


def list_names(place: Place, prefix: str) -> list[tuple[str, int]]:
    """The names and sizes of all files below `prefix`, which is a directory; sorted."""
    client = place.client

    def attempt() -> list[tuple[str, int]]:
        import obstore

        batches = obstore.list(client, prefix or None)
        return sorted((each["path"], each["size"]) for batch in batches for each in batch)

    return retried("listed", place.shown(prefix), place.seconds, attempt)


def download(place: Place, name: str, path: str, size: int, seconds: float) -> str:
    """Write a file of `size` bytes to `path` within `seconds`; returns its SHA-256.

    An attempt that fails is continued by the next one where it ended. The caller compares the
    SHA-256: only that shows that all bytes are right.
    """
    # Not truncated: the cache has reserved the space of the file by its size.
    client, flags = place.client, os.O_WRONLY | os.O_CREAT
    digest = hashlib.sha256()
    done = 0

    def attempt() -> str:
        nonlocal done, digest
        if size == 0:
            stream.truncate(0)
            return digest.hexdigest()
        try:
            for chunk in _chunks(client, name, done, size):
                stream.write(chunk)
                digest.update(chunk)
                done += len(chunk)
        except _NoRanges:  # the server sends whole files only
            stream.seek(0)
            done, digest = 0, hashlib.sha256()
            raise WrongBytes("the server does not send parts of a file") from None
        _check_length(done, size)
        stream.truncate(size)
        return digest.hexdigest()

    with os.fdopen(open_regular(Path(path), flags), "wb", buffering=0) as stream:
        return retried("downloaded", place.shown(name), seconds, attempt)


class _NoRanges(Exception):  # noqa: N818  (an outcome that is acted upon)
    """The server ignored the range that it was asked for."""


def _chunks(client: "ObjectStore", name: str, start: int, size: int) -> Iterator[bytes]:
    """The bytes of a file from `start` on; never more than `size` in all."""
    import obstore
    from obstore.exceptions import NotSupportedError

    options: Any = {"range": (start, size)} if start else {}
    try:
        result = obstore.get(client, name, options=options)
    except NotSupportedError:
        raise _NoRanges from None
    if result.meta["size"] != size or result.range != (start, size):
        raise WrongBytes(f"it has {result.meta['size']:,} bytes, and not {size:,}")
    left = size - start
    for chunk in result.stream(_CHUNK_BYTES):
        left -= len(chunk)
        if left < 0:
            raise WrongBytes(f"it has more than {size:,} bytes")
        if ending.is_set():
            raise RemoteError(f"{name} was not downloaded: this process is ending.")
        yield chunk


def put(
    place: Place,
    name: str,
    source: bytes | Path,
    if_absent: bool,
    if_match: tuple[int, str | None, str | None] | None,
) -> ObjectInfo:
    """Write a file; returns its version. See `penstock.remote.objects.Objects.put`."""
    size = source.stat().st_size if isinstance(source, Path) else len(source)
    mode: Any = "create" if if_absent else "overwrite"
    if if_match is not None:
        _, etag, version = if_match  # S3 and Azure compare the ETag, and GCS the version
        both = {"e_tag": etag, "version": version}
        mode = {key: value for key, value in both.items() if value is not None}
    is_conditional = mode != "overwrite"
    is_split = size > _MULTIPART_BYTES and not is_conditional
    client = place.multipart_client if is_split else place.client
    is_uncertain = False

    def attempt() -> ObjectInfo:
        nonlocal is_uncertain
        import obstore
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        more: Any = {"use_multipart": is_split, "chunk_size": _MULTIPART_CHUNK}
        try:
            done = obstore.put(client, name, source, mode=mode, **more)
        except (AlreadyExistsError, PreconditionError):
            if is_uncertain and (found := _written_by_us(client, name, source)) is not None:
                return found
            raise
        except Exception:
            # The server may have stored the file and then failed to answer. The next attempt would
            # find it there, and take it for another writer's.
            is_uncertain = is_conditional
            raise
        return ObjectInfo(size, done["e_tag"], done["version"])

    return retried("written", place.shown(name), place.seconds, attempt)


def _written_by_us(client: "ObjectStore", name: str, source: bytes | Path) -> ObjectInfo | None:
    """The version of a file if it has the contents that we sent; None if it has others."""
    import obstore

    result = obstore.get(client, name)
    expected = source.read_bytes() if isinstance(source, Path) else source
    return _info(result.meta) if result.bytes() == expected else None


def delete(place: Place, name: str) -> None:
    """Delete a file, if there is one."""
    client = place.client

    def attempt() -> None:
        import obstore

        try:
            obstore.delete(client, name)
        except FileNotFoundError:
            return

    retried("deleted", place.shown(name), place.seconds, attempt)


def _info(meta: Any) -> ObjectInfo:
    return ObjectInfo(int(meta["size"]), meta["e_tag"], meta["version"])


def _check_length(length: int, expected: int) -> None:
    if length != expected:
        raise WrongBytes(f"{length:,} bytes came, and not {expected:,}")
