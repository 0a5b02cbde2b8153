"""Tables and the small histogram."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.store.summary import Bin

__all__ = ["documents_text", "facts", "histogram_lines", "reasons_text"]

_BLOCKS = " ▁▂▃▄▅▆▇█"


def facts(rows: Sequence[tuple[str, Any]]) -> Any:
    """Names and values in two columns."""
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(f"  {name}", value)
    return table


def documents_text(num_documents: int, num_pieces: int) -> str:
    """How many documents there are, and pieces where these are more.

    >>> documents_text(1_200, 1_200), documents_text(1, 3)
    ('1,200', '1, in 3 pieces')
    """
    pieces = f", in {num_pieces:,} pieces" if num_pieces != num_documents else ""
    return f"{num_documents:,}{pieces}"


def reasons_text(rejects: dict[str, int]) -> str:
    """Rejects by reason in one line.

    >>> reasons_text({"bad_json": 1_200, "too_long": 3}), reasons_text({})
    ('1,203: bad_json 1,200, too_long 3', 'none')
    """
    if not rejects:
        return "none"
    reasons = ", ".join(f"{reason} {number:,}" for reason, number in rejects.items())
    return f"{sum(rejects.values()):,}: {reasons}"


def histogram_lines(bins: Sequence["Bin"], *, width: int = 60, height: int = 3) -> list[str]:
    """Bars of `height` lines, one to three columns a bin, over a scale of token counts.

    A bin with any document in it shows at least the lowest block.

    >>> from penstock.store.summary import Bin
    >>> for line in histogram_lines([Bin(1, 1, 8), Bin(2, 2, 0), Bin(3, 3, 1)], height=1):
    ...     print(line)
    ███   ▁▁▁
    1  2
    """
    wide = max(1, min(3, width // len(bins)))
    tallest = max(each.num_documents for each in bins)
    heights = [-(-each.num_documents * 8 * height // tallest) for each in bins]
    lines = []
    for level in reversed(range(height)):
        filled = [min(8, max(0, each - 8 * level)) for each in heights]
        lines.append("".join(_BLOCKS[each] * wide for each in filled).rstrip())
    return [*lines, _scale(bins, wide)]


def _scale(bins: Sequence["Bin"], wide: int) -> str:
    """Where bins begin, as many numbers as have room."""
    line = ""
    for number, each in enumerate(bins):
        place = number * wide
        # Whole octaves only: 1, 2, 4, 8; the bins between begin at 3, 6, 12.
        octave = each.first & (each.first - 1) == 0
        if not line or (octave and place >= len(line) + 2):
            line = line.ljust(place) + _binary_text(each.first)
    return line


def _binary_text(number: int) -> str:
    """A power of two as people write it: 512, 1k, 64k, 1M."""
    for power, unit in ((30, "G"), (20, "M"), (10, "k")):
        if number >= 1 << power and number % (1 << power) == 0:
            return f"{number >> power}{unit}"
    return f"{number}"
