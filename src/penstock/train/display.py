"""Shows a run: a line about its progress, the loss curve, and the names of documents.

    step 1,200/4,800  loss 5.3121  val 5.4410  lr 0.0028  6,210 tok/s  ETA 9:48  wait 0.1%  1.2 GB

    6 ┤╲                      curve.svg: the training loss, smoothed
      │ ╲__ •                 the validation loss, with dots
    5 ┤    ‾‾──•────•         a dashed line at the target
      └──────────────►  step

In a terminal, the line is redrawn in place. Otherwise a line is printed every ten seconds. The
curve is SVG text, so that no plotting library is needed.
"""

import math
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple, TextIO

from penstock.cli.terminal import visible
from penstock.cli.units import duration_text
from penstock.loader.run import AnyPlan
from penstock.store.files import write_file
from penstock.train.metrics import Line, RunProgress, RunReport

_PRINT_SECONDS = 10.0  # between lines, without a terminal
_DRAW_SECONDS = 0.2
_WIDTH, _HEIGHT = 720, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 16, 40, 44
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
    if not finished:
        return f"stopped as requested after step {progress.step:,}; the same command resumes it"
    loss = "" if progress.val_loss is None else f", validation loss {progress.val_loss:.4f}"
    took = duration_text(progress.seconds)
    return f"{progress.step:,} steps, {progress.tokens:,} tokens, {took}{loss}"


def report_line(report: RunReport) -> str:
    """A report as one line."""
    progress = report.progress
    total = "" if progress.steps is None else f"/{progress.steps:,}"
    parts = [f"step {progress.step:,}{total}", f"loss {progress.loss:.4f}"]
    if progress.val_loss is not None:
        parts.append(f"val {progress.val_loss:.4f}")
    parts += [f"lr {report.learning_rate:.2g}", f"{report.tokens_per_second:,.0f} tok/s"]
    # Before the second step there is no speed, and the time left is infinite. It precedes the
    # other numbers, because a terminal of 80 columns cuts the end of the line.
    if report.seconds_left is not None and math.isfinite(report.seconds_left):
        minutes, seconds = divmod(round(report.seconds_left), 60)
        parts.append(f"ETA {minutes}:{seconds:02d}")
    if report.mfu is not None:
        parts.append(f"MFU {report.mfu:.1%}")
    parts += [f"wait {report.data_wait:.1%}", f"{report.peak_memory / 1e9:.1f} GB"]
    return "  ".join(parts)


def write_curve(path: Path, metrics: Iterable[Line], *, title: str, target: float | None) -> None:
    """Write what `draw_curve` returns to a file."""
    write_file(path, [draw_curve(metrics, title=title, target=target).encode()])


def draw_curve(metrics: Iterable[Line], *, title: str = "loss", target: float | None = None) -> str:
    """The loss curve as SVG.

    Args:
        metrics: The lines of metrics.jsonl.
        title: The title above the curve.
        target: A loss to draw a dashed line at.
    """
    points: dict[str, list[Point]] = {"step": [], "val": []}
    for each in metrics:
        value = each.get("loss" if each["kind"] == "step" else "val_loss")
        if each["kind"] in points and isinstance(value, float) and math.isfinite(value):
            points[each["kind"]].append((each["step"], value))
    train, val = _averaged(points["step"]), points["val"]
    lowest = f", lowest {min(y for _, y in val):.4f}" if val else ""
    scale = _scale([*train, *val], target)
    # XML allows neither control characters nor lone surrogates, and a path can contain both.
    title = "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in title)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
            'font-family="sans-serif" font-size="12" fill="#444">',
            '<rect width="100%" height="100%" fill="white"/>',
            f'<text x="{_LEFT}" y="22" font-size="15" fill="#222">{escape(title)}</text>',
            _text(_WIDTH - _RIGHT, 22, f"validation{lowest}", fill="#c1440e"),
            _text(_WIDTH - _RIGHT, 36, "train", fill="#7896b8"),
            *_axes(scale),
            *([] if target is None else _target_line(scale, target)),
            _polyline(scale, train, "#9db7d5", "train"),
            _polyline(scale, val, "#c1440e", "val"),
            *(
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="#c1440e"/>'
                for x, y in map(scale.to_pixels, val)
            ),
            "</svg>\n",
        ]
    )


