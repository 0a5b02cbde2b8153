"""The parts of a page that are about a recipe or a run."""

from collections import defaultdict
from itertools import pairwise

import numpy as np

from penstock.cli.units import estimate_text, size_text
from penstock.inspect.steps import StepRow, read_rows
from penstock.order.plan import Plan
from penstock.order.shuffle import mode_to_json
from penstock.report.figures import (
    Chart,
    RowPiece,
    Table,
    epoch_chart,
    mixture_chart,
    row_chart,
    shuffle_chart,
)
from penstock.report.subject import Subject
from penstock.train.display import draw_curve
from penstock.train.logs import Line, read_metrics

_INTERVALS = 60
_LEAST_ROWS = 50  # of an interval; in fewer rows, a share of 30 % cannot be seen
_COUNTED_ROWS = 1_000_000  # without weights, rows are counted one by one, for each interval
_DRAWN_ROWS = 16
_DOTS = 1_500
_NEIGHBOURS = 65_536
Context = dict[str, object]


def overview(subject: Subject) -> Context:
    """Return the numbers of the whole run."""
    run, found = subject.run, subject.forecast
    assert run is not None
    mode = mode_to_json(run.plan.shuffle)["mode"]
    facts = [
        ("steps", "not determined by the recipe" if found.steps is None else f"{found.steps:,}"),
        ("rows per step", "-" if found.rows_per_step is None else f"{found.rows_per_step:,}"),
        ("rows", f"{found.rows:,}" + (" in one epoch" if found.steps is None else "")),
        ("columns of a row", f"{run.job.model.length:,}"),
        ("sources", f"{len(found.sources):,}"),
        ("shuffle", f"{mode}, seed {run.plan.seed}"),
        ("stores on disk", size_text(found.store_bytes)),
        ("digest of the plan", found.digest[:16]),
    ]
    if run.record is not None and run.steps.num_recorded:
        facts.insert(1, ("steps that were taken", f"{run.steps.num_recorded:,}"))
    return {"facts": facts, "warnings": found.warnings}


def mixture(subject: Subject) -> Context:
    """Return the shares of the sources over time, and how often each is read."""
    found = subject.forecast
    edges, counts, unit = _counts(subject)
    charts = []
    if len(counts) > 1 and len(edges) > 1:
        charts.append(mixture_chart(edges, counts, unit, "The mixture over time"))
    epochs = {each.source: each.epochs for each in found.sources}
    charts.append(epoch_chart(epochs, "Epochs of each source"))
    rows = [
        (
            each.source,
            f"{each.rows:,}",
            f"{each.run_rows:,}",
            "-" if each.asked is None else f"{each.asked:.2%}",
            f"{each.delivered:.2%}",
            f"{each.epochs:,.2f}",
            "-" if each.repeats_from is None else f"step {each.repeats_from:,}",
            estimate_text(each.run_tokens, is_exact=each.tokens_exact),
        )
        for each in found.sources
    ]
    heads = ("source", "rows", "rows read", "asked", "delivered", "epochs", "repeats from")
    return {"charts": charts, "table": Table((*heads, "targets"), rows)}


