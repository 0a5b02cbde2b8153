"""How the commands mark text that is trained on, and text that is only read.

Every line of text has its mark, so that it is clear without colour too. The HTML views use the
same words, and underline text that is only read with dots.
"""

import textwrap
from typing import TYPE_CHECKING

from penstock.cli.terminal import visible

if TYPE_CHECKING:
    from rich.console import Console

LEGEND = "+ trained on, - only read"
MARKS = {True: "+ ", False: "- "}
_STYLES = {True: "green", False: "dim"}
_LEAST_WIDTH = 20


def print_marked(out: "Console", text: str, *, trained: bool) -> None:
    """Print text, escaped, with its mark before each line."""
    from rich.text import Text

    mark = MARKS[trained]
    width = max(_LEAST_WIDTH, out.width - len(mark) - 3)
    for line in visible(text).split("\n"):
        # Long lines are folded here, so that every line on the screen has its mark. Spaces are
        # part of the text and are not removed.
        for piece in textwrap.wrap(
            line, width, drop_whitespace=False, replace_whitespace=False, break_on_hyphens=False
        ) or [""]:
            out.print(Text(f"  {mark}{piece}", style=_STYLES[trained]), soft_wrap=True)
