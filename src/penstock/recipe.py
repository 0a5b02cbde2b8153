"""Reads a recipe: a TOML file that describes a training run.

    output = "runs/mine"          [model]                    [training]
                                  size = "124M"              max_minutes = 90
    [data]                        positions = "rotary"       batch_size = "auto"
    train = "stores/owt/train"
    val = "stores/owt/val"        [optimization]
    length = 1024                 learning_rate = 6e-4

Each table is one dataclass, and its keys are the fields: `DataConfig` here, `ModelConfig` (and
`size`), `OptimizationConfig` and `TrainingConfig` in `penstock.train.config`. An unknown key is an
error that suggests the closest known one. Paths are relative to the working directory. If a path
names text and not a store, a store is first built from it, inside the output.
"""

import json
import re
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, is_dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from types import UnionType
from typing import Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from penstock.errors import MissingRecipeError, PlanError, RecipeError
from penstock.formats.options import TokenOptions
from penstock.paths import expand_user
from penstock.train.bundled import bundled_recipes
from penstock.train.config import (
    SIZES,
    ModelConfig,
    OptimizationConfig,
    TrainingConfig,
    model_config,
)

RowKind = Literal["windows", "packs"]
Config = TypeVar("Config")
DEFAULT_TOKENIZER, DEFAULT_SIZE = "gpt2", "124M"
Tables = dict[str, Any]
"""The values of a TOML file by name; a table is a dict inside."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceConfig:
    """One source of a mixture."""

    train: str
    """A store, or text to build one from."""
    weight: float | None = None
    """Its share of the rows, relative to the others; set for every source or for none."""
    rows: RowKind | None = None
    """How rows are made from this source, if not as `DataConfig.rows` says."""
    tokens: TokenOptions | None = None
    """How its token files are opened, if `train` names token files of another tool."""
    field: str | None = None
    """The field of its text, if not as `DataConfig.field` says."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """The data to train and validate on."""

    train: str | None = None
    """A store, a directory with the two sides of a split store, a token file, or text."""
    val: str | None = None
    """The same for validation; without it, the validation side of a split store."""
    sources: dict[str, SourceConfig] = field(default_factory=dict)
    """Several sources by name, instead of `train`."""
    tokens: TokenOptions | None = None
    """How the token files of another tool in `train` and `val` are opened; not for sources."""
    length: int = 1024
    """Tokens per row."""
    rows: RowKind = "windows"
    """"windows" are cut from the concatenated tokens. "packs" contain whole documents, with
    attention masked between documents."""
    seed: int = 0
    """Seed of the data order."""
    shuffle: Literal["full", "block", "part", "none"] | None = None
    """As in `Plan`; without it, as `Plan` chooses, and "part" with `stream`."""
    tokenizer: str = DEFAULT_TOKENIZER
    """The tokenizer of stores that are built from text. It and the settings below have no effect
    on an existing store, except that its sample of text is decoded with a tokenizer named here."""
    documents: str = "auto"
    """What a document is, as in `penstock.build`."""
    field: str = "text"
    """The JSON field or table column that holds the text; `a.b` is the field `b` inside `a`."""
    eos: bool = True
    """Whether the end token follows each document."""
    split: str | None = None
    """The part of `train` to hold out for validation, such as "tail:0.1"."""
    stream: bool = False
    """Whether training starts while the text is still being tokenized."""

    @property
    def named_tokenizer(self) -> str | None:
        """The tokenizer, if it is not the default, so that somebody has chosen it."""
        return None if self.tokenizer == DEFAULT_TOKENIZER else self.tokenizer

    def __post_init__(self) -> None:
        # Check ranges, and settings that contradict each other. `_value` checks the types.
        if (self.train is None) == (not self.sources):
            raise PlanError("Set data.train or data.sources: exactly one of them.")
        if self.length < 1:
            raise PlanError(f"length must be at least 1 token; got {self.length}.")
        weights = [source.weight for source in self.sources.values()]
        if None in weights and any(weight is not None for weight in weights):
            raise PlanError(f"Set a weight for every source or for none; the weights: {weights}.")
        for name in self.sources:
            is_path = Path(name).name != name or "\0" in name
            if is_path or (name == "val" and self.val is not None):
                raise PlanError(
                    f"A source cannot be named {name!r}, because its store would be built under "
                    'that name in the output. Use one word, and not "val" if val is set.'
                )
        if self.split is not None and self.sources:
            raise PlanError(
                f"split={self.split!r} applies to a single text. With several sources, set val."
            )
        if self.stream and (self.sources or self.split is not None):
            raise PlanError(
                "stream=true reads a single text from its start, so it cannot be combined with "
                "sources or split. Set train and val, or build the stores first."
            )
        if self.tokens is not None and (self.sources or self.stream or self.split is not None):
            raise PlanError(
                "data.tokens is about the token files in data.train and data.val, so it cannot be "
                "combined with sources, stream or split. A source has [data.sources.NAME.tokens]."
            )
        if self.stream and self.shuffle not in (None, "part"):
            raise PlanError(
                f"shuffle={self.shuffle!r} needs all rows, but with stream=true the store is still "
                'being built. Remove it, or use "part".'
            )


class EarlierSources(NamedTuple):
    """The sources that a run had up to a position; after it, its recipe has others."""

    until: int
    """The first position with the sources that come next."""
    sources: dict[str, SourceConfig]


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """The settings of a run whose data is not opened yet."""

    output: Path
    data: DataConfig
    model: Tables = field(default_factory=dict)
    """A size, and the fields of `ModelConfig` that differ from that size."""
    optimization: OptimizationConfig = field(default_factory=OptimizationConfig)
    training: TrainingConfig
    path: Path | None = None
    """The file, for messages; None if the settings come from a command line."""
    earlier: tuple[EarlierSources, ...] = ()
    """The sources that its run had before the recipe was changed, in the order of the run."""

    def model_config(self, vocab_size: int) -> ModelConfig:
        """Return the model for rows of `data.length` tokens and the vocabulary of the data.

        A `vocab_size` in the recipe takes precedence.
        """
        changes = {"vocab_size": vocab_size, "length": self.data.length, **self.model}
        return model_config(changes.pop("size", DEFAULT_SIZE), **changes)


# The settings of each table, with their types.
_HINTS: dict[str, Tables] = {
    "data": get_type_hints(DataConfig),
    "model": {**get_type_hints(ModelConfig), "size": Literal[tuple(SIZES)]},
    "optimization": get_type_hints(OptimizationConfig),
    "training": get_type_hints(TrainingConfig),
}
del _HINTS["model"]["length"]  # the length of rows is a setting of the data


def read_recipe(path: str | Path, changes: Tables | None = None) -> Recipe:
    """Return the recipe in a file, after setting `changes`: values by names like "training.steps".

    Raises:
        RecipeError: the file does not exist, is not TOML, or has an unknown key or a wrong value.
    """
    path = expand_user(path)
    try:  # utf-8-sig: editors on Windows put a byte order mark first, which TOML does not allow.
        tables = _parse_toml(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError as error:
        missing = f"{path} does not exist (working directory: {Path.cwd()})."
        if path.stem in bundled_recipes():
            missing += f" A recipe of this name comes with penstock: penstock train {path.stem}."
        raise MissingRecipeError(missing) from error
    except ValueError as error:  # it is not TOML, or not UTF-8
        raise RecipeError(f"{path} is not TOML: {error}.") from error
    # Without an output, the run is named after the recipe.
    tables.setdefault("output", f"runs/{path.stem}")
    # Changes are applied to the tables, before any check, so they can repair a wrong value.
    for name, value in (changes or {}).items():
        set_value(tables, name, value)
        if name == "data.train":
            tables["data"].pop("sources", None)  # one text replaces the mixture
    return replace(parse_recipe(tables, str(path)), path=path)


def _parse_toml(text: str) -> Tables:
    """The tables of a TOML file; every error is a ValueError that says what to change."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("its lists or tables are nested too deeply") from None
    except tomllib.TOMLDecodeError:
        raise
    except ValueError:  # Python does not read more than 4,300 digits
        longest = max(re.finditer(r"[\d_]+", text), key=lambda found: len(found[0]))
        line, digits = text.count("\n", 0, longest.start()) + 1, len(longest[0])
        raise ValueError(f"a number in line {line:,} has {digits:,} digits") from None


