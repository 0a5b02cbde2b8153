"""`penstock info`: the contents of a store, in numbers."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli import options, terminal
from penstock.cli.options import by_side, open_at
from penstock.cli.token_files import (
    TokenColumn,
    TokenDtype,
    TokenFormat,
    TokenOptions,
    TokenTokenizer,
    VocabSize,
    open_files,
    show_files,
)
from penstock.cli.units import number_of, size_text
from penstock.errors import StoreBusyError

if TYPE_CHECKING:
    from penstock.store.summary import Bin, Summary

_SHOWN_INPUTS = 2
# Beside the names of the facts, in a terminal of 80 columns.
_TABLE_WIDTH = 62
_PLAIN = ("text", "jsonl", "texts")
# Nine heights of one character: from empty to eight eighths.
_BLOCKS = " ▁▂▃▄▅▆▇█"


def info_command(
    store: options.AnyStore,
    format: TokenFormat = None,
    dtype: TokenDtype = None,
    column: TokenColumn = None,
    vocab_size: VocabSize = None,
    tokenizer: TokenTokenizer = None,
    as_json: options.AsJson = False,
) -> None:
    """Show the contents of a store.

    Prints the numbers of documents and tokens, the lengths of documents, the tokenizer, the
    inputs, and the records that were rejected. Reads the manifest and the document bounds, but
    no tokens. For a store that was built with --split, shows both sides. For a store that is
    still being built, shows how far the build is.

    Token files of other tools (docs/formats.md), directories and patterns of them are shown too.
    """
    from penstock.store.manifest import FILE_NAME
    from penstock.store.summary import summarize

    given = TokenOptions(format, dtype, vocab_size, tokenizer, column)
    if (files := open_files(store, given)) is not None:
        show_files(files, as_json=as_json)
        return
    state = _build_state(store) if isinstance(store, Path) else None
    if state is not None and isinstance(store, Path) and not (store / FILE_NAME).exists():
        if as_json:
            terminal.print_json(state)
        else:
            _show_state(state)
        return
    summaries = {side: summarize(opened) for side, opened in open_at(store).items()}
    if as_json:
        terminal.print_json(by_side({side: asdict(summary) for side, summary in summaries.items()}))
        return
    for number, summary in enumerate(summaries.values()):
        if number:
            terminal.write("")
        show_summary(summary)
    if state is not None:  # a finished store, to which a build appends
        _show_state(state)
    if not isinstance(store, Path):
        return
    whole = store.resolve()
    if (unfinished := whole.parent / f".{whole.name}.new").exists():
        terminal.write(
            f"{unfinished} holds an unfinished replacement of this store: run the same penstock "
            "build command again to resume it, or delete that directory"
        )


def _build_state(path: Path) -> dict[str, Any] | None:
    """How far the build in a directory is; None if there is no unfinished build."""
    from penstock.disk import lock_holder, locked
    from penstock.sources.batch import Tally
    from penstock.store.journal import Journal
    from penstock.store.manifest import FILE_NAME
    from penstock.store.part import SIDES

    if not path.is_dir():
        return None  # opening the store says what is wrong
    # The journal of a split store is beside its two sides.
    is_side = path.name in SIDES and not (path / ".building.json").exists()
    whole = path.parent if is_side else path
    journal = Journal(whole)
    try:
        begun, sealed = journal.begun(), journal.sealed()
    except FileNotFoundError:  # the build ended just now, and removed its records
        return None
    if not begun or (is_side and (path / FILE_NAME).exists()):
        return None
    process = None
    with suppress(OSError):  # if nobody can write here, nobody builds
        try:
            with locked(whole):  # for a moment, to see whether another process holds the lock
                pass
        except StoreBusyError:
            process = lock_holder(whole)
    inputs, tally = begun["inputs"], Tally.total(record.tally for record in sealed)
    # How much text a compressed file or a table contains is not known before it is read.
    is_plain = all(not each["compression"] and each["format"] in _PLAIN for each in inputs)
    num_bytes = sum(each["bytes"] for each in inputs)
    return {
        "store": str(path),
        "finished": False,
        "process": process,
        "failed": (whole / ".failed").exists(),
        "text_bytes": tally.total_bytes,
        "input_bytes": num_bytes,
        "share": tally.total_bytes / max(1, num_bytes) if is_plain else None,
        "num_parts": sum(len(record.parts) for record in sealed),
        "num_documents": tally.documents,
        "num_tokens": sum(part.num_tokens for each in sealed for part in each.parts.values()),
        "num_rejects": tally.rejected,
    }


def _show_state(state: dict[str, Any]) -> None:
    """Print how far an unfinished build is, and how to finish it."""
    share = "" if state["share"] is None else f"{state['share']:.0%} of the text: "
    text, inputs = size_text(state["text_bytes"]), size_text(state["input_bytes"])
    rows: list[tuple[str, str | list[str]]] = [
        ("done", f"{share}{text} in {number_of(state['num_parts'], 'finished part')}"),
        ("inputs", f"{inputs} on disk"),
        ("documents", f"{state['num_documents']:,} so far"),
        ("tokens", f"{state['num_tokens']:,} so far"),
        ("rejected", f"{state['num_rejects']:,} so far"),
    ]
    if state["process"] is not None:
        terminal.print_facts(f"{state['store']} is being built by process {state['process']}", rows)
        return
    if state["failed"]:
        terminal.print_facts(f"{state['store']} holds a build that failed", rows)
        terminal.write("next: change what its message says, and run penstock build again")
        return
    terminal.print_facts(
        f"{state['store']} holds an unfinished build; no process continues it", rows
    )
    terminal.write("next: run the same penstock build command again to resume it")


def show_summary(summary: "Summary") -> None:
    """Print the numbers of one store as a table."""
    facts = {
        "documents": terminal.documents_text(summary.num_documents, summary.num_pieces),
        "tokens": f"{summary.num_tokens:,}",
    }
    # A chat store records which tokens are trained on; their share is shown instead of the bytes
    # per token.
    if summary.num_trained is not None:
        share = summary.num_trained / max(1, summary.num_tokens)
        facts["trained"] = f"{summary.num_trained:,} tokens, {share:.1%}"
    elif summary.bytes_per_token is not None:
        facts["bytes/token"] = f"{summary.bytes_per_token:.2f}{_both(summary)}"
    else:
        facts["bytes/token"] = "not recorded"
    rows: list[tuple[str, str | list[str]]] = [*facts.items()]
    # Of one document, the table would repeat the number of tokens nine times.
    if summary.lengths and summary.num_pieces > 1:
        # All fields but the histogram are quantiles.
        quantiles = asdict(summary.lengths)
        del quantiles["histogram"]
        cells = [list(quantiles), [f"{round(value):,}" for value in quantiles.values()]]
        table = terminal.aligned(cells)
        if len(table[0]) > _TABLE_WIDTH:
            halves = (slice(len(quantiles) // 2), slice(len(quantiles) // 2, None))
            table = [line for half in halves for line in terminal.aligned([c[half] for c in cells])]
        rows.append(("lengths", [*table, *histogram_lines(summary.lengths.histogram)]))
    terminal.print_facts(summary.store, [*rows, *_origin(summary)])


def _origin(summary: "Summary") -> terminal.Facts:
    """How the store was built: tokenizer, files and rejected records."""
    tokenizer = summary.tokenizer
    # An object of the user's own class cannot be serialised. It is known by the ids that it gives
    # for a sample text, and errors show the digest of these ids too.
    digest = str(tokenizer["digest"] or tokenizer["canary"] or "none")[:12]
    eos, bos = ("none" if each is None else each for each in (summary.eos_id, summary.bos_id))
    builds = f", {summary.num_builds} builds" if summary.num_builds > 1 else ""
    parts = f"{number_of(summary.num_parts, 'part')}{builds}"
    size = tokenizer["vocab_size"]
    named = [f"{tokenizer['name']}, {size:,} tokens, digest {digest}"]
    if not tokenizer["digest"] and tokenizer["canary"]:
        named.append("an object: pass it again each time")
    facts: dict[str, str | list[str]] = {"tokenizer": named}
    if tokenizer.get("added_tokens"):
        from penstock.tokenize.definition import padded_vocab_size

        # Models are usually made with a multiple of 64 embeddings; see `penstock.train.config`.
        facts["added tokens"] = ", ".join(tokenizer["added_tokens"])
        facts["vocab_size"] = f"{size:,}; next multiple of 64: {padded_vocab_size(size):,}"
    facts |= {
        "edges": f"eos {eos}, bos {bos}",
        "on disk": f"{size_text(summary.disk_bytes)}, {summary.dtype}, {parts}",
        "inputs": _inputs(summary),
        "document is": summary.documents,
    }
    if summary.side:
        facts["split"] = f"{summary.split}, this is {summary.side}"
    if summary.skipped_files:
        from penstock.sources.listing import skipped_text

        facts["not read"] = skipped_text(summary.skipped_files)
    if summary.num_skipped:
        facts["skipped"] = number_of(summary.num_skipped, "blank record") + _both(summary)
    if summary.num_replaced:
        repaired = number_of(summary.num_replaced, "document")
        facts["repaired"] = f"{repaired} with bytes that are not UTF-8{_both(summary)}"
    return [
        *facts.items(),
        (
            "rejected",
            terminal.reasons_text(summary.rejects) + _both(summary) * bool(summary.rejects),
        ),
        ("digest", summary.digest[:16]),
    ]


def _both(summary: "Summary") -> str:
    """A note for numbers that a split store records for both of its sides together."""
    return ", train and val together" if summary.side else ""


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


def histogram_lines(bins: "Sequence[Bin]", *, width: int = 60, height: int = 3) -> list[str]:
    """A bar chart of `height` lines over an axis with token counts.

    Each bin is one to three columns wide. A bin that is not empty shows at least the lowest
    block.

    >>> from penstock.store.summary import Bin
    >>> for line in histogram_lines([Bin(1, 1, 8), Bin(2, 2, 0), Bin(3, 3, 1)], height=1):
    ...     print(line)
    ███   ▁▁▁
    1  2
    """
    # Sixty bins of one column fit into a terminal of 80 columns, beside the names of the table.
    columns = max(1, min(3, width // len(bins)))
    tallest = max(each.num_documents for each in bins)
    # Heights in eighths of a line, rounded up: -(-a // b) is the ceiling of a / b.
    heights = [-(-each.num_documents * 8 * height // tallest) for each in bins]
    lines = []
    for level in reversed(range(height)):
        filled = [min(8, max(0, each - 8 * level)) for each in heights]
        lines.append("".join(_BLOCKS[each] * columns for each in filled).rstrip())
    return [*lines, _axis(bins, columns)]


def _axis(bins: "Sequence[Bin]", columns: int) -> str:
    """The smallest length of each bin, for as many bins as there is room."""
    line = ""
    for number, each in enumerate(bins):
        column = number * columns
        # Only powers of two are labelled: 1, 2, 4, 8. The bins between them begin at 3, 6, 12.
        is_power = each.first & (each.first - 1) == 0
        if not line or (is_power and column >= len(line) + 2):
            line = line.ljust(column) + _binary_text(each.first)
    return line


def _binary_text(number: int) -> str:
    """A power of two with a unit, such as 512, 1k, 64k or 1M."""
    # Units are multiples of 1,024, because the bins of the histogram begin at powers of two.
    for power, unit in ((30, "G"), (20, "M"), (10, "k")):
        if number >= 1 << power and number % (1 << power) == 0:
            return f"{number >> power}{unit}"
    return f"{number}"
