"""Charts as SVG text, drawn by matplotlib.

    painter ── matplotlib ──► SVG with inline styles ── `_themed` ──► SVG for a page, or for a file

A chart in a page takes its colours from CSS variables, so it follows the light and the dark theme
of the page. Inline styles are moved to attributes, because the Content-Security-Policy of the page
forbids them. A chart in a file has the colours of the light theme and a white background, so that
every viewer shows it. Text stays text: it can be searched, and the reader's font is used.
"""

import io
import re
import threading
import warnings
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from penstock.errors import MissingExtraError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    Painter = Callable[[Sequence[Axes]], None]

# The colour of each role in the light and in the dark theme. Neighbouring series differ in
# lightness too, so that they differ without colour vision (after Okabe and Ito).
PALETTE = {
    "ink": ("#1f2328", "#e6edf3"),
    "muted": ("#59636e", "#9198a1"),
    "line": ("#d1d9e0", "#3d444d"),
    "surface": ("#ffffff", "#161b22"),
    "series-0": ("#0b6fb8", "#58a6ff"),
    "series-1": ("#d9730d", "#f0a04b"),
    "series-2": ("#1a8a6a", "#3fb98f"),
    "series-3": ("#b0478c", "#e08cc0"),
    "series-4": ("#7a6fd0", "#a8a0f0"),
    "series-5": ("#a08a00", "#d8c03c"),
    "series-6": ("#c2403a", "#ff7b72"),
    "series-7": ("#4a5560", "#b0bac4"),
}
_NUM_SERIES = 8
# matplotlib gets a placeholder for each role, which no other part of the SVG has.
_PLACEHOLDERS = {name: f"#0{number:x}0a0b" for number, name in enumerate(PALETTE)}
INK, MUTED, LINE = (_PLACEHOLDERS[name] for name in ("ink", "muted", "line"))
_SVG = "http://www.w3.org/2000/svg"
_LINK = "http://www.w3.org/1999/xlink"
_SETTINGS = {
    "axes.edgecolor": LINE,
    "axes.labelcolor": MUTED,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.unicode_minus": False,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "font.size": 11,
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "path.simplify": False,  # it would remove the dots of `scattered`, which have no length
    "svg.fonttype": "none",
    "text.color": INK,
    "text.parse_math": False,  # the name of a source may have dollar signs
    "xtick.color": LINE,
    "xtick.labelcolor": MUTED,
    "ytick.color": LINE,
    "ytick.labelcolor": MUTED,
}
# The settings of matplotlib and the filters of warnings belong to the process.
_drawing = threading.Lock()


def series(number: int) -> str:
    """Return the colour of a series, for a painter; the colours repeat after eight."""
    return _PLACEHOLDERS[f"series-{number % _NUM_SERIES}"]


def palette_css() -> str:
    """Return CSS that defines the variables of the light and of the dark theme."""
    light, dark = (
        "".join(f"--{name}:{colours[theme]};" for name, colours in PALETTE.items())
        for theme in (0, 1)
    )
    return (
        f":root{{color-scheme:light dark;{light}}}\n"
        f"@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}\n"
    )


def label_text(text: str, most: int = 32) -> str:
    """Return a name as it can be written into a chart: one line, shortened, valid in XML."""
    # XML allows neither control characters nor lone surrogates, and a path can contain both.
    clean = "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in text)
    return clean if len(clean) <= most else f"{clean[: most - 1]}…"


