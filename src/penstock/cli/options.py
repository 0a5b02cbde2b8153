"""Options that several commands share, so that they are spelled and explained once."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

__all__ = [
    "AsJson",
    "DocumentsOption",
    "Errors",
    "ErrorsOption",
    "FieldOption",
    "Format",
    "FormatOption",
    "Inputs",
    "MaxBadOption",
    "StoreArgument",
    "stores_at",
]


def stores_at(path: Path) -> dict[str, Path]:
    """The two sides of a store that was split, by name; else `path` itself, under "".

    A path that holds neither is given back too: opening it says what is wrong.
    """
    from penstock.store.manifest import FILE_NAME

    sides = {side: path / side for side in ("train", "val")}
    whole = (path / FILE_NAME).exists() or (path / ".building.json").exists()
    if whole or not all((each / FILE_NAME).exists() for each in sides.values()):
        return {"": path}
    return sides


class Format(StrEnum):
    """Formats of input files."""

    AUTO = "auto"
    TEXT = "text"
    JSONL = "jsonl"
    PARQUET = "parquet"
    ARROW = "arrow"


class Errors(StrEnum):
    """What to do with documents that are not UTF-8."""

    STRICT = "strict"
    REPLACE = "replace"


AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]

Inputs = Annotated[
    list[str],
    typer.Argument(
        metavar="INPUTS",
        show_default=False,
        help="Files, directories, globs or URLs; plain, .gz, .zst, .bz2 or .xz.",
    ),
]

StoreArgument = Annotated[
    Path, typer.Argument(metavar="STORE", show_default=False, help="The directory of the store.")
]

FormatOption = Annotated[Format, typer.Option(help="Of the files; auto goes by their suffix.")]

DocumentsOption = Annotated[
    str,
    typer.Option(
        metavar="WHAT",
        help="In text files. auto: the text between <|endoftext|>, or between the tokenizer's "
        "end token, if the first 64 MB of a file contain it, otherwise the whole file with every "
        "byte. Or lines, paragraphs, file, or sep:SEPARATOR.",
    ),
]

FieldOption = Annotated[
    str,
    typer.Option(
        metavar="NAME", help="The JSON field or table column that holds the text; a.b is nested."
    ),
]

ErrorsOption = Annotated[
    Errors,
    typer.Option(
        help="Documents that are not UTF-8: strict rejects them, replace puts U+FFFD where bytes "
        "are wrong."
    ),
]

MaxBadOption = Annotated[
    float,
    typer.Option(
        metavar="NUMBER",
        help="How many rejects to bear: below 1 a share of all records (ten are always borne), "
        "else a number.",
    ),
]
