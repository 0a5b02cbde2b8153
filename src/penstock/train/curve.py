"""The loss curve of a run as a picture: SVG, written by hand, so that nothing is needed.

6 ┤╲                      train, faint and smoothed
  │ ╲__ •                 val, a dot each
5 ┤    ‾‾──•────•         a dashed line at the target
  └──────────────►  step
"""

import math
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from penstock.store.files import write_file

__all__ = ["draw_curve", "write_curve"]

_WIDTH, _HEIGHT = 720, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 16, 40, 44
_MOST_POINTS = 600
Point = tuple[float, float]


def write_curve(path: Path, metrics: Iterable[dict[str, Any]], **options: Any) -> None:
    """Draw the losses of metrics.jsonl into a file."""
    write_file(path, [draw_curve(metrics, **options).encode()])


def draw_curve(
    metrics: Iterable[dict[str, Any]], *, title: str = "loss", target: float | None = None
) -> str:
    """The picture as SVG text.

    Args:
        metrics: The lines of metrics.jsonl.
        title: What stands above it.
        target: A loss to draw a line at.
    """
    train: list[Point] = []
    val: list[Point] = []
    for each in metrics:
        value = each.get("loss") if each["kind"] == "step" else each.get("val_loss")
        if each["kind"] in ("step", "val") and isinstance(value, float) and math.isfinite(value):
            (train if each["kind"] == "step" else val).append((each["step"], value))
    train = _thinned(train)
    points = [*train, *val, *([(0.0, target)] if target is not None else [])]
    steps = max((x for x, _ in points), default=1) or 1
    low = min((y for _, y in points), default=0.0)
    high = max((y for _, y in points), default=1.0)
    margin = 0.05 * (high - low) or 0.5
    scale = _Scale(steps, low - margin, high + margin)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
            'font-family="sans-serif" font-size="12" fill="#444">',
            '<rect width="100%" height="100%" fill="white"/>',
            f'<text x="{_LEFT}" y="22" font-size="15" fill="#222">{_inert(title)}</text>',
            *_axes(scale),
            *([_target(scale, target)] if target is not None else []),
            _path(scale, train, "#9db7d5", "train"),
            _path(scale, val, "#c1440e", "val"),
            *(
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="#c1440e"/>'
                for x, y in map(scale.place, val)
            ),
            *_legend(val),
            "</svg>\n",
        ]
    )


def _inert(title: str) -> str:
    """As text of a picture, which holds no control characters and no bytes that are no text."""
    held = (each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in title)
    return escape("".join(held))


class _Scale:
    """Steps and losses to places in the picture."""

    def __init__(self, steps: float, low: float, high: float) -> None:
        self.steps, self.low, self.high = steps, low, high

    def place(self, point: Point) -> Point:
        across = _WIDTH - _LEFT - _RIGHT
        down = _HEIGHT - _TOP - _BOTTOM
        x = _LEFT + across * point[0] / self.steps
        return x, _TOP + down * (self.high - point[1]) / (self.high - self.low)


def _thinned(points: Sequence[Point]) -> list[Point]:
    """At most 600 points: means of neighbours."""
    size = max(1, -(-len(points) // _MOST_POINTS))
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return [(group[-1][0], math.fsum(y for _, y in group) / len(group)) for group in groups]


def _ticks(low: float, high: float, most: int = 8) -> list[float]:
    """Round numbers between two.

    >>> _ticks(0, 1000), _ticks(5.2, 6.3)
    ([0.0, 200.0, 400.0, 600.0, 800.0, 1000.0], [5.2, 5.4, 5.6, 5.8, 6.0, 6.2])
    """
    size = 10.0 ** math.floor(math.log10((high - low) / most))
    step = next(size * k for k in (1, 2, 5, 10) if (high - low) / (size * k) <= most)
    first = math.ceil(low / step - 1e-9)
    count = math.floor(high / step + 1e-9) - first + 1
    return [round((first + number) * step, 10) for number in range(count)]


def _axes(scale: _Scale) -> list[str]:
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    lines = []
    for loss in _ticks(scale.low, scale.high):
        y = scale.place((0, loss))[1]
        lines.append(f'<path d="M{_LEFT} {y:.1f}H{right}" stroke="#eee"/>')
        lines.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{loss:g}</text>')
    for step in _ticks(0, scale.steps):
        x = scale.place((step, 0))[0]
        label = f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{step:,.10g}</text>'
        lines.append(label)
    lines.append(f'<path d="M{_LEFT} {_TOP}V{bottom}H{right}" fill="none" stroke="#999"/>')
    middle = (_LEFT + right) / 2
    return [*lines, f'<text x="{middle}" y="{_HEIGHT - 8}" text-anchor="middle">step</text>']


def _target(scale: _Scale, target: float) -> str:
    y = scale.place((0, target))[1]
    return (
        f'<path d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}" stroke="#3a7d44" stroke-dasharray="5 4"/>'
        f'<text x="{_WIDTH - _RIGHT}" y="{y - 5:.1f}" text-anchor="end" fill="#3a7d44">'
        f"target {target:g}</text>"
    )


def _path(scale: _Scale, points: Sequence[Point], colour: str, name: str) -> str:
    places = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(scale.place, points))
    style = f'fill="none" stroke="{colour}" stroke-width="1.5"'
    return f'<polyline id="{name}" points="{places}" {style}/>'


def _legend(val: Sequence[Point]) -> list[str]:
    x = _WIDTH - _RIGHT
    best = f", lowest {min(y for _, y in val):.4f}" if val else ""
    return [
        f'<text x="{x}" y="22" text-anchor="end"><tspan fill="#7896b8">train</tspan> '
        f'<tspan fill="#c1440e">validation{best}</tspan></text>'
    ]
