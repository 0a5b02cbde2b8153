"""`penstock info`: the contents of a store, in numbers."""

from dataclasses import asdict
from typing import TYPE_CHECKING

from penstock.cli import options
from penstock.cli.options import by_side, stores_at
from penstock.cli.tables import aligned, documents_text, histogram_lines, print_facts, reasons_text
from penstock.cli.terminal import print_json, write
from penstock.cli.units import number_of, size_text

if TYPE_CHECKING:
    from penstock.store.summary import Lengths, Summary

_SHOWN_INPUTS = 2


def info_command(store: options.Store, as_json: options.AsJson = False) -> None:
    """Show the contents of a store.

    Prints the numbers of documents and tokens, the lengths of documents, the tokenizer, the
    inputs, and the records that were rejected. Reads the manifest and the document bounds, but
    no tokens. For a store that was built with --split, shows both sides.
    """
    from penstock.store.reader import TokenStore
    from penstock.store.summary import summarize

    summaries = {side: summarize(TokenStore(path)) for side, path in stores_at(store).items()}
    if as_json:
        print_json(by_side({side: asdict(summary) for side, summary in summaries.items()}))
        return
    for number, summary in enumerate(summaries.values()):
        if number:
            write("")
        show_summary(summary)


def show_summary(summary: "Summary") -> None:
    """Print the numbers of one store as a table."""
    per_token = summary.bytes_per_token
    rows: list[tuple[str, str | list[str]]] = [
        ("documents", documents_text(summary.num_documents, summary.num_pieces)),
        ("tokens", f"{summary.num_tokens:,}"),
    ]
    # A chat store records which tokens are trained on; their share is shown instead.
    if summary.num_trained is None:
        per_token_text = "not recorded" if per_token is None else f"{per_token:.2f}"
        rows.append(("bytes/token", per_token_text))
    else:
        share = summary.num_trained / max(1, summary.num_tokens)
        rows.append(("trained", f"{summary.num_trained:,} tokens, {share:.1%}"))
    if summary.lengths:
        rows.append(("lengths", _lengths(summary.lengths)))
    print_facts(summary.store, [*rows, *_origin(summary)])


def _lengths(lengths: "Lengths") -> list[str]:
    """The quantiles under their names, then the histogram."""
    # All fields but the histogram are quantiles.
    quantiles = asdict(lengths)
    del quantiles["histogram"]
    table = aligned([list(quantiles), [f"{round(value):,}" for value in quantiles.values()]])
    return [*table, *histogram_lines(lengths.histogram)]


def _origin(summary: "Summary") -> list[tuple[str, str | list[str]]]:
    """How the store was built: tokenizer, files and rejected records."""
    tokenizer = summary.tokenizer
    # A tokenizer object that cannot be serialised has no digest.
    digest = str(tokenizer["digest"] or "none")[:12]
    parts = number_of(summary.num_parts, "part")
    if summary.num_builds > 1:
        parts += f", {summary.num_builds} builds"
    rows: list[tuple[str, str | list[str]]] = [
        ("tokenizer", f"{tokenizer['name']}, {tokenizer['vocab_size']:,} tokens, digest {digest}"),
        ("edges", f"eos {_id_text(summary.eos_id)}, bos {_id_text(summary.bos_id)}"),
        ("on disk", f"{size_text(summary.disk_bytes)}, {summary.dtype}, {parts}"),
        ("inputs", _inputs(summary)),
        ("document is", summary.documents),
    ]
    if tokenizer.get("added_tokens"):
        from penstock.tokenize.definition import padded_vocab_size

        size = tokenizer["vocab_size"]
        # Models are usually made with a multiple of 64 embeddings; see `penstock.train.config`.
        rows.insert(1, ("added tokens", ", ".join(tokenizer["added_tokens"])))
        rows.insert(
            2, ("vocab_size", f"{size:,}; next multiple of 64: {padded_vocab_size(size):,}")
        )
    if summary.side:
        rows.append(("split", f"{summary.split}, this is {summary.side}"))
    if summary.num_skipped:
        rows.append(("skipped", number_of(summary.num_skipped, "blank record")))
    if summary.num_replaced:
        repaired = number_of(summary.num_replaced, "document")
        rows.append(("repaired", f"{repaired} with bytes that are not UTF-8"))
    return [*rows, ("rejected", reasons_text(summary.rejects)), ("digest", summary.digest[:16])]


def _id_text(token: int | None) -> str:
    return "none" if token is None else f"{token}"


def _inputs(summary: "Summary") -> list[str]:
    """The number and the size of the inputs, and the names of the first ones."""
    inputs = summary.inputs
    size = size_text(sum(each["bytes"] for each in inputs))
    names = [str(each["name"]) for each in inputs[:_SHOWN_INPUTS]]
    if len(inputs) == 1:
        return [f"{names[0]}, {size}"]
    more = len(inputs) - len(names)  # a store can have thousands of inputs
    rest = [f"and {more:,} more"] if more else []
    return [f"{len(inputs):,} files, {size}", *names, *rest]
