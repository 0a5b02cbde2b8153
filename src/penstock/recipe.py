"""A run as a file: TOML to the same objects that a script would make.

    output = "runs/mine"          [model]                    [training]
                                  size = "124M"              max_minutes = 90
    [data]                        positions = "rotary"       batch_size = "auto"
    train = "stores/owt/train"
    val = "stores/owt/val"        [optimization]
    length = 1024                 learning_rate = 6e-4

Each table is one dataclass, and its keys are the fields: `Data` here, `Shape` and a size,
`Optimization` and `Training` in `penstock.train`. A key that none has is an error that names
the nearest. Paths are as seen from where the command runs. Text in place of a store is built
into one first, under the output.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from penstock.errors import RecipeError
from penstock.train.data import Data
from penstock.train.job import Training
from penstock.train.model import SIZES, Shape
from penstock.train.optimize import Optimization

__all__ = ["Recipe", "parse_recipe", "read_recipe", "set_value"]


_KNOWN = {
    "data": {each.name for each in fields(Data)},
    "model": {"size", *(each.name for each in fields(Shape))} - {"length"},  # which is the data's
    "optimization": {each.name for each in fields(Optimization)},
    "training": {each.name for each in fields(Training)},
}
"""The settings of each table, for those that stand in another."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """A run before its files are opened."""

    output: Path
    data: Data
    model: Mapping[str, Any] = field(default_factory=dict)
    """A size, and fields of `Shape` that differ from it."""
    optimization: Optimization = field(default_factory=Optimization)
    training: Training

    def shape(self, vocab_size: int) -> Shape:
        """The model, for rows of the data's length and tokens of its tokenizer."""
        told = dict(self.model)
        size = told.pop("size", "124M")
        return Shape(
            **{**asdict(SIZES[size]), "vocab_size": vocab_size, "length": self.data.length, **told}
        )


def read_recipe(path: str | Path, changes: Mapping[str, Any] | None = None) -> Recipe:
    """The recipe in a file, with some values changed by their dotted names.

    Raises:
        RecipeError: there is no such file, it is not TOML, or it has a key or value that is not
            understood.
    """
    path = Path(path)
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError as error:
        raise RecipeError(f"{path} does not exist, seen from {Path.cwd()}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path} is not TOML: {error}.") from error
    tables.setdefault("output", f"runs/{path.stem}")
    for name, value in (changes or {}).items():
        set_value(tables, name, value)
        if name == "data.train":
            tables["data"].pop("sources", None)  # one text in place of them
    return parse_recipe(tables, str(path))


def set_value(tables: dict[str, Any], name: str, value: Any) -> None:
    """Set one value by its dotted name.

    >>> tables = {"training": {"steps": 10}}
    >>> set_value(tables, "training.steps", 20)
    >>> tables
    {'training': {'steps': 20}}
    """
    *path, last = name.split(".")
    for each in path:
        tables = tables.setdefault(each, {})
        if not isinstance(tables, dict):
            raise RecipeError(f"{name} cannot be set: {each} is a value, not a table.")
    tables[last] = value


def parse_recipe(tables: Mapping[str, Any], where: str) -> Recipe:
    """The recipe that the tables of a TOML file mean; `where` is for messages."""
    _refuse_unknown(tables, [each.name for each in fields(Recipe)], where, "")
    for needed in ("data", "training"):
        if needed not in tables:
            raise RecipeError(f"{where} has no table [{needed}], which a run needs.")
    for name, value in tables.items():
        if name != "output" and not isinstance(value, Mapping):
            raise RecipeError(f"{where}: {name} is {value!r}, and must be a table [{name}].")
    recipe = Recipe(
        output=Path(_value(tables.get("output", "runs/run"), str, f"{where}: output")),
        data=_filled(Data, tables["data"], where, "data"),
        model=_model(tables.get("model", {}), where),
        optimization=_filled(Optimization, tables.get("optimization", {}), where, "optimization"),
        training=_filled(Training, tables["training"], where, "training"),
    )
    try:
        recipe.shape(recipe.model.get("vocab_size", 1))  # what is wrong with it is said at once
    except ValueError as error:
        error.add_note(f"In [model] of {where}.")
        raise
    return recipe


def _model(table: Mapping[str, Any], where: str) -> dict[str, Any]:
    hints = {**get_type_hints(Shape), "size": Literal[tuple(SIZES)]}
    hints.pop("length")  # the data's
    _refuse_unknown(table, list(hints), where, "model")
    return {
        name: _value(value, hints[name], f"{where}: model.{name}") for name, value in table.items()
    }


def _filled(kind: type[Any], table: Mapping[str, Any], where: str, prefix: str) -> Any:
    """An object of a dataclass, its fields from a table."""
    hints = get_type_hints(kind)
    _refuse_unknown(table, list(hints), where, prefix)
    values = {
        name: _value(value, hints[name], f"{where}: {prefix}.{name}")
        for name, value in table.items()
    }
    try:
        return kind(**values)
    except TypeError as error:
        raise RecipeError(f"{where}: [{prefix}] is not complete: {error}.") from error
    except ValueError as error:
        error.add_note(f"In [{prefix}] of {where}.")
        raise


def _refuse_unknown(table: Mapping[str, Any], known: list[str], where: str, prefix: str) -> None:
    for name in table:
        if name not in known:
            near = get_close_matches(name, known, 1)
            guess = f" Did you mean {near[0]}?" if near else f" There are {', '.join(known)}."
            if homes := [f"[{table}]" for table, names in _KNOWN.items() if name in names]:
                guess = f" It belongs in {' or '.join(homes)}."
            spelled = f"{prefix}.{name}" if prefix else name
            raise RecipeError(f"{where} sets {spelled}, which is no setting.{guess}")


def _value(value: Any, hint: Any, name: str) -> Any:
    """A TOML value as the type that a field asks for."""
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    for kind in kinds:
        found = _as_kind(value, kind, name)
        if found is not _NOT:
            return found
    allowed = " or ".join(_spelled(kind) for kind in kinds if kind is not type(None))
    raise RecipeError(f"{name} is {value!r}, and must be {allowed}.")


_NOT = object()


def _as_kind(value: Any, kind: Any, name: str) -> Any:
    """The value, if it is of that kind."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Literal:
        return value if value in parts and not isinstance(value, bool) else _NOT
    if origin is tuple and isinstance(value, list):
        kinds = parts[:1] * len(value) if parts[-1] is ... else parts
        if len(kinds) != len(value):
            return _NOT
        return tuple(_value(each, one, name) for each, one in zip(value, kinds, strict=True))
    if origin is dict and isinstance(value, Mapping):
        return {key: _value(each, parts[1], f"{name}.{key}") for key, each in value.items()}
    if is_dataclass(kind) and isinstance(kind, type) and isinstance(value, Mapping):
        where, _, prefix = name.partition(": ")
        return _filled(kind, value, where, prefix)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind in (int, float, str, bool) and type(value) is kind:
        return value
    return _NOT


def _spelled(kind: Any) -> str:
    names = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
    if get_origin(kind) is Literal:
        return " or ".join(f'"{each}"' for each in get_args(kind))
    if get_origin(kind) is tuple:
        return f"a list of {len(get_args(kind))} numbers"
    return names.get(kind, "a table")
