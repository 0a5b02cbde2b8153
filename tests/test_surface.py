"""The public names, the cost of importing them, and the examples that users read first."""

import ast
import json
import re
import shlex
import subprocess
import sys
import tomllib
from importlib import import_module
from inspect import isclass, isfunction
from pathlib import Path
from types import ModuleType

import pytest
import zygote

import penstock

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NAMES = json.loads((ROOT / "tests" / "public_names.json").read_text(encoding="utf-8"))
HEAVY = ("torch", "numpy", "pyarrow", "gigatoken", "tokenizers", "tiktoken", "fsspec", "awkward")


def packages():
    """The packages that export names, by the files that say so."""
    source = ROOT / "src"
    for path in sorted(source.rglob("__init__.py")):
        if "lazy_exports" in path.read_text(encoding="utf-8"):
            yield ".".join(path.parent.relative_to(source).parts)


def test_every_package_that_exports_names_is_pinned():
    assert list(NAMES) == list(packages())


@pytest.mark.parametrize("package", NAMES)
def test_the_public_names_of_a_package_are_pinned_and_there(package):
    """A changed list needs an entry in CHANGELOG.md."""
    pytest.importorskip("lightning" if package.endswith(".lightning") else "penstock")
    module = import_module(package)
    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    checked = next(node for node in tree.body if isinstance(node, ast.If))
    for_types = [alias.asname for node in checked.body for alias in node.names]

    assert sorted(for_types) == module.__all__ == NAMES[package]
    assert set(module.__all__) <= set(dir(module))
    for name in module.__all__:
        value = getattr(module, name)
        assert not isinstance(value, ModuleType), f"{name} is a module"
        if isclass(value) or isfunction(value):
            assert value.__doc__, f"{name} has no docstring"


@pytest.mark.parametrize(
    ("package", "name"),
    [("penstock.store", "build"), ("penstock.check", "check"), ("penstock.catalog", "fetch")],
)
def test_a_function_is_not_hidden_by_the_module_of_its_name(package, name, python):
    """Importing a module sets it as an attribute of its package."""
    code = f"""
import {package}.{name}
from {package} import {name} as first
from {package}.{name} import {name} as second
assert first is second, first
"""

    python(code)


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'penstock' has no attribute 'nope'"):
        penstock.nope  # noqa: B018


@pytest.mark.parametrize("package", NAMES)
def test_dir_is_the_public_surface(package):
    pytest.importorskip("lightning" if package.endswith(".lightning") else "penstock")
    import_module("penstock.testing")  # a module that was imported is no public name
    module = import_module(package)

    modules = ["errors"] if package == "penstock" else []  # docs write `ps.errors.ResumeError`
    public = [name for name in dir(module) if not name.startswith("__")]
    assert public == sorted(NAMES[package] + modules)


def test_importing_penstock_imports_few_modules_and_nothing_heavy(python):
    code = f"""
import sys
import importlib, typing, collections.abc
before = set(sys.modules)
import penstock
new = set(sys.modules) - before
print(len(new), [name for name in {HEAVY!r} if name in sys.modules])
"""

    number, heavy = python(code).stdout.split(maxsplit=1)

    assert heavy == "[]\n"
    assert int(number) < 10


def test_reading_a_store_needs_numpy_and_nothing_else(python, tmp_path):
    penstock.build(penstock.Texts(["one", "two"]), tmp_path / "store", tokenizer="bytes")
    code = """
import sys, penstock
store = penstock.TokenStore(sys.argv[1])
assert store.document(1).tolist() == [116, 119, 111, 256]
penstock.verify(sys.argv[1])
print([name for name in sys.argv[2:] if name in sys.modules])
"""
    others = [name for name in HEAVY if name != "numpy"]

    assert python(code, tmp_path / "store", *others).stdout == "[]\n"


def test_loading_needs_numpy_and_torch_and_nothing_else(python, tmp_path):
    penstock.build(penstock.Texts(["one", "two"]), tmp_path / "store", tokenizer="bytes")
    code = """
import sys, penstock
loader = penstock.Loader(penstock.Windows(sys.argv[1], 3), 1, prefetch=0)
assert loader[0]["inputs"].shape == (1, 3)
print([name for name in sys.argv[2:] if name in sys.modules])
"""
    others = [name for name in HEAVY if name not in ("numpy", "torch")]

    assert python(code, tmp_path / "store", *others).stdout == "[]\n"


def test_every_extra_that_a_message_names_is_defined():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    named = set()
    for path in [*(ROOT / "src").rglob("*.py"), *PAGES]:
        text = path.read_text(encoding="utf-8")
        named |= set(re.findall(r"penstock\[(\w+)\]", text))
        named |= set(re.findall(r'extra = "(\w+)"', text))

    assert named
    assert named <= set(extras)