def set_value(tables: Tables, name: str, value: object) -> None:
    """Set one value by its dotted name.

    >>> tables = {"training": {"steps": 10}}
    >>> set_value(tables, "training.steps", 20)
    >>> tables
    {'training': {'steps': 20}}
    """
    *path, last = name.split(".")
    for each in path:
        tables = tables.setdefault(each, {})  # a table that the recipe does not have is added
        if not isinstance(tables, dict):
            raise RecipeError(f"{name} cannot be set: {each} is a value, not a table.")
    tables[last] = value


def parse_recipe(tables: Tables, where: str) -> Recipe:
    """Return the recipe in the tables of a TOML file; error messages name the file as `where`."""
    _refuse_unknown(tables, ["output", *_HINTS], where, "")
    _refuse_large(tables, where, "")
    # The other two tables have defaults for all their settings.
    for needed in ("data", "training"):
        if needed not in tables:
            raise RecipeError(f"{where} has no table [{needed}], which every recipe needs.")
    if not isinstance(model := tables.get("model", {}), dict):
        raise RecipeError(f"{where}: model is {model!r}, but must be a table.")
    rates = tables.get("optimization", {})
    output = _value(tables.get("output", "runs/run"), str, where, "output")
    if not output.strip() or "\0" in output:
        raise RecipeError(f"{where}: output is {output!r}, but must be the path of a directory.")
    recipe = Recipe(
        output=expand_user(output),
        data=_value(tables["data"], DataConfig, where, "data"),
        model=_values(_HINTS["model"], model, where, "model"),
        optimization=_value(rates, OptimizationConfig, where, "optimization"),
        training=_value(tables["training"], TrainingConfig, where, "training"),
    )
    with _in_table("model", where):
        recipe.model_config(1)  # reports a wrong value now, before any text is tokenized
    return recipe


