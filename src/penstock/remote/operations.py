"""What can be done with the files below a URL: each function sends requests until one succeeds.

A request that fails is repeated by `penstock.remote.failures`, and not by obstore: obstore does not
repeat an answer that ends early, and has no deadline for several requests together.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from penstock.errors import RemoteError
from penstock.paths import redacted
from penstock.remote.clients import make_client
from penstock.remote.failures import WrongBytes, ending, retried

if TYPE_CHECKING:
    from obstore.store import ObjectStore

# The GIL is released while a chunk is received, hashed and written.
_CHUNK_BYTES = 1 << 20
# Larger files are sent in several requests, whose contents are not all in memory.
_MULTIPART_BYTES = 64 << 20
_MULTIPART_CHUNK = 16 << 20
_MULTIPART_RETRIES = 10


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


def read(place: Place, name: str) -> bytes:
    """The contents of a file."""
    client = place.client

    def attempt() -> bytes:
        import obstore

        result = obstore.get(client, name)
        data = bytes(result.bytes())
        _check_length(len(data), result.meta["size"])
        return data

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


def size(place: Place, name: str) -> int:
    """The size of a file."""
    client = place.client

    def attempt() -> int:
        import obstore

        return int(obstore.head(client, name)["size"])

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
    """Write a file of `size` bytes to `path` within `seconds`; returns its XXH3-128.

    An attempt that fails is continued by the next one where it ended. The caller compares the
    digest: only that shows that all bytes are right.
    """
    client = place.client
    digest = xxhash.xxh3_128()
    done = 0

    def attempt() -> str:
        nonlocal done, digest
        if size == 0:
            stream.truncate(0)
            return str(digest.hexdigest())
        try:
            for chunk in _chunks(client, name, done, size):
                stream.write(chunk)
                digest.update(chunk)
                done += len(chunk)
        except _NoRanges:  # the server sends whole files only
            stream.seek(0)
            done, digest = 0, xxhash.xxh3_128()
            raise WrongBytes("the server does not send parts of a file") from None
        _check_length(done, size)
        stream.truncate(size)
        return str(digest.hexdigest())

    # Not truncated: the cache has reserved the space of the file by its size.
    Path(path).touch()
    with Path(path).open("r+b", buffering=0) as stream:
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


def put(place: Place, name: str, source: bytes | Path) -> None:
    """Write a file."""
    num_bytes = source.stat().st_size if isinstance(source, Path) else len(source)
    is_split = num_bytes > _MULTIPART_BYTES
    client = place.multipart_client if is_split else place.client

    def attempt() -> None:
        import obstore

        obstore.put(client, name, source, use_multipart=is_split, chunk_size=_MULTIPART_CHUNK)

    retried("written", place.shown(name), place.seconds, attempt)


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


def _check_length(length: int, expected: int) -> None:
    if length != expected:
        raise WrongBytes(f"{length:,} bytes came, and not {expected:,}")
