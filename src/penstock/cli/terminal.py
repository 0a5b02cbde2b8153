r"""What is written, where, and in which spelling.

Results go to stdout, progress and errors to stderr. Text that comes from data (a
document, the name of a file, an error that quotes either) passes through `visible`
first: an escape sequence in a web page must not retitle the reader's terminal, nor a
bidi control turn a file name around.
"""

import errno
import json
import re
import shlex
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

__all__ = ["in_background"]

Result = TypeVar("Result")


def in_background(work: Callable[[], Result]) -> Result:
    """What `work()` returns or raises.

    Python hears Ctrl-C only between two steps of its main thread, and a native call that
    learns merges is one step of a minute. So the call gets a thread of its own, and the
    main thread waits where it can be interrupted; the thread ends with the process.
    """
    results: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:  # noqa: BLE001  (raised again in the calling thread)
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True, name="work")
    thread.start()
    while thread.is_alive():
        thread.join(0.1)
    if errors:
        raise errors[0]
    return results[0]


if TYPE_CHECKING:
    from rich.console import Console

__all__ = [
    "complain",
    "console",
    "fail",
    "message_of",
    "print_json",
    "shell_word",
    "visible",
    "write",
]

# C0 and C1 controls but tab and newline, delete, bidi controls, the separators that some
# terminals break lines at, byte order marks, halves of surrogate pairs (names of files
# that are not UTF-8), and tags, which are ASCII that nobody sees.
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"
    "\ud800-\udfff\ufeff\U000e0000-\U000e007f]"
)


def visible(text: str, *, lines: bool = True) -> str:
    r"""`text` with every character that could act on a terminal spelled out.

    Args:
        text: Anything.
        lines: Whether newlines and tabs stay; without, the result is one line.

    >>> print(visible("red: \x1b[31m, reversed: \u202e"))
    red: \x1b[31m, reversed: \u202e
    """
    safe = _UNSAFE.sub(_spelled, text)
    return safe if lines else safe.replace("\n", r"\n").replace("\t", r"\t")


def _spelled(found: re.Match[str]) -> str:
    number = ord(found[0])
    if number < 0x100:
        return f"\\x{number:02x}"
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


def shell_word(path: Any) -> str:
    """`path` as it can be typed into a shell, for commands that we suggest."""
    return visible(shlex.quote(str(path)), lines=False)


def console(*, stderr: bool = False) -> "Console":
    """A rich console on the stream as it is now; it takes nothing in a text for markup."""
    from rich.console import Console

    return Console(stderr=stderr, highlight=False, markup=False, emoji=False)


def write(text: str) -> None:
    """Write safe text and a newline to stdout, wrapped by nobody."""
    sys.stdout.write(visible(text) + "\n")


def print_json(value: dict[str, Any]) -> None:
    """Write one JSON object to stdout, in ASCII, so that it is inert in a terminal too."""
    sys.stdout.write(json.dumps(value, indent=1) + "\n")


def message_of(error: BaseException) -> str:
    """What an error says, with the notes that were added as it rose."""
    # OSError puts "[Errno 28]" before its words, and our own need no number.
    told = getattr(error, "strerror", None) if _is_ours(error) else None
    return "\n".join([str(told or error), *getattr(error, "__notes__", [])])


def _is_ours(error: BaseException) -> bool:
    from penstock.errors import PenstockError

    return isinstance(error, PenstockError)


def fail(error: BaseException, *, as_json: bool) -> None:
    """Report `error` in plain words on stderr, or as the one JSON object on stdout."""
    complain(type(error).__name__, message_of(error), as_json=as_json)


def complain(name: str, message: str, *, as_json: bool) -> None:
    """Report what went wrong, as `fail` does; on stderr too where stdout takes nothing more."""
    if as_json:
        try:
            print_json({"error": {"type": name, "message": message}})
            sys.stdout.flush()
            return
        except OSError as full:
            if full.errno == errno.EPIPE:
                raise
    from rich.text import Text

    text = Text.assemble((name, "bold red"), ": ", visible(message))
    console(stderr=True).print(text, soft_wrap=True)
