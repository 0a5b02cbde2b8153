"""One HTTP request, and what kind of failure it was.

Only http and https, also after a redirect, and never from https back to http. A user and
password in a URL are sent as a header to that host alone, and stand in no message, nor
does a query, which may be a signature. Proxies are those of the environment
(`https_proxy`, `no_proxy`).
"""

import base64
import email.utils
import http.client
import socket
import ssl
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

from penstock import __version__
from penstock.errors import FetchError

__all__ = ["Refused", "Transient", "open_url", "shown_url"]

_AGENT = f"penstock/{__version__} (+https://pypi.org/project/penstock)"
_RETRIED = frozenset((408, 425, 429, 500, 502, 503, 504))


@dataclass(slots=True)
class Transient(Exception):  # noqa: N818  (an outcome that the caller acts upon, not an error of ours)
    """A failure that may pass."""

    reason: str
    wait_seconds: float | None = None
    """How long the server asks to be left alone."""
    offline: bool = False
    """Whether the host was not reached at all."""


@dataclass(slots=True)
class Refused(Exception):  # noqa: N818  (likewise)
    """An answer that will be the same the next time."""

    reason: str
    status: int = 0
    headers: Any = None


def shown_url(url: str) -> str:
    """`url` as it may be shown: without user, password and query.

    >>> shown_url("https://me:secret@host.org:81/a.txt?signature=1")
    'https://host.org:81/a.txt'
    """
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects to http(s), but not from https to http."""

    max_redirections = 8

    def redirect_request(
        self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> Any:
        old, new = urlsplit(req.full_url).scheme, urlsplit(newurl).scheme
        if new not in ("http", "https") or (old == "https" and new == "http"):
            raise Refused(f"it redirects from {old} to {new}, which is not followed")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _opener() -> urllib.request.OpenerDirector:
    """Like `build_opener`, without the handlers of ftp, file and data URLs."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        urllib.request.HTTPHandler(),
        urllib.request.HTTPSHandler(context=ssl.create_default_context()),
        urllib.request.HTTPDefaultErrorHandler(),
        _Redirects(),
        urllib.request.HTTPErrorProcessor(),
    ):
        opener.add_handler(handler)
    return opener


def open_url(url: str, headers: dict[str, str], timeout_seconds: float) -> Any:
    """The answer to a GET of `url`, its body not read yet.

    Raises:
        Transient: trying again may help.
        Refused: it will not.
        FetchError: `url` is none that can be asked.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise FetchError(f"{shown_url(url)!r} is no http:// or https:// address.")
    bare = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
    request = urllib.request.Request(bare, headers={"User-Agent": _AGENT, **headers})
    # Compressed on the way, a range would be one of other bytes.
    request.add_header("Accept-Encoding", "identity")
    if parts.username is not None:
        pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
        secret = f"Basic {base64.b64encode(pair).decode()}"
        request.add_unredirected_header("Authorization", secret)
    try:
        return _opener().open(request, timeout=timeout_seconds)
    except urllib.error.HTTPError as error:
        with error:
            raise _answered(error) from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise told(error, timeout_seconds) from None


def told(error: Exception, timeout_seconds: float) -> Transient | Refused:
    """What an error of the connection means."""
    reason = getattr(error, "reason", error)
    if isinstance(reason, ssl.SSLCertVerificationError):
        return Refused(f"its certificate is not trusted ({reason.verify_message})")
    if isinstance(reason, socket.gaierror):
        return Transient(f"its name is not known here ({reason.strerror})", offline=True)
    if isinstance(reason, TimeoutError):
        return Transient(f"nothing came for {timeout_seconds:g} s", offline=True)
    if isinstance(reason, http.client.InvalidURL):
        return Refused("the address is malformed")
    if isinstance(reason, OSError) and not isinstance(reason, urllib.error.URLError):
        words = reason.strerror or type(reason).__name__
        return Transient(f"the connection failed ({words})", offline=True)
    return Transient(f"the answer was cut or garbled ({type(reason).__name__})")


def _answered(error: urllib.error.HTTPError) -> Transient | Refused:
    reason = f"the server answered {error.code} ({http.client.responses.get(error.code, '?')})"
    if error.code in _RETRIED:
        return Transient(reason, wait_seconds=_retry_after(error.headers.get("Retry-After")))
    return Refused(reason, status=error.code, headers=error.headers)


def _retry_after(text: str | None) -> float | None:
    """The header's seconds, or seconds until its date.

    >>> _retry_after("7"), _retry_after("soon"), _retry_after(None)
    (7.0, None, None)
    """
    if not text:
        return None
    if text.strip().isdigit():
        return float(text)
    try:
        date = email.utils.parsedate_to_datetime(text)
    except ValueError:
        return None
    return max(0.0, date.timestamp() - time.time())
