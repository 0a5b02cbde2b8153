"""Writes notebooks from their Markdown, with outputs, and shows notebooks as pages.

    docs/notebooks/NAME.md ── run every block ──► NAME.ipynb ──► a page of the site

NAME.md and NAME.ipynb are a pair as Jupytext keeps them: `jupytext --sync` works on either.
`python docs/site/notebook_pages.py` runs all blocks in new directories and writes the .ipynb files.
"""

import ast
import contextlib
import hashlib
import io
import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

NOTEBOOKS = Path(__file__).resolve().parent.parent / "notebooks"
HEADER = re.compile(r"\A---\n(.*?)^---\n", re.M | re.S)
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)
Notebook = dict[str, Any]


def cells(markdown: str) -> list[tuple[str, str]]:
    """Return the kind and the source of each cell, as Jupytext reads them."""
    parts = BLOCK.split(HEADER.sub("", markdown))
    kinds = ["markdown" if number % 2 == 0 else "code" for number in range(len(parts))]
    return [
        (kind, part.strip("\n")) for kind, part in zip(kinds, parts, strict=True) if part.strip()
    ]


def _shown(value: object) -> dict[str, str]:
    """The output of a cell whose last expression has this value."""
    method = getattr(value, "_repr_html_", None)
    html = {} if method is None else {"text/html": method()}
    return html | {"text/plain": repr(value)}


def _result(data: dict[str, str]) -> dict[str, Any]:
    """An output as a notebook stores it."""
    lines = {kind: text.splitlines(keepends=True) for kind, text in data.items()}
    return {"data": lines, "metadata": {}, "output_type": "display_data"}


def _run(source: str, names: dict[str, Any]) -> list[dict[str, Any]]:
    """Run a cell, and return its outputs: what it prints, its figures, and its last expression."""
    import matplotlib.pyplot as plt

    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, "cell", "exec"), names)
        value = eval(compile(ast.Expression(last.value), "cell", "eval"), names) if last else None
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        text = printed.getvalue().splitlines(keepends=True)
        outputs.append({"name": "stdout", "output_type": "stream", "text": text})
    for number in plt.get_fignums():
        file = io.BytesIO()
        plt.figure(number).savefig(file, format="svg", bbox_inches="tight", metadata={"Date": None})
        outputs.append(_result({"image/svg+xml": file.getvalue().decode()}))
    plt.close("all")
    if value is not None:
        outputs.append(_result(_shown(value)))
    return outputs


def executed(markdown: str) -> Notebook:
    """Return the notebook of a Markdown file, with the outputs of its blocks."""
    import matplotlib.pyplot as plt

    # Colours that can be read on light and on dark pages; the same ids in every run.
    grey = "#7d8590"
    plt.rcParams |= dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor"), grey)
    plt.rcParams |= {"xtick.color": grey, "ytick.color": grey, "axes.facecolor": "none"}
    plt.rcParams |= {"figure.facecolor": "none", "legend.framealpha": 0.0, "svg.fonttype": "none"}
    plt.rcParams |= {
        "svg.hashsalt": "penstock",
        "axes.spines.right": False,
        "axes.spines.top": False,
    }
    names: dict[str, Any] = {"__name__": "__main__"}
    made = []
    for number, (kind, source) in enumerate(cells(markdown)):
        cell: dict[str, Any] = {"cell_type": kind}
        if kind == "code":
            cell["execution_count"] = None
        cell["id"] = hashlib.sha256(f"{number} {source}".encode()).hexdigest()[:8]
        cell["metadata"] = {}
        if kind == "code":
            cell["outputs"] = _run(source, names)
        cell["source"] = source.splitlines(keepends=True)
        made.append(cell)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"jupytext": {"formats": "ipynb,md"}, "kernelspec": kernel}
    return {"cells": made, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def _output_page(output: dict[str, Any]) -> str:
    """One output as Markdown."""
    block = '<div class="output" markdown>\n\n```text\n{}\n```\n\n</div>'
    if output["output_type"] == "stream":
        return block.format("".join(output["text"]).rstrip())
    data = output["data"]
    if "image/svg+xml" in data:
        text = "".join(data["image/svg+xml"])
        return f'<div class="diagram">{" ".join(text[text.index("<svg") :].split())}</div>'
    if "text/html" in data:
        return f'<div class="output">{"".join(data["text/html"]).replace(chr(10), " ")}</div>'
    return block.format("".join(data["text/plain"]))


def notebook_page(notebook: Notebook) -> str:
    """Return a notebook as a Markdown page, with its outputs."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        parts += [_output_page(each) for each in cell["outputs"]]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    """Run the notebooks and write their outputs."""
    for path in sorted(NOTEBOOKS.glob("*.md")):
        with tempfile.TemporaryDirectory() as directory:
            os.chdir(directory)
            notebook = executed(path.read_text(encoding="utf-8"))
            os.chdir(NOTEBOOKS)
        text = json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"
        path.with_suffix(".ipynb").write_text(text, encoding="utf-8")
        print(path.with_suffix(".ipynb").name, file=sys.stderr)


if __name__ == "__main__":
    main()
