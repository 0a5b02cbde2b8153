"""One request to a server, and whether a failure is worth a retry.

Only http and https are allowed, and never a redirect from https to http. A user name and a
password in a URL are sent to that host only. Messages show neither them nor the query, which may
be a signature. Proxies come from the environment (`https_proxy`, `no_proxy`).
"""

import base64
import email.utils
import http.client
import re
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

from penstock import __version__
from penstock.errors import FetchError

_AGENT = f"penstock/{__version__}"
# Timeouts, rate limits and overload, which may be over a few seconds later.
_RETRIED = frozenset((408, 425, 429, 500, 502, 503, 504))


class RequestFailure(Exception):  # noqa: N818  (an outcome that is acted upon, not an error of ours)
    """A request that failed: why, and whether a retry may help."""

    def __init__(
        self, reason: str, *, retry: bool = False, wait_seconds: float = 0.0, status: int = 0
    ) -> None:
        super().__init__(reason)
        self.retry = retry
        self.wait_seconds = wait_seconds  # the wait that the server asks for
        self.status = status  # 0 if there was no answer at all


def shown_url(url: str) -> str:
    """Return `url` without user name, password and query, for messages.

    >>> shown_url("https://me:secret@host.org:81/a.txt?signature=1")
    'https://host.org:81/a.txt'
    """
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects to http and https, but not from https to http."""

    max_redirections = 8

    def redirect_request(
        self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> Any:
        old, new = urlsplit(req.full_url).scheme, urlsplit(newurl).scheme
        if new not in ("http", "https") or (old == "https" and new == "http"):
            fp.close()
            raise RequestFailure(f"the server redirects from {old} to {new}, which is not allowed")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def open_url(url: str, headers: dict[str, str], seconds: float) -> Any:
    """Send a GET request and return the response, with its body not read yet.

    Raises:
        RequestFailure: there was no usable answer within `seconds`.
        FetchError: `url` is not an http or https URL.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise FetchError(f"{shown_url(url)!r} is not an http:// or https:// URL.")
    bare = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
    # A byte range of a compressed response would not be a byte range of the file.
    headers = {"User-Agent": _AGENT, "Accept-Encoding": "identity", **headers}
    request = urllib.request.Request(bare, headers=headers)
    if parts.username is not None:
        pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
        # Unredirected: the password must not reach the host that a redirect leads to.
        request.add_unredirected_header("Authorization", f"Basic {base64.b64encode(pair).decode()}")
    # The opener's handlers for ftp, file and data URLs are out of reach: both checks of the
    # scheme, above and in `_Redirects`, come before them.
    opener = urllib.request.build_opener(_Redirects)
    try:
        return _by_deadline(lambda: opener.open(request, timeout=seconds), seconds)
    except urllib.error.HTTPError as error:
        with error:
            raise _status_failure(error.code, error.headers) from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise connection_failure(error, seconds) from None


def hub_metadata(url: str, seconds: float) -> tuple[int | None, str | None]:
    """Return size and SHA-256 of a file on the Hugging Face Hub; None for an unknown value.

    Raises:
        RequestFailure: there was no usable answer within `seconds`.
    """
    from huggingface_hub import constants, get_hf_file_metadata
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    # With telemetry, the library also requests a list of agents and sends the version of torch.
    # It reads the environment variable only when it is imported, so the constant is set.
    constants.HF_HUB_DISABLE_TELEMETRY = True
    try:
        # The catalog's files are public, so the user's token is not sent.
        library = {"library_name": "penstock", "library_version": __version__}
        ask = partial(get_hf_file_metadata, url, token=False, timeout=seconds, **library)
        found = _by_deadline(ask, seconds)
    except OfflineModeIsEnabled:
        raise RequestFailure("HF_HUB_OFFLINE is set; unset it to download") from None
    except HfHubHTTPError as error:
        raise _status_failure(error.response.status_code, error.response.headers) from None
    except Exception as error:  # noqa: BLE001  (of httpx, httpx2 or requests, by version)
        raise connection_failure(error, seconds) from None
    # For large files the Hub's ETag is the SHA-256. For small files it is the SHA-1 that Git uses,
    # which is not compared.
    is_sha256 = re.fullmatch("[0-9a-f]{64}", found.etag or "")
    return found.size, found.etag if is_sha256 else None


def _by_deadline(call: Callable[[], Any], seconds: float) -> Any:
    """Return `call()`, or raise TimeoutError if it takes longer than `seconds`.

    A socket's timeout limits one read only: a server that sends header after header would never
    time out. A call that is late continues in its daemon thread, and its result is dropped.
    """
    outcome: Future[Any] = Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except Exception as error:  # noqa: BLE001  (raised in the calling thread)
            outcome.set_exception(error)

    # A daemon, so that a late call does not keep the interpreter from exiting.
    threading.Thread(target=run, daemon=True).start()
    return outcome.result(timeout=seconds)


def connection_failure(error: Exception, seconds: float) -> RequestFailure:
    """Return a connection error as a `RequestFailure`."""
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    # This error is tested first: it is an OSError too, but a retry would not help.
    if isinstance(reason, ssl.SSLCertVerificationError):
        return RequestFailure(f"the server's certificate is not trusted ({reason.verify_message})")
    if isinstance(reason, http.client.InvalidURL):
        return RequestFailure("the URL is malformed")
    if isinstance(reason, TimeoutError):
        return RequestFailure(f"the server did not answer within {seconds:g} s", retry=True)
    words = reason.strerror if isinstance(reason, OSError) else None
    return RequestFailure(f"the connection failed ({words or type(reason).__name__})", retry=True)


def _status_failure(status: int, headers: Any) -> RequestFailure:
    """Return the failure for an HTTP status. Retry-After is a number of seconds or a date."""
    text = (headers.get("Retry-After") or "").strip()
    wait_seconds = 0.0
    if re.fullmatch("[0-9]+", text):
        wait_seconds = float(text)
    elif text:
        with suppress(ValueError, OverflowError):
            date = email.utils.parsedate_to_datetime(text)
            wait_seconds = max(0.0, date.timestamp() - time.time())
    reason = f"the server answered {status} ({http.client.responses.get(status, '?')})"
    retry = status in _RETRIED
    return RequestFailure(
        reason, retry=retry, wait_seconds=wait_seconds if retry else 0, status=status
    )
