"""The pages of the reference: the API, the commands, the keys of recipes and the errors.

docs/reference has a page for each package, with a heading and an example for each public name.
Signatures and descriptions are inserted here, and come from the docstrings. A public name without
a heading, or without an example on the page or in its docstring, is an error.
"""

import ast
import inspect
import json
import re
from importlib import import_module
from pathlib import Path
from textwrap import dedent
from typing import Any, Literal, get_args, get_origin, get_type_hints

HEADING = re.compile(r"^## `?([\w.]+)`?$", re.M)
CODE = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)
Names = dict[str, list[str]]


def public_names(root: Path) -> Names:
    """Return the public names of each package."""
    names: Names = json.loads((root / "tests" / "public_names.json").read_text(encoding="utf-8"))
    return names


def page_of(package: str) -> str:
    """Return the path of the page of a package below docs."""
    return f"reference/{package.removeprefix('penstock.')}.md"


def sections(page: str) -> dict[str, str]:
    """Return the text under the heading of each name."""
    parts = HEADING.split(page)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def home_of(package: str, name: str) -> str:
    """Return the path under which the source of a name is found.

    That is the module which defines it: a package may have a module of the same name.
    """
    tree = ast.parse(Path(str(import_module(package).__file__)).read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and any(each.name == name for each in node.names):
            home = f"{node.module}.{name}"
            value = getattr(import_module(package), name)
            module = getattr(value, "__module__", "")
            is_own = module.startswith("penstock.") and inspect.isclass(value) | inspect.isfunction(
                value
            )
            return f"{module}.{name}" if is_own else home
    raise LookupError(f"{package} does not import {name}")


def _has_doctest(value: object) -> bool:
    """Whether the docstring of a function or class, or of a method, has an example."""
    if not (inspect.isclass(value) or inspect.isfunction(value)):
        return False
    members = [value, *(vars(value).values() if inspect.isclass(value) else ())]
    # Not those of plain values: int has an example, and from Python 3.13 on each class has an int.
    texts = [each.__doc__ for each in members if each.__doc__ != type(each).__doc__]
    return any(">>>" in (text or "") for text in texts)


def missing(root: Path) -> list[str]:
    """Return what the reference lacks: names without a heading, and names without an example."""
    names, lacking = public_names(root), []
    for package, exported in names.items():
        path = root / "docs" / page_of(package)
        written = sections(path.read_text(encoding="utf-8")) if path.exists() else {}
        for name in exported:
            if package != "penstock" and name in names["penstock"]:
                continue  # described on the page of penstock
            if name not in written:
                lacking.append(f"{package}.{name} has no heading in docs/{page_of(package)}")
            elif not CODE.search(written[name]) and not _has_doctest(
                getattr(import_module(package), name)
            ):
                lacking.append(f"{package}.{name} has no example")
        others = set(written) - set(exported)
        lacking += [f"docs/{page_of(package)}: {package} has no {name}" for name in others]
    return lacking


def _package_page(package: str, names: Names, text: str) -> tuple[str, dict[str, str]]:
    """The page of a package with a directive for each name, and the examples by name."""
    examples = {}
    for name, body in sections(text).items():
        home = home_of(package, name)
        if body.strip():
            examples[home] = body.strip()
        text = re.sub(
            rf"^(## {name}\n)(?:(?!^## ).*\n?)*", rf"\1\n::: {home}\n\n", text, flags=re.M
        )
    at_root = [name for name in names[package] if name in names["penstock"]]
    if package != "penstock" and at_root:
        links = ", ".join(f"[`{name}`](penstock.md#{name.lower()})" for name in at_root)
        text += f"\n## Also in this package\n\n{links}\n"
    return text, examples


def _parameter_row(each: Any, kind: object) -> str:
    """The row of an argument or an option in a table; `kind` is the type of its value."""
    flags = ", ".join([*each.opts, *each.secondary_opts])
    shown = each.name.upper() if each.param_type_name == "argument" else flags
    if each.param_type_name == "option" and not each.is_flag:
        inner = [kind, *get_args(kind)]  # the Literal of a choice may be in an optional type
        choices = next((get_args(each) for each in inner if get_origin(each) is Literal), ())
        shown += f" {each.metavar or '|'.join(map(str, choices)) or 'VALUE'}"
    text = (getattr(each, "help", None) or "").replace("|", "\\|").replace("\n", " ")
    is_shown = isinstance(each.default, str | int | float) and each.default not in (False, "")
    default = f" Default: `{each.default}`." if is_shown else ""
    return f"| `{shown}` | {text}{default} |"


def _command_section(name: str, command: Any) -> str:
    """The section of one command."""
    paragraphs = inspect.cleandoc(command.help or "").replace("\b\n", "").split("\n\n")
    text = ""
    for each in paragraphs:
        is_example = each.lstrip().startswith("penstock ")
        before = text.endswith("```")
        if is_example and before:
            text = text.removesuffix("```") + f"{inspect.cleandoc(each)}\n```"
        elif is_example:
            text += f"\n\n```sh\n{inspect.cleandoc(each)}\n```"
        else:
            text += f"\n\n{each}"
    parameters = [each for each in command.params if not getattr(each, "hidden", False)]
    kinds = get_type_hints(command.callback)
    rows = [_parameter_row(each, kinds.get(each.name)) for each in parameters]
    table = "\n".join(["| | |", "|---|---|", *rows])
    return f"## penstock {name}{text}\n\n{table}\n"


def command_page() -> str:
    """Return the page of the command line, from the commands themselves."""
    from typer.main import get_command

    from penstock.cli import app as module
    from penstock.cli.app import app

    codes = dedent((module.__doc__ or "").partition("\n\n")[2].partition("\n\n")[0])
    parts = [
        "# Command line",
        "`penstock COMMAND --help` shows the same text in a terminal. With `--json`, a "
        "command prints one JSON object and nothing else.",
        f"Exit codes:\n\n```text\n{codes}\n```",
    ]
    for name, command in sorted(get_command(app).commands.items()):  # type: ignore[attr-defined]
        inner = getattr(command, "commands", None)
        if inner is None:
            parts.append(_command_section(name, command))
        for sub, each in sorted((inner or {}).items()):
            parts.append(_command_section(f"{name} {sub}", each))
    return "\n\n".join(parts) + "\n"


def _fields(source: Path, name: str) -> list[tuple[str, str, str, str]]:
    """The fields of a dataclass: name, type, default, and the docstring below it."""
    tree = ast.parse(source.read_text(encoding="utf-8"))
    body = next(
        node.body for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == name
    )
    found = []
    for node, after in zip(body, [*body[1:], None], strict=True):
        if not isinstance(node, ast.AnnAssign):
            continue
        text = ""
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            text = inspect.cleandoc(str(after.value.value)).replace("\n", " ")
        default = ast.unparse(node.value) if node.value else "required"
        default = re.sub(r"field\(default_factory=(\w+)\)", "", default)
        found.append((ast.unparse(node.target), ast.unparse(node.annotation), default, text))
    return found


def recipe_page(root: Path) -> str:
    """Return the page of the keys of recipes, from the dataclasses that read them."""
    config = root / "src" / "penstock" / "train" / "config.py"
    recipe = root / "src" / "penstock" / "recipe.py"
    tables = [
        ("data", recipe, "DataConfig"),
        ("data.sources.NAME", recipe, "SourceConfig"),
        ("model", config, "ModelConfig"),
        ("optimization", config, "OptimizationConfig"),
        ("training", config, "TrainingConfig"),
    ]
    file = root / "src/penstock/recipes/tinyshakespeare-cpu.toml"
    example = file.read_text(encoding="utf-8")
    parts = [
        "# Recipe keys",
        "A recipe is a TOML file that describes a training run. `penstock train RECIPE` runs it, "
        "and `penstock plan`, `inspect`, `when` and `seen` read it ([training](../training.md)). "
        "`--set training.steps=100` changes a key for one command.",
        "The key `output` before the first table is the directory of the run. An unknown key is an "
        "error that suggests the closest known one. In `[model]`, `size` names a set of settings "
        "(`nano`, `124M` and others), and `length` is that of the data.",
        f"```toml\n{example}```",
    ]
    for table, path, name in tables:
        rows = [
            "| `{}` | `{}` | {} | {} |".format(
                key,
                kind.replace("|", "\\|"),
                f"`{default}`" if default else "",
                text.replace("|", "\\|"),
            )
            for key, kind, default, text in _fields(path, name)
            if (table, key) != ("model", "length")
        ]
        head = f"## [{table}]\n\n| key | type | default | |\n|---|---|---|---|\n"
        parts.append(head + "\n".join(rows))
    return "\n\n".join(parts) + "\n"


def error_page() -> str:
    """Return the page of the errors, from their module."""
    from penstock import errors

    about = inspect.cleandoc(errors.__doc__ or "")
    tree, _, rest = about.partition("\n\n")[2].partition("\n\n")
    classes = [
        name
        for name, each in vars(errors).items()
        if inspect.isclass(each) and not name.startswith("_")
    ]
    parts = ["# Errors", rest, f"```text\n{inspect.cleandoc(tree)}\n```"]
    parts.append("[Troubleshooting](../troubleshooting.md) has causes and cures of common ones.")
    parts += [f"## {name}\n\n::: penstock.errors.{name}" for name in classes]
    return "\n\n".join(parts) + "\n"


def reference_pages(root: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Return the pages of the reference, by path below docs, and the examples, by dotted name."""
    lacking = missing(root)
    if lacking:
        raise SystemExit("\n".join([*lacking, f"The reference lacks {len(lacking)} things."]))
    names = public_names(root)
    pages, examples = {}, {}
    for path in sorted((root / "docs" / "reference").glob("*.md")):
        text = path.read_text(encoding="utf-8")
        package = path.stem if path.stem == "penstock" else f"penstock.{path.stem}"
        if package in names:
            text, found = _package_page(package, names, text)
            examples |= found
        else:  # a module without a list of names is described as a whole
            text = re.sub(
                r"<!-- module (\S+) -->",
                r"::: \1\n    options:\n      show_root_heading: false\n      heading_level: 2",
                text,
            )
        pages[f"reference/{path.name}"] = text
    made = [("Command line", "cli", "every command with its options")]
    made += [("Recipe keys", "recipe", "every key of a TOML recipe")]
    made += [("Errors", "errors", "the errors that penstock raises on purpose")]
    rows = "\n".join(f"| [{title}]({name}.md) | {what} |" for title, name, what in made)
    index = "reference/index.md"
    pages[index] = pages[index].replace("<!-- generated -->", rows)
    pages["reference/cli.md"] = command_page()
    pages["reference/recipe.md"] = recipe_page(root)
    pages["reference/errors.md"] = error_page()
    return pages, examples
