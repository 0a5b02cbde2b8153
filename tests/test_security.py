"""SECURITY.md names tests that exist, and a test for each of its claims."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "SECURITY.md").read_text()
NAMED = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", PAGE)
# These say what penstock cannot do.
WITHOUT_TEST = ("Somebody who can write", "How long the regular expressions", "Of openwebtext")


def test_every_test_that_the_page_names_exists():
    for file in {file for file, _ in NAMED}:
        tree = ast.parse((ROOT / file).read_text())
        names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        assert any(name.startswith("test_") for name in names), file
        assert {test for named, test in NAMED if named == file and test} <= names, file


def test_every_claim_of_the_page_names_a_test():
    claims = re.findall(r"^- .*(?:\n  .*)*", PAGE.partition("## Threat model")[2], re.MULTILINE)

    assert len(claims) > 15
    without = [each for each in claims if "`tests/" not in each]
    assert [each for each in without if not each.removeprefix("- ").startswith(WITHOUT_TEST)] == []
