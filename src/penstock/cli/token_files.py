"""Token files of other tools, in the commands that take a store."""

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.options import option
from penstock.cli.progress import bar
from penstock.cli.terminal import print_facts, print_json, visible, write
from penstock.cli.units import duration_text, number_of
from penstock.errors import StoreError
from penstock.formats import options as names
from penstock.formats.options import TokenOptions as TokenOptions

if TYPE_CHECKING:
    from penstock.formats.token_files import TokenFiles

TokenFormat = Annotated[
    names.TokenFormat | None,
    option("The format of token files of another tool, if they have no header."),
]
TokenDtype = Annotated[str | None, option("The dtype of ids in files without a header.", "TYPE")]
VocabSize = Annotated[
    int | None,
    option("The vocabulary size that ids in token files must be below.", "NUMBER", "--vocab-size"),
]
TokenTokenizer = Annotated[
    str | None, option("The tokenizer of token files, for its vocabulary size.", "NAME")
]
TokenColumn = Annotated[
    str | None,
    option("The column with the ids, if it is not input_ids or tokens.", "NAME"),
]


def refuse_options(path: object, given: TokenOptions) -> None:
    """Raise if an option for token files was given for something else.

    Raises:
        typer.BadParameter: names the option.
    """
    values = {**asdict(given), "tokenizer": None}  # stores have a tokenizer, too
    for name in [each.replace("_", "-") for each, value in values.items() if value is not None]:
        raise typer.BadParameter(
            f"--{name} is for token files of other tools, and {path} is not one: a store records "
            "this itself, and a recipe has the table data.tokens. Leave the option out."
        )


def open_files(path: object, given: TokenOptions) -> "TokenFiles | None":
    """Open the token files at a path; None for a store.

    Raises:
        typer.BadParameter: it is a store, and an option for token files was given.
    """
    from penstock.formats.open import token_files_at

    files = token_files_at(path, **asdict(given)) if isinstance(path, Path) else None
    if files is None:
        refuse_options(path, given)
    return files


def _to_json(files: "TokenFiles") -> dict[str, object]:
    return {
        "path": str(files.path),
        "format": files.format,
        "dtype": files.dtype.name,
        "num_documents": len(files) if files.has_documents else None,
        "num_tokens": files.num_tokens,
        "vocab_size": files.vocab_size,
        "has_loss": files.has_loss,
        "digest": files.digest,
    }


def show_files(files: "TokenFiles", *, as_json: bool) -> None:
    """Print the numbers of token files."""
    if as_json:
        print_json(_to_json(files))
        return
    documents = f"{len(files):,}" if files.has_documents else "not recorded"
    size = "not given" if files.vocab_size is None else f"{files.vocab_size:,}"
    rows: list[tuple[str, str | list[str]]] = [
        ("format", files.format),
        ("documents", documents),
        ("tokens", f"{files.num_tokens:,}"),
        ("dtype", files.dtype.name),
        ("vocab_size", size),
        ("loss masks", "yes" if files.has_loss else "no"),
        ("digest", f"{files.digest[:16]}, of the documents and sampled blocks"),
    ]
    print_facts(str(files.path), rows)


def verify_files(files: "TokenFiles", *, as_json: bool) -> None:
    """Check every id of token files, and print the result."""
    from penstock.formats.token_files import verify_tokens

    started = time.monotonic()
    with bar(shown=not as_json) as draw:

        def report(done: int, total: int) -> None:
            draw(done, total, f"{done:,} of {number_of(total, 'file')}")

        verify_tokens(files, report)
    if as_json:
        print_json({**_to_json(files), "whole": True})
        return
    took = duration_text(time.monotonic() - started)
    checked = (
        "no id is negative; give --vocab-size or --tokenizer to check more"
        if files.vocab_size is None
        else f"every id is below {files.vocab_size:,}"
    )
    tokens = number_of(files.num_tokens, "token")
    name = visible(str(files.path), lines=False)
    write(f"{name} is readable: {tokens}, {checked} ({took}). Token files have no checksums.")


def decode_files(files: "TokenFiles", document: int, count: int, *, as_json: bool) -> None:
    """Print documents of token files as text."""
    size = len(files)
    if not files.has_documents:
        raise StoreError(
            f"{files.path} ({files.format}) does not record where documents end. penstock import "
            "makes a store of it, with one document for each file, which can be decoded."
        )
    if not -size <= document < size:
        raise StoreError(
            f"{files.path} has no document {document:,}; it has {number_of(size, 'document')}, "
            "numbered from 0."
        )
    first = document % size
    numbers = range(first, min(first + count, size))
    if as_json:
        found = [
            {"document": each, "num_tokens": len(files.document(each)), "text": files.decode(each)}
            for each in numbers
        ]
        print_json({"documents": found})
        return
    for number in numbers:
        tokens = number_of(len(files.document(number)), "token")
        write(f"document {number:,} of {size:,}, {tokens}")
        write(files.decode(number))
