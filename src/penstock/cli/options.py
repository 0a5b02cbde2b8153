"""Options and arguments that several commands have."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from penstock.sources.settings import Format as FileFormat


def option(
    help: str, metavar: str | None = None, *flags: str, least: float | None = None
) -> object:
    """A typer option. Without `flags`, the name of the parameter is its flag.

    A flag with underscores can be typed with hyphens too.
    """
    # dict.fromkeys removes duplicates and keeps the order.
    both = dict.fromkeys(each for flag in flags for each in (flag, flag.replace("_", "-")))
    return typer.Option(*both, metavar=metavar, min=least, help=help)


def argument(help: str, metavar: str) -> object:
    """A typer argument."""
    return typer.Argument(metavar=metavar, show_default=False, help=help)


AsJson = Annotated[bool, option("Print one JSON object and nothing else.", None, "--json")]
Inputs = Annotated[
    list[str],
    argument(
        "Files, directories, globs or URLs. Files can be compressed: .gz, .zst, .bz2 or .xz.",
        "INPUTS",
    ),
]
Store = Annotated[Path, argument("The directory of the store.", "STORE")]
Tokenizer = Annotated[
    str,
    option(
        "gpt2, bytes, a tokenizer.json, a directory with one, tiktoken:NAME, or hf:NAME for a "
        "tokenizer on the Hugging Face Hub.",
        "NAME",
    ),
]
Format = Annotated[FileFormat, option("Format of the files. auto: from their suffix.")]
Documents = Annotated[
    str,
    option(
        "What a document is in a text file: lines, paragraphs, file or sep:SEPARATOR. auto: the "
        "text between <|endoftext|>, or between the tokenizer's end token, if the first 64 MB of "
        "the file contain it; otherwise the whole file, with every byte.",
        "RULE",
    ),
]
Field = Annotated[
    str, option("The JSON field or table column with the text. a.b is field b inside a.", "NAME")
]
Errors = Annotated[
    Literal["strict", "replace"],
    option("For documents that are not UTF-8. strict: reject; replace: put U+FFFD for bad bytes."),
]
MaxBad = Annotated[
    float,
    option(
        "Stop if more records than this are rejected. Below 1: a share of all records, but at "
        "least ten are allowed. From 1: a number of records.",
        "NUMBER",
    ),
]


def stores_at(path: Path) -> dict[str, Path]:
    """The two sides of a split store, "train" and "val"; for any other path, the path under "".

    A path without a store is returned too: opening it raises an error that explains it.
    """
    from penstock.store.manifest import FILE_NAME

    # A directory with ".building.json" is an unfinished store, even if its sides look finished.
    sides = {side: path / side for side in ("train", "val")}
    whole = (path / FILE_NAME).exists() or (path / ".building.json").exists()
    if whole or not all((each / FILE_NAME).exists() for each in sides.values()):
        return {"": path}
    return sides


def by_side(values: dict[str, dict[str, object]]) -> dict[str, object]:
    """JSON objects by side; without sides, the only object itself."""
    # `stores_at` uses "" as the side of a store that is not split.
    return values.get("") or dict(values)
