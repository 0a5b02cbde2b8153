r"""Output of the commands: text, tables, JSON and error messages.

Results go to stdout, progress and errors to stderr. Text from data (a document, a file name, an
error that quotes one of them) passes through `visible` first. Otherwise an escape sequence in a
web page could change the title of the terminal, and a bidi control could reverse a file name.
"""

import errno
import json
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import PenstockError

if TYPE_CHECKING:
    from rich.console import Console

    from penstock.store.reader import TokenStore

# C0 and C1 control characters except tab and newline, delete, bidi controls, line separators,
# byte order marks, halves of surrogate pairs (in file names that are not UTF-8), and the
# invisible "tag" characters.
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"
    "\ud800-\udfff\ufeff\U000e0000-\U000e007f]"
)

Facts = Sequence[tuple[str, str | list[str]]]
"""Names and their values. A list is a value of several lines."""


def visible(text: str, *, lines: bool = True) -> str:
    r"""`text` with an escape such as `\x1b` for each character that could control a terminal.

    Args:
        text: Any text.
        lines: Keep newlines and tabs. Without it, they are escaped too, and the result is one
            line.

    >>> print(visible("red: \x1b[31m, reversed: \u202e"))
    red: \x1b[31m, reversed: \u202e
    """
    safe = _UNSAFE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
    return safe if lines else safe.replace("\n", r"\n").replace("\t", r"\t")


def shell_word(path: str | Path) -> str:
    """`path`, quoted so that it can be typed into a shell."""
    # A name with control characters cannot be pasted after this, but it cannot do harm either.
    return visible(shlex.quote(str(path)), lines=False)


def console(*, stderr: bool = False) -> "Console":
    """A rich console on the current stdout or stderr, which does not interpret markup."""
    from rich.console import Console

    # A new console for each call, because tests and callers may replace sys.stdout.
    return Console(stderr=stderr, highlight=False, markup=False, emoji=False)


def write(text: str) -> None:
    """Write text and a newline to stdout, escaped but not wrapped."""
    # rich would wrap long lines, but a path or a command must stay on one line to be copied.
    sys.stdout.write(visible(text) + "\n")


def print_json(value: Mapping[str, object]) -> None:
    """Write one JSON object to stdout, in ASCII, so that it cannot control a terminal."""
    # json.dumps escapes all characters that are not ASCII, and control characters with them.
    sys.stdout.write(json.dumps(value, indent=1) + "\n")


def notes_of(error: BaseException) -> list[str]:
    """The notes that were added to an exception."""
    # The attribute exists only after the first `add_note`.
    return list(getattr(error, "__notes__", []))


def message_of(error: BaseException) -> str:
    """The message of an exception, and its notes."""
    # str() of an OSError begins with "[Errno 28]". Our own messages do not need that number.
    message = None
    if isinstance(error, PenstockError) and isinstance(error, OSError):
        message = error.strerror
    return "\n".join([message or str(error), *notes_of(error)])


def print_error(name: str, message: str, *, as_json: bool) -> None:
    """Print an error to stderr, or as one JSON object to stdout."""
    if as_json:
        try:
            print_json({"error": {"type": name, "message": message}})
            sys.stdout.flush()
            return
        except OSError as error:
            if error.errno == errno.EPIPE:
                raise
            # A full disk: stderr may still work, so the message is printed there.
    from rich.text import Text

    text = Text.assemble((name, "bold red"), ": ", visible(message))
    console(stderr=True).print(text, soft_wrap=True)


def print_facts(title: str, facts: Facts) -> None:
    """Print a bold title, and names and values in two columns; all text is escaped."""
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")  # long paths continue on the next line, not as "…"
    for name, value in facts:
        # A newline inside a value is escaped; only the items of a list are separate lines.
        lines = [value] if isinstance(value, str) else value
        table.add_row(f"  {name}", "\n".join(visible(line, lines=False) for line in lines))
    out = console()
    out.print(visible(title, lines=False), style="bold", soft_wrap=True)
    out.print(table)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """The rows as lines of text, with each column aligned to the right.

    >>> aligned([["min", "max"], ["1", "12,345"]])
    ['min     max', '  1  12,345']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]


def store_json(store: "TokenStore") -> dict[str, object]:
    """The path, sizes and digest of a store, as an object for `--json`."""
    return {
        "path": str(store.path),
        "num_documents": store.manifest.num_documents,
        "num_tokens": store.num_tokens,
        "digest": store.digest,
    }


def documents_text(num_documents: int, num_pieces: int) -> str:
    """The number of documents, and of pieces if some documents are stored in several.

    >>> documents_text(1_200, 1_200), documents_text(1, 3)
    ('1,200', '1, in 3 pieces')
    """
    pieces = f", in {num_pieces:,} pieces" if num_pieces != num_documents else ""
    return f"{num_documents:,}{pieces}"


def reasons_text(rejects: dict[str, int]) -> str:
    """The number of rejected records, in total and for each reason.

    >>> reasons_text({"bad_json": 1_200, "too_long": 3}), reasons_text({})
    ('1,203: bad_json 1,200, too_long 3', 'none')
    """
    if not rejects:
        return "none"
    reasons = ", ".join(f"{reason} {number:,}" for reason, number in rejects.items())
    return f"{sum(rejects.values()):,}: {reasons}"
