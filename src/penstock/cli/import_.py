"""`penstock import`: a store of the token files of another tool."""

import time
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli import options
from penstock.cli.progress import bar
from penstock.cli.terminal import print_json, store_json, visible, write
from penstock.cli.token_files import TokenColumn, TokenDtype, TokenFormat, VocabSize
from penstock.cli.units import clock_text, count_text, duration_text, number_of
from penstock.paths import expand_user


def import_command(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SOURCE",
            show_default=False,
            parser=expand_user,
            help="The token files; of Megatron, the prefix or either file.",
        ),
    ],
    store: options.Output,
    format: TokenFormat = None,
    dtype: TokenDtype = None,
    column: TokenColumn = None,
    vocab_size: VocabSize = None,
    tokenizer: Annotated[
        str | None,
        options.option("The tokenizer of the ids, which is recorded in the store.", "NAME"),
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Make a store of token files of another tool: nanoGPT, llm.c, Megatron, datatrove and others.

    The store has the tokens, the documents and the loss mask of the files. Every id is compared
    with the vocabulary, so --tokenizer or --vocab-size is needed, and every part is compared with
    the source after it was written. An import can be killed at any time: the same command resumes
    it.

    Token files can also be used in place, without an import: see docs/formats.md.

    penstock import data/web_text_document -o stores/web --tokenizer gpt2
    """
    from penstock.formats.imports import import_tokens
    from penstock.store.copy import on_this_machine

    started = time.monotonic()
    with bar(shown=not as_json) as draw:

        def report(done: int, total: int) -> None:
            seconds = max(time.monotonic() - started, 1e-9)
            left = clock_text((total - done) * seconds / max(1, done))
            draw(done, total, f"{count_text(done / seconds)} tokens/s  {left} left")

        made = import_tokens(
            source,
            on_this_machine(store),
            format=format,
            dtype=dtype,
            vocab_size=vocab_size,
            tokenizer=tokenizer,
            column=column,
            progress=report,
        )
    if as_json:
        print_json(store_json(made))
        return
    took = duration_text(time.monotonic() - started)
    counts = [
        number_of(len(made.manifest.parts), "part"),
        number_of(made.manifest.num_documents, "document"),
        number_of(made.num_tokens, "token"),
    ]
    name = visible(str(made.path), lines=False)
    write(f"{name} imported, and compared with its source: {', '.join(counts)} ({took})")