def _counts(subject: Subject) -> tuple[list[int], dict[str, list[int]], str]:
    """Return the edges of intervals, the rows of each source in each, and what edges count."""
    run, steps = subject.run, subject.steps
    assert run is not None
    plan = run.plan
    total = steps.total or 0
    if not total:  # the data is shorter than a step
        return [], {name: [] for name in plan.names}, "step"
    few = plan.is_weighted or len(plan.names) == 1 or sum(plan.sizes) <= _COUNTED_ROWS
    if run.steps.total is not None and not few:
        parts = subject.forecast.intervals
        edges = [*(each.first_step for each in parts), parts[-1].last_step + 1] if parts else []
        return edges, {name: [each.rows[name] for each in parts] for name in plan.names}, "step"
    count = min(_INTERVALS, total, max(4, subject.num_rows // _LEAST_ROWS))
    edges = [steps.first + total * each // max(1, count) for each in range(count + 1)]
    at = [steps.span(each)[0] for each in edges[:-1]] + [steps.span(edges[-1] - 1)[1]]
    upto = [plan.counts(each) for each in at]
    counts = {name: [two[name] - one[name] for one, two in pairwise(upto)] for name in plan.names}
    if run.steps.total is None:  # the recipe does not say where a step ends
        return at, counts, "row"
    return edges, counts, "step"


def packing(subject: Subject) -> Context:
    """Return how documents are arranged in rows."""
    run = subject.run
    assert run is not None
    end = min(subject.steps.end or 0, _DRAWN_ROWS)
    rows = read_rows(run.plan, np.arange(end), 0, subject.tokenizer) if end else []
    charts = []
    if rows:
        widths = [max(_width(run.plan, each), len(each.tokens)) for each in rows]
        title = f"Documents in the first {len(rows):,} rows"
        charts.append(row_chart([_drawn(each) for each in rows], widths, title))
    table = [
        (
            each.source,
            each.kind,
            f"{each.padding:.2%}",
            f"{each.split_documents:,}",
            f"{each.cut_documents:,}",
            f"{each.cut_tokens:,}",
            f"{each.unread_targets:,}",
            estimate_text(each.trained_tokens, is_exact=each.tokens_exact),
        )
        for each in subject.forecast.sources
    ]
    heads = ("source", "rows are", "padding", "documents split", "documents cut", "tokens cut off")
    return {"charts": charts, "table": Table((*heads, "never a target", "trained on"), table)}


def _width(plan: Plan, row: StepRow) -> int:
    return int(plan.sources[row.source].length)


def _drawn(row: StepRow) -> list[RowPiece]:
    pieces = []
    at = 0
    for each in row.segments:
        document = 0 if each.document is None else each.document
        pieces.append(RowPiece(at, at + len(each.tokens), document, each.trained))
        at += len(each.tokens)
    return pieces


def shuffle(subject: Subject) -> Context:
    """Return a picture of the order: where in its source each row is."""
    run = subject.run
    assert run is not None
    plan = run.plan
    horizon = max(1, subject.steps.end or subject.num_rows)
    at = np.unique(np.linspace(0, horizon - 1, _DOTS).astype(np.int64))
    sources, _, samples = plan.locate(at)
    points: dict[str, tuple[list[int], list[float]]] = {}
    for number, name in enumerate(plan.names):
        chosen = sources == number
        points[name] = (
            at[chosen].tolist(),
            (samples[chosen] / max(1, plan.sizes[number])).tolist(),
        )
    title = "Where each row is in its source"
    chart = shuffle_chart(points, "position in the run", title)
    return {"charts": [chart], "table": _neighbours(plan, horizon), "num_dots": len(at)}


def _neighbours(plan: Plan, horizon: int) -> Table:
    """Return, for each source, how often a row is followed by its neighbour in the source."""
    count = min(horizon, _NEIGHBOURS)
    sources, _, samples = plan.locate(np.arange(count))
    rows = []
    for number, name in enumerate(plan.names):
        found = samples[sources == number]
        pairs = max(1, len(found) - 1)
        following = int((np.diff(found) == 1).sum())
        chance = 1 / max(1, plan.sizes[number])
        rows.append((name, f"{len(found):,}", f"{following / pairs:.3%}", f"{chance:.3%}"))
    return Table(("source", "rows compared", "followed by the next row", "by chance"), rows)


def loss(subject: Subject) -> Context:
    """Return the loss curve; it is read again at every call, because the run may continue."""
    run = subject.run
    assert run is not None
    lines = list(read_metrics(run.job.output / "metrics.jsonl"))
    title = "Loss, and the time that each step waited for data"
    target = run.job.training.target_val_loss
    svg = draw_curve(lines, title=title, target=target, in_file=False)
    return {"charts": [Chart(title, svg, _loss_table(lines))], "facts": _loss_facts(lines)}


def _loss_facts(lines: list[Line]) -> list[tuple[str, str]]:
    last: dict[str, Line] = defaultdict(dict)
    for each in lines:
        last[each["kind"]] = each
    facts = []
    for kind, name, title, digits in (
        ("step", "step", "steps", ".0f"),
        ("step", "loss", "training loss", ".4f"),
        ("val", "val_loss", "validation loss", ".4f"),
        ("step", "tokens", "tokens", ".0f"),
        ("step", "tokens_per_second", "tokens per second", ".0f"),
    ):
        value = last[kind].get(name)
        if isinstance(value, int | float):
            facts.append((title, f"{value:,{digits}}"))
    seconds = last["step"].get("seconds")
    if isinstance(seconds, int | float) and seconds:
        waited = sum(each.get("waited") or 0 for each in lines)
        facts.append(("waiting for data", f"{waited / seconds:.2%} of the time"))
    return facts


def _loss_table(lines: list[Line]) -> Table:
    steps = [each for each in lines if each["kind"] == "step"]
    every = max(1, -(-len(steps) // 12))
    rows = [
        (
            f"{each['step']:,}",
            "-" if each.get("loss") is None else f"{each['loss']:.4f}",
            "-" if each.get("waited") is None else f"{1000 * each['waited']:.2f}",
        )
        for each in steps[every - 1 :: every]
    ]
    return Table(("step", "loss", "ms waited for data"), rows)