class _Scale(NamedTuple):
    """Converts (step, loss) into coordinates of the picture."""

    steps: float
    low: float
    high: float

    def to_pixels(self, point: Point) -> Point:
        across = _WIDTH - _LEFT - _RIGHT
        down = _HEIGHT - _TOP - _BOTTOM
        # y grows downwards in SVG, so the highest loss is at the top.
        x = _LEFT + across * point[0] / self.steps
        return x, _TOP + down * (self.high - point[1]) / (self.high - self.low)


def _scale(points: Sequence[Point], target: float | None) -> _Scale:
    """A scale that shows all points and the target, with a margin above and below."""
    losses = [y for _, y in points] + ([] if target is None else [target])
    low, high = min(losses, default=0.0), max(losses, default=1.0)
    margin = 0.05 * (high - low) or 0.5  # a single point still needs a height
    return _Scale(max((x for x, _ in points), default=1) or 1, low - margin, high + margin)


def _averaged(points: Sequence[Point]) -> list[Point]:
    """At most 600 points, each the mean of a group of neighbouring points."""
    # 1,500 points make 500 groups of 3. A million points would be an SVG of 12 MB.
    size = max(1, -(-len(points) // _MAX_POINTS))
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return [(group[-1][0], math.fsum(y for _, y in group) / len(group)) for group in groups]


def _ticks(low: float, high: float, most: int = 8) -> list[float]:
    """At most nine round numbers from `low` to `high`, for the labels of an axis.

    >>> _ticks(0, 1000), _ticks(5.2, 6.3)
    ([0.0, 200.0, 400.0, 600.0, 800.0, 1000.0], [5.2, 5.4, 5.6, 5.8, 6.0, 6.2])
    """
    # The smallest of 1, 2, 5 or 10 times a power of ten that gives at most `most` intervals.
    size = 10.0 ** math.floor(math.log10((high - low) / most))
    step = next(size * k for k in (1, 2, 5, 10) if (high - low) / (size * k) <= most)
    # The tolerance keeps an end such as 5.2, which is 25.999… steps of 0.2 in floating point.
    first = math.ceil(low / step - 1e-9)
    count = math.floor(high / step + 1e-9) - first + 1
    return [round((first + number) * step, 10) for number in range(count)]


def _text(x: float, y: float, text: str, *, anchor: str = "end", fill: str = "#444") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{fill}">{text}</text>'


def _axes(scale: _Scale) -> Iterator[str]:
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    for loss in _ticks(scale.low, scale.high):
        y = scale.to_pixels((0, loss))[1]
        yield f'<path d="M{_LEFT} {y:.1f}H{right}" stroke="#eee"/>'
        yield _text(_LEFT - 8, y + 4, f"{loss:g}")
    for step in _ticks(0, scale.steps):
        x = scale.to_pixels((step, 0))[0]  # ".10g" writes 100000 as 100,000 and not as 1e+05
        yield _text(x, bottom + 18, f"{step:,.10g}", anchor="middle")
    yield f'<path d="M{_LEFT} {_TOP}V{bottom}H{right}" fill="none" stroke="#999"/>'
    yield _text((_LEFT + right) / 2, _HEIGHT - 8, "step", anchor="middle")


def _target_line(scale: _Scale, target: float) -> list[str]:
    y = scale.to_pixels((0, target))[1]
    dashes = 'stroke="#3a7d44" stroke-dasharray="5 4"'
    label = _text(_WIDTH - _RIGHT, y - 5, f"target {target:g}", fill="#3a7d44")
    return [f'<path d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}" {dashes}/>', label]


def _polyline(scale: _Scale, points: Sequence[Point], colour: str, name: str) -> str:
    coordinates = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(scale.to_pixels, points))
    style = f'fill="none" stroke="{colour}" stroke-width="1.5"'
    return f'<polyline id="{name}" points="{coordinates}" {style}/>'


def documents_at(plan: AnyPlan, start: int, stop: int) -> str:
    """The documents in the rows at positions `start` up to `stop`: the first few, by name."""
    names: list[str] = []
    for sample in plan.samples(start, stop):
        for at in plan.origins(sample.position):
            name = f"document {at.document:,} of {at.store.path} ({at.file}, offset {at.offset:,})"
            full = name if len(plan.names) == 1 else f"{sample.source}: {name}"
            if full not in names:
                names.append(full)
        if len(names) > _NAMED_DOCUMENTS:
            break
    if not names:
        return "rows that do not record their documents"
    more = " and more" if len(names) > _NAMED_DOCUMENTS else ""
    return ", ".join(names[:_NAMED_DOCUMENTS]) + more
