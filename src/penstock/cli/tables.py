"""Tables and the histogram of document lengths."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.cli.terminal import console, visible

if TYPE_CHECKING:
    from penstock.store.reader import TokenStore
    from penstock.store.summary import Bin

Facts = Sequence[tuple[str, str | list[str]]]
"""Names and their values. A list is a value of several lines."""

# Nine heights of one character: from empty to eight eighths.
_BLOCKS = " ▁▂▃▄▅▆▇█"


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


def histogram_lines(bins: Sequence["Bin"], *, width: int = 60, height: int = 3) -> list[str]:
    """A bar chart of `height` lines over an axis with token counts.

    Each bin is one to three columns wide. A bin that is not empty shows at least the lowest
    block.

    >>> from penstock.store.summary import Bin
    >>> for line in histogram_lines([Bin(1, 1, 8), Bin(2, 2, 0), Bin(3, 3, 1)], height=1):
    ...     print(line)
    ███   ▁▁▁
    1  2
    """
    # Sixty bins of one column fit into a terminal of 80 columns, beside the names of the table.
    columns = max(1, min(3, width // len(bins)))
    tallest = max(each.num_documents for each in bins)
    # Heights in eighths of a line, rounded up: -(-a // b) is the ceiling of a / b.
    heights = [-(-each.num_documents * 8 * height // tallest) for each in bins]
    lines = []
    for level in reversed(range(height)):
        filled = [min(8, max(0, each - 8 * level)) for each in heights]
        lines.append("".join(_BLOCKS[each] * columns for each in filled).rstrip())
    return [*lines, _axis(bins, columns)]


def _axis(bins: Sequence["Bin"], columns: int) -> str:
    """The smallest length of each bin, for as many bins as there is room."""
    line = ""
    for number, each in enumerate(bins):
        column = number * columns
        # Only powers of two are labelled: 1, 2, 4, 8. The bins between them begin at 3, 6, 12.
        is_power = each.first & (each.first - 1) == 0
        if not line or (is_power and column >= len(line) + 2):
            line = line.ljust(column) + _binary_text(each.first)
    return line


def _binary_text(number: int) -> str:
    """A power of two with a unit, such as 512, 1k, 64k or 1M."""
    # Units are multiples of 1,024, because the bins of the histogram begin at powers of two.
    for power, unit in ((30, "G"), (20, "M"), (10, "k")):
        if number >= 1 << power and number % (1 << power) == 0:
            return f"{number >> power}{unit}"
    return f"{number}"
