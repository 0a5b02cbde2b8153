"""`penstock tokenizer`: train tokenizers."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from penstock.cli import options
from penstock.cli.options import option, path_option
from penstock.cli.progress import bar
from penstock.cli.terminal import print_facts, print_json, shell_word, write
from penstock.cli.units import size_text

Result = TypeVar("Result")
app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def tokenizer() -> None:
    """Train a tokenizer on your text."""


@app.command("train")
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
    format: options.Format = "auto",
    documents: options.Documents = "auto",
    field: options.Field = "text",
    errors: options.Errors = "strict",
    newlines: options.Newlines = "keep",
    max_bad: options.MaxBad = 0.001,
    overwrite: Annotated[bool, option("Replace the file.", None, "--overwrite")] = False,
    as_json: options.AsJson = False,
) -> None:
    """Train a byte-level BPE tokenizer on your text.

    It can encode any text, and decodes it to the same bytes. The same inputs give the same
    file. Use it with: penstock build … --tokenizer FILE

    penstock tokenizer train corpus.txt -o tokenizer.json --vocab-size 16000
    """
    from penstock.sources.settings import ReadSettings
    from penstock.tokenize.train import train_tokenizer

    with bar(shown=not as_json) as draw:

        def report(done: int, total: int) -> None:
            # After the last byte, the native code learns merges and reports nothing more.
            stage = f"reading {size_text(done)}" if done < total else "learning merges"
            draw(done, total, stage)

        reading = ReadSettings(
            format=format, documents=documents, field=field, errors=errors, newlines=newlines
        )
        trained = _in_thread(
            lambda: train_tokenizer(
                inputs,
                path,
                vocab_size=vocab_size,
                special_tokens=special_token,
                reading=reading,
                max_bytes=max_bytes,
                max_bad=max_bad,
                overwrite=overwrite,
                progress=report,
            )
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


def _in_thread(work: Callable[[], Result]) -> Result:
    """Call `work` in a thread, so that Ctrl-C can interrupt it.

    Python handles Ctrl-C between two instructions of its main thread, but learning merges is one
    native call of up to a minute. So the call runs in a daemon thread while the main thread
    waits. After Ctrl-C, the daemon thread ends with the process.
    """
    outcome: Future[Result] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:  # noqa: BLE001  (raised again in the calling thread)
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True, name="tokenizer training").start()
    while not outcome.done():
        # Without a timeout, Ctrl-C would not end the wait on some systems.
        wait([outcome], timeout=0.1)
    # An error is raised again in the main thread, where `app` turns it into a message.
    return outcome.result()
