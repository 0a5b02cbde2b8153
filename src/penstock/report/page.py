"""One HTML page, with everything in it.

The page may be opened by a person who does not trust the data. So its Content-Security-Policy
allows only the script and the style whose hashes it names, and no requests at all. If text from
data became markup by a mistake, a browser would still not run it.
"""

import base64
import hashlib
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

from penstock.charts import palette_css
from penstock.cli.terminal import visible

if TYPE_CHECKING:
    from jinja2 import Environment


@cache
def environment() -> "Environment":
    """The templates; they escape all values."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("penstock.report")
    return Environment(
        loader=loader,
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def page_html(name: str, sections: list[dict[str, str]], *, live: bool = False) -> str:
    """Return a page with some sections; a live page fetches its sections."""
    from penstock import __version__

    style, script = _assets()
    return (
        environment()
        .get_template("page.html")
        .render(
            title=visible(name, lines=False),
            sections=sections,
            policy=policy(live=live),
            style=style,
            script=script,
            live=live,
            version=__version__,
        )
    )


@cache
def policy(*, live: bool = False) -> str:
    """Return the Content-Security-Policy of a page; a live one may fetch from its own server."""
    style, script = (f"'sha256-{_digest(each)}'" for each in _assets())
    rules = ["default-src 'none'", f"style-src {style}", f"script-src {script}", "img-src data:"]
    rules += ["connect-src 'self'"] if live else []
    return "; ".join([*rules, "base-uri 'none'", "form-action 'none'"])


@cache
def _assets() -> tuple[str, str]:
    """Return the style and the script of all pages."""
    folder = files("penstock.report") / "templates"
    style, script = ((folder / name).read_text("utf-8") for name in ("page.css", "page.js"))
    return palette_css() + style, script


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
