"""`penstock build`: raw text to a sealed store."""

import logging
from enum import StrEnum
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
from penstock.cli.outcome import measured_build
from penstock.cli.terminal import console, print_json, visible

if TYPE_CHECKING:
    from penstock.tokenize.tokenizer import Tokenizer

__all__ = ["build_command"]


class SpecialTokens(StrEnum):
    """What `<|endoftext|>` is where a document spells it."""

    TEXT = "text"
    PARSE = "parse"


class Engine(StrEnum):
    """Which program tokenizes."""

    AUTO = "auto"
    GIGATOKEN = "gigatoken"
    TOKENIZERS = "tokenizers"


def build_command(
    inputs: Inputs,
    store: Annotated[
        Path,
        typer.Option(
            "--output", "-o", metavar="STORE", show_default=False, help="The directory to write."
        ),
    ],
    tokenizer: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="gpt2, bytes, a tokenizer.json, a directory with one, tiktoken:NAME, or hf:NAME "
            "on the Hugging Face Hub.",
        ),
    ] = "gpt2",
    format: FormatOption = Format.AUTO,
    documents: DocumentsOption = "auto",
    field: FieldOption = "text",
    errors: ErrorsOption = Errors.STRICT,
    chat: Annotated[
        str | None,
        typer.Option(
            metavar="TEMPLATE",
            help="The inputs are conversations; render them with this chat template (chatml, "
            "nanochat, a .jinja file, a tokenizer_config.json or a directory with one) and store "
            "which tokens are trained on.",
        ),
    ] = None,
    chat_date: Annotated[
        str | None,
        typer.Option(metavar="DATE", help="The date that a chat template writes, as 2026-01-31."),
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(
            metavar="RULE",
            help="Hold out a share as STORE/val: tail:0.1 is the last tenth (the documents that "
            "begin there, or the characters of a single document), hash:0.1 a tenth of the "
            "documents, chosen by their text.",
        ),
    ] = None,
    append: Annotated[
        bool, typer.Option("--append", help="Add the inputs to a finished store.")
    ] = False,
    eos: Annotated[
        bool, typer.Option(help="End each document with the tokenizer's end token.")
    ] = True,
    eos_token: Annotated[
        str | None, typer.Option(metavar="TOKEN", help="End it with this token instead.")
    ] = None,
    bos: Annotated[
        bool, typer.Option(help="Begin each document with the tokenizer's first token.")
    ] = False,
    bos_token: Annotated[
        str | None, typer.Option(metavar="TOKEN", help="Begin it with this token.")
    ] = None,
    special_tokens: Annotated[
        SpecialTokens,
        typer.Option(help="What a document means that spells a special token: text, or the token."),
    ] = SpecialTokens.TEXT,
    max_bad: MaxBadOption = 0.001,
    max_document_bytes: Annotated[
        int,
        typer.Option(
            metavar="BYTES",
            show_default=False,
            help="Longer documents are rejected; 1 GiB if not given.",
        ),
    ] = 1 << 30,
    max_expansion: Annotated[
        int,
        typer.Option(
            metavar="TIMES", help="Compressed files that grow more than this are refused."
        ),
    ] = 200,
    engine: Annotated[
        Engine, typer.Option(help="Which program tokenizes; the ids are the same.")
    ] = Engine.AUTO,
    threads: Annotated[
        int | None,
        typer.Option(
            metavar="NUMBER",
            show_default=False,
            help="How many slices of the input to tokenize at once; one a core if not given.",
        ),
    ] = None,
    as_json: AsJson = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")] = False,
) -> None:
    """Tokenize raw text into a store that training reads.

    Safe to kill: the same command goes on where it stopped, and one that has finished
    returns at once. The bytes of the store depend on the inputs and these settings alone.

    penstock build corpus.txt -o stores/corpus

    penstock build 'web/*.jsonl.zst' -o stores/web --split hash:0.01

    penstock build chats.jsonl -o stores/chats --chat chatml
    """
    if eos_token is not None and not eos:
        raise typer.BadParameter("--no-eos and --eos-token exclude each other.")
    parsed = special_tokens if chat is None else SpecialTokens.TEXT
    loaded = _load(tokenizer, parsed, engine, quiet=quiet)
    settings: dict[str, Any] = {
        "tokenizer": loaded,
        "eos": eos if eos_token is None else eos_token,
        "bos": bos if bos_token is None else bos_token,
        "special_tokens": special_tokens.value,
        "engine": engine.value,
        "format": format.value,
        "documents": documents,
        "field": field,
        "errors": errors.value,
        "chat": _chat(chat, chat_date, loaded),
        "split": split,
        "append": append,
        "max_bad": max_bad,
        "max_document_bytes": max_document_bytes,
        "max_expansion": max_expansion,
        "threads": threads,
    }
    outcome = measured_build(inputs, store, settings, bar=not (quiet or as_json))
    if as_json:
        print_json({**outcome.spell(), "engine": loaded.engine.name})
    elif not quiet:
        by = f"tokenizer {loaded.name}, engine {loaded.engine.name}"
        console().print(visible(by, lines=False), soft_wrap=True)
        outcome.show()


def _load(name: str, special_tokens: SpecialTokens, engine: Engine, *, quiet: bool) -> "Tokenizer":
    """The tokenizer; that only the slow engine knows it is said on stderr, unless `quiet`."""
    from penstock.tokenize.tokenizer import load_tokenizer

    before = logging.root.manager.disable
    if quiet:
        logging.disable(logging.WARNING)
    try:
        return load_tokenizer(name, special_tokens=special_tokens.value, engine=engine.value)
    finally:
        logging.disable(before)


def _chat(template: str | None, date: str | None, tokenizer: "Tokenizer") -> Any:
    """What to give to `build` as chat=."""
    if template is None and date is not None:
        raise typer.BadParameter("--chat-date is the date of a template; give --chat too.")
    if date is None:
        return template
    from penstock.chat.chat import Chat

    return Chat(template, tokenizer, date=date)
