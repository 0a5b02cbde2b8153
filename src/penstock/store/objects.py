"""The files below one URL, in object storage or on a web server.

    Objects("s3://bucket/owt").read("penstock.json")      s3://bucket/owt/penstock.json

Every call ends within a deadline: 300 seconds, or `PENSTOCK_REMOTE_SECONDS`. A failed request is
repeated until then, with growing waits; obstore itself does not repeat an answer that ends early,
and has no deadline for several requests together. A server that stalls, or sends a byte now and
then, counts as failed. A file that does not exist, and a request that is refused, are errors at
once.

Credentials come from the environment, as for other tools: `AWS_ACCESS_KEY_ID` and the like,
`GOOGLE_APPLICATION_CREDENTIALS`, `AZURE_STORAGE_ACCOUNT_NAME` and `AZURE_STORAGE_ACCOUNT_KEY`, the
token of the Hugging Face Hub. If boto3 is installed, the profiles in `~/.aws` are used too. A user
and a password in an `https://` URL are sent to its host only. No user, password, query or key is in
a message, a log or a repr: messages of obstore contain them, so they are never chained or shown as
they are.
"""

import base64
import importlib.util
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote, urlsplit, urlunsplit

import xxhash

from penstock import __version__
from penstock.digest import derive_key
from penstock.errors import (
    MissingExtraError,
    MissingStoreError,
    PenstockError,
    RemoteError,
    StoreError,
)
from penstock.paths import REMOTE_SCHEMES, redacted, without_secrets

if TYPE_CHECKING:
    from obstore.store import ObjectStore

_Result = TypeVar("_Result")
_SECONDS = 300.0
# The GIL is released while a chunk is received, hashed and written.
_CHUNK_BYTES = 1 << 20
# Larger files are sent in several requests, whose contents are not all in memory.
_MULTIPART_BYTES = 64 << 20
_MULTIPART_CHUNK = 16 << 20
_MULTIPART_RETRIES = 10
_FIRST_WAIT, _LONGEST_WAIT = 0.1, 5.0
# Timeouts, rate limits and overload, which may be over a few seconds later.
_RETRIED = frozenset((408, 425, 429, 500, 502, 503, 504))
# Answers of another size than expected; one may be the fault of a proxy.
_MOST_WRONG = 4

ending = threading.Event()
"""Set when the process ends: downloads on background threads stop."""
_first_user: int | None = None


class WrongBytes(Exception):  # noqa: N818  (an outcome that is acted upon)
    """An answer is shorter, longer or other than expected; another attempt may be right."""


class _NoRanges(Exception):  # noqa: N818  (an outcome that is acted upon)
    """The server ignored the range that it was asked for."""


def is_forked() -> bool:
    """Whether this process was forked from one that had used obstore.

    obstore runs threads of its own. A fork copies no threads, so a request of such a process, for
    example a worker of a DataLoader, would wait for ever.
    """
    return _first_user not in (None, os.getpid())


