"""`penstock decode`: documents of a store as text."""

import sys
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli import options
from penstock.cli.marks import LEGEND, print_marked
from penstock.cli.options import option, path_option
from penstock.cli.terminal import console, print_json, visible, write
from penstock.cli.token_files import (
    TokenColumn,
    TokenDtype,
    TokenFormat,
    TokenOptions,
    VocabSize,
    decode_files,
    open_files,
)
from penstock.cli.units import number_of
from penstock.errors import StoreError

if TYPE_CHECKING:
    from penstock.store.reader import TokenStore
    from penstock.tokenize.tokenizer import Tokenizer


def decode_command(
    store: options.AnyStore,
    document: Annotated[
        int, option("0 is the first document, -1 the last.", "NUMBER", "--document", "-d")
    ] = 0,
    count: Annotated[
        int, option("The number of documents to show, at most.", "NUMBER", "--count", "-n", least=1)
    ] = 1,
    tokenizer: Annotated[
        str | None, option("The tokenizer of the store, if penstock does not find it.", "NAME")
    ] = None,
    inputs: Annotated[
        Path | None, path_option("The directory of the inputs, to show where they are.", "DIR")
    ] = None,
    format: TokenFormat = None,
    dtype: TokenDtype = None,
    column: TokenColumn = None,
    vocab_size: VocabSize = None,
    mask: Annotated[
        bool, option("Mark the text that is trained on with +, other text with -.", None, "--mask")
    ] = False,
    raw: Annotated[bool, option("Write the documents' exact bytes.", None, "--raw")] = False,
    as_json: options.AsJson = False,
) -> None:
    r"""Show documents as text, and the file that each came from.

    Control characters and escape sequences in the text are shown as escapes such as \x1b. With
    --raw, the bytes of the documents are written unchanged, one document after the other.

    A store records its inputs below their common directory. --inputs DIR names that directory on
    this machine: paths are then shown in full.

    With --mask, text after + is trained on, and text after - is only read, such as the questions in
    conversations. A newline of the text is shown as ↵. End tokens are shown too.

    Documents of token files of other tools are shown too, with --tokenizer.

    penstock decode stores/chats --document 0 --mask
    """
    from penstock.store.reader import TokenStore
    from penstock.tokenize.tokenizer import load_tokenizer

    if raw and as_json:
        raise typer.BadParameter("--raw and --json cannot be combined: leave one of them out.")
    if raw and mask:
        raise typer.BadParameter("--raw and --mask cannot be combined: leave one of them out.")
    given = TokenOptions(format, dtype, vocab_size, tokenizer, column)
    if (files := open_files(store, given)) is not None:
        if raw or mask or inputs is not None:
            raise typer.BadParameter("--raw, --mask and --inputs are for stores; leave them out.")
        decode_files(files, document, count, as_json=as_json)
        return
    opened = TokenStore(store)
    # The tokenizer of --tokenizer is loaded once, for all documents.
    loaded = None if tokenizer is None else load_tokenizer(tokenizer)
    numbers = _numbers(opened, document, count)
    if raw:
        # sys.stdout would encode text; the bytes of a document need not be UTF-8.
        for number in numbers:
            sys.stdout.buffer.write(opened.decode_bytes(number, loaded))
        sys.stdout.buffer.flush()
    elif as_json:
        found = [_to_json(opened, number, loaded, inputs, mask=mask) for number in numbers]
        print_json({"documents": found})
    else:
        for number in numbers:
            if number > numbers.start:
                write("")
            show_document(opened, number, loaded, inputs=inputs, mask=mask)


def _numbers(store: "TokenStore", document: int, count: int) -> range:
    """The numbers of the requested documents that the store has.

    Raises:
        StoreError: the store does not have the first of them.
    """
    size = len(store)
    if not -size <= document < size:
        raise StoreError(
            f"{store.path} has no document {document:,}; it has {number_of(size, 'document')}, "
            "numbered from 0."
        )
    first = document % size  # -1 becomes the last document
    return range(first, min(first + count, size))


def _located(file: str, inputs: Path | None) -> str:
    """The path of an input, if the directory of the inputs is given.

    Raises:
        StoreError: it is not there.
    """
    if inputs is None or "://" in file:
        return file
    if not (inputs / file).exists():
        raise StoreError(
            f"{inputs / file} does not exist. The store records {file} below the common directory "
            "of its inputs: name that directory with --inputs."
        )
    return str(inputs / file)


def _to_json(
    store: "TokenStore",
    number: int,
    tokenizer: "Tokenizer | None",
    inputs: Path | None,
    *,
    mask: bool,
) -> dict[str, object]:
    text, num_tokens = store.decode(number, tokenizer), len(store.document(number))
    # False if the document continues in the piece before or after this one.
    begins, ends = store.edges(number)
    values: dict[str, object] = {
        "num_tokens": num_tokens,
        "text": text,
        "begins": begins,
        "ends": ends,
    }
    if mask:
        pieces = _pieces(store, number, tokenizer)
        values["pieces"] = [{"trained": trained, "text": piece} for piece, trained in pieces]
    origin = store.origin(number)
    place = {"file": _located(origin.file, inputs), "offset": origin.offset}
    return {"document": number, **place, **values}


def _pieces(
    store: "TokenStore", number: int, tokenizer: "Tokenizer | None"
) -> list[tuple[str, bool]]:
    """The text of a document, cut where it begins or ceases to be trained on."""
    import numpy as np

    from penstock.store.decoder import decoder_of, document_loss

    tokens, loss = store.document(number), document_loss(store, number)
    decoder = decoder_of(store.manifest, tokenizer)
    changes = (np.flatnonzero(np.diff(loss)) + 1).tolist()
    edges = pairwise([0, *changes, len(tokens)])
    return [(decoder.decode(tokens[a:b]), bool(loss[a])) for a, b in edges if a < b]


def show_document(
    store: "TokenStore",
    number: int,
    tokenizer: "Tokenizer | None" = None,
    *,
    num_lines: int | None = None,
    inputs: Path | None = None,
    mask: bool = False,
) -> None:
    """Print one document, and above it the file that it came from.

    Args:
        store: The store.
        number: The number of the document.
        tokenizer: The tokenizer of the store, if it was not loaded on this machine before.
        num_lines: The number of lines to print; all by default.
        inputs: The directory of the inputs of the store.
        mask: Mark the text that is trained on.
    """
    from penstock.store.reader import record_unit

    origin = store.origin(number)
    tokens = number_of(len(store.document(number)), "token")
    piece = "" if all(store.edges(number)) else ", a piece of a longer document"
    out = console()
    out.print(f"document {number:,} of {len(store):,}, {tokens}{piece}", style="bold")
    file = visible(_located(origin.file, inputs), lines=False)
    unit = record_unit(store, origin.file)
    out.print(f"from {file}, {unit} {origin.offset:,}", style="dim", soft_wrap=True)
    if mask:
        write(LEGEND)
        for text, trained in _pieces(store, number, tokenizer):
            print_marked(out, text, trained=trained)
        return
    lines = store.decode(number, tokenizer).split("\n")
    write("\n".join(lines[:num_lines]))
    if num_lines is not None and num_lines < len(lines):
        write(f"… and {number_of(len(lines) - num_lines, 'line')} more")
