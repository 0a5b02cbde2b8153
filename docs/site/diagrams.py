"""Draws the diagrams of the pages: docs/figures/diagram-*.svg.

    python docs/site/diagrams.py

Points and lines are computed by penstock, not sketched. Colours are CSS variables: in a file, they
follow the light or dark theme of the reader; inside a page of the site, those of the page.
"""

from collections.abc import Iterable
from html import escape
from pathlib import Path

import numpy as np

from penstock.order.interleave import Mix
from penstock.order.permute import permute
from penstock.order.plan import Plan
from penstock.rows.protocol import Rows

FIGURES = Path(__file__).resolve().parent.parent / "figures"
LIGHT = {"ink": "#1f2328", "muted": "#59636e", "line": "#d1d9e0", "surface": "#f6f8fa"}
LIGHT |= {"a": "#0b6fb8", "b": "#d9730d", "c": "#1a8a6a", "d": "#b0478c"}
DARK = {"ink": "#e6edf3", "muted": "#9198a1", "line": "#3d444d", "surface": "#161b22"}
DARK |= {"a": "#58a6ff", "b": "#f0a04b", "c": "#3fb98f", "d": "#e08cc0"}
SEED = 17


def _variables(colours: dict[str, str]) -> str:
    return "".join(f"--d-{name}:{value};" for name, value in colours.items())


def save(name: str, width: int, height: int, parts: Iterable[str]) -> None:
    """Write a diagram."""
    dark = f"@media (prefers-color-scheme: dark){{svg{{{_variables(DARK)}}}}}"
    style = f"<style>svg{{{_variables(LIGHT)}}}{dark}</style>"
    font = 'font-family="system-ui, sans-serif" font-size="14"'
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    text = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font}>\n{style}\n'
    path = FIGURES / f"diagram-{name}.svg"
    path.write_text(text + "\n".join(parts) + "\n</svg>\n", encoding="utf-8")


def text(
    x: float, y: float, words: str, *, colour: str = "ink", anchor: str = "middle", **more: object
) -> str:
    """Text at a point."""
    rest = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in more.items())
    style = f'text-anchor="{anchor}" style="fill:var(--d-{colour})"{rest}'
    return f'<text x="{x:g}" y="{y:g}" {style}>{escape(words)}</text>'


def box(
    x: float, y: float, width: float, height: float, colour: str, *, filled: bool = False
) -> str:
    """A rounded rectangle, in outline or filled."""
    fill = f"var(--d-{colour})" if filled else "var(--d-surface)"
    style = f"fill:{fill};stroke:var(--d-{colour});stroke-width:1.5"
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="5" style="{style}"/>'
    )


def arrow(x0: float, y0: float, x1: float, y1: float, colour: str = "muted") -> str:
    """A line with a head at its end."""
    direction = np.array([x1 - x0, y1 - y0]) / np.hypot(x1 - x0, y1 - y0)
    side = np.array([-direction[1], direction[0]])
    end = np.array([x1, y1])
    left, right = end - 8 * direction + 4 * side, end - 8 * direction - 4 * side
    points = " ".join(f"{x:g},{y:g}" for x, y in (end, left, right))
    line = f'<line x1="{x0:g}" y1="{y0:g}" x2="{x1:g}" y2="{y1:g}"'
    return (
        f'{line} style="stroke:var(--d-{colour});stroke-width:1.5"/>'
        f'<polygon points="{points}" style="fill:var(--d-{colour})"/>'
    )


