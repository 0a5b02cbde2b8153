"""What a run would read, before it is started: a dry run.

Every number about rows is computed from the plan, which is the plan of the run, so it is what the
run delivers. Speed is measured for half a second on this machine.
"""

import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from penstock.inspect.runs import OpenedRun, RunSteps
from penstock.inspect.seen import targets_exact, targets_in
from penstock.order.plan import Plan
from penstock.rows.documents import Documents
from penstock.rows.packs import Packs
from penstock.rows.protocol import Rows, WrappedRows
from penstock.rows.windows import Windows
from penstock.store.reader import TokenStore
from penstock.train.metrics import known_peak_flops, peak_flops

_MOST_INTERVALS = 10
_COUNTED_ROWS = 20_000_000  # without weights, rows are counted one by one, at 30 ns each
_MEASURED_SECONDS = 0.5
_SAMPLED_TOKENS = 1 << 26
_SAMPLED_PARTS = 256
_BLOCK_BYTES = 4 << 20  # of tokens that a loader reads at once
_USED_PEAK = 0.5  # of the arithmetic of a GPU, which few training runs exceed
_BYTES_PER_WEIGHT = 12  # of a checkpoint: the weight and two moments of Adam, in float32
_MANY_EPOCHS = 4  # repeated data is nearly as good as new data up to here (Muennighoff et al. 2023)
_MUCH_PADDING = 0.05