class Objects:
    """The files below one URL. It may be used from several threads.

    Names of files are relative to the URL. All methods raise a `RemoteError` if the server refuses,
    or does not answer within the deadline, and a `MissingStoreError` for a file that does not
    exist.

    Args:
        url: `s3://bucket/prefix`, `gs://…`, `az://…`; `https://…` and `hf://…` to read only.
        seconds: The deadline of each call; `PENSTOCK_REMOTE_SECONDS`, or 300, if it is None.

    Raises:
        StoreError: `url` is not such a URL.
    """

    def __init__(self, url: str, seconds: float | None = None) -> None:
        self.url, self._scheme = url, urlsplit(url).scheme
        if self._scheme not in REMOTE_SCHEMES or not urlsplit(url).netloc:
            known = ", ".join(f"{scheme}://" for scheme in REMOTE_SCHEMES)
            raise StoreError(
                f"{redacted(url)!r} is not the URL of a remote store; those begin with {known}, "
                "followed by a host or a bucket."
            )
        self.seconds = _seconds_of_environment() if seconds is None else seconds
        """The deadline of each call."""

    def shown(self, name: str) -> str:
        """The URL of a file for messages: without user, password and query."""
        return f"{redacted(self.url).rstrip('/')}/{name}".rstrip("/")

    def __repr__(self) -> str:
        return f"Objects({self.shown('')!r})"

    def __reduce__(self) -> tuple[type["Objects"], tuple[str, float]]:
        return type(self), (self.url, self.seconds)  # a client cannot be pickled

    @cached_property
    def _client(self) -> "ObjectStore":
        """The client that sends requests, each of them once."""
        return _client(self.url, self.seconds, retries=0)

    @cached_property
    def _multipart_client(self) -> "ObjectStore":
        """The client that sends large files: it repeats the requests of one file itself."""
        return _client(self.url, self.seconds, retries=_MULTIPART_RETRIES)

    def read(self, name: str) -> bytes:
        """Return the contents of a file."""

        def attempt(client: "ObjectStore") -> bytes:
            result = client.get(name)
            data = bytes(result.bytes())
            _check_length(len(data), result.meta["size"])
            return data

        return self._retried("read", name, attempt)

    def size(self, name: str) -> int:
        """Return the size of a file."""
        return self._retried("examined", name, lambda client: int(client.head(name)["size"]))

    def list(self) -> list[tuple[str, int]]:
        """Return names and sizes of all files, sorted. Web servers and the Hub have no lists."""

        def attempt(client: "ObjectStore") -> list[tuple[str, int]]:
            return sorted((each["path"], each["size"]) for page in client.list() for each in page)

        if self._scheme in ("http", "https", "hf"):
            raise RemoteError(f"{self.shown('')} cannot be listed: web servers have no lists.")
        return self._retried("listed", "", attempt)

    def put(self, name: str, source: bytes | Path) -> None:
        """Write bytes, or a file of this machine; others see all of it or nothing."""
        self._refuse_to_write(name)
        num_bytes = source.stat().st_size if isinstance(source, Path) else len(source)
        is_split = num_bytes > _MULTIPART_BYTES

        def attempt(client: "ObjectStore") -> None:
            client = self._multipart_client if is_split else client
            client.put(name, source, use_multipart=is_split, chunk_size=_MULTIPART_CHUNK)

        self._retried("written", name, attempt)

    def delete(self, name: str) -> None:
        """Delete a file, if there is one."""

        def attempt(client: "ObjectStore") -> None:
            with suppress(FileNotFoundError):
                client.delete(name)

        self._refuse_to_write(name)
        self._retried("deleted", name, attempt)

    def _refuse_to_write(self, name: str) -> None:
        if self._scheme in ("http", "https", "hf"):
            raise RemoteError(
                f"{self.shown(name)} cannot be written: https:// and hf:// are for reading. Write "
                "to s3://, gs:// or az://."
            )

    def download(self, name: str, path: Path, size: int, *, until: float | None = None) -> str:
        """Write a file of `size` bytes to `path`; returns its XXH3-128, which the caller compares.

        An attempt that fails is continued by the next one where it ended. The file is not synced to
        disk. If the call fails, an incomplete file may be left.

        Args:
            name: The name of the file.
            path: The path of the copy. A file that is there is not truncated first: the cache has
                reserved its space by its size.
            size: The size of the file, as a manifest records it.
            until: An earlier deadline than that of the object, in seconds of `time.monotonic`.
        """
        left = self.seconds if until is None else until - time.monotonic()
        digest, done = xxhash.xxh3_128(), 0

        def attempt(client: "ObjectStore") -> str:
            nonlocal done, digest
            try:
                for chunk in self._chunks(client, name, done, size) if size else ():
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

        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "wb", buffering=0) as stream:
            return self._retried("downloaded", name, attempt, min(self.seconds, max(0.0, left)))

    @staticmethod
    def _chunks(client: "ObjectStore", name: str, start: int, size: int) -> Iterator[bytes]:
        """The bytes of a file from `start` on; never more than `size` in all."""
        from obstore.exceptions import NotSupportedError

        options: Any = {"range": (start, size)} if start else {}
        try:
            result = client.get(name, options=options)
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

    def _retried(
        self,
        action: str,
        name: str,
        attempt: Callable[["ObjectStore"], _Result],
        seconds: float | None = None,
    ) -> _Result:
        """Return the result of `attempt`; repeat it with growing waits until the deadline.

        No attempt begins after three quarters of this time, and each ends within a quarter: see
        `_client_options`.

        Args:
            action: What the attempt does, for messages: "read".
            name: The file.
            attempt: Sends a request with a client.
            seconds: The deadline, if it is another than that of this object.
        """
        global _first_user
        shown, seconds = self.shown(name), self.seconds if seconds is None else seconds
        if is_forked():
            raise RemoteError(
                f"{shown} cannot be {action} in this process: it was forked from one that had used "
                "object storage before. Start it with the method spawn or forkserver of "
                "multiprocessing."
            )
        _first_user = os.getpid()
        begun, failures, num_wrong = time.monotonic(), 0, 0
        while True:
            try:
                return attempt(self._client)
            except PenstockError:
                raise
            except Exception as error:  # noqa: BLE001  (obstore's are known when it is imported)
                failures += 1
                num_wrong += isinstance(error, WrongBytes)
                if num_wrong == _MOST_WRONG:  # the server has another file
                    raise RemoteError(f"{shown} could not be {action}: {error}.") from None
                _raise_final(error, action, shown)
                wait = min(_LONGEST_WAIT, _FIRST_WAIT * 2.0 ** (failures - 1))
                # Up to twice as long, so that ranks that fail together do not retry together.
                wait *= 1 + derive_key("retry", os.getpid(), shown, failures) % 1000 / 1000
                if time.monotonic() - begun + wait > seconds * 0.75:
                    raise RemoteError(
                        f"{shown} could not be {action} within {seconds:g} s, in {failures} "
                        f"attempts. The last error: {_reason_of(error)}. Check the network and the "
                        "server, or allow more time with PENSTOCK_REMOTE_SECONDS."
                    ) from None
                if ending.wait(wait):
                    raise RemoteError(
                        f"{shown} was not {action}: this process is ending."
                    ) from None