def pipeline() -> None:
    """What flows through the packages."""
    stages = [
        ("sources", "raw files", "a"),
        ("tokenize", "documents", "a"),
        ("store", "token ids", "a"),
        ("rows", "sealed files", "c"),
        ("order", "rows", "b"),
        ("loader", "positions", "b"),
    ]
    parts = []
    for number, (name, given, colour) in enumerate(stages):
        x = 70 + 130 * number
        parts += [box(x, 50, 86, 40, colour), text(x + 43, 75, name, font_weight=600)]
        parts += [
            arrow(x - 42, 70, x - 3, 70),
            text(x - 23, 40, given, colour="muted", font_size=12),
        ]
    parts += [arrow(808, 70, 850, 70), text(829, 40, "batches", colour="muted", font_size=12)]
    parts += [box(854, 50, 56, 40, "d"), text(882, 75, "GPU", font_weight=600)]
    parts += [text(242, 120, "once: penstock build", colour="a", font_size=13)]
    parts += [
        text(
            612, 120, "every step: computed from (stores, plan, position)", colour="b", font_size=13
        )
    ]
    save("pipeline", 920, 140, parts)


class _Numbered(Rows):
    """50,000 rows of which only the numbers matter."""

    length = 1_024
    digest = "numbered"

    def __len__(self) -> int:
        return 50_000


def position() -> None:
    """How a position becomes a row."""
    weights, at = {"web": 0.7, "code": 0.3}, 1_000_003
    plan = Plan({"web": _Numbered(), "code": _Numbered()}, weights=weights, seed=SEED)
    (sample,) = plan.samples(at, at + 1)
    ordinal = plan.counts(at)[sample.source]  # how many rows of the source come before
    epoch, number = divmod(ordinal, 50_000)
    first = sample.sample * 1_024
    steps = [
        ("position", f"{at:,}", "the only state of a run", "b"),
        (
            "mix",
            f"source {sample.source}, its row number {ordinal:,} of the run",
            "from the weights 0.7 and 0.3, in exact integers",
            "b",
        ),
        (
            "epoch",
            f"epoch {epoch}, number {number:,} in it",
            f"{ordinal:,} = {epoch} x 50,000 + {number:,}, because the source has 50,000 rows",
            "b",
        ),
        (
            "permute",
            f"row {sample.sample:,}",
            "a bijection with a key for each epoch: no list, no buffer",
            "b",
        ),
        (
            "store",
            f"tokens {first:,} to {first + 1_024:,}",
            f"{sample.sample:,} x 1,024, read from a memory-mapped file",
            "a",
        ),
        ("batch", "inputs and targets", "two views of one buffer of 1,025 tokens", "c"),
    ]
    parts = []
    for number, (name, value, why, colour) in enumerate(steps):
        y = 16 + 66 * number
        parts += [box(20, y, 110, 40, colour), text(75, y + 25, name, font_weight=600)]
        parts += [text(150, y + 18, value, anchor="start", font_weight=600)]
        parts += [text(150, y + 37, why, anchor="start", colour="muted", font_size=13)]
        if number:
            parts.append(arrow(75, y - 26, 75, y - 3))
    save("position", 620, 410, parts)


