"""A plan as text: its sources, the shares that were asked for, and the rows delivered.

    plan ad156226, seed 17, shuffle full; in the first 10,000 rows:
    ├── web   8,000 rows  8,192,000 tokens  asked 70 %  delivered 7,000 rows  70 %  0.88 epochs
    └── code  1,000 rows  1,024,000 tokens  asked 30 %  delivered 3,000 rows  30 %  3.00 epochs

Equal plans give equal text, so logs of two runs can be compared.
"""

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["SourceLine", "draw_tree", "percent"]


class SourceLine(NamedTuple):
    """What the picture shows of one source."""

    name: str
    rows: int
    tokens: int | None
    asked: str
    delivered: int

    def cells(self, num_rows: int) -> list[str]:
        """Return the text of each column; `num_rows` is the total over all sources."""
        share = self.delivered / num_rows if num_rows else 0
        epochs = self.delivered / self.rows if self.rows else 0
        return [
            self.name,
            f"{self.rows:,} rows",
            f"{self.tokens:,} tokens" if self.tokens is not None else "",
            f"asked {self.asked}",
            f"delivered {self.delivered:,} rows",
            percent(share),
            f"{epochs:,.2f} epochs",
        ]


def draw_tree(
    heading: str, sources: Sequence[SourceLine], num_rows: int, stages: Sequence[str]
) -> str:
    """Return the heading, one line per source, and then the lines of `stages`."""
    table = [source.cells(num_rows) for source in sources]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = []
    for name, *others in table:
        aligned = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        # A column is empty in all lines or in none, except for unknown numbers of tokens.
        lines.append("  ".join([name.ljust(widths[0]), *filter(str.strip, aligned)]))
    # The last line has another corner, whether it is a source or a stage.
    *branches, last = [*lines, *stages]
    return "\n".join([heading, *(f"├── {branch}" for branch in branches), f"└── {last}"])


def percent(share: float) -> str:
    """Return a share in percent with up to four significant digits.

    >>> percent(0.3), percent(1 / 3), percent(1e-9)
    ('30 %', '33.33 %', '1e-07 %')
    """
    return f"{100 * share:.4g} %"
