"""`penstock inspect`: the rows of a step, as text or token by token."""

from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli import options
from penstock.cli.marks import LEGEND, MARKS, print_marked
from penstock.cli.options import argument, option
from penstock.cli.terminal import aligned, console, print_json, visible, write
from penstock.cli.train import Settings
from penstock.cli.units import estimate_text, number_of

if TYPE_CHECKING:
    from rich.console import Console

    from penstock.inspect import InspectedStep, OpenedRun, Seen
    from penstock.inspect.steps import Segment, StepRow
    from penstock.tokenize.definition import Decoder

Run = Annotated[str, argument("A recipe (.toml), or the directory of a run.", "RECIPE|RUN")]
TokenizerName = Annotated[
    str | None, option("The tokenizer of the stores, if penstock does not find it.", "NAME")
]
_SHOWN_CHARACTERS = 600
_SHOWN_IDS = 100


def opened(source: str, settings: list[str] | None, *, as_json: bool) -> "OpenedRun":
    """The recipe or run that a command names, after its settings were changed."""
    from penstock.inspect import open_run
    from penstock.train.command import recipe_changes

    # With --json, stdout must hold one JSON object and nothing else.
    def log(event: str) -> None:
        if not as_json:
            console(stderr=True).print(visible(event), soft_wrap=True)

    return open_run(source, recipe_changes(settings or []), log)


def inspect_command(
    run: Run,
    step: Annotated[int, option("The step; the first one is 1.", "NUMBER", "--step", "-s")],
    rank: Annotated[
        int | None, option("Only the rows of this rank.", "NUMBER", "--rank", least=0)
    ] = None,
    world_size: Annotated[
        int | None, option("The number of ranks, for --rank.", "NUMBER", "--world-size", least=1)
    ] = None,
    around: Annotated[
        int, option("Also list this many steps before and after.", "STEPS", "--around", least=0)
    ] = 0,
    rows: Annotated[int, option("Show at most this many rows.", "NUMBER", "--rows", least=1)] = 4,
    full: Annotated[bool, option("Show all text of each row.", None, "--full")] = False,
    tokens: Annotated[bool, option("Show one token per line.", None, "--tokens")] = False,
    tokenizer: TokenizerName = None,
    settings: Settings = None,
    as_json: options.AsJson = False,
) -> None:
    """Show the rows of a step, with their text and documents.

    The rows are computed from the recipe and the stores, at any step, before or after it was
    trained. Steps are numbered as in metrics.jsonl and in the names of checkpoints: the first is
    1. Of a run, the loss of the step is shown too. The last lines say what was read of each source
    when the step was done.

    Text after + is trained on: its tokens are targets. Text after - is only read, such as the
    question in a conversation. A newline of the text is shown as ↵, and control characters as
    escapes.

    penstock inspect runs/mine --step 1200 --around 3
    """
    from penstock.inspect import inspect_step, seen

    found = opened(run, settings, as_json=as_json)
    ranks = world_size or (found.record.world_size if found.record is not None else 1)
    if rank is not None and rank >= ranks:
        raise typer.BadParameter(
            f"--rank {rank} needs more than {ranks:,} ranks; give their number with --world-size."
        )
    shard = {} if rank is None else {"rank": rank, "world_size": ranks}
    name = tokenizer or found.tokenizer
    # JSON has all rows, and a terminal the first ones.
    most = None if as_json else rows
    inspected = inspect_step(found.plan, found.steps, step, most=most, tokenizer=name, **shard)
    has_seen = seen(found.plan, found.steps, step)
    if as_json:
        values = {**inspected.to_json(), "metrics": _metrics(found, step)}
        values["seen"] = has_seen.to_json()["sources"]
        print_json(values | ({"around": _around(found, step, around)} if around else {}))
        return
    out = console()
    _show_heading(out, found, inspected)
    if around:
        _show_around(found, step, around)
    for row in inspected.rows:
        _show_row(out, row, full=full, known=_tokenizer(found, row, name) if tokens else None)
    total = inspected.positions[1] - inspected.positions[0]
    total = total // ranks if rank is not None else total
    if total > len(inspected.rows):
        more = number_of(total - len(inspected.rows), "more row")
        write(f"\n… and {more}; --rows {total} shows all")
    _show_seen(has_seen)


def _show_seen(has_seen: "Seen") -> None:
    """Print what was read of each source when the step was done."""
    write(f"\nafter step {has_seen.step:,}, {has_seen.position:,} rows were read:")
    table = [["", "rows", "targets", "epochs", "of the next epoch"]]
    for each in has_seen.sources:
        share = f"{each.rows_in_last_epoch:,} of {each.rows_in_epoch:,} rows"
        targets = estimate_text(each.tokens, is_exact=each.tokens_exact)
        table.append([each.source, f"{each.rows:,}", targets, f"{each.epochs:,}", share])
    for row in aligned(table):
        write(row)


