"""`penstock build`: raw text to a sealed store."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
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
from penstock.cli.progress import measured_build
from penstock.cli.terminal import console, print_json, visible

if TYPE_CHECKING:
    from penstock.tokenize.tokenizer import Tokenizer

__all__ = ["build_command"]


class SpecialTokens(StrEnum):
    """What `<|endoftext|>` is where a document spells it."""

    TEXT = "text"
    PARSE = "parse"


class Rewritten(StrEnum):
    """What happens to turns of which a chat template leaves something out."""

    MASK = "mask"
    TRAIN = "train"
    REFUSE = "refuse"


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
    rewritten: Annotated[
        Rewritten,
        typer.Option(
            help="Turns of which a chat template leaves something out, such as thoughts: do not "
            "train on them, train on what is left, or reject the conversation."
        ),
    ] = Rewritten.MASK,
    add_tokens: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TOKEN",
            show_default=False,
            help="A special token to add to the tokenizer, after its vocabulary; may be given more "
            "than once. auto adds the markers of the chat template that it does not have.",
        ),
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

    penstock build chats.jsonl -o stores/chats --chat chatml --add-tokens auto
    """
    if eos_token is not None and not eos:
        raise typer.BadParameter("--no-eos and --eos-token exclude each other.")
    parsed = special_tokens if chat is None else SpecialTokens.TEXT
    more: Any = "auto" if add_tokens == ["auto"] else add_tokens
    if chat is None and (chat_date, rewritten) != (None, Rewritten.MASK):
        raise typer.BadParameter("--chat-date and --rewritten belong to a template; give --chat.")
    settings: dict[str, Any] = {
        "eos": eos if eos_token is None else eos_token,
        "bos": bos if bos_token is None else bos_token,
        "special_tokens": parsed.value,
        "engine": engine.value,
        "format": format.value,
        "documents": documents,
        "field": field,
        "errors": errors.value,
        "split": split,
        "append": append,
        "max_bad": max_bad,
        "max_document_bytes": max_document_bytes,
        "max_expansion": max_expansion,
        "threads": threads,
    }
    with _warnings(shown=not quiet):
        loaded = _load(tokenizer, parsed, engine)
        settings |= {"tokenizer": loaded, "add_tokens": more}
        if chat is not None:
            in_content = special_tokens is SpecialTokens.PARSE
            options = {"date": chat_date, "rewritten": rewritten.value, "add_tokens": more}
            settings["chat"] = _chat(chat, loaded, special_in_content=in_content, **options)
            del settings["add_tokens"]
        outcome = measured_build(inputs, store, settings, bar=not (quiet or as_json))
    if as_json:
        print_json({**outcome.spell(), "engine": loaded.engine.name})
    elif not quiet:
        by = f"tokenizer {loaded.name}, engine {loaded.engine.name}"
        console().print(visible(by, lines=False), soft_wrap=True)
        outcome.show()


@contextmanager
def _warnings(*, shown: bool) -> Iterator[None]:
    """Log lines go to stderr, unless they are not to be shown."""
    before = logging.root.manager.disable
    if not shown:
        logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def _load(name: str, special_tokens: SpecialTokens, engine: Engine) -> "Tokenizer":
    from penstock.tokenize.tokenizer import load_tokenizer

    return load_tokenizer(name, special_tokens=special_tokens.value, engine=engine.value)


def _chat(template: str, tokenizer: "Tokenizer", **options: Any) -> Any:
    from penstock.chat.chat import Chat

    return Chat(template, tokenizer, **options)
