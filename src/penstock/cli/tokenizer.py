"""`penstock tokenizer`: train tokenizers."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli import options
from penstock.cli.options import option, path_option, with_flags
from penstock.cli.progress import bar
from penstock.cli.terminal import print_facts, print_json, shell_word, write
from penstock.cli.units import size_text
from penstock.options import BuildOptions, ReadSettings

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def tokenizer() -> None:
    """Train a tokenizer on your text."""


@app.command("train")
@with_flags(BuildOptions, "format", "documents", "field", "errors", "max_bad")
def train_command(
    inputs: options.Inputs,
    path: Annotated[Path, path_option("The tokenizer.json to write.", "FILE", "--output", "-o")],
    vocab_size: Annotated[
        int, option("Size of the vocabulary, with 256 bytes and special tokens.", "NUMBER")
    ],
    special_token: Annotated[
        list[str],
        option(
            "A special token: no text is encoded as it. Repeatable; replaces the default.", "TOKEN"
        ),
    ] = ["<|endoftext|>"],  # noqa: B006  (typer copies it)
    max_bytes: Annotated[
        int | None,
        option("Stop after this many bytes of text. 100000000 are usually enough.", "BYTES"),
    ] = None,
    threads: Annotated[
        int | None, option("Threads that count words. Default: one per core.", "NUMBER")
    ] = None,
    overwrite: Annotated[bool, option("Replace the file.", None, "--overwrite")] = False,
    as_json: options.AsJson = False,
    **given: Any,
) -> None:
    """Train a byte-level BPE tokenizer on your text.

    It can encode any text, and decodes it to the same bytes. The same inputs give the same
    file. Use it with: penstock build … --tokenizer FILE

    penstock tokenizer train corpus.txt -o tokenizer.json --vocab-size 16000
    """
    from penstock.tokenize.train import train_tokenizer

    with bar(shown=not as_json) as draw:

        def report(stage: str, done: int, total: int) -> None:
            shown = size_text(done) if stage == "reading" else f"{done:,} tokens"
            draw(done, total, f"{stage} {shown}")

        max_bad = given.pop("max_bad")
        reading = ReadSettings(**given)
        trained = train_tokenizer(
            inputs,
            path,
            vocab_size=vocab_size,
            special_tokens=special_token,
            reading=reading,
            max_bytes=max_bytes,
            max_bad=max_bad,
            overwrite=overwrite,
            threads=threads,
            progress=report,
        )
    if as_json:
        print_json(asdict(trained))
        return
    rows = [
        ("vocabulary", f"{trained.vocab_size:,} tokens"),
        ("trained on", f"{trained.num_documents:,} documents, {size_text(trained.num_bytes)}"),
        ("rejected", f"{trained.num_rejects:,}" if trained.num_rejects else "none"),
    ]
    print_facts(f"{trained.path} written", rows)
    write(f"next: penstock build INPUTS -o STORE --tokenizer {shell_word(trained.path)}")
