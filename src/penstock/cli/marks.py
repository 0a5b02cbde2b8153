"""How the commands mark text that is trained on, and text that is only read.

Every line of text has its mark, so that it is clear without colour too. The HTML views use the
same words, and underline text that is only read with dots.
"""

import textwrap
from typing import TYPE_CHECKING

from penstock.cli.terminal import visible, write

if TYPE_CHECKING:
    from rich.console import Console

LEGEND = "+ trained on, - only read, ↵ newline"
MARKS = {True: "+ ", False: "- "}
_STYLES = {True: "green", False: "dim"}
_LEAST_WIDTH = 20


def print_marked(out: "Console", text: str, *, trained: bool) -> None:
    """Print text, escaped, with its mark before each line, and a sign for each newline."""
    from rich.text import Text

    mark = MARKS[trained]
    # Both edges of a piece can be within a line of the text. Without a sign, a newline at the end
    # of a piece could not be seen.
    *lines, last = visible(text).split("\n")
    for line in [f"{each}↵" for each in lines] + [last] * bool(last):
        if not out.is_terminal:
            write(f"  {mark}{line}")
            continue
        # Long lines are folded here, so that every line on the screen has its mark. Spaces are
        # part of the text and are not removed.
        width = max(_LEAST_WIDTH, out.width - len(mark) - 3)
        for piece in textwrap.wrap(
            line, width, drop_whitespace=False, replace_whitespace=False, break_on_hyphens=False
        ):
            out.print(Text(f"  {mark}{piece}", style=_STYLES[trained]), soft_wrap=True)
