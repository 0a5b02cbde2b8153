"""`penstock decode`: documents of a store, as text again."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.options import AsJson, StoreArgument
from penstock.cli.terminal import console, print_json, visible, write
from penstock.cli.units import number_of

if TYPE_CHECKING:
    from penstock.store.reader import TokenStore
    from penstock.tokenize.tokenizer import Tokenizer

__all__ = ["decode_command", "show_document"]


def decode_command(
    store: StoreArgument,
    document: Annotated[
        int,
        typer.Option(
            "--document",
            "-d",
            metavar="NUMBER",
            show_default=False,
            help="Which document; -1 is the last.",
        ),
    ],
    count: Annotated[
        int, typer.Option("--count", "-n", min=1, metavar="NUMBER", help="How many, from there on.")
    ] = 1,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            show_default=False,
            help="What the store was built with, if its name alone does not find it.",
        ),
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Write the exact bytes of the documents, nothing else.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    r"""Show documents as text, and where they came from.

    Control characters, escape sequences and bidi controls in the text are shown as \x1b
    and the like; --raw gives the bytes as they are, one document after the other.
    """
    from penstock.store.reader import TokenStore

    if raw and as_json:
        raise typer.BadParameter("--raw and --json exclude each other.")
    opened = TokenStore(store)
    loaded = _loaded(tokenizer)
    numbers = _numbers(opened, document, count)
    with _advice(tokenizer):
        if raw:
            for number in numbers:
                sys.stdout.buffer.write(opened.decode(number, loaded))
            sys.stdout.buffer.flush()
        elif as_json:
            print_json({"documents": [_spell(opened, number, loaded) for number in numbers]})
        else:
            for number in numbers:
                if number > numbers.start:
                    write("")
                show_document(opened, number, loaded)


def _loaded(tokenizer: str | None) -> "Tokenizer | None":
    """The tokenizer of that name, loaded once for all documents."""
    from penstock.tokenize.tokenizer import load_tokenizer

    return None if tokenizer is None else load_tokenizer(tokenizer)


@contextmanager
def _advice(tokenizer: str | None) -> Iterator[None]:
    """What to do where the store's tokenizer is not found by its name."""
    from penstock.errors import TokenizerError

    try:
        yield
    except TokenizerError as error:
        if tokenizer is None:
            error.add_note(
                "The store was built with it. Say where it is now: --tokenizer NAME, which may be "
                "the path of its file."
            )
        raise


def _numbers(store: "TokenStore", document: int, count: int) -> range:
    """The documents that were asked for, all of which are there."""
    from penstock.errors import StoreError

    if not -len(store) <= document < len(store):
        raise StoreError(
            f"{store.path} has no document {document:,}; it has {len(store):,} documents, of which "
            "the first is 0."
        )
    first = document % len(store)
    if first + count > len(store):
        raise StoreError(
            f"{store.path} has {len(store) - first:,} documents from {first:,} on, and {count:,} "
            f"were asked for. Use --count {len(store) - first}."
        )
    return range(first, first + count)


def _spell(store: "TokenStore", number: int, tokenizer: "Tokenizer | None") -> dict[str, Any]:
    origin = store.origin(number)
    begins, ends = store.edges(number)
    return {
        "document": number,
        "file": origin.file,
        "offset": origin.offset,
        "num_tokens": len(store.document(number)),
        "text": store.text(number, tokenizer),
        "begins": begins,
        "ends": ends,
    }


def show_document(
    store: "TokenStore",
    number: int,
    tokenizer: "Tokenizer | None" = None,
    *,
    num_lines: int | None = None,
) -> None:
    """Print one document under a line that says where it came from.

    Args:
        store: Where it is.
        number: Which it is.
        tokenizer: What the store was built with, if its name does not find it.
        num_lines: How many lines of it to print, if not all.
    """
    told = _spell(store, number, tokenizer)
    out = console()
    tokens = number_of(told["num_tokens"], "token")
    begins, ends = store.edges(number)
    piece = "" if begins and ends else ", a piece of a longer document"
    out.print(f"document {number:,} of {len(store):,}, {tokens}{piece}", style="bold")
    origin = f"from {visible(told['file'], lines=False)}, offset {told['offset']:,}"
    out.print(origin, style="dim", soft_wrap=True)
    lines = told["text"].split("\n")
    shown = lines if num_lines is None else lines[:num_lines]
    write("\n".join(shown))
    if len(shown) < len(lines):
        write(f"… and {number_of(len(lines) - len(shown), 'line')} more")
