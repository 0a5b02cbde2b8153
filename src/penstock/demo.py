"""Text that is on every machine with Python: its own standard library.

The sources are one corpus ("code"), what they say in words another ("prose"): the
docstrings of each module as one page, and the topics of `help()`. Tests are left out,
because some distributions do not ship them. No network, no data in the package.
"""

import ast
import importlib
import inspect
import json
import os
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

from penstock.errors import SourceError

__all__ = ["library_files", "prose_pages", "write_prose"]

_NOT_LIBRARY = frozenset(
    ("site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__")
)
_Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
_Documented = ast.Module | _Definition


def library_files() -> list[Path]:
    """The modules of the standard library, sorted.

    Raises:
        SourceError: this Python came without them.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _NOT_LIBRARY]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    if not found:
        raise SourceError(
            f"{root} holds no sources of the standard library, so the demo has no text. "
            "Run it with a Python that has them."
        )
    return sorted(found)


def prose_pages(files: list[Path]) -> Iterator[tuple[str, str]]:
    """The name and text of each page: topics of `help()`, then a page a module."""
    for name, text in sorted(_topics().items()):
        yield f"help: {name}", text
    root = Path(sysconfig.get_paths()["stdlib"])
    for file in files:
        page = _page(file, root)
        if page:
            yield page


def write_prose(path: Path, files: list[Path]) -> list[str]:
    """Write the pages to `path` as JSON lines; returns their names.

    A file that holds them already is left alone, so that a build from it can go on.
    """
    pages = list(prose_pages(files))
    lines = [json.dumps({"name": name, "text": text}) + "\n" for name, text in pages]
    data = "".join(lines).encode()
    if not path.exists() or path.read_bytes() != data:
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.write_bytes(data)
        temporary.replace(path)
    return [name for name, _ in pages]


def _topics() -> dict[str, str]:
    try:
        topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    except ImportError:  # some distributions leave it out
        return {}
    return topics


def _page(file: Path, root: Path) -> tuple[str, str] | None:
    """All docstrings of a module under the names they belong to."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old modules spell escapes that now warn
            tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):  # templates and samples that are no modules
        return None
    module = ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
    sections = [f"{name}\n\n{text}" for name, text in _docstrings(tree, module)]
    return (module, "\n\n".join(sections) + "\n") if sections else None


def _docstrings(node: _Documented, name: str) -> Iterator[tuple[str, str]]:
    text = ast.get_docstring(node)
    if text:
        yield name, inspect.cleandoc(text)
    for child in _definitions(node):
        yield from _docstrings(child, f"{name}.{child.name}")


def _definitions(node: ast.AST) -> Iterator[_Definition]:
    """Classes and functions right inside `node`, also those under an `if` or `try`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _Definition):
            yield child
        elif isinstance(child, ast.stmt | ast.excepthandler):
            yield from _definitions(child)