def _check_length(length: int, expected: int) -> None:
    if length != expected:
        raise WrongBytes(f"{length:,} bytes came, and not {expected:,}")


def _seconds_of_environment() -> float:
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


def _raise_final(error: Exception, action: str, name: str) -> None:
    """Raise if another attempt would fail in the same way."""
    if isinstance(error, WrongBytes):
        return
    if isinstance(error, OSError) and error.errno is not None:
        raise error  # of this machine, such as a full disk; those of obstore have no number
    if isinstance(error, FileNotFoundError):
        raise MissingStoreError(f"{name} does not exist.") from None
    from obstore import exceptions

    if isinstance(error, exceptions.PermissionDeniedError | exceptions.UnauthenticatedError):
        raise RemoteError(
            f"{name} could not be {action}: {_reason_of(error)}. The credentials are missing, have "
            "expired, or do not allow it; some servers answer so for a file that does not exist."
        ) from None
    found = re.search(r"status code: (\d{3})", str(error))
    # A status of 300 or more that is not in the list is the server's last word.
    is_refused = found is not None and int(found[1]) not in _RETRIED
    if is_refused or not isinstance(error, exceptions.GenericError | OSError):
        raise RemoteError(f"{name} could not be {action}: {_reason_of(error)}.") from None


def _reason_of(error: Exception) -> str:
    """The reason in an error of obstore, without URLs, keys, and what the server wrote.

    >>> _reason_of(OSError("Error performing GET http://me:pw@h/x?sig=1 - Server returned non-2xx "
    ...                    "status code: 503 Service Unavailable: <?xml?><Code>Slow</Code>"))
    'the server answered 503 Service Unavailable (Slow)'
    """
    text = str(error).partition("\n\nDebug source")[0]
    if found := re.search(r"status code: (\d{3}[\w ]*)", text):
        # S3 says what is wrong in a word, and repeats headers of the request after it.
        code = re.search(r"<Code>(\w{1,60})</Code>", text)
        return f"the server answered {found[1].strip()}" + (f" ({code[1]})" if code else "")
    kind = re.search(r"kind: (Timeout|Connect|Interrupted|Request|Decode)\b", str(error))
    named = {"Timeout": "no answer in time", "Interrupted": "the connection ended early"}
    if kind:
        return named.get(kind[1], "the connection failed")
    return without_secrets(Exception(text[:300])).rstrip(".")


