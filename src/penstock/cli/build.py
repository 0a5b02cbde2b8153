"""`penstock build`: tokenize raw text into a store."""

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from penstock.cli import options, terminal
from penstock.cli.options import open_at, option, with_flags
from penstock.cli.progress import build_bar
from penstock.cli.units import duration_text, number_of, size_text
from penstock.errors import StoreError
from penstock.options import BuildOptions

if TYPE_CHECKING:
    from penstock.paths import StorePath
    from penstock.store.reader import TokenStore

# The names of the counts that together cover every byte of the text.
_TEXT_BYTES = ("document_bytes", "separator_bytes", "skipped_bytes", "rejected_bytes")


@with_flags(
    BuildOptions,
    *("tokenizer", "format", "documents", "field", "errors", "chat", "split", "max_bad", "workers"),
)
def build_command(
    inputs: options.Inputs,
    store: options.Output,
    chat_date: Annotated[
        str | None, option("The current date for the chat template.", "YYYY-MM-DD")
    ] = None,
    rewritten: Annotated[
        Literal["mask", "train", "refuse"],
        option("What to do with turns from which the chat template omits text, such as reasoning."),
    ] = "mask",
    add_tokens: Annotated[
        list[str] | None, option("Add a special token to the tokenizer. Repeatable.", "TOKEN")
    ] = None,
    append: Annotated[
        bool, option("Add the inputs to a finished store.", None, "--append")
    ] = False,
    overwrite: Annotated[
        bool, option("Replace the store that is in the directory.", None, "--overwrite")
    ] = False,
    eos: Annotated[bool, option("End each document with the tokenizer's end token.")] = True,
    eos_token: Annotated[str | None, option("End documents with this token.", "TOKEN")] = None,
    bos: Annotated[bool, option("Begin each document with the beginning token.")] = False,
    bos_token: Annotated[str | None, option("Begin documents with this token.", "TOKEN")] = None,
    special_tokens: Annotated[
        Literal["text", "parse"],
        option("How to read special tokens in a document. text: as text; parse: as these tokens."),
    ] = "text",
    as_json: options.AsJson = False,
    quiet: Annotated[bool, option("Print nothing but errors.", None, "--quiet", "-q")] = False,
    **given: Any,
) -> None:
    """Tokenize raw text into a store that training reads.

    The build can be killed at any time: the same command resumes it. If the store is already
    finished, the command only makes missing files again. The bytes of the store depend only on the
    inputs and on these settings. --overwrite builds the store again; the old one stays until the
    new one is complete, except in object storage.

    -o takes a directory, or the URL of a store in object storage: s3://, gs:// or az://. Keys are
    taken from the environment, as AWS_ACCESS_KEY_ID.

    Files are read in the order of their names, not in that of the arguments.

    --add-tokens auto adds the markers of the chat template that the tokenizer does not have. Turns
    that the template changes are not trained on (--rewritten mask), trained on without the omitted
    part (train), or make the conversation a rejected one (refuse).

    --workers ray lets the nodes of a Ray cluster tokenize: the cluster in RAY_ADDRESS, or the one
    on this machine. The inputs and the store must have the same paths on all nodes.

    penstock build corpus.txt -o stores/corpus

    penstock build 'web/*.jsonl.zst' -o stores/web --split hash:0.01

    penstock build chats.jsonl -o stores/chats --chat chatml --add-tokens auto
    """
    if eos_token is not None and not eos:
        raise typer.BadParameter(
            "--no-eos and --eos-token contradict each other: leave one of them out."
        )
    template = given["chat"]
    if template is None and (chat_date, rewritten) != (None, "mask"):
        raise typer.BadParameter("--chat-date and --rewritten need a chat template: set --chat.")
    from penstock.tokenize.tokenizer import load_tokenizer

    # With a template, --special-tokens is about the contents of messages; see `Chat`.
    in_text = special_tokens if template is None else "text"
    # The word "auto" alone is not a token: it asks for all markers of the template.
    added: Any = "auto" if add_tokens == ["auto"] else add_tokens
    if added == "auto" and template is None:
        raise typer.BadParameter(
            "--add-tokens auto adds the markers of a chat template: set --chat, or name the tokens."
        )
    with _log_warnings(shown=not quiet):
        # The tokenizer is loaded here and not inside `build`, because its engine is printed below.
        loaded = load_tokenizer(
            given["tokenizer"],
            special_tokens=in_text,
            add_tokens=added if template is None else None,
        )
        if template is not None:
            from penstock.chat.chat import Chat

            given["chat"] = Chat(
                template,
                loaded,
                # The template adds the tokens, because it knows its own markers for "auto".
                add_tokens=added,
                special_in_content=special_tokens == "parse",
                date=chat_date,
                rewritten=rewritten,
            )
        settings = {
            **given,
            "tokenizer": loaded,
            "eos": eos if eos_token is None else eos_token,
            "bos": bos if bos_token is None else bos_token,
            "append": append,
            "overwrite": overwrite,
        }
        bar = not (quiet or as_json)
        stores, values = measured_build(inputs, store, bar=bar, **settings)
    if as_json:
        terminal.print_json({**values, "engine": loaded.engine.name})
    elif not quiet:
        name = terminal.visible(loaded.name, lines=False)
        terminal.write(f"tokenizer {name}, engine {loaded.engine.name}")
        _show(store, stores, values)


