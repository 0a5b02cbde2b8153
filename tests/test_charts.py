"""Charts are SVG that a strict page can hold, and that any viewer can show."""

import re
import xml.etree.ElementTree as ElementTree

from penstock.charts import PALETTE, draw, label_text, palette_css, scattered, series


def paint(axes):
    axes[0].plot([0, 1, 2], [3, 1, 2], color=series(0), label="cost $x$ <b>", gid="series-cost")
    axes[0].legend()


def test_a_chart_of_a_page_takes_its_colours_from_the_page():
    drawn = draw(paint, title="a chart")

    assert "style=" not in drawn
    assert "<style" not in drawn
    used = set(re.findall(r"var\(--([\w-]+)\)", drawn))
    assert {"series-0", "ink", "muted"} <= used <= set(PALETTE)
    assert not re.search(r'(fill|stroke)="#(?!fff)', drawn)


def test_a_chart_of_a_file_has_literal_colours_and_a_background():
    drawn = draw(paint, title="a chart", in_file=True)

    assert "var(" not in drawn
    assert PALETTE["series-0"][0] in drawn
    first = next(iter(ElementTree.fromstring(drawn)))
    assert (first.tag.rpartition("}")[2], first.get("fill")) == ("rect", "white")


def test_text_stays_text_and_a_dollar_sign_is_no_formula():
    drawn = draw(paint, title='a "title" & <b>')
    root = ElementTree.fromstring(drawn)

    assert "cost $x$ <b>" in [each.text for each in root.iter() if each.tag.endswith("text")]
    assert root.get("aria-label") == 'a "title" & <b>'


def test_the_same_chart_is_the_same_text():
    assert draw(paint, title="one") == draw(paint, title="one")
    assert draw(paint, title="one") != draw(paint, title="two")


def test_every_dot_is_in_the_picture_and_no_others():
    def dots(axes):
        scattered(axes[0], [1, 2, 3], [1, 2, 3], series(1))
        axes[0].set(xlim=(0, 4), ylim=(0, 4))

    paths = re.findall(r' d="([^"]*)"[^>]*stroke-linecap="round"', draw(dots, title="dots"))
    assert len(paths) == 1
    assert paths[0].count("M") == 3


def test_a_name_fits_into_a_label():
    assert label_text("short") == "short"
    assert label_text("a\x1b\udce9b") == "a\ufffd\ufffdb"
    assert label_text("x" * 99, 10) == "x" * 9 + "…"


def test_both_themes_define_every_colour():
    light, dark = palette_css().split("@media")

    for name, colours in PALETTE.items():
        assert f"--{name}:{colours[0]};" in light
        assert f"--{name}:{colours[1]};" in dark
