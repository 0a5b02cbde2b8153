"""The size of the repository, each figure beside its goal.

    make size                prints the figures
    make size SIZE=record    also writes them to tests/size.json, unless one has risen

tests/test_size.py fails when a figure is above the recorded one, so the record only falls. Where a
rise is right, delete tests/size.json and record again; the commit then shows the rise.
"""

import ast
import io
import json
import subprocess
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).parent.parent
RECORD = ROOT / "tests" / "size.json"
# Run in a fresh interpreter; prints figures with their goals. `**options: Unpack[Options]` counts
# as the options it stands for. `build` has 14 besides its inputs and the store; 6 of LLMDataModule
# are those of all data modules.
IMPORTED = """
import inspect, sys, typing, penstock as ps
for name, goal in {"Loader": 60, "build": 95}.items():
    getattr(ps, name)
    print(sum(each.startswith("penstock") for each in sys.modules), goal, "modules after", name)
from penstock.integrations.lightning import LLMDataModule
from penstock.integrations.multiplex import create_multiplex_dataloader as multiplex
for call, goal in {ps.build: 16, ps.Loader: 13, LLMDataModule: 19, multiplex: 17}.items():
    given = inspect.signature(call).parameters.values()
    several = [typing.get_args(each.annotation)[0] for each in given if each.kind == 4]
    count = len(given) + sum(len(options.__annotations__) - 1 for options in several)
    print(count, goal, "parameters of", call.__name__)
"""


def measure_file(path):
    """Return the lines of code, the tokens, all lines, and the names of the classes of a file."""
    text = path.read_text(encoding="utf-8")
    nodes = list(ast.walk(ast.parse(text)))
    # A string that is a statement is a docstring, also below a field.
    strings = [node for node in nodes if isinstance(node, ast.Expr)]
    strings = [each for each in strings if isinstance(getattr(each.value, "value", None), str)]
    skipped = {line for each in strings for line in range(each.lineno, each.end_lineno + 1)}
    lines, num_tokens, depth = set(), 0, 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        kind = tokenize.tok_name[token.type]
        # The tokens of line ends and indentation are blank.
        if kind == "COMMENT" or not token.string.strip() or token.start[0] in skipped:
            continue
        lines.update(range(token.start[0], token.end[0] + 1))
        # From Python 3.12 on, an f-string is several tokens. Here it is one, as it was before.
        depth += (kind == "FSTRING_START") - (kind == "FSTRING_END")
        num_tokens += depth == 0
    classes = [node.name for node in nodes if isinstance(node, ast.ClassDef)]
    return len(lines), num_tokens, text.count("\n"), classes


def measure():
    """Return each figure with its goal; and the figures of each source file."""
    files = {path.relative_to(ROOT): measure_file(path) for path in ROOT.glob("src/**/*.py")}
    code, tokens, lines, classes = zip(*files.values(), strict=True)
    classes = [name for each in classes for name in each]
    tests = [path.read_bytes().count(b"\n") for path in ROOT.glob("tests/**/*.py")]
    pages = [path.read_text(encoding="utf-8").split() for path in ROOT.glob("docs/*.md")]
    names = json.loads((ROOT / "tests" / "public_names.json").read_text(encoding="utf-8"))
    figures = {
        "lines of code in src": (sum(code), 20_500),
        "Python tokens in src": (sum(tokens), 185_000),
        "lines in src": (sum(lines), 33_000),
        "files in src": (len(files), 165),
        "lines of the longest file": (max(lines), 600),
        "classes with the name of another one": (len(classes) - len(set(classes)), 0),
        "lines of tests": (sum(tests), 28_000),
        "pages of docs": (len(pages), 20),
        "words of docs": (sum(map(len, pages)), 30_000),
        "notebooks": (len(list(ROOT.glob("docs/notebooks/*.ipynb"))), 3),
        "public names": (sum(map(len, names.values())), 110),
        "public names of penstock": (len(names["penstock"]), 18),
    }
    for line in subprocess.check_output([sys.executable, "-c", IMPORTED], text=True).splitlines():
        figure, goal, name = line.split(" ", 2)
        figures[name] = (int(figure), int(goal))
    return figures, files


def risen(figures):
    """Return the names of the figures that are above the recorded ones."""
    recorded = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
    return [name for name, (now, _) in figures.items() if now > recorded.get(name, now)]


if __name__ == "__main__":
    figures, files = measure()
    for package in sorted({path.parts[2] for path in files}):
        sizes = [size for path, size in files.items() if path.parts[2] == package]
        code, tokens = sum(size[0] for size in sizes), sum(size[1] for size in sizes)
        print(f"{package:<24}{code:>7,} lines of code{tokens:>8,} tokens{len(sizes):>4} files")
    print("longest files:", *sorted((of[2], str(at)) for at, of in files.items())[-5:], sep="\n")
    for name, (now, goal) in figures.items():
        print(f"{name:<44}{now:>8,}   goal {goal:>8,}")
    if above := risen(figures):
        sys.exit("above tests/size.json: " + ", ".join(above))
    if sys.argv[1:] == ["record"]:
        recorded = {name: now for name, (now, _) in figures.items()}
        RECORD.write_text(json.dumps(recorded, indent=2) + "\n", encoding="utf-8")
