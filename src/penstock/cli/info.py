"""`penstock info`: what a store holds."""

from typing import TYPE_CHECKING, Any

from penstock.cli.options import AsJson, StoreArgument, stores_at
from penstock.cli.tables import documents_text, facts, histogram_lines, reasons_text
from penstock.cli.terminal import console, print_json, visible, write
from penstock.cli.units import number_of, size_text

if TYPE_CHECKING:
    from penstock.store.summary import Lengths, Summary

__all__ = ["info_command", "show_summary"]

_SHOWN_INPUTS = 2


def info_command(store: StoreArgument, as_json: AsJson = False) -> None:
    """Show what a store holds.

    Documents, tokens, lengths, tokenizer, inputs, rejects. Reads the manifest and where
    documents end, no tokens. Given the directory of a store
    that was built with --split, it shows both sides.
    """
    from dataclasses import asdict

    from penstock.store.reader import TokenStore
    from penstock.store.summary import summarize

    summaries = {side: summarize(TokenStore(path)) for side, path in stores_at(store).items()}
    if as_json:
        told: dict[str, Any] = {side: asdict(summary) for side, summary in summaries.items()}
        print_json(told.get("") or told)
        return
    for number, summary in enumerate(summaries.values()):
        if number:
            write("")
        show_summary(summary)


def show_summary(summary: "Summary") -> None:
    """Print one store's numbers as a table."""
    out = console()
    out.print(visible(summary.store, lines=False), style="bold", soft_wrap=True)
    out.print(facts([*_contents(summary), *_making(summary)]))


def _contents(summary: "Summary") -> list[tuple[str, Any]]:
    per_token = summary.bytes_per_token
    rows: list[tuple[str, Any]] = [
        ("documents", documents_text(summary.num_documents, summary.num_pieces)),
        ("tokens", f"{summary.num_tokens:,}"),
        ("bytes/token", "not recorded" if per_token is None else f"{per_token:.2f}"),
    ]
    if summary.num_trained is not None:
        share = summary.num_trained / max(1, summary.num_tokens)
        rows[2] = ("trained", f"{summary.num_trained:,} tokens, {share:.1%}")
    if summary.lengths:
        rows.append(("lengths", _lengths(summary.lengths)))
    return rows


def _lengths(lengths: "Lengths") -> Any:
    """The quantiles under their names, and the histogram under them."""
    from rich.console import Group
    from rich.table import Table

    names = ("min", "p1", "p10", "median", "mean", "p90", "p99", "max")
    table = Table.grid(padding=(0, 2))
    for _ in names:
        table.add_column(justify="right")
    table.add_row(*names, style="dim")
    table.add_row(*(f"{round(getattr(lengths, name)):,}" for name in names))
    return Group(table, *histogram_lines(lengths.histogram))


def _making(summary: "Summary") -> list[tuple[str, Any]]:
    tokenizer = summary.tokenizer
    name = visible(str(tokenizer["name"]), lines=False)
    digest = str(tokenizer["digest"] or "none")[:12]
    rows = [
        ("tokenizer", f"{name}, {tokenizer['vocab_size']:,} tokens, digest {digest}"),
        *_added(tokenizer),
        ("edges", f"eos {_id_text(summary.eos_id)}, bos {_id_text(summary.bos_id)}"),
        ("on disk", f"{size_text(summary.disk_bytes)}, {summary.dtype}, {_parts_text(summary)}"),
        ("inputs", _inputs_text(summary)),
        ("document is", visible(summary.documents, lines=False)),
    ]
    if summary.side:
        rows.append(("split", f"{summary.split}, this is {summary.side}"))
    if summary.num_skipped:
        rows.append(("skipped", number_of(summary.num_skipped, "blank record")))
    if summary.num_replaced:
        mended = number_of(summary.num_replaced, "document")
        rows.append(("mended", f"{mended} with bytes that are not UTF-8"))
    return [*rows, ("rejected", reasons_text(summary.rejects)), ("digest", summary.digest[:16])]


def _added(tokenizer: dict[str, Any]) -> list[tuple[str, Any]]:
    """The tokens that the tokenizer was extended by, and the size that a model may want."""
    from penstock.tokenize.definition import padded_vocab_size

    if not tokenizer.get("added_tokens"):
        return []
    shown = visible(", ".join(tokenizer["added_tokens"]), lines=False)
    return [
        ("added tokens", shown),
        (
            "vocab_size",
            f"{tokenizer['vocab_size']:,}; next multiple of 64: "
            f"{padded_vocab_size(tokenizer['vocab_size']):,}",
        ),
    ]


def _id_text(token: int | None) -> str:
    return "none" if token is None else f"{token}"


def _parts_text(summary: "Summary") -> str:
    parts = number_of(summary.num_parts, "part")
    return parts if summary.num_builds == 1 else f"{parts}, {summary.num_builds} builds"


def _inputs_text(summary: "Summary") -> str:
    """How many inputs there are, and the names of the first."""
    inputs = summary.inputs
    size = size_text(sum(each["bytes"] for each in inputs))
    names = [visible(each["name"], lines=False) for each in inputs[:_SHOWN_INPUTS]]
    if len(inputs) == 1:
        return f"{names[0]}, {size}"
    more = len(inputs) - len(names)
    rest = [f"and {more:,} more"] if more else []
    return "\n".join([f"{len(inputs):,} files, {size}", *names, *rest])
