"""Shows a run: a line about its progress, the loss curve, and the names of documents.

    step 1,200/4,800  loss 5.3121  val 5.4410  lr 0.0028  6,210 tok/s  ETA 9:48  wait 0.1%  1.2 GB

    6 ┤╲                      curve.svg: the training loss, smoothed
      │ ╲__ •                 the validation loss, with dots
    5 ┤    ‾‾──•────•         a dashed line at the target
      ├──────────────
   ms │▁▂▁▁▁▁▁▁▁▁▁▁▁▁         the time that steps waited for data
      └──────────────►  step

In a terminal, the line is redrawn in place. Otherwise a line is printed every ten seconds.
"""

import math
import shutil
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from penstock.charts import LINE, draw, series
from penstock.cli.terminal import visible
from penstock.cli.units import duration_text
from penstock.disk import write_file
from penstock.errors import MissingExtraError
from penstock.loader.run import AnyPlan
from penstock.store.reader import record_unit
from penstock.train.logs import Line
from penstock.train.metrics import Log, RunProgress, RunReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PRINT_SECONDS = 10.0  # between lines, without a terminal
_DRAW_SECONDS = 0.2
_MAX_POINTS = 600
_NAMED_DOCUMENTS = 4
Point = tuple[float, float]


class Display:
    """Shows a run on a text stream, by default stdout; pass it to `train` as `log`."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._in_terminal = self._stream.isatty()
        self._shown = -math.inf
        self._last = ""

    def __call__(self, event: RunReport | str) -> None:
        """Show a line of text at once; show a report only if the last one is old enough."""
        if isinstance(event, str):
            self._write(f"{visible(event)}\n")  # a sample of the model may have escape sequences
            return
        self._last = report_line(event)
        now, step = time.monotonic(), event.progress.step
        # Without a terminal the first lines come soon, then one every ten seconds.
        wait = _DRAW_SECONDS if self._in_terminal else min(_PRINT_SECONDS, step)
        # The last step is always shown.
        if now - self._shown >= wait or step == event.progress.steps:
            self._shown = now
            # A line that wraps could not be cleared, so it is cut to the width of the terminal.
            width = shutil.get_terminal_size().columns - 1
            self._write(self._last[:width] if self._in_terminal else f"{self._last}\n")

    def _write(self, text: str) -> None:
        # "\r" moves to the first column, and the escape sequence clears the line, which has the
        # last report.
        self._stream.write(f"\r\x1b[K{text}" if self._in_terminal else text)
        self._stream.flush()

    def close(self) -> None:
        """Draw the last report and leave it on the screen."""
        if self._in_terminal and self._last:
            self._write(f"{self._last}\n")


def summary_line(progress: RunProgress, *, finished: bool) -> str:
    """The line that a command prints after a run."""
    if not finished and not progress.step:
        return "stopped before the first step; the same command begins again"
    if not finished:
        return f"stopped as requested after step {progress.step:,}; the same command resumes it"
    loss = "" if progress.val_loss is None else f", validation loss {progress.val_loss:.4f}"
    took = duration_text(progress.seconds)
    steps = "step" if progress.step == 1 else "steps"
    return f"{progress.step:,} {steps}, {progress.tokens:,} tokens, {took}{loss}"


def report_line(report: RunReport) -> str:
    """A report as one line."""
    progress = report.progress
    total = "" if progress.steps is None else f"/{progress.steps:,}"
    parts = [f"step {progress.step:,}{total}", f"loss {progress.loss:.4f}"]
    if progress.val_loss is not None:
        parts.append(f"val {progress.val_loss:.4f}")
    parts.append(f"lr {report.learning_rate:.2g}")
    # Before the second step there is no speed: it is 0, and the time left is infinite.
    if report.tokens_per_second:
        parts.append(f"{report.tokens_per_second:,.0f} tok/s")
    # It precedes the other numbers, because a terminal of 80 columns cuts the end of the line.
    if report.seconds_left is not None and math.isfinite(report.seconds_left):
        minutes, seconds = divmod(round(report.seconds_left), 60)
        parts.append(f"ETA {minutes}:{seconds:02d}")
    if report.mfu:
        parts.append(f"MFU {report.mfu:.1%}")
    parts += [f"wait {report.data_wait:.1%}", f"{report.peak_memory / 1e9:.1f} GB"]
    return "  ".join(parts)


def write_curve(
    path: Path, metrics: Iterable[Line], *, title: str, target: float | None, log: Log
) -> None:
    """Write what `draw_curve` returns to a file; without matplotlib, log that there is none."""
    try:
        picture = draw_curve(metrics, title=title, target=target)
    except MissingExtraError as error:  # the run is complete without a picture
        log(f"{path.name} was not written. {error}")
        return
    write_file(path, [picture.encode()])


def draw_curve(
    metrics: Iterable[Line],
    *,
    title: str = "loss",
    target: float | None = None,
    in_file: bool = True,
) -> str:
    """The loss curve as SVG, and below it the time that each step waited for data.

    Args:
        metrics: The lines of metrics.jsonl.
        title: The title above the curve.
        target: A loss to draw a dashed line at.
        in_file: Whether the curve will be a file, and not a part of a page.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    lines = list(metrics)
    val = _points(lines, "val", "val_loss")
    train, waited = (_averaged(_points(lines, "step", name)) for name in ("loss", "waited"))

    def paint(axes: "Sequence[Axes]") -> None:
        _paint_losses(axes[0], train, val, target)
        if waited:
            steps, seconds = zip(*waited, strict=True)
            times = [1000 * each for each in seconds]
            axes[1].fill_between(steps, times, color=series(2), lw=0, gid="series-waited")
            axes[1].set_ylabel("ms waited")
            axes[1].set_ylim(0, 1.1 * max([1.0, *times]))
        axes[-1].set_xlabel("step")
        axes[-1].xaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")

    size = (720, 400) if in_file else (420, 300)
    heights = (3, 1) if waited else (1,)
    return draw(paint, size=size, heights=heights, title=title, in_file=in_file)