def draw(
    paint: "Painter",
    *,
    size: tuple[float, float] = (420, 240),
    heights: Sequence[float] = (1,),
    title: str = "",
    in_file: bool = False,
) -> str:
    """Return a chart as SVG.

    Args:
        paint: Called with the axes, from top to bottom; it draws on them.
        size: The width and the height in pixels.
        heights: The share of the height of each of the axes, which have a common x axis.
        title: What screen readers say; in a file, also the title above the chart.
        in_file: Whether the chart will be a file, and not a part of a page.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError(
            "Charts need matplotlib, which is not installed. Install it with: "
            'pip install "penstock[report]"'
        ) from error
    text = io.StringIO()
    with _drawing, warnings.catch_warnings(), matplotlib.rc_context(_SETTINGS):
        # The fonts of the machine that draws need not have all characters: the reader's are used.
        warnings.filterwarnings("ignore", "Glyph .* missing from")
        figure = Figure((size[0] / 72, size[1] / 72), layout="constrained")
        axes = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)
        paint([each[0] for each in axes])
        if in_file:
            figure.suptitle(label_text(title, 80), x=0.01, ha="left", size=12)
        # The ids of clip paths are hashes, so that the same data gives the same text.
        matplotlib.rcParams["svg.hashsalt"] = label_text(title, 200)
        figure.savefig(text, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Type")))
    return _themed(text.getvalue(), label_text(title, 200), in_file=in_file)


def scattered(axes: "Axes", x: Sequence[float], y: Sequence[float], colour: str) -> None:
    """Draw dots. They are one path of lines without length, which takes 20 bytes a dot."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    points = [point for point in zip(x, y, strict=True) for _ in range(2)]
    if points:
        path = Path(points, [Path.MOVETO, Path.LINETO] * len(x))
        axes.add_patch(PathPatch(path, fill=False, ec=colour, lw=2.2, capstyle="round"))


def _themed(text: str, title: str, *, in_file: bool) -> str:
    """Replace inline styles and placeholders, and drop what a page does not need."""
    ElementTree.register_namespace("", _SVG)
    ElementTree.register_namespace("xlink", _LINK)
    root = ElementTree.fromstring(text)
    colours = {
        placeholder: PALETTE[name][0] if in_file else f"var(--{name})"
        for name, placeholder in _PLACEHOLDERS.items()
    }
    used = set(re.findall(r"#([\w.]+)", " ".join(_links(root))))
    for each in list(root.iter()):
        for child in [inner for inner in each if inner.tag in _DROPPED]:
            each.remove(child)
        _restyle(each, colours)
        name = each.attrib.pop("id", "")
        if name in used:
            each.set("id", name)
        elif name.startswith("series-"):
            each.set("class", name)
        if "d" in each.attrib:
            # A hundredth of a pixel is not visible, and matplotlib writes millionths.
            each.set("d", re.sub(r"\s+", " ", re.sub(r"(\.\d\d)\d+", r"\1", each.attrib["d"])))
    for size in ("width", "height"):
        del root.attrib[size]  # the page decides
    root.attrib |= {"role": "img", "aria-label": title, "font-family": "system-ui, sans-serif"}
    if in_file:
        root.insert(0, ElementTree.Element(f"{{{_SVG}}}rect", _BACKGROUND))
    return re.sub(r">\s+<", "><", ElementTree.tostring(root, "unicode")) + "\n"


_DROPPED = {f"{{{_SVG}}}metadata", f"{{{_SVG}}}style"}
_BACKGROUND = {"width": "100%", "height": "100%", "fill": "white"}


def _links(root: ElementTree.Element) -> list[str]:
    """Return the attributes that refer to an id."""
    names = (f"{{{_LINK}}}href", "clip-path")
    return [each.attrib[name] for each in root.iter() for name in names if name in each.attrib]


def _restyle(element: ElementTree.Element, colours: Mapping[str, str]) -> None:
    """Move the declarations of an inline style to attributes."""
    for declaration in element.attrib.pop("style", "").split(";"):
        name, _, value = (part.strip() for part in declaration.partition(":"))
        # The root has the font, and marks repeat the stroke of their definition.
        if name and name != "font-family":
            element.set(name, colours.get(value, value))
    if re.fullmatch(r"rotate\(-?0 .*\)", element.get("transform", "")):
        del element.attrib["transform"]
