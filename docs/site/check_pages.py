"""Finds broken links, broken anchors and requests to other hosts in the built site."""

import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

# Attributes that a browser requests without a click.
REQUESTED = {
    ("img", "src"),
    ("script", "src"),
    ("link", "href"),
    ("iframe", "src"),
    ("source", "src"),
}


class Page(HTMLParser):
    """The links, the requests and the anchors of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.requests: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Record the links and the anchors of an element."""
        for name, value in attrs:
            if name in ("id", "name") and value:
                self.anchors.add(value)
            if name in ("href", "src") and value:
                self.links.append(value)
                if (tag, name) in REQUESTED:
                    self.requests.append(value)


def _broken(site: Path, path: Path, pages: dict[Path, Page]) -> list[str]:
    """Return a line for each link of a page that leads nowhere."""
    found = []
    for link in pages[path].links:
        parts = urlsplit(link)
        if parts.scheme or parts.netloc:
            continue
        target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
        if target.is_dir():
            target /= "index.html"
        anchors = pages[target].anchors if target in pages else None
        if not target.exists():
            found.append(f"{path.relative_to(site)}: no such page: {link}")
        elif parts.fragment and anchors is not None and unquote(parts.fragment) not in anchors:
            found.append(f"{path.relative_to(site)}: no such anchor: {link}")
    return found


def problems(site: Path) -> list[str]:
    """Return a line for each broken link, broken anchor and request to another host."""
    site = site.resolve()
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}
    found = []
    for path, page in pages.items():
        name = path.relative_to(site)
        found += [f"{name}: requests {each}" for each in page.requests if urlsplit(each).netloc]
        if name.name != "404.html":  # it is shown at any address, so its links are absolute
            found += _broken(site, path, pages)
    for path in site.rglob("*.css"):
        if re.search(r"""url\(["']?(https?:)?//""", path.read_text(encoding="utf-8")):
            found.append(f"{path.relative_to(site)}: requests another host")
    return found
