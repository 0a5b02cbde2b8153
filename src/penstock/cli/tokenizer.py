"""`penstock tokenizer`: tokenizers of your own."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.options import (
    AsJson,
    DocumentsOption,
    Errors,
    ErrorsOption,
    FieldOption,
    Format,
    FormatOption,
    Inputs,
    MaxBadOption,
)
from penstock.cli.progress import bar
from penstock.cli.tables import facts
from penstock.cli.terminal import console, in_background, print_json, shell_word, visible
from penstock.cli.units import size_text

if TYPE_CHECKING:
    from penstock.tokenize.train import Trained

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def tokenizer() -> None:
    """Make a tokenizer of your own."""


@app.command("train")
def train_command(
    inputs: Inputs,
    path: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            show_default=False,
            help="The tokenizer.json to write.",
        ),
    ],
    vocab_size: Annotated[
        int,
        typer.Option(
            metavar="NUMBER",
            show_default=False,
            help="Tokens to have: 256 bytes, the special tokens, and what is learned.",
        ),
    ],
    special_token: Annotated[
        list[str],
        typer.Option(
            metavar="TOKEN", help="A token that no text spells; may be given more than once."
        ),
    ] = ["<|endoftext|>"],  # noqa: B006  (typer copies it)
    max_bytes: Annotated[
        int | None,
        typer.Option(
            metavar="BYTES",
            show_default=False,
            help="Stop reading after this much text; 100000000 is plenty for most.",
        ),
    ] = None,
    format: FormatOption = Format.AUTO,
    documents: DocumentsOption = "auto",
    field: FieldOption = "text",
    errors: ErrorsOption = Errors.STRICT,
    max_bad: MaxBadOption = 0.001,
    as_json: AsJson = False,
) -> None:
    """Learn a byte-level BPE tokenizer from your text.

    Any text can be encoded with it and comes back byte for byte. The same inputs give the
    same file. Use it with: penstock build … --tokenizer FILE

    penstock tokenizer train corpus.txt -o tokenizer.json --vocab-size 16000
    """
    from penstock.sources.settings import ReadSettings
    from penstock.tokenize.train import train_tokenizer

    # Values of the enumerations are those of the library, which checks them again.
    settings: dict[str, Any] = {
        "format": format.value,
        "documents": documents,
        "field": field,
        "errors": errors.value,
    }
    with bar(shown=not as_json) as draw:
        trained = in_background(
            lambda: train_tokenizer(
                inputs,
                path,
                vocab_size=vocab_size,
                special_tokens=special_token,
                reading=ReadSettings(**settings),
                max_bytes=max_bytes,
                max_bad=max_bad,
                progress=lambda done, total: draw(done, total, _stage(done, total)),
            )
        )
    if as_json:
        print_json(asdict(trained))
    else:
        _show(trained)


def _stage(done: int, total: int) -> str:
    return f"reading {size_text(done)}" if done < total else "learning merges"


def _show(trained: "Trained") -> None:
    out = console()
    out.print(f"{visible(trained.path, lines=False)} written", style="bold", soft_wrap=True)
    rows = [
        ("vocabulary", f"{trained.vocab_size:,} tokens"),
        ("learned from", f"{trained.num_documents:,} documents, {size_text(trained.num_bytes)}"),
        ("rejected", f"{trained.num_rejects:,}" if trained.num_rejects else "none"),
    ]
    out.print(facts(rows))
    where = shell_word(trained.path)
    out.print(f"next: penstock build INPUTS -o STORE --tokenizer {where}", soft_wrap=True)
