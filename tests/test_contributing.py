"""CONTRIBUTING.md names every package, and only files that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "penstock"
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_the_tree_names_every_package_and_module():
    tree = TEXT.partition("src/penstock/\n")[2].partition("```")[0]
    found = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    modules = {path.name for path in PACKAGE.glob("*.py") if not path.name.startswith("__")}

    assert set(re.findall(r"(\w+)/ ", tree)) == found
    assert set(re.findall(r"\w+\.py", tree)) == modules


@pytest.mark.parametrize(("title", "most"), [("a document", 12), ("a position", 10)])
def test_a_life_passes_few_files_and_all_exist(title, most):
    section = TEXT.partition(f"## The life of {title}\n")[2].partition("\n## ")[0]
    numbered = re.findall(r"^\d+\. `([\w/]+\.py)`", section, re.M)

    assert 5 <= len(numbered) <= most
    for name in re.findall(r"`(\w+/\w+\.py)`", section):
        assert (PACKAGE / name).exists(), name


def test_every_file_that_is_named_exists():
    for name in re.findall(r"`((?:docs|tests)/[\w./]+)`", TEXT):
        assert (ROOT / name).exists(), name
