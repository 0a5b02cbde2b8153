"""The files below one URL: `open_objects`.

    open_objects("s3://bucket/owt").read("penstock.json")      s3://bucket/owt/penstock.json

Every call ends within a deadline: 300 seconds, or `PENSTOCK_REMOTE_SECONDS`. A failed request is
repeated until then, with growing waits. A server that stalls, or sends a byte now and then, counts
as failed. A file that does not exist, and a request that is refused, are errors at once.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.errors import RemoteError
from penstock.remote import operations
from penstock.remote.clients import check_url
from penstock.remote.forked import call_outside, must_call_outside
from penstock.remote.operations import Place

_SECONDS = 300.0


def open_objects(url: str, seconds: float | None = None) -> "Objects":
    """Return the files below `url`, without sending a request.

    Args:
        url: `s3://bucket/prefix`, `gs://…`, `az://…`; `https://…` and `hf://…` to read only.
        seconds: The deadline of each call; `PENSTOCK_REMOTE_SECONDS`, or 300, if it is None.

    Raises:
        StoreError: `url` is not such a URL.
    """
    check_url(url)
    return Objects(url, _deadline() if seconds is None else seconds)


class Objects:
    """The files below one URL.

    It may be used from several threads and after a fork, and it can be pickled; the pickle contains
    the URL, with its password or signature. Names of files are relative to the URL. All methods
    raise a `RemoteError` if the server refuses, or does not answer within the deadline, and a
    `MissingStoreError` for a file that does not exist.
    """

    def __init__(self, url: str, seconds: float) -> None:
        self._place = Place(url, seconds)

    def __repr__(self) -> str:
        return f"Objects({self.shown('')!r})"

    def __reduce__(self) -> tuple[type["Objects"], tuple[str, float]]:
        return type(self), (self._place.url, self._place.seconds)

    @property
    def seconds(self) -> float:
        """The deadline of each call."""
        return self._place.seconds

    def shown(self, name: str) -> str:
        """Return the URL of a file for messages: without user, password and query."""
        return self._place.shown(name)

    def read(self, name: str) -> bytes:
        """Return the contents of a file."""
        data: bytes = self._call(operations.read, name)
        return data

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        """Return the bytes `[start, stop)` of a file."""
        data: bytes = self._call(operations.read_range, name, start, stop)
        return data

    def size(self, name: str) -> int:
        """Return the size of a file."""
        size: int = self._call(operations.size, name)
        return size

    def list(self, prefix: str = "") -> list[tuple[str, int]]:
        """Return names and sizes of all files below the directory `prefix`, sorted.

        Web servers and the Hub have no lists.
        """
        if self._place.url.startswith(("http", "hf:")):
            raise RemoteError(f"{self.shown(prefix)} cannot be listed: web servers have no lists.")
        return [(name, size) for name, size in self._call(operations.list_names, prefix)]

    def download(self, name: str, path: Path, size: int, *, until: float | None = None) -> str:
        """Write a file of `size` bytes to `path`; returns its XXH3-128, which the caller compares.

        The file is not synced to disk. If the call fails, an incomplete file may be left.

        Args:
            name: The name of the file.
            path: The path of the copy; it must not be a link.
            size: The size of the file, as a manifest records it.
            until: An earlier deadline than that of the object, in seconds of `time.monotonic`.
        """
        left = self.seconds if until is None else until - time.monotonic()
        seconds = min(self.seconds, max(0.0, left))
        digest: str = self._call(operations.download, name, str(path.absolute()), size, seconds)
        return digest

    def put(self, name: str, source: bytes | Path) -> None:
        """Write bytes, or a file of this machine; others see all of it or nothing."""
        self._refuse_to_write(name)
        self._call(operations.put, name, source)

    def delete(self, name: str) -> None:
        """Delete a file, if there is one."""
        self._refuse_to_write(name)
        self._call(operations.delete, name)

    def _refuse_to_write(self, name: str) -> None:
        if self._place.url.startswith(("http", "hf:")):
            raise RemoteError(
                f"{self.shown(name)} cannot be written: https:// and hf:// are for reading. Write "
                "to s3://, gs:// or az://."
            )

    def _call(self, operation: Callable[..., Any], *arguments: Any) -> Any:
        if must_call_outside():
            return call_outside(operation.__name__, self._place, arguments)
        return operation(self._place, *arguments)


def _deadline() -> float:
    text = os.environ.get("PENSTOCK_REMOTE_SECONDS", "")
    try:
        seconds = float(text) if text else _SECONDS
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise RemoteError(
            f"The environment variable PENSTOCK_REMOTE_SECONDS is {text!r}. Set it to the seconds "
            "within which a file of a remote store must arrive, such as 300."
        )
    return seconds
