"""One HTML page, with everything in it.

The page may be opened by a person who does not trust the data. So its Content-Security-Policy
allows only the style whose hash it names, no script, and no requests at all. If text from data
became markup by a mistake, a browser would still not run it.
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


def page_html(name: str, sections: list[dict[str, str]]) -> str:
    """Return a page with some sections."""
    from penstock import __version__

    return (
        environment()
        .get_template("page.html")
        .render(
            title=visible(name, lines=False),
            sections=sections,
            policy=_policy(),
            style=_style(),
            version=__version__,
        )
    )


def _policy() -> str:
    digest = base64.b64encode(hashlib.sha256(_style().encode()).digest()).decode()
    rules = ["default-src 'none'", f"style-src 'sha256-{digest}'", "img-src data:"]
    return "; ".join([*rules, "base-uri 'none'", "form-action 'none'"])


@cache
def _style() -> str:
    """Return the style of all pages."""
    return palette_css() + (files("penstock.report") / "templates/page.css").read_text("utf-8")
