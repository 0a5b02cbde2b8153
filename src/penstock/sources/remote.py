"""Inputs on other machines, opened through fsspec.

Some HTTP servers and proxies ignore what they are asked for. So each response is checked: a part
of the file is the part that was asked for, and it is not compressed. Messages never show a user, a
password or a query, which may be a signature; so the errors of other packages are not chained to
ours.
"""

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from penstock.disk import redacted as redacted
from penstock.errors import MissingExtraError, SourceError

_PACKAGES = {
    **dict.fromkeys(("s3", "s3a"), "penstock[s3]"),
    **dict.fromkeys(("http", "https"), "fsspec[http]"),
    **dict.fromkeys(("gs", "gcs"), "fsspec[gcs]"),
    **dict.fromkeys(("az", "abfs", "abfss"), "fsspec[abfs]"),
}


class RemoteStream(io.RawIOBase):
    """A file that is read through fsspec; every error is a SourceError that names the file."""

    def __init__(self, name: str, path: str) -> None:
        self._name = name
        with remote_errors(name):
            self._stream = file_system(path).open(path, "rb")

    def readable(self) -> bool:
        """Always true."""
        return True

    def seekable(self) -> bool:
        """Whether the server can send the file from any position."""
        return bool(self._stream.seekable())

    def read(self, size: int | None = -1, /) -> bytes:
        """At most `size` bytes from the current position; all that follow if it is negative."""
        with remote_errors(self._name):
            return bytes(self._stream.read(-1 if size is None else size))

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Change the position, and return it."""
        with remote_errors(self._name):
            return int(self._stream.seek(offset, whence))

    def tell(self) -> int:
        """The current position."""
        return int(self._stream.tell())

    def close(self) -> None:
        """Close the file."""
        if not self.closed:
            self._stream.close()
        super().close()


@contextmanager
def remote_errors(name: str) -> Iterator[None]:
    """Turn the errors of fsspec and of its packages into a SourceError without secrets.

    Raises:
        FileNotFoundError: the server says that there is no such file.
    """
    try:
        yield
    except (SourceError, MissingExtraError):
        raise
    except Exception as error:  # noqa: BLE001  (of aiohttp, botocore and others, by protocol)
        # fsspec reports every failure of an HTTP request as a missing file.
        reason = error.__cause__ if isinstance(error, FileNotFoundError) else error
        if reason is None or getattr(reason, "status", None) == 404:
            raise FileNotFoundError(name) from None
        raise SourceError(
            f"{name} cannot be read: {without_secrets(reason)}. Check the address and the network, "
            "or download the file and name the copy."
        ) from None


def without_secrets(error: BaseException) -> str:
    """The message of an error, without the users, passwords and queries of addresses in it.

    >>> without_secrets(ValueError("403 for 'https://me:pw@host/a.txt?sig=1'"))
    "403 for 'https://host/a.txt?…'"
    """
    text = re.sub(r"//[^/\s]*@", "//", str(error) or type(error).__name__)
    text = re.sub(r"\?[^\s'\")]+", "?…", text)
    # A server decides how long a header is that a message repeats.
    return re.sub(r"(\S{80})\S+", r"\1…", " ".join(text.split()))


def file_system(path: str) -> Any:
    """The file system of fsspec that opens `path`."""
    import fsspec

    protocol = path.partition("://")[0]
    options: dict[str, Any] = {}
    if protocol in ("http", "https"):
        # What the user has configured in fsspec, such as a timeout, takes precedence.
        configured = fsspec.config.conf.get(protocol, {}).get("client_kwargs", {})
        # A range of a compressed response would not be a range of the file.
        headers = {"Accept-Encoding": "identity"} | configured.get("headers", {})
        checks = {"raise_for_status": _check_response, **configured, "headers": headers}
        options["client_kwargs"] = checks
    try:
        return fsspec.core.url_to_fs(path, **options)[0]
    except ImportError as error:
        package = _PACKAGES.get(protocol)
        advice = f' Install it with: pip install "{package}"' if package else ""
        raise MissingExtraError(
            f"Reading {redacted(path)} needs a package that is not installed: {error}.{advice}"
        ) from error


async def _check_response(response: Any) -> None:
    """Raise if an HTTP response is not what was asked for; aiohttp calls this for each response."""
    if response.status >= 400:
        return  # fsspec raises
    encoding = response.headers.get("Content-Encoding") or "identity"
    if encoding.lower() != "identity":
        raise OSError(f"the server sent it as {encoding:.20}, though it was asked not to")
    asked = re.fullmatch(r"bytes=(\d+)-\d+", response.request_info.headers.get("Range", ""))
    if asked is None:
        return
    sent = response.headers.get("Content-Range", "")
    # 200 means that the server sends the file from its beginning.
    is_right = response.status == 200 and asked[1] == "0"
    if response.status == 206:
        is_right = re.fullmatch(rf"bytes {asked[1]}-\d+/(\d+|\*)", sent) is not None
    if not is_right:
        raise OSError(
            f"the server answered {response.status} with {sent or 'the whole file'!r:.60} when it "
            f"was asked for the bytes from {int(asked[1]):,}"
        )
