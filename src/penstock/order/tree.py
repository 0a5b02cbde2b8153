"""A picture of a plan as text: the sources, their shares, and the stages of a schedule."""

from typing import TYPE_CHECKING

from penstock.order.layout import Layout
from penstock.order.shuffle import mode_to_json
from penstock.order.weighted import percent

if TYPE_CHECKING:
    from penstock.order.plan import Plan

_DRAWN_STAGES = 10


def draw_tree(plan: "Plan", layout: Layout, num_rows: int | None) -> str:
    """Return the picture that `Plan.tree` describes; `layout` is how the plan orders sources."""
    if num_rows is None:
        num_rows = min(plan.end, layout.default_num_rows)
    counts, asked = plan.counts(num_rows), ["once an epoch"] * len(plan.names)
    if (shares := layout.asked(num_rows)) is not None:
        asked = [percent(rows / max(num_rows, 1)) for rows in shares]
    table = [
        [
            name,
            f"{size:,} rows",
            "" if source.num_tokens is None else f"{source.num_tokens:,} tokens",
            f"asked {share}",
            f"delivered {counts[name]:,} rows",
            percent(counts[name] / max(num_rows, 1)),
            f"{counts[name] / max(size, 1):,.2f} epochs",
        ]
        for (name, source), size, share in zip(plan.sources.items(), plan.sizes, asked, strict=True)
    ]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = []
    for name, *others in table:
        aligned = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        # A column is empty in all lines or in none, except for unknown numbers of tokens.
        lines.append("  ".join([name.ljust(widths[0]), *filter(str.strip, aligned)]))
    num_stages = layout.num_stages
    drawn = min(num_stages, _DRAWN_STAGES) if num_stages > 1 else 0
    lines += ["from position {:,}: {}".format(*layout.stage(each)) for each in range(drawn)]
    if num_stages > _DRAWN_STAGES:
        lines.append(f"… and {num_stages - drawn:,} more stages")
    mode = mode_to_json(plan.shuffle)["mode"]
    heading = (
        f"plan {plan.digest[:8]}, seed {plan.seed}, shuffle {mode}; in the first {num_rows:,} rows:"
    )
    # The last line has another corner, whether it is a source or a stage.
    *branches, last = lines
    return "\n".join([heading, *(f"├── {branch}" for branch in branches), f"└── {last}"])