def _tokenizer(run: "OpenedRun", row: "StepRow", name: str | None) -> "Decoder | str":
    """The tokenizer of a row; "" if it is not known, which means that ids are shown alone."""
    from penstock.errors import MissingTokenizerError
    from penstock.loader.explain import RowTokenizers

    try:
        return RowTokenizers(run.plan, name).of(row.source) or ""
    except MissingTokenizerError:
        return ""


def _metrics(run: "OpenedRun", step: int) -> dict[str, object] | None:
    """The numbers of a step that a run has logged; None if it has not."""
    return run.metrics.get(step)


def _around(run: "OpenedRun", step: int, steps: int) -> list[dict[str, object]]:
    """The steps around a step: their positions, the rows of each source, and their losses."""
    from penstock.inspect import source_counts

    first = max(run.steps.first, step - steps)
    last = step + steps if run.steps.last is None else min(step + steps, run.steps.last)
    counts = source_counts(run.plan, run.steps, first, last)
    return [
        {
            "step": number,
            "positions": run.steps.span(number),
            "rows": rows,
            "loss": run.metrics.get(number, {}).get("loss"),
            "norm": run.metrics.get(number, {}).get("norm"),
        }
        for number, rows in zip(range(first, last + 1), counts, strict=True)
    ]


def _show_heading(out: "Console", run: "OpenedRun", found: "InspectedStep") -> None:
    start, stop = found.positions
    out.print(
        f"step {found.step:,}: positions {start:,} to {stop - 1:,}, "
        f"{number_of(stop - start, 'row')}",
        style="bold",
        soft_wrap=True,
    )
    metrics = _metrics(run, found.step)
    if metrics is not None:
        loss, norm = (_number(metrics.get(name)) for name in ("loss", "norm"))
        write(f"loss {loss}, gradient norm {norm}")
    elif run.record is not None:
        write("the run has not logged a loss for this step")
    write(LEGEND)


def _number(value: object) -> str:
    """A loss with four digits; "-" for one that was not logged, or was not finite."""
    return f"{value:.4f}" if isinstance(value, int | float) else "-"


def _show_around(run: "OpenedRun", step: int, steps: int) -> None:
    """Print a line for each of the steps around a step, with its loss."""
    table = [["", "step", "loss", "norm", *run.plan.names]]
    for each in _around(run, step, steps):
        numbers = [_number(each[name]) for name in ("loss", "norm")]
        counts = each["rows"]
        assert isinstance(counts, dict)
        mark = ">" if each["step"] == step else ""
        table.append([mark, f"{each['step']:,}", *numbers, *(f"{n:,}" for n in counts.values())])
    for line in aligned(table):
        write(line)


def _show_row(out: "Console", row: "StepRow", *, full: bool, known: "Decoder | str | None") -> None:
    """Print one row: where it is, and its documents with their text or tokens."""
    where = f"row {row.number}, position {row.position:,}: row {row.sample:,} of {row.source}"
    counts = f"{row.num_trained:,} of {number_of(len(row.tokens), 'token')} trained on"
    out.print(visible(f"\n{where}, epoch {row.epoch:,}; {counts}"), style="bold", soft_wrap=True)
    left = len("".join(each.text or "" for each in row.segments)) if full else _SHOWN_CHARACTERS
    document = None
    for segment in row.segments:
        if segment.document is not None and segment.document != document:
            document = segment.document
            out.print(f"  {_document_line(row, document)}", style="cyan", soft_wrap=True)
        if known is not None:
            _show_tokens(segment, known)
        elif segment.text is None:
            ids = " ".join(map(str, segment.tokens[: None if full else _SHOWN_IDS]))
            more = " …" * (not full and len(segment.tokens) > _SHOWN_IDS)
            write(f"  {MARKS[segment.trained]}ids {ids}{more}")
        elif left > 0:
            print_marked(out, segment.text[:left], trained=segment.trained)
            left -= len(segment.text)
    if known is None and left < 0:
        write("  … shortened; --full shows all text")
    if known is None and any(each.text is None for each in row.segments):
        write("  the tokenizer is not known here: give it with --tokenizer to see text")


def _document_line(row: "StepRow", number: int) -> str:
    each = row.documents[number]
    last = each.first_token + each.num_tokens
    place = f"{each.file}:{each.record}"
    tokens = f"tokens {each.first_token:,} to {last:,}"
    return visible(f"│ {place}, document {each.document:,} of {each.store}, {tokens}", lines=False)


def _show_tokens(segment: "Segment", known: "Decoder | str") -> None:
    """Print a line for each token: its column, its id, whether it is a target, and its text."""
    mark = MARKS[segment.trained]
    for offset, token in enumerate(segment.tokens):
        text = "" if isinstance(known, str) else repr(known.decode([token]))
        write(f"  {segment.column + offset:6,} {token:8} {mark}{visible(text, lines=False)}")
