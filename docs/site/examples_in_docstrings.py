"""An extension of griffe, which reads docstrings for mkdocstrings: it adds the examples.

Doctests become code blocks, also outside a section "Examples:". The examples of docs/reference,
which `reference_pages` collects, are added to the docstrings of their names, before the members.
"""

import json
import re
from pathlib import Path
from typing import Any

import griffe

# From the first `>>>` to the next blank line, at any indentation.
DOCTEST = re.compile(r"^([ \t]*)>>> .*(?:\n[ \t]*\S.*)*", re.M)


class ExamplesInDocstrings(griffe.Extension):
    """Changes the docstrings that were read."""

    def __init__(self, examples: str) -> None:
        super().__init__()
        self.examples: dict[str, str] = json.loads(Path(examples).read_text(encoding="utf-8"))

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Add the examples of an object."""
        text = obj.docstring.value if obj.docstring else ""
        text = DOCTEST.sub(lambda found: f"{found[1]}```pycon\n{found[0]}\n{found[1]}```", text)
        if obj.path in self.examples:
            text += f"\n\n**Example**\n\n{self.examples[obj.path]}"
        if obj.docstring:
            obj.docstring.value = text
        elif text:
            obj.docstring = griffe.Docstring(text, parent=obj)