@contextmanager
def _log_warnings(*, shown: bool) -> Iterator[None]:
    """Let the library's warnings reach stderr only if they are to be shown."""
    # `logging.disable` applies to all loggers, so the previous level is restored at the end.
    before = logging.root.manager.disable
    if not shown:
        logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def measured_build(
    inputs: str | Path | list[str] | list[Path],
    directory: "StorePath",
    *,
    bar: bool,
    **settings: Any,
) -> tuple[dict[str, "TokenStore"], dict[str, Any]]:
    """Build a store with the settings of `penstock.build`, and measure it.

    Args:
        inputs: Files, as for `penstock.build`.
        directory: The directory of the store, or its URL.
        bar: Draw a progress bar if stderr is a terminal.
        settings: Other arguments of `penstock.build`.

    Returns:
        The stores by side of the split (without a split, the only side is ""), and the object that
        `--json` prints.
    """
    from penstock.store.build import build
    from penstock.store.reader import manifest_at
    from penstock.store.resume import was_interrupted
    from penstock.store.sides import stores_at

    before: list[str] = []
    # There is no store yet, or it is not finished. The build reports what is wrong, if anything.
    with suppress(StoreError):
        before = [manifest_at(path).digest for path in stores_at(directory).values()]
    resumed = was_interrupted(directory, overwrite=bool(settings.get("overwrite")))
    started = time.monotonic()
    try:
        # stdout is for the result. Ray prints there when a node dies.
        with build_bar(shown=bar) as (meter, report), redirect_stdout(sys.stderr):
            build(inputs, directory, progress=report, **settings)
    # The library does not know the command line, so the advice is added here.
    except KeyboardInterrupt as error:
        error.add_note("Finished parts are kept: the same command resumes the build.")
        raise
    stores = open_at(directory)
    values = {
        **_counts(stores),
        "seconds": round(time.monotonic() - started, 3),
        # A finished store keeps its digest if the build has nothing to do.
        "finished_before": not settings.get("overwrite")
        and before == [store.digest for store in stores.values()],
        "resumed": resumed,
    }
    # The counts include parts of earlier runs, and so does the first report of a resumed build.
    if resumed and meter.first:
        values["read_bytes"] = max(0, values["read_bytes"] - meter.first.text_bytes)
    if values["finished_before"]:
        values["read_bytes"] = 0
    return stores, values


def _counts(stores: dict[str, "TokenStore"]) -> dict[str, Any]:
    """The counts of a store for `--json`; those of its last build cover both sides of a split."""
    from penstock.store.summary import bytes_per_token, describe_rules
    from penstock.tokenize.definition import padded_vocab_size

    first = next(iter(stores.values()))
    contents = first.manifest.contents
    # An append adds an entry to this list, so the last entry describes this run.
    rejects, counts = (contents["builds"][-1][name] for name in ("rejects", "counts"))
    vocab_size = contents["tokenizer"]["vocab_size"]
    sides = [{**terminal.store_json(each), "side": side or None} for side, each in stores.items()]
    return {
        "stores": sides,
        "num_documents": sum(store.manifest.num_documents for store in stores.values()),
        "num_pieces": sum(map(len, stores.values())),
        "documents": describe_rules(contents),
        "num_tokens": sum(store.num_tokens for store in stores.values()),
        "vocab_size": vocab_size,
        "padded_vocab_size": padded_vocab_size(vocab_size),
        "bytes_per_token": bytes_per_token(first),
        "rejects": rejects["reasons"],
        "num_skipped": counts.get("skipped", 0),
        "skipped_files": contents["builds"][-1].get("skipped_files", {}),
        "num_replaced": counts.get("replaced", 0),
        "read_bytes": sum(counts.get(name, 0) for name in _TEXT_BYTES),
    }


def _show(directory: "StorePath", stores: dict[str, "TokenStore"], values: dict[str, Any]) -> None:
    """Print a summary and the next command."""
    from penstock.sources.listing import skipped_text
    from penstock.store.manifest import rejects_file

    took = duration_text(values["seconds"])
    verb = "resumed and finished" if values["resumed"] else "built"
    title = f"{directory} {verb} in {took}"
    if values["finished_before"]:
        title = f"{directory} is already finished ({took})"
    # With less than a megabyte, this would be the time to start Python, not a speed.
    elif values["read_bytes"] > 1e6:
        title += f", {size_text(values['read_bytes'] / values['seconds'])}/s"
    rows: list[tuple[str, str | list[str]]] = [
        ("documents", terminal.documents_text(values["num_documents"], values["num_pieces"])),
        ("document is", values["documents"]),
        ("tokens", f"{values['num_tokens']:,}"),
    ]
    if values["bytes_per_token"] is not None:
        rows.append(("bytes/token", f"{values['bytes_per_token']:.2f}"))
    for side, store in stores.items():
        if side:
            documents = number_of(store.manifest.num_documents, "document")
            rows.append((side, f"{documents}, {number_of(store.num_tokens, 'token')}"))
    rejected = [terminal.reasons_text(values["rejects"])]
    if values["rejects"]:
        # Each append has a separate log, so this is the log of the last build.
        first = next(iter(stores.values()))
        number = len(first.manifest.contents["builds"]) - 1
        rejected.append(str(first.path / rejects_file(number)))
    if values["num_skipped"]:
        rows.append(("skipped", number_of(values["num_skipped"], "blank record")))
    if values["num_replaced"]:
        repaired = number_of(values["num_replaced"], "document")
        rows.append(("repaired", f"{repaired} with U+FFFD in place of invalid bytes"))
    rows.append(("rejected", rejected))
    if values["skipped_files"]:
        rows.append(("not read", skipped_text(values["skipped_files"])))
    terminal.print_facts(title, rows)
    terminal.write(f"next: penstock info {terminal.shell_word(str(directory))}")
