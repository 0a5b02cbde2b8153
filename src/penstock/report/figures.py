"""Charts and tables of a page, as its templates take them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.charts import INK, LINE, MUTED, draw, label_text, scattered, series
from penstock.store.summary import Bin

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_HALF = (420.0, 240.0)  # two charts fit beside each other; on a phone, labels can still be read
_BAR = 24.0
Painter = Callable[["Sequence[Axes]"], None]


@dataclass(frozen=True, slots=True)
class Table:
    """A table; the first column has the names of the rows."""

    heads: tuple[str, ...]
    rows: Sequence[Sequence[str]]
    ends_in_text: bool = False
    """Whether the last column has text; the columns between have numbers or short words."""


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart, and the same numbers as a table for readers who do not see it."""

    title: str
    svg: str
    table: Table | None
    note: str = ""


@dataclass(frozen=True, slots=True)
class RowPiece:
    """Consecutive tokens of a row that are drawn as one bar."""

    start: int
    stop: int
    document: int
    trained: bool


def length_histogram(bins: Sequence[Bin], name: str) -> Chart:
    """Return the lengths of documents as bars; the axis has powers of two."""

    def paint(axes: "Sequence[Axes]") -> None:
        (plot,) = axes
        plot.bar(range(len(bins)), [each.num_documents for each in bins], 0.9, color=series(0))
        powers = [n for n, each in enumerate(bins) if each.first & (each.first - 1) == 0]
        shown = powers[:: max(1, -(-len(powers) // 8))]
        plot.set_xticks(shown, [f"{bins[each].first:,}" for each in shown])
        _grid(plot, "tokens", "documents")

    rows = [(_span(each.first, each.last), f"{each.num_documents:,}") for each in bins]
    title = f"Lengths of documents: {name}"
    return Chart(title, draw(paint, title=title), Table(("tokens", "documents"), rows))


def mixture_chart(
    edges: Sequence[int], counts: dict[str, list[int]], unit: str, title: str
) -> Chart:
    """Return the share of each source over time as stacked areas.

    Args:
        edges: The first step (or row) of each interval, and the one after the last.
        counts: The rows of each source in each interval.
        unit: What `edges` count.
        title: The title of the chart.
    """
    totals = [max(1, sum(each)) for each in zip(*counts.values(), strict=True)]
    shares = {
        name: [100 * one / total for one, total in zip(rows, totals, strict=True)]
        for name, rows in counts.items()
    }

    def paint(axes: "Sequence[Axes]") -> None:
        (plot,) = axes
        values = [[*each, each[-1]] for each in shares.values()]
        colours = [series(number) for number in range(len(values))]
        names = [label_text(name, 20) for name in shares]
        plot.stackplot(edges, values, step="post", colors=colours, labels=names, alpha=0.85)
        plot.set(ylim=(0, 100), xlim=(edges[0], edges[-1]))
        _grid(plot, unit, "% of rows")
        _legend(plot, len(names))

    every = max(1, -(-len(totals) // 12))
    rows = [
        (f"{edges[each]:,}", *(f"{values[each]:.2f} %" for values in shares.values()))
        for each in range(0, len(totals), every)
    ]
    return Chart(title, draw(paint, title=title), Table((f"from {unit}", *counts), rows))


def epoch_chart(epochs: dict[str, float], title: str) -> Chart:
    """Return how often each source is read, as bars."""

    def paint(axes: "Sequence[Axes]") -> None:
        (plot,) = axes
        values = list(epochs.values())
        places = range(len(values))
        plot.barh(places, values, 0.7, color=[series(each) for each in places])
        plot.set_yticks(places, [label_text(name, 20) for name in epochs])
        plot.invert_yaxis()
        plot.axvline(1, color=MUTED, lw=1, ls="--")
        for place, value in enumerate(values):
            plot.annotate(f" {value:,.2f}", (value, place), va="center", color=INK)
        plot.set_xlim(0, 1.15 * max([1.0, *values]))
        plot.set_xlabel("epochs; the dashed line is one")

    rows = [(name, f"{value:,.2f}") for name, value in epochs.items()]
    size = _HALF[0], max(120.0, 70 + _BAR * len(epochs))
    return Chart(title, draw(paint, size=size, title=title), Table(("source", "epochs"), rows))


def row_chart(rows: Sequence[Sequence[RowPiece]], widths: Sequence[int], title: str) -> Chart:
    """Return rows as lines of bars: a colour for each document, pale if it is not trained on."""

    def paint(axes: "Sequence[Axes]") -> None:
        (plot,) = axes
        for place, (pieces, width) in enumerate(zip(rows, widths, strict=True)):
            plot.broken_barh([(0, width)], (place - 0.4, 0.8), facecolor=LINE, alpha=0.6)
            for each in pieces:
                span = [(each.start, each.stop - each.start)]
                colour = series(each.document)
                shade = 0.9 if each.trained else 0.3
                plot.broken_barh(span, (place - 0.4, 0.8), facecolor=colour, alpha=shade)
        plot.set(xlim=(0, max(widths)), ylim=(len(rows) - 0.4, -0.6), xlabel="token", ylabel="row")
        plot.locator_params(axis="y", integer=True)

    numbers = [
        (
            f"{number}",
            f"{len({each.document for each in pieces}):,}",
            f"{sum(each.stop - each.start for each in pieces):,}",
            f"{sum(each.stop - each.start for each in pieces if each.trained):,}",
            f"{max(0, width - max([0, *(each.stop for each in pieces)])):,}",
        )
        for number, (pieces, width) in enumerate(zip(rows, widths, strict=True))
    ]
    heads = ("row", "documents", "tokens", "trained on", "padding")
    return Chart(title, draw(paint, title=title), Table(heads, numbers))


def shuffle_chart(points: dict[str, tuple[list[int], list[float]]], unit: str, title: str) -> Chart:
    """Return where in its source each of some rows is, in a band for each source."""

    def paint(axes: "Sequence[Axes]") -> None:
        (plot,) = axes
        for number, (x, y) in enumerate(points.values()):
            scattered(plot, x, [number + each for each in y], series(number))
        last = max((max(x, default=1) for x, _ in points.values()), default=1)
        plot.set(xlim=(0, max(1, last)), ylim=(len(points), 0), xlabel=unit)
        places = [number + 0.5 for number in range(len(points))]
        plot.set_yticks(places, [label_text(name, 20) for name in points])
        for number in range(1, len(points)):
            plot.axhline(number, color=LINE, lw=1)

    height = max(_HALF[1], 60.0 * len(points))
    return Chart(title, draw(paint, size=(_HALF[0], height), title=title), None)


def _grid(plot: "Axes", x: str, y: str) -> None:
    plot.set(xlabel=x, ylabel=y)
    plot.grid(axis="y", color=LINE, lw=0.6)
    plot.set_axisbelow(True)
    for axis in (plot.xaxis, plot.yaxis):
        if not axis.get_label_text().endswith("tokens") or axis is plot.yaxis:
            axis.set_major_formatter(_number_text)


def _number_text(value: float, _: object = None) -> str:
    """A number as a label of an axis: 1,500 and not 1500.0."""
    return f"{value:,.10g}"


def _legend(plot: "Axes", count: int) -> None:
    plot.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=min(3, count), fontsize=10)


def _span(first: int, last: int) -> str:
    return f"{first:,}" if first == last else f"{first:,} to {last:,}"
