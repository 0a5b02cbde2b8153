"""The pages of docs: links that work on a code host, the reference, and the pairs of notebooks.

`make docs` builds the site, and checks the links and anchors of what was built.
"""

import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md"))]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.md"))


@pytest.fixture
def site(monkeypatch):
    """The modules that build the site can be imported."""
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "site"))
    yield
    for name in ("reference_pages", "notebook_pages", "check_pages"):
        sys.modules.pop(name, None)


def test_every_public_name_has_a_heading_and_an_example_in_the_reference(site):
    from reference_pages import missing

    assert missing(ROOT) == []


def test_a_public_name_without_an_example_is_found(site, tmp_path):
    from reference_pages import missing

    (tmp_path / "tests").mkdir()
    (tmp_path / "docs" / "reference").mkdir(parents=True)
    names = {"penstock.sources": ["InputFile", "list_files", "ReadSettings"]}
    (tmp_path / "tests" / "public_names.json").write_text(json.dumps({"penstock": []} | names))
    page = "## InputFile\n\n## list_files\n\n```python\n...\n```\n\n## nope\n"
    (tmp_path / "docs" / "reference" / "sources.md").write_text(page)

    assert missing(tmp_path) == [
        "penstock.sources.InputFile has no example",
        "penstock.sources.ReadSettings has no heading in docs/reference/sources.md",
        "docs/reference/sources.md: penstock.sources has no nope",
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_files_that_a_page_links_to_exist(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    for link in re.findall(r"\]\(([^)#\s]+)[^)\s]*\)", text):
        if "://" not in link:
            assert (page.parent / link).exists(), link


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_has_the_cells_of_its_markdown(path, site):
    """`python docs/site/notebook_pages.py` writes it again."""
    from notebook_pages import cells

    notebook = json.loads(path.with_suffix(".ipynb").read_text(encoding="utf-8"))
    found = [(cell["cell_type"], "".join(cell["source"])) for cell in notebook["cells"]]

    assert found == cells(path.read_text(encoding="utf-8"))


def test_a_broken_link_an_anchor_and_a_request_are_found(site, tmp_path):
    from check_pages import problems

    page = '<h1 id="top"></h1><a href="#nope"></a><a href="b.html#top"></a><a href="c.html"></a>'
    (tmp_path / "a.html").write_text(page + '<img src="https://example.org/x.png">')
    (tmp_path / "b.html").write_text('<a href="a.html#top"></a>')

    assert sorted(problems(tmp_path)) == [
        "a.html: no such anchor: #nope",
        "a.html: no such anchor: b.html#top",
        "a.html: no such page: c.html",
        "a.html: requests https://example.org/x.png",
    ]


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) < 120