def ranks() -> None:
    """The rows of a step on one, two and four ranks."""
    parts = []
    for line, world in enumerate((1, 2, 4)):
        y = 30 + 66 * line
        parts.append(text(95, y + 24, f"{world} rank" + "s" * (world > 1), anchor="end"))
        for row in range(8):
            colour = "abcd"[row * world // 8]
            parts.append(box(110 + 62 * row, y, 52, 36, colour, filled=True))
            parts.append(
                text(136 + 62 * row, y + 23, str(40 + row), colour="surface", font_weight=600)
            )
        share = 8 // world
        for rank in range(world):
            x = 110 + 62 * rank * share
            parts.append(
                text(x + 31 * share - 5, y + 54, f"rank {rank}", colour="muted", font_size=12)
            )
    parts.append(text(353, 16, "step 5: positions 40 to 47", colour="muted"))
    save("ranks", 620, 222, parts)


def _points(x: float, y: float, size: float, values: np.ndarray, colour: str) -> str:
    scale = size / len(values)
    dots = "".join(
        f"M{x + number * scale:.1f} {y + size - value * scale:.1f}h0"
        for number, value in enumerate(values)
    )
    style = f"stroke:var(--d-{colour});stroke-width:2.4;stroke-linecap:round;fill:none"
    return f'<path d="{dots}" style="{style}"/>'


def shuffle() -> None:
    """The row at each position: in order, shuffled in a buffer, and permuted."""
    n, buffer = 512, 48
    generator = np.random.default_rng(SEED)
    held, drawn = list(range(buffer)), []
    for following in [*range(buffer, n), *[None] * buffer]:
        drawn.append(held.pop(generator.integers(len(held))))
        held += [] if following is None else [following]
    cases = [
        ("no shuffle", np.arange(n), "muted"),
        (f"a buffer of {buffer} rows", np.array(drawn), "b"),
        ("penstock: permute", permute(np.arange(n), n, SEED), "a"),
    ]
    parts = []
    for number, (name, values, colour) in enumerate(cases):
        x = 50 + 250 * number
        parts += [box(x - 6, 34, 212, 212, "line"), _points(x, 40, 200, values, colour)]
        parts += [text(x + 100, 22, name, font_weight=600)]
        parts += [text(x + 100, 268, "position", colour="muted", font_size=12)]
    parts.append(text(26, 140, "row", colour="muted", font_size=12, transform="rotate(-90 26 140)"))
    save("shuffle", 780, 282, parts)


def feistel() -> None:
    """One round of the network, and the walk back into the range."""
    parts = [
        text(120, 22, "position", font_weight=600),
        arrow(120, 30, 80, 56),
        arrow(120, 30, 160, 56),
    ]
    parts += [
        box(40, 58, 80, 32, "a"),
        text(80, 79, "high"),
        box(140, 58, 80, 32, "a"),
        text(180, 79, "low"),
    ]
    parts += [box(260, 58, 130, 32, "b"), text(325, 79, "noise(low, key)")]
    parts += [arrow(222, 74, 257, 74), arrow(325, 92, 92, 126), arrow(80, 92, 80, 120)]
    parts += [box(30, 122, 100, 32, "a"), text(80, 143, "high + noise")]
    parts += [arrow(180, 92, 180, 120), box(140, 122, 80, 32, "a"), text(180, 143, "low")]
    parts += [
        text(420, 79, "a key for each of 8 rounds,", anchor="start", colour="muted", font_size=13)
    ]
    parts += [
        text(
            420, 97, "and the two halves change roles", anchor="start", colour="muted", font_size=13
        )
    ]
    parts += [
        arrow(130, 158, 130, 186),
        box(60, 188, 140, 34, "c"),
        text(130, 210, "below n? a row"),
    ]
    parts += [
        text(
            220,
            203,
            "otherwise the network is applied again,",
            anchor="start",
            colour="muted",
            font_size=13,
        )
    ]
    parts += [
        text(
            220,
            221,
            "until the result is below n (cycle walking)",
            anchor="start",
            colour="muted",
            font_size=13,
        )
    ]
    save("feistel", 640, 236, parts)


def mixture() -> None:
    """How far a source is from its share, over the run."""
    n, share, scale = 4_000, 0.3, 4.0
    drawn = Mix([0.7, 0.3]).at(np.arange(n))[0] == 1
    random = np.random.default_rng(SEED).random(n) < share
    parts = [box(60, 20, 640, 240, "line")]
    for value in (-20, -10, 0, 10, 20):
        y = 140 - value * scale
        parts.append(f'<line x1="60" x2="700" y1="{y}" y2="{y}" style="stroke:var(--d-line)"/>')
        parts.append(
            text(
                52,
                y + 5,
                f"{value:+d}" if value else "0",
                anchor="end",
                colour="muted",
                font_size=12,
            )
        )
    for values, colour, words, y in (
        (random, "b", "drawn at random", 44),
        (drawn, "a", "penstock", 64),
    ):
        error = np.cumsum(values) - share * np.arange(1, n + 1)
        every = range(0, n, 8)
        line = " ".join(
            f"{60 + 640 * at / n:.1f},{140 - np.clip(error[at], -29, 29) * scale:.1f}"
            for at in every
        )
        style = f"fill:none;stroke:var(--d-{colour});stroke-width:1.8"
        parts.append(f'<polyline points="{line}" style="{style}"/>')
        parts.append(text(76, y, words, anchor="start", colour=colour, font_weight=600))
    parts.append(
        text(380, 296, "rows read; the weight of the source is 0.3", colour="muted", font_size=12)
    )
    for at in (0, 1_000, 2_000, 3_000, 4_000):
        parts.append(text(60 + 640 * at / n, 276, f"{at:,}", colour="muted", font_size=12))
    words = "rows of a source minus its share"
    parts.append(text(14, 140, words, colour="muted", font_size=12, transform="rotate(-90 14 140)"))
    save("mixture", 720, 304, parts)


def tree() -> None:
    """Weights as a tree of two-way splits."""
    parts = [box(280, 10, 120, 34, "b"), text(340, 32, "position 6")]
    parts += [arrow(310, 46, 190, 84), arrow(370, 46, 490, 84)]
    parts += [box(130, 86, 120, 34, "a"), text(190, 108, "web 0.5")]
    parts += [box(430, 86, 120, 34, "b"), text(490, 108, "the rest 0.5")]
    parts += [arrow(460, 122, 400, 160), arrow(520, 122, 580, 160)]
    parts += [box(330, 162, 120, 34, "c"), text(390, 184, "code 0.25")]
    parts += [box(530, 162, 120, 34, "d"), text(590, 184, "books 0.25")]
    for number, source in enumerate(Mix([0.5, 0.25, 0.25]).at(np.arange(16))[0]):
        parts.append(box(20 + 40 * number, 222, 34, 30, "acd"[source], filled=True))
        parts.append(text(37 + 40 * number, 243, "wcb"[source], colour="surface", font_weight=600))
    parts.append(
        text(
            20,
            274,
            "positions 0 to 15: w web, c code, b books",
            anchor="start",
            colour="muted",
            font_size=12,
        )
    )
    save("tree", 680, 284, parts)


def store() -> None:
    """The files of a store."""
    files = [
        ("penstock.json", "the manifest, written last: sizes, SHA-256, tokenizer, settings", "b"),
        ("part-00000.tokens.npy", "token ids, uint16 or uint32, one after the other", "a"),
        ("part-00000.bounds.npy", "where each document ends", "c"),
        ("part-00000.origin.npy", "the input file and the offset of each document", "c"),
        ("part-00000.loss.npy", "chat stores only: 1 where a token is trained on", "d"),
        ("rejects.jsonl", "what was refused, where and why", "muted"),
    ]
    parts = []
    for number, (name, why, colour) in enumerate(files):
        y = 10 + 44 * number
        parts += [box(10, y, 210, 32, colour), text(22, y + 21, name, anchor="start", font_size=13)]
        parts += [text(236, y + 21, why, anchor="start", colour="muted", font_size=13)]
    for number, (width, colour) in enumerate([(150, "a"), (70, "c"), (220, "d"), (110, "a")]):
        x = 10 + sum([150, 70, 220, 110][:number])
        parts.append(box(x, 292, width - 4, 28, colour, filled=True))
        parts.append(text(x + width / 2 - 2, 311, f"doc {number}", colour="surface", font_size=12))
        parts.append(text(x + width - 4, 338, "↑", colour="muted", font_size=12))
    parts.append(text(574, 311, "tokens", anchor="start", colour="muted", font_size=13))
    parts.append(text(574, 338, "bounds", anchor="start", colour="muted", font_size=13))
    save("store", 680, 350, parts)


def main() -> None:
    """Draw all diagrams."""
    for draw in (pipeline, position, ranks, shuffle, feistel, mixture, tree, store):
        draw()


if __name__ == "__main__":
    main()
