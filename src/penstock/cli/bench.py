"""`penstock bench`: how fast a store is read here, beside what GPUs need."""

import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.options import AsJson, StoreArgument, stores_at
from penstock.cli.progress import bar
from penstock.cli.tables import facts
from penstock.cli.terminal import console, print_json, visible
from penstock.cli.units import count_text, number_of, size_text

if TYPE_CHECKING:
    from penstock.loader.loader import Loader

__all__ = ["GPU_FLOPS", "NEEDS", "UTILISATION", "Need", "Speed", "bench_command", "measure_speed"]

GPU_FLOPS = 989e12
"""Operations a second that an H100 is specified for: bfloat16, dense."""
UTILISATION = 0.5
"""The share of them that a well tuned training run gets."""
_FLOPS_A_PARAMETER = 6  # and token: 2 forward, 4 backward

_NUM_TURNS = 3
_NUM_RESUMES = 20
_WARM_SHARE = 0.1  # of a turn: what was made ahead while the other kind was read


@dataclass(frozen=True, slots=True)
class Need:
    """A model on some GPUs."""

    model: str
    num_parameters: float
    num_gpus: int

    @property
    def tokens_per_second(self) -> float:
        """How many tokens all of its GPUs together take.

        >>> round(Need("GPT-2", 124e6, 1).tokens_per_second)
        664651
        """
        flops = self.num_gpus * GPU_FLOPS * UTILISATION
        return flops / (_FLOPS_A_PARAMETER * self.num_parameters)