def _points(lines: Iterable[Line], kind: str, name: str) -> list[Point]:
    """The finite values of a name in the lines of a kind, each with its step."""
    return [
        (each["step"], each[name])
        for each in lines
        if each["kind"] == kind and isinstance(each.get(name), float) and math.isfinite(each[name])
    ]


def _paint_losses(
    plot: "Axes", train: Sequence[Point], val: Sequence[Point], target: float | None
) -> None:
    lowest = f", lowest {min(y for _, y in val):.4f}" if val else ""
    if train:
        color, name = series(0), "series-train"
        plot.plot(*zip(*train, strict=True), color=color, lw=1.2, label="training", gid=name)
    if val:
        color, name, label = series(1), "series-val", f"validation{lowest}"
        # Each validation is a dot too, so that a single one can be seen.
        dots = plot.plot(*zip(*val, strict=True), color=color, lw=1.5, label=label, gid=name)
        dots[0].set(marker="o", markersize=3)
    if target is not None:
        plot.axhline(target, color=series(2), lw=1, ls="--", label=f"target {target:g}")
    plot.grid(axis="y", color=LINE, lw=0.6)
    plot.set_ylabel("loss")
    if train or val or target is not None:
        plot.legend(loc="upper right")


def _averaged(points: Sequence[Point]) -> list[Point]:
    """At most 600 points, each the mean of a group of neighbouring points."""
    # 1,500 points make 500 groups of 3. A million points would be an SVG of 12 MB.
    size = max(1, -(-len(points) // _MAX_POINTS))
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return [(group[-1][0], math.fsum(y for _, y in group) / len(group)) for group in groups]


def documents_at(plan: AnyPlan, start: int, stop: int) -> str:
    """The documents in the rows at positions `start` up to `stop`: the first few, by name."""
    names: list[str] = []
    for sample in plan.samples(start, stop):
        for at in plan.origins(sample.position):
            unit = record_unit(at.store, at.file)
            name = f"document {at.document:,} of {at.store.path} ({at.file}, {unit} {at.offset:,})"
            full = name if len(plan.names) == 1 else f"{sample.source}: {name}"
            if full not in names:
                names.append(full)
        if len(names) > _NAMED_DOCUMENTS:
            break
    if not names:
        return "rows that do not record their documents"
    more = " and more" if len(names) > _NAMED_DOCUMENTS else ""
    return ", ".join(names[:_NAMED_DOCUMENTS]) + more