Json = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceForecast:
    """One source of a run."""

    source: str
    kind: str
    """Windows, Packs or another class of rows."""
    stores: tuple[str, ...]
    rows: int
    """All rows of the source: one epoch."""
    tokens: int | None
    """Targets in all rows."""
    run_rows: int
    """Rows that the run reads; a row counts once for each epoch."""
    run_tokens: int | None
    """Targets in these rows, by the mean of all rows."""
    tokens_exact: bool
    """Whether `run_tokens` and `trained_tokens` are exact: all rows have equally many targets, or
    the run reads whole epochs, and nothing is masked."""
    trained_tokens: int | None
    """Targets that no loss mask excludes, by the mean of the store."""
    asked: float | None
    """The share of the rows that its weight asks for."""
    delivered: float
    epochs: float
    repeats_from: int | None
    """The step at which its second epoch begins; None if the run ends before."""
    padding: float
    """The share of columns that hold no token."""
    split_documents: int
    """Documents that are longer than a row, and continue in another row."""
    cut_documents: int
    cut_tokens: int
    """Tokens that are in no row, because their documents are cut off."""
    unread_targets: int
    """Tokens that are the target of no row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """Some consecutive steps, and the rows of each source in them."""

    first_step: int
    last_step: int
    rows: dict[str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """How fast batches are made, and how fast a GPU would take them."""

    tokens_per_second: float
    """Measured on this machine, by one process."""
    gpu: str
    gpu_tokens_per_second: float
    """What one such GPU needs, at half of its peak, for the model of the recipe."""
    is_here: bool
    """Whether this machine has that GPU; otherwise, an H100 is an example."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """What a run would read."""

    digest: str
    """The digest of the plan."""
    steps: int | None
    """None if the recipe does not determine the number of steps."""
    rows_per_step: int | None
    rows: int
    """Rows of the run; of one epoch if the number of steps is not known."""
    sources: tuple[SourceForecast, ...]
    intervals: tuple[Interval, ...]
    store_bytes: int
    checkpoint_bytes: int
    """Of one checkpoint, about."""
    memory_bytes: int
    """Of one process that reads the data, about, without the model."""
    speed: Speed | None
    warnings: tuple[str, ...]

    def to_json(self) -> Json:
        """Return it as JSON."""
        return asdict(self)


def forecast(run: OpenedRun, *, measured: bool = True) -> Forecast:
    """Return what a run would read.

    Args:
        run: The recipe or the run.
        measured: Whether to measure the speed of the loader, for half a second.
    """
    plan, steps = run.plan, run.steps
    end = steps.end
    per_step = None
    if steps.total:
        first = steps.span(steps.first)
        per_step = first[1] - first[0]
    num_rows = min(sum(plan.sizes), plan.end) if end is None else end
    sources = _sources(plan, steps, num_rows)
    speed = _measure(run, per_step or 8) if measured else None
    return Forecast(
        digest=plan.digest,
        steps=steps.total,
        rows_per_step=per_step,
        rows=num_rows,
        sources=sources,
        intervals=_intervals(plan, steps),
        store_bytes=sum(_store_bytes(rows) for rows in plan.sources.values()),
        checkpoint_bytes=_BYTES_PER_WEIGHT * run.job.model.matrix_weights,
        memory_bytes=_memory(run, per_step or 8),
        speed=speed,
        warnings=tuple(_warnings(run, sources, speed)),
    )


def _sources(plan: Plan, steps: RunSteps, num_rows: int) -> tuple[SourceForecast, ...]:
    found = []
    for name, run_rows, asked, repeats_at in plan.outlook(num_rows):
        rows = plan.sources[name]
        inner = _unwrapped(rows)
        tokens = targets_in(rows, run_rows)
        known = steps.total is not None and repeats_at is not None
        cut = inner if isinstance(inner, Documents) else None
        found.append(
            SourceForecast(
                source=name,
                kind=rows.type_name,
                stores=tuple(str(each.path) for each in rows.stream.members) if rows.stream else (),
                rows=len(rows),
                tokens=rows.num_tokens,
                run_rows=run_rows,
                run_tokens=tokens,
                tokens_exact=targets_exact(plan, name, run_rows),
                trained_tokens=None if tokens is None else round(tokens * _trained_share(rows)),
                asked=None if asked is None else asked / max(1, num_rows),
                delivered=run_rows / max(1, num_rows),
                epochs=run_rows / max(1, len(rows)),
                repeats_from=steps.at(repeats_at) if known and repeats_at is not None else None,
                padding=inner.padding_share if isinstance(inner, Packs) else 0.0,
                split_documents=inner.num_split if isinstance(inner, Packs | Documents) else 0,
                cut_documents=cut.cut_documents if cut else 0,
                cut_tokens=cut.cut_tokens if cut else 0,
                unread_targets=inner.unread_targets if isinstance(inner, Windows) else 0,
            )
        )
    return tuple(found)


def _unwrapped(rows: Rows) -> Rows:
    while isinstance(rows, WrappedRows):
        rows = rows.rows
    return rows


def _trained_share(rows: Rows) -> float:
    """Return the share of tokens that loss masks include; of a sample, if there are many."""
    stream = rows.stream
    if stream is None or not stream.has_loss:
        return 1.0
    total = trained = 0
    # Each mask is a file that has to be opened, so at most this many, spread evenly.
    num_sampled = min(_SAMPLED_PARTS, len(stream.ends))
    most = max(1, _SAMPLED_TOKENS // max(1, num_sampled))
    for sampled in range(num_sampled):
        number = sampled * len(stream.ends) // num_sampled
        mask = stream.loss(number)
        size = int(stream.ends[number] - stream.starts[number])
        some = min(size, most)
        total += some
        trained += some if mask is None else int((mask[:some] != 0).sum())
    return trained / max(1, total)


def _intervals(plan: Plan, steps: RunSteps) -> tuple[Interval, ...]:
    """Return the rows of each source over the run, in at most ten intervals of steps."""
    if not steps.total:
        return ()
    most = min(_MOST_INTERVALS, steps.total)
    if not plan.is_weighted and len(plan.names) > 1 and (plan.epoch_rows or 0) > _COUNTED_ROWS:
        most = 1
    edges = [steps.first + steps.total * each // most for each in range(most + 1)]
    before = dict.fromkeys(plan.names, 0)
    found = []
    for first, stop in pairwise(edges):
        counts = plan.counts(steps.span(stop - 1)[1])
        rows = {name: counts[name] - before[name] for name in plan.names}
        found.append(Interval(first_step=first, last_step=stop - 1, rows=rows))
        before = counts
    return tuple(found)


def _store_bytes(rows: Rows) -> int:
    stores = rows.stream.members if rows.stream is not None else ()
    found = 0
    for each in stores:
        if isinstance(each, TokenStore):
            found += each.manifest.parts.num_bytes
        else:
            found += int(each.part_tokens.sum()) * each.dtype.itemsize
    return found


def _memory(run: OpenedRun, per_step: int) -> int:
    """Return the bytes that the loader of one process needs, about."""
    length = next(iter(run.plan.sources.values())).length
    ids = per_step * (length + 1) * 4
    # Blocks that are ready, being made and being used; and two batches of int64 inputs and targets.
    return (run.job.training.prefetch + 2) * max(_BLOCK_BYTES, ids) + 2 * 16 * per_step * length


def _measure(run: OpenedRun, per_step: int) -> Speed:
    """Measure how many tokens a loader gives per second, and compare with the need of a GPU."""
    import torch

    from penstock.loader.loader import Loader

    loader = Loader(run.plan, global_batch_size=per_step, rank=0, world_size=1)
    num_tokens, begun = 0, 0.0
    for batch in loader:
        if begun:  # the first batch opens files
            num_tokens += batch["inputs"].numel()
        begun = begun or time.perf_counter()
        if time.perf_counter() - begun > _MEASURED_SECONDS:
            break
    seconds = max(1e-9, time.perf_counter() - begun)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    peak = peak_flops(device)
    gpu = "H100" if peak is None else torch.cuda.get_device_name(device)
    return Speed(
        tokens_per_second=num_tokens / seconds,
        gpu=gpu,
        gpu_tokens_per_second=_USED_PEAK
        * (known_peak_flops(gpu) if peak is None else peak)
        / run.job.model.flops_per_token,
        is_here=peak is not None,
    )


def _warnings(
    run: OpenedRun, sources: tuple[SourceForecast, ...], speed: Speed | None
) -> list[str]:
    """Return what a user should know before the run is started, the most important first."""
    found = []
    asked = run.job.training.steps
    if asked is not None and run.steps.total is not None and run.steps.total < asked:
        found.append(f"the data ends after {run.steps.total:,} of {asked:,} steps")
    if run.steps.total is None:
        found.append(
            "the recipe does not determine the number of steps and of rows in each; set "
            "training.steps and training.global_batch_size to see the whole run"
        )
    for each in sources:
        found += _source_warnings(each)
    found += _shared_data(run)
    # Without a GPU on this machine, it is not known which one the model will be trained on.
    is_slow = speed is not None and speed.tokens_per_second < speed.gpu_tokens_per_second
    if speed is not None and speed.is_here and is_slow:
        found.append(
            f"this machine prepares {speed.tokens_per_second:,.0f} tokens/s, and one {speed.gpu} "
            f"may need {speed.gpu_tokens_per_second:,.0f}"
        )
    return found


def _source_warnings(each: SourceForecast) -> list[str]:
    found = []
    if not each.run_rows:
        found.append(f"{each.source} is not read at all")
    if each.epochs > _MANY_EPOCHS:
        found.append(
            f"{each.source} is read {each.epochs:,.1f} times; after {_MANY_EPOCHS} epochs, "
            "repeated data helps less and less"
        )
    if each.padding > _MUCH_PADDING:
        found.append(f"{each.padding:.0%} of the columns of {each.source} are padding")
    if each.cut_documents:
        found.append(
            f"{each.cut_tokens:,} tokens of {each.cut_documents:,} documents of {each.source} are "
            "cut off"
        )
    return found


def _shared_data(run: OpenedRun) -> list[str]:
    """Return a warning for stores that two sources share, or training and validation."""
    users: dict[str, list[str]] = {}
    everything = dict(run.plan.sources)
    if run.job.val is not None:
        everything["the validation"] = run.job.val
    for name, rows in everything.items():
        for member in rows.stream.members if rows.stream is not None else ():
            users.setdefault(member.digest, []).append(name)
    return [
        f"{' and '.join(dict.fromkeys(names))} read the same store"
        for names in users.values()
        if len(set(names)) > 1
    ]