NEEDS = (
    Need("GPT-2, 124M", 124e6, 1),
    Need("GPT-2, 124M", 124e6, 8),
    Need("1B", 1e9, 8),
    Need("8B", 8e9, 8),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """What was measured."""

    store: Path
    num_tokens: int
    num_rows: int
    length: int
    batch_size: int
    wide: float
    """Tokens a second as int64 tensors."""
    narrow: float
    """Tokens a second, ids as narrow as they are stored."""
    first_batch: float
    """Seconds from opening the store to the first batch."""
    resumes: tuple[float, ...]
    """Seconds from a state to its next batch, at places all over a run."""
    memory_bytes: int | None
    """How far anonymous memory grew; None where the system does not say."""

    def spell(self) -> dict[str, Any]:
        """As plain JSON."""
        return {
            "store": str(self.store),
            "num_tokens": self.num_tokens,
            "num_rows": self.num_rows,
            "length": self.length,
            "batch_size": self.batch_size,
            "tokens_per_second": {"int64": round(self.wide), "narrow": round(self.narrow)},
            "first_batch_seconds": self.first_batch,
            "resume_seconds": {
                "median": statistics.median(self.resumes),
                "worst": max(self.resumes),
            },
            "memory_bytes": self.memory_bytes,
            "needs": [
                {
                    "model": need.model,
                    "num_parameters": round(need.num_parameters),
                    "num_gpus": need.num_gpus,
                    "tokens_per_second": round(need.tokens_per_second),
                    "headroom": self.wide / need.tokens_per_second,
                }
                for need in NEEDS
            ],
        }


def measure_speed(
    path: Path,
    *,
    length: int,
    batch_size: int,
    seconds: float,
    tell: Callable[[int, int, str], None] = lambda *_: None,
) -> Speed:
    """Read a store for about that many seconds.

    Args:
        path: The directory of the store.
        length: Tokens in a row.
        batch_size: Rows in a batch.
        seconds: How long to read, in all.
        tell: Called with (done, total, words) as it goes.
    """
    from penstock.loader.loader import Loader
    from penstock.rows.windows import Windows
    from penstock.store.reader import TokenStore

    before = anonymous_bytes()
    begun = time.perf_counter()
    rows = Windows(TokenStore(path), length)
    wide = Loader(rows, batch_size)
    batches = {"int64": iter(wide)}
    next(batches["int64"])
    first_batch = time.perf_counter() - begun
    batches["narrow"] = iter(Loader(rows, batch_size, format="narrow"))
    rates: dict[str, list[float]] = {"int64": [], "narrow": []}
    peak = before or 0
    for turn in range(2 * _NUM_TURNS):
        kind = "narrow" if turn % 2 else "int64"
        tell(turn, 2 * _NUM_TURNS, f"reading {kind}")
        count, took = _read(batches[kind], seconds / (2 * _NUM_TURNS))
        rates[kind].append(count * batch_size * length / took)
        peak = max(peak, anonymous_bytes() or 0)
    del batches  # their threads end
    resumes = tuple(_resumes(wide, Loader(rows, batch_size), len(rows)))
    return Speed(
        store=path,
        num_tokens=rows.stream.num_tokens,
        num_rows=len(rows),
        length=length,
        batch_size=batch_size,
        wide=statistics.median(rates["int64"]),
        narrow=statistics.median(rates["narrow"]),
        first_batch=first_batch,
        resumes=resumes,
        memory_bytes=None if before is None else peak - before,
    )


def _read(batches: Iterator[Any], seconds: float) -> tuple[int, float]:
    """Batches read in that time, and the time that it really was."""
    warm = time.perf_counter() + _WARM_SHARE * seconds
    while time.perf_counter() < warm:
        next(batches)
    count = 0
    begun = now = time.perf_counter()
    while now - begun < seconds:
        next(batches)
        count += 1
        now = time.perf_counter()
    return count, now - begun


def _resumes(loader: "Loader", fresh: "Loader", num_rows: int) -> Iterator[float]:
    """Seconds from a state to its next batch, from the first row to the thousandth epoch."""
    for number in range(_NUM_RESUMES):
        loader.seek(1_000 * num_rows * number // (_NUM_RESUMES - 1))
        state = json.loads(json.dumps(loader.state_dict()))
        begun = time.perf_counter()
        fresh.load_state_dict(state)
        for _ in islice(fresh, 1):
            yield time.perf_counter() - begun


def anonymous_bytes() -> int | None:
    """Memory of this process that no file stands behind; None where the system does not say."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:  # macOS and Windows
        return None
    found = (int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))
    return next(found, None)


def bench_command(
    store: StoreArgument,
    length: Annotated[
        int, typer.Option(min=1, metavar="TOKENS", help="Tokens in the inputs of a row.")
    ] = 1024,
    batch_size: Annotated[int, typer.Option(min=1, metavar="ROWS", help="Rows in a batch.")] = 32,
    seconds: Annotated[
        float, typer.Option(min=0.01, metavar="NUMBER", help="How long to read, in all.")
    ] = 5.0,
    as_json: AsJson = False,
) -> None:
    """Measure how fast a store is read on this machine.

    Tokens a second, time to the first batch, time to resume, memory; and what GPUs need, to
    compare. Batches are shuffled over the whole store and stay on the CPU. Files that are not
    in memory yet come at the speed of the disk: run it twice to see the difference.
    """
    path = next(iter(stores_at(store).values()))
    with bar(shown=not as_json) as draw:
        speed = measure_speed(
            path, length=length, batch_size=batch_size, seconds=seconds, tell=draw
        )
    if as_json:
        print_json(speed.spell())
    else:
        show_speed(speed)


def show_speed(speed: "Speed") -> None:
    """Print what was measured, and what GPUs need."""
    out = console()
    out.print(visible(str(speed.store), lines=False), style="bold", soft_wrap=True)
    out.print(facts(_rows(speed)))
    out.print("\nwhat GPUs need", style="bold")
    out.print(_needs(speed))
    peak = f"{GPU_FLOPS / 1e12:.0f} TFLOP/s (H100, bfloat16)"
    out.print(f"  GPUs · {peak} · {UTILISATION:.0%} ÷ (6 FLOP · parameters)", style="dim")


def _rows(speed: "Speed") -> list[tuple[str, str]]:
    size = number_of(speed.batch_size, "row")
    worst = _short_text(max(speed.resumes))
    told = speed.memory_bytes
    memory = "not told by this system" if told is None else f"{size_text(told)} more than before"
    return [
        ("batches", f"{size} of {speed.length:,} tokens, out of {speed.num_rows:,}"),
        ("int64", _rate_text(speed.wide, speed)),
        ("narrow", _rate_text(speed.narrow, speed)),
        ("first batch", f"{_short_text(speed.first_batch)} after opening the store"),
        ("resume", f"{_short_text(statistics.median(speed.resumes))}, {worst} at worst"),
        ("memory", memory),
    ]


def _rate_text(rate: float, speed: "Speed") -> str:
    batch = _short_text(speed.batch_size * speed.length / rate)
    return f"{count_text(rate)} tokens/s, {batch} a batch"


def _short_text(seconds: float) -> str:
    """A time of milliseconds or less.

    >>> _short_text(0.0000634), _short_text(0.00412), _short_text(1.5)
    ('63 µs', '4.1 ms', '1500.0 ms')
    """
    return f"{seconds * 1e6:.0f} µs" if seconds < 0.0009995 else f"{seconds * 1e3:.1f} ms"


def _needs(speed: "Speed") -> Any:
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    for _ in range(3):
        table.add_column(justify="right")
    for need in NEEDS:
        times = speed.wide / need.tokens_per_second
        table.add_row(
            f"  {need.model}",
            number_of(need.num_gpus, "GPU"),
            f"{count_text(need.tokens_per_second)} tokens/s",
            f"read {times:,.1f} times as fast"
            if times < 10
            else f"read {times:,.0f} times as fast",
        )
    return table