def test_every_error_is_drawn_in_the_tree_and_is_the_builtin_it_says():
    from penstock import errors

    tree = dict(re.findall(r"── (\w+)\s+\((\w+)\)", errors.__doc__))
    found = {name: each for name, each in vars(errors).items() if not name.startswith("_")}
    for name, error in found.items():
        assert issubclass(error, errors.PenstockError)
        if error is not errors.PenstockError:
            assert tree[name] in {base.__name__ for base in error.__mro__}
    assert set(tree) | {"PenstockError"} == set(found)


def blocks(page):
    """The blocks of a page: the mark `<!-- no-run -->` or "", the language, and the code."""
    pattern = r"(<!-- no-run -->|)\s*^```(\w*)\n(.*?)^```$"
    return re.findall(pattern, page.read_text(encoding="utf-8"), re.M | re.S)


def examples(page):
    """The Python and shell blocks of a page, as Python; without those marked `<!-- no-run -->`."""
    found = [(language, code) for mark, language, code in blocks(page) if not mark]
    return [
        code if language == "python" else shell_as_python(code)
        for language, code in found
        if language in ("python", "sh")
    ]


def shell_as_python(code):
    """A shell block as Python: commands of penstock alone as calls, which saves their imports."""
    lines = [line for line in code.splitlines() if line]
    if not all(re.fullmatch(r"penstock [\w ./:=,-]+(#.*)?", line) for line in lines):
        return f"__import__('subprocess').run(['bash', '-euc', {code!r}], check=True)\n"
    return "".join(f"run_command({shlex.split(line, comments=True)!r})\n" for line in lines)


# Warnings are errors, and the log is shown if the page fails. One thread: beside other tests,
# threads of torch that wait for each other make small models many times slower.
PREAMBLE = """
import os, sys, warnings
import torch
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"
log = os.open("log", os.O_WRONLY | os.O_CREAT)
os.dup2(log, 1), os.dup2(log, 2)
os.environ["PATH"] = {programs!r} + os.pathsep + os.environ["PATH"]
warnings.simplefilter("error")

def run_command(words):
    # As a shell does, but in a fork of this process, which has imported torch.
    with warnings.catch_warnings():
        warnings.simplefilter("default")  # as in a new process; and Python 3.12 warns of a fork
        child = os.fork()
        if child == 0:
            code = 1
            try:
                import penstock.cli
                sys.argv = words
                code = penstock.cli.main() or 0
            except SystemExit as ended:
                code = ended.code or 0
            except BaseException:
                import traceback
                traceback.print_exc()
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0, words
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if examples(page)],
    ids=lambda page: page.relative_to(ROOT).as_posix(),
)
def test_the_examples_of_a_page_run_in_order(page, tmp_path):
    """In a directory with a text file, which is what a reader has."""
    text = "".join(f"Line {number}: the quick brown fox jumps.\n" for number in range(2_000))
    (tmp_path / "input.txt").write_text(text)
    script = tmp_path / "examples.py"
    programs = str(Path(sys.executable).parent)  # `penstock` of this environment
    code = [PREAMBLE.format(programs=programs), *examples(page)]
    script.write_text("\n".join(code), encoding="utf-8")
    done = zygote.run([script], cwd=tmp_path, timeout=280)

    assert done.returncode == 0, (tmp_path / "log").read_text()


def test_every_block_of_the_readme_is_run_but_those_of_a_clone():
    found = blocks(ROOT / "README.md")

    assert {language for _, language, _ in found} == {"", "python", "sh", "text"}
    assert [code.split()[:2] for mark, _, code in found if mark] == [["pip", "install"]]
    assert [code.split()[:2] for _, language, code in found if not language] == [["make", "demo"]]


def first_block(page):
    """The first Python block of a page, and the output that the page shows below it."""
    found = blocks(page)
    at = [language for _, language, _ in found].index("python")
    assert found[at + 1][1] == "text"
    return found[at][2], found[at + 1][2]


def test_the_first_block_runs_in_an_empty_folder_and_prints_what_the_readme_shows(tmp_path):
    code, shown = first_block(ROOT / "README.md")
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )

    assert (done.returncode, done.stderr) == (0, "")
    lines, expected = done.stdout.splitlines(), shown.splitlines()
    assert [line.split("loss")[0] for line in lines] == [line.split("loss")[0] for line in expected]
    losses = [[float(n) for n in re.findall(r"loss (\S+)", text)] for text in (done.stdout, shown)]
    assert losses[0] == pytest.approx(losses[1], abs=0.02)  # sums differ by processor
    assert losses[0][0] > 2 * losses[0][-1]  # it falls
    assert lines[3:5] == lines[6:]  # the resume repeats the losses to the last digit


@pytest.mark.parametrize("page", ["index.md", "quickstart.md"])
def test_pages_begin_with_the_block_of_the_readme(page):
    assert first_block(ROOT / "docs" / page) == first_block(ROOT / "README.md")


def test_the_first_example_of_the_readme_stands_before_line_25():
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()

    assert lines.index("```python") < 25
