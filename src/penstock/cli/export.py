"""`penstock export`: tokens in the format of another tool."""

import time
from pathlib import Path
from typing import Annotated, Literal

from penstock.cli import options
from penstock.cli.options import option, path_option
from penstock.cli.progress import bar
from penstock.cli.terminal import print_json, visible, write
from penstock.cli.token_files import (
    TokenColumn,
    TokenDtype,
    TokenFormat,
    TokenOptions,
    TokenTokenizer,
    VocabSize,
    open_files,
)
from penstock.cli.units import clock_text, count_text, duration_text, number_of


def export_command(
    store: options.AnyStore,
    to: Annotated[
        Literal["megatron", "nanogpt", "llmc", "parquet"],
        option("The format to write."),
    ],
    directory: Annotated[Path, path_option("The directory to write.", "DIR", "--output", "-o")],
    overwrite: Annotated[bool, option("Replace an earlier export in DIR.")] = False,
    drop_loss_mask: Annotated[
        bool,
        option(
            "Write the tokens of a chat store without their loss mask, which only parquet can hold."
        ),
    ] = False,
    format: TokenFormat = None,
    dtype: TokenDtype = None,
    column: TokenColumn = None,
    vocab_size: VocabSize = None,
    tokenizer: TokenTokenizer = None,
    as_json: options.AsJson = False,
) -> None:
    """Write the tokens of a store, or of token files, in the format of another tool.

    The tokens are written as they are: documents of a store contain their end tokens. Every id is
    checked. The same source gives the same bytes, and DIR appears when all files are on disk. Of a
    store that was built with --split, both sides are written.

    penstock export stores/web --to megatron -o exports/web
    """
    from penstock.formats.export import export_tokens

    files = open_files(store, TokenOptions(format, dtype, vocab_size, tokenizer, column))
    started = time.monotonic()
    with bar(shown=not as_json) as draw:

        def report(done: int, total: int) -> None:
            seconds = max(time.monotonic() - started, 1e-9)
            left = clock_text((total - done) * seconds / max(1, done))
            draw(done, total, f"{count_text(done / seconds)} tokens/s  {left} left")

        made = export_tokens(
            # Files without documents have the length 0.
            store if files is None else files,
            directory,
            to=to,
            overwrite=overwrite,
            drop_loss_mask=drop_loss_mask,
            progress=report,
        )
    if as_json:
        print_json({"path": str(directory), "format": to, "files": [str(each) for each in made]})
        return
    took = duration_text(time.monotonic() - started)
    name = visible(str(directory), lines=False)
    write(f"{name} holds {number_of(len(made), 'file')} of the format {to} ({took})")
