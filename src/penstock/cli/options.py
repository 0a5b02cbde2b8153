"""Options and arguments that several commands have."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from penstock.paths import expand_user, store_path
from penstock.sources.settings import Format as FileFormat

if TYPE_CHECKING:
    from penstock.paths import StorePath
    from penstock.store.reader import TokenStore

    Anywhere = StorePath
else:
    # typer takes no unions; the parser decides. Not Path: typer 0.19 would make a Path of a URL.
    Anywhere = object


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


def path_option(help: str, metavar: str, *flags: str) -> object:
    """A typer option that takes a path; `~` is the home directory."""
    return typer.Option(*flags, metavar=metavar, parser=expand_user, help=help)


AsJson = Annotated[bool, option("Print one JSON object and nothing else.", None, "--json")]
Inputs = Annotated[
    list[str],
    argument("Files (also .gz, .zst, .bz2, .xz), directories, globs, URLs.", "INPUTS"),
]
Store = Annotated[
    Path,
    typer.Argument(
        metavar="STORE", show_default=False, parser=expand_user, help="The directory of the store."
    ),
]
AnyStore = Annotated[
    Anywhere,
    typer.Argument(
        metavar="STORE",
        show_default=False,
        parser=store_path,
        help="The directory of the store, or its URL (s3://, gs://, az://, https://, hf://).",
    ),
]
Output = Annotated[
    Anywhere,
    typer.Option(
        "--output", "-o", metavar="STORE", parser=store_path, help="The directory or URL to write."
    ),
]
Tokenizer = Annotated[
    str, option("gpt2, bytes, tiktoken:NAME, hf:NAME (on the Hub), or a tokenizer.json.", "NAME")
]
Format = Annotated[FileFormat, option("Format of the files. auto: from their suffix.")]
Documents = Annotated[
    str,
    option(
        "What a document is in a text file: lines, paragraphs, file or sep:SEPARATOR. auto: the "
        "text between end tokens, if the first 64 MB have one; otherwise the whole file.",
        "RULE",
    ),
]
Field = Annotated[
    str,
    option(
        "JSON field or column with the text; a.b is b in a. Of chats: PROMPT,COMPLETION.", "NAME"
    ),
]
Errors = Annotated[
    Literal["strict", "replace"],
    option("For documents that are not UTF-8. strict: reject; replace: put U+FFFD in their place."),
]
MaxBad = Annotated[
    float,
    option(
        "Stop if more records are rejected: below 1 a share of all records, else a number.",
        "NUMBER",
    ),
]


def open_at(path: Anywhere) -> "dict[str, TokenStore]":
    """The stores of `stores_at`, opened; the two sides of a split store are of one build."""
    from penstock.store.sides import open_stores, stores_at

    paths = stores_at(path)
    return dict(zip(paths, open_stores([*paths.values()]), strict=True))


def by_side(values: dict[str, dict[str, object]]) -> dict[str, object]:
    """The JSON objects of a split store by side; of any other store, its only object."""
    # `stores_at` uses "" as the side of a store that is not split.
    return values.get("") or dict(values)