def _client(url: str, seconds: float, retries: int) -> "ObjectStore":
    """Return the client for all files below `url`.

    Args:
        url: The prefix of the files.
        seconds: The deadline of one call. A request ends within a quarter of it.
        retries: How often the client itself repeats a request that failed.
    """
    try:
        from obstore.store import HTTPStore, from_url
    except ImportError:
        raise MissingExtraError(
            f"{redacted(url)} needs obstore, which is not installed.\n"
            'Install it with: pip install "penstock[remote]"'
        ) from None
    parts = urlsplit(url)
    options: Any = _client_options(seconds, parts.scheme)
    retry: Any = {"max_retries": retries, "retry_timeout": timedelta(seconds=seconds / 4)}
    try:
        if parts.scheme == "hf":
            url, options["default_headers"] = _hub_address(url)
            return HTTPStore.from_url(url, client_options=options, retry_config=retry)
        if parts.scheme in ("http", "https"):
            host = parts.netloc.rpartition("@")[2]
            if parts.username is not None:
                # Sent as a header: obstore would repeat a password of the URL in its errors, and
                # not use it.
                pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
                header = f"Basic {base64.b64encode(pair).decode()}"
                options["default_headers"] = {"Authorization": header}
            bare = urlunsplit(parts._replace(netloc=host))
            return HTTPStore.from_url(bare, client_options=options, retry_config=retry)
        more: Any = {}
        if parts.scheme == "s3" and _has_profiles_only():
            from obstore.auth.boto3 import Boto3CredentialProvider

            more["credential_provider"] = Boto3CredentialProvider()
        return from_url(url, client_options=options, retry_config=retry, **more)
    except (ImportError, MissingExtraError, StoreError):
        raise
    except Exception as error:  # noqa: BLE001  (of obstore and botocore, by scheme)
        raise StoreError(f"{redacted(url)} cannot be opened: {_reason_of(error)}.") from None


def _client_options(seconds: float, scheme: str) -> dict[str, object]:
    """The timeouts of one request, so that four requests fit into the deadline."""
    # Without encryption only where the user asks for it: then a redirect from https to http is an
    # error.
    endpoint = os.environ.get("AWS_ENDPOINT_URL", "") if scheme == "s3" else ""
    if scheme == "hf":
        endpoint = os.environ.get("HF_ENDPOINT", "")
    return {
        "timeout": timedelta(seconds=seconds / 4),
        # A body that stalls is found before the time of the request is over.
        "read_timeout": timedelta(seconds=min(15.0, seconds / 8)),
        "connect_timeout": timedelta(seconds=min(10.0, seconds / 8)),
        "allow_http": scheme == "http" or endpoint.startswith("http://"),
        "user_agent": f"penstock/{__version__}",
    }


def _has_profiles_only() -> bool:
    """Whether keys of S3 are not in the environment, and boto3 can look for them elsewhere."""
    named = ("AWS_ACCESS_KEY_ID", "AWS_SKIP_SIGNATURE", "AWS_WEB_IDENTITY_TOKEN_FILE")
    return not any(map(os.environ.get, named)) and importlib.util.find_spec("boto3") is not None


def _hub_address(url: str) -> tuple[str, dict[str, str]]:
    """The https URL of a prefix on the Hugging Face Hub, and the headers of its requests.

    `hf://datasets/OWNER/NAME[@REVISION]/PREFIX`, as `huggingface_hub` writes it.
    """
    from huggingface_hub import get_token, hf_hub_url

    kind, *rest = url.removeprefix("hf://").strip("/").split("/")
    if kind not in ("datasets", "models") or len(rest) < 2:
        raise StoreError(
            f"{redacted(url)!r} does not name a repository of the Hugging Face Hub. Write "
            "hf://datasets/OWNER/NAME/PREFIX, with NAME@REVISION for another revision than main."
        )
    name, _, revision = rest[1].partition("@")
    # The name of a file is part of the URL, so one without a name needs a place for it.
    address = hf_hub_url(
        f"{rest[0]}/{name}",
        "/".join([*rest[2:], "x"]),
        repo_type=kind.removesuffix("s"),
        revision=revision or None,
        endpoint=os.environ.get("HF_ENDPOINT") or None,
    )
    # Not `build_hf_headers`, which asks the Hub for a list of agents first. The header is not sent
    # to the host that a redirect leads to.
    token = get_token()
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    return address.removesuffix("/x"), headers