@contextmanager
def _in_table(table: str, where: str) -> Iterator[None]:
    """Let an error about a value, which names the setting, name the table and the file too."""
    try:
        yield
    except PlanError as error:
        raise RecipeError(f"{where}, in [{table}]: {error}") from error


def _refuse_large(value: object, where: str, name: str) -> None:
    """Raise if a whole number has more than 64 bits, which TOML does not allow and Python does."""
    if isinstance(value, dict):
        for key, each in value.items():
            _refuse_large(each, where, _dotted(name, key))
    elif isinstance(value, list):
        for each in value:
            _refuse_large(each, where, name)
    elif type(value) is int and not -(1 << 63) <= value < 1 << 63:
        raise RecipeError(
            f"{where}: {name} has a whole number of {value.bit_length():,} bits. Numbers in TOML "
            "have at most 64 bits; use a smaller one."
        )


def _dotted(prefix: str, key: str) -> str:
    """The name of a setting. A key that is not a plain word is quoted, so that it is one line."""
    shown = key if re.fullmatch(r"[\w-]+", key) else json.dumps(key)
    return f"{prefix}.{shown}" if prefix else shown


def _filled(kind: type[Config], table: Tables, where: str, prefix: str) -> Config:
    """Return a dataclass whose fields have the values of a table."""
    values = _values(get_type_hints(kind), table, where, prefix)
    try:
        with _in_table(prefix, where):
            return kind(**values)
    except TypeError as error:  # a field without a default is missing
        raise RecipeError(f"{where}: [{prefix}] is not complete: {error}.") from error


def _values(hints: Tables, table: Tables, where: str, prefix: str) -> Tables:
    """The values of a table, each converted to its type in `hints`."""
    _refuse_unknown(table, list(hints), where, prefix)
    return {
        name: _value(value, hints[name], where, f"{prefix}.{name}") for name, value in table.items()
    }


def _refuse_unknown(table: Tables, known: list[str], where: str, prefix: str) -> None:
    for name in table:
        if name not in known:
            # A setting of another table is more likely misplaced than mistyped.
            close = get_close_matches(name, known, 1)
            advice = f"Did you mean {close[0]}?" if close else f"Use one of {', '.join(known)}."
            if homes := [f"[{table}]" for table, names in _HINTS.items() if name in names]:
                advice = f"It belongs in {' or '.join(homes)}."
            full = _dotted(prefix, name)
            raise RecipeError(f"{where} sets {full:.200}, but there is no such setting. {advice}")


def _value(value: object, hint: Any, where: str, name: str) -> Any:
    """Return a TOML value, converted to the type of a field; each type of a union is tried."""
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    for kind in kinds:
        if (found := _as_kind(value, kind, where, name)) is not None:
            return found
    allowed = " or ".join(_kind_name(kind) for kind in kinds if kind is not type(None))
    raise RecipeError(f"{where}: {name} is {value!r:.200}, but must be {allowed}.")


def _as_kind(value: object, kind: Any, where: str, name: str) -> object:
    """Return the value, converted to the type `kind`; None if it cannot be converted."""
    origin, parts = get_origin(kind), get_args(kind)
    # isinstance would accept true for an int: bool is a subclass of it, and True == 1.
    if origin is Literal and value in parts and not isinstance(value, bool):
        return value
    if origin is tuple and isinstance(value, list) and len(parts) == len(value):
        return tuple(_value(each, one, where, name) for each, one in zip(value, parts, strict=True))
    # A dict of tables, such as [data.sources.web]; the user chooses their names.
    if origin is dict and isinstance(value, dict):
        return {
            key: _value(each, parts[1], where, _dotted(name, key)) for key, each in value.items()
        }
    if is_dataclass(kind) and isinstance(kind, type) and isinstance(value, dict):
        return _filled(kind, value, where, name)
    # A float may be written without a point: `clip = 1`.
    if kind is float and type(value) is int:
        return float(value)
    return value if kind in (int, float, str, bool) and type(value) is kind else None


def _kind_name(kind: Any) -> str:
    names = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}
    if get_origin(kind) is Literal:
        return " or ".join(f'"{each}"' for each in get_args(kind))
    if get_origin(kind) is tuple:
        return f"a list of {len(get_args(kind))} numbers"
    return names.get(kind, "a table")
