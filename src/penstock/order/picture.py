"""A plan as a picture: its sources, what was asked and what is delivered.

    plan ad156226, seed 17, shuffle full; in the first 10,000 rows:
    ├── web   8,000 rows  8,192,000 tokens  asked 70 %  delivered 7,000 rows  70 %  0.88 epochs
    └── code  1,000 rows  1,024,000 tokens  asked 30 %  delivered 3,000 rows  30 %  3.00 epochs

Plain text, the same for the same plan, so that it can go into logs and be compared.
"""

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["SourceLine", "draw_tree", "percent"]


class SourceLine(NamedTuple):
    """One source in the picture."""

    name: str
    rows: int
    tokens: int | None
    asked: str
    delivered: int


def draw_tree(
    heading: str, leaves: Sequence[SourceLine], num_rows: int, stages: Sequence[str]
) -> str:
    """The picture: a line for each source, and one for each stage where there are several."""
    table = [_cells(leaf, num_rows) for leaf in leaves]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = []
    for cells in table:
        name, *others = cells
        aligned = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([name.ljust(widths[0]), *filter(str.strip, aligned)]))
    branches = [*lines, *stages]
    marks = ["├── "] * (len(branches) - 1) + ["└── "]
    return "\n".join([heading, *map(str.__add__, marks, branches)])


def percent(share: float) -> str:
    """A share in percent with four digits, however small.

    >>> percent(0.3), percent(1 / 3), percent(1e-9)
    ('30 %', '33.33 %', '1e-07 %')
    """
    return f"{100 * share:.4g} %"


def _cells(leaf: SourceLine, num_rows: int) -> list[str]:
    share = percent(leaf.delivered / num_rows if num_rows else 0)
    epochs = leaf.delivered / leaf.rows if leaf.rows else 0
    return [
        leaf.name,
        f"{leaf.rows:,} rows",
        f"{leaf.tokens:,} tokens" if leaf.tokens is not None else "",
        f"asked {leaf.asked}",
        f"delivered {leaf.delivered:,} rows",
        share,
        f"{epochs:,.2f} epochs",
    ]
