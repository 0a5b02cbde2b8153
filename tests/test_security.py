"""SECURITY.md is short, and names tests that exist."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "SECURITY.md").read_text()
NAMED = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", PAGE)


def test_every_test_that_the_page_names_exists():
    assert NAMED
    for file in {file for file, _ in NAMED}:
        tree = ast.parse((ROOT / file).read_text())
        names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        assert any(name.startswith("test_") for name in names), file
        assert {test for named, test in NAMED if named == file and test} <= names, file


def test_the_page_is_short():
    assert len(PAGE.encode()) <= 2_048
