"""Builds the site from docs/: `python docs/site/build.py`, or `make docs`.

    docs/*.md, docs/reference, docs/notebooks ─┐
    docstrings, commands, recipe keys          ├─► build/docs/pages ── zensical ──► build/docs/site
    CHANGELOG.md, CONTRIBUTING.md, SECURITY.md ┘                                        │ checks
                                                                                        ▼
                                                                       links, anchors, other hosts

The pages in docs/ are written for a code host. This script only adapts them: diagrams become part
of the page, so that they follow its theme; links to source files lead to pages with the source;
and notebooks are shown with their outputs. It needs no network. It fails if a link, an anchor or a
public name is missing.
"""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

from check_pages import problems
from notebook_pages import notebook_page
from reference_pages import reference_pages

ROOT = Path(__file__).resolve().parent.parent.parent
DOCS = ROOT / "docs"
BUILD = ROOT / "build" / "docs"
PAGES = BUILD / "pages"
PROJECT_PAGES = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")

DIAGRAM = re.compile(r"^!\[([^\]]*)\]\(((?:\.\./)?figures/diagram-[\w-]+\.svg)\)$", re.M)
SOURCE = re.compile(r"\]\((?:\.\./)+((?:src|tests|examples|benchmarks)/[\w./-]+)\)")
FENCE = re.compile(r"^(```.*?^```$)", re.M | re.S)
LIST_AFTER_TEXT = re.compile(r"^(?![-*|>#]|\d+\. | |$)(.*\n)(?=(?:- |\d+\. ))", re.M)


def inlined(page: str, directory: Path) -> str:
    """Return a page whose diagrams are SVG elements, which follow the theme of the site."""

    def element(found: re.Match[str]) -> str:
        text = (directory / found[2]).read_text(encoding="utf-8")
        text = re.sub(r"<style>.*?</style>|<\?xml.*?\?>", "", text, flags=re.S)
        start = f'<div class="diagram" role="img" aria-label="{found[1]}">'
        return f"{start}{' '.join(text.split())}</div>"

    return DIAGRAM.sub(element, page)


def unescaped(line: re.Match[str]) -> str:
    """Return a row of a table in which `|` inside code has no backslash; code hosts want one."""
    return re.sub(r"`[^`]*`", lambda code: code[0].replace(r"\|", "|"), line[0])


def adapted(page: str, directory: Path, depth: int) -> tuple[str, set[str]]:
    """Return a page as the site needs it, and the source files that it links to.

    Python-Markdown, unlike code hosts, wants a blank line before a list.
    """
    sources = set(SOURCE.findall(page))
    page = SOURCE.sub(lambda found: f"]({'../' * depth}source/{found[1]}.md)", page)
    page = re.sub(r"^\|.*\|$", unescaped, inlined(page, directory), flags=re.M)
    parts = FENCE.split(page)
    parts[::2] = [LIST_AFTER_TEXT.sub(r"\1\n", each) for each in parts[::2]]
    return "".join(parts), sources


def write(name: str, text: str) -> None:
    """Write a page."""
    path = PAGES / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def collect() -> None:
    """Write all pages of the site."""
    pages = {
        path.relative_to(DOCS).as_posix(): path.read_text(encoding="utf-8")
        for path in DOCS.glob("*.md")
    }
    for path in (DOCS / "notebooks").glob("*.ipynb"):
        name = f"notebooks/{path.stem}.md"
        pages[name] = notebook_page(json.loads(path.read_text(encoding="utf-8")))
    reference, examples = reference_pages(ROOT)
    pages |= reference
    (BUILD / "examples.json").write_text(json.dumps(examples), encoding="utf-8")
    for name in PROJECT_PAGES:
        text = (ROOT / name).read_text(encoding="utf-8")
        text = re.sub(r"\]\(docs/", "](", text)
        for other in PROJECT_PAGES:
            text = text.replace(f"]({other}", f"]({other.lower()}")
        pages[name.lower()] = text
    sources = set()
    for name, text in pages.items():
        for other in PROJECT_PAGES:
            text = text.replace(f"](../{other}", f"]({other.lower()}")
        text = re.sub(r"\]\(([\w./-]+)\.ipynb", r"](\1.md", text)
        depth = name.count("/")
        text, linked = adapted(text, DOCS / Path(name).parent, depth)
        sources |= linked
        write(name, text)
    for name in sources:
        language = "python" if name.endswith(".py") else "toml"
        code = (ROOT / name).read_text(encoding="utf-8")
        write(f"source/{name}.md", f"# {name}\n\n````{language}\n{code}````\n")
    shutil.copytree(DOCS / "figures", PAGES / "figures")
    shutil.copytree(DOCS / "site" / "theme", PAGES / "theme")


def main() -> int:
    """Build and check the site; returns the exit code."""
    shutil.rmtree(BUILD, ignore_errors=True)
    PAGES.mkdir(parents=True)
    collect()
    shutil.copy(DOCS / "site" / "zensical.toml", BUILD)
    program = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
    done = subprocess.run(program, cwd=BUILD, check=False)
    if done.returncode:
        return done.returncode
    found = problems(BUILD / "site")
    print(
        "\n".join(found)
        or f"{len(list(BUILD.rglob('*.html')))} pages: {BUILD / 'site' / 'index.html'}"
    )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
