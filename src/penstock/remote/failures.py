"""Errors of object stores as errors of penstock, and what is worth a retry.

Messages of obstore contain whole URLs, with passwords and signatures, and whole answers of servers.
So they are never chained or shown as they are: see `reason_of`.
"""

import os
import re
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from penstock.digest import derive_key
from penstock.errors import MissingStoreError, PenstockError, RemoteError
from penstock.paths import without_secrets

_Result = TypeVar("_Result")
_FIRST_WAIT, _LONGEST_WAIT = 0.1, 5.0
# Timeouts, rate limits and overload, which may be over a few seconds later.
_RETRIED = frozenset((408, 425, 429, 500, 502, 503, 504))
# Answers of another size than expected; one may be the fault of a proxy.
_MOST_WRONG = 4
_STATUS = re.compile(r"status code: (\d{3})")


ending = threading.Event()
"""Set when the process ends: downloads on background threads stop."""


class WrongBytes(Exception):  # noqa: N818  (an outcome that is acted upon)
    """An answer is shorter, longer or other than expected; another attempt may be right."""


def retried(action: str, name: str, seconds: float, attempt: Callable[[], _Result]) -> _Result:
    """Return `attempt()`; repeat it with growing waits, as long as the deadline allows it.

    Args:
        action: What the attempt does, for messages: "read".
        name: The URL of the object, without secrets.
        seconds: No attempt begins after three quarters of this time. Each ends within a quarter:
            see `penstock.remote.clients`.
        attempt: Sends a request.

    Raises:
        MissingStoreError: there is no such object.
        RemoteError: the server refuses the request, or no attempt succeeded in time.
    """
    begun, failures, num_wrong = time.monotonic(), 0, 0
    while True:
        try:
            return attempt()
        except PenstockError:
            raise
        except Exception as error:  # noqa: BLE001  (obstore's classes are known when it is imported)
            failures += 1
            num_wrong += isinstance(error, WrongBytes)
            if num_wrong == _MOST_WRONG:  # the server has another file
                raise RemoteError(f"{name} could not be {action}: {error}.") from None
            _raise_final(error, action, name)
            wait = min(_LONGEST_WAIT, _FIRST_WAIT * 2.0 ** (failures - 1))
            # Up to twice as long, so that ranks that fail together do not retry together.
            wait *= 1 + derive_key("retry", os.getpid(), name, failures) % 1000 / 1000
            elapsed = time.monotonic() - begun
            if elapsed + wait > seconds * 0.75:
                raise RemoteError(
                    f"{name} could not be {action} within {seconds:g} s, in {failures} attempts. "
                    f"The last error: {reason_of(error)}. Check the network and the server, or "
                    "allow more time with PENSTOCK_REMOTE_SECONDS."
                ) from None
            if ending.wait(wait):
                raise RemoteError(f"{name} was not {action}: this process is ending.") from None


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
            f"{name} could not be {action}: {reason_of(error)}. The credentials are missing, have "
            "expired, or do not allow it; some servers answer so for a file that does not exist."
        ) from None
    found = _STATUS.search(str(error))
    # A status of 300 or more that is not in the list is the server's last word.
    is_refused = found is not None and int(found[1]) not in _RETRIED
    if is_refused or not isinstance(error, exceptions.GenericError | OSError):
        raise RemoteError(f"{name} could not be {action}: {reason_of(error)}.") from None


def reason_of(error: Exception) -> str:
    """The reason in an error of obstore, without URLs, keys, and what the server wrote.

    >>> reason_of(OSError("Error performing GET http://me:pw@h/x?sig=1 in 1ms - Server returned "
    ...                   "non-2xx status code: 503 Service Unavailable: <?xml?><Code>Slow</Code>"))
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
