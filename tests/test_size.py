"""The figures of `make size` never rise above those in tests/size.json."""

import json
import runpy
from pathlib import Path

import pytest

SIZE = Path(__file__).parent / "size.py"


@pytest.fixture(scope="module")
def size():
    return runpy.run_path(str(SIZE))


def test_no_figure_is_above_the_recorded_one(size):
    pytest.importorskip("lightning")  # a data module is among what is measured
    figures, _ = size["measure"]()

    assert set(figures) == set(json.loads(size["RECORD"].read_text()))
    assert size["risen"](figures) == [], "see the docstring of tests/size.py"


def test_a_figure_that_has_risen_is_named(size):
    recorded = json.loads(size["RECORD"].read_text())
    figures = {name: (figure, 0) for name, figure in recorded.items()}
    figures["files in src"] = (recorded["files in src"] + 1, 0)
    figures["lines in src"] = (recorded["lines in src"] - 1, 0)

    assert size["risen"](figures) == ["files in src"]


def test_comments_docstrings_and_layout_are_not_counted(size, tmp_path):
    path = tmp_path / "code.py"
    lines = ['"""Two\nlines."""', "", "class A:  # a comment", "    x: int = 1", '    """x"""']
    path.write_text(
        "\n".join([*lines, "", "y = f'{A.x!r} and {A.x:<9}'", "print(y,", "  ...)", ""])
    )

    assert size["measure_file"](path) == (5, 17, 10, ["A"])
