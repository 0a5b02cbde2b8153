"""`penstock bench`: the reading speed of a store on this machine, and the speed that GPUs need."""

import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from penstock.cli import options
from penstock.cli.options import option, stores_at
from penstock.cli.progress import Draw, bar
from penstock.cli.tables import aligned, print_facts
from penstock.cli.terminal import console, print_json, write
from penstock.cli.units import count_text, number_of, size_text

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.loader.loader import Loader

GPU_FLOPS = 989e12
"""Peak floating-point operations per second of an H100: bfloat16, dense."""
UTILISATION = 0.5
"""The share of the peak that a well tuned training run reaches."""
_FLOPS_PER_PARAMETER = 6  # and token: 2 in the forward pass, 4 in the backward pass

_NUM_TURNS = 3  # the median ignores one turn that other programs have slowed down
_NUM_RESUMES = 20
# The share of a turn that is not measured. It uses up the batches that the prefetch thread made
# while the other kind was read.
_WARM_UP_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Need:
    """A model, and the number of GPUs that train it."""

    model: str
    num_parameters: float
    num_gpus: int

    @property
    def tokens_per_second(self) -> float:
        """The tokens per second that all the GPUs consume together.

        >>> round(Need("GPT-2", 124e6, 1).tokens_per_second)
        664651
        """
        flops = self.num_gpus * GPU_FLOPS * UTILISATION
        return flops / (_FLOPS_PER_PARAMETER * self.num_parameters)


# A small model on many GPUs needs the most tokens per second.
NEEDS = (
    Need("GPT-2, 124M", 124e6, 1),
    Need("GPT-2, 124M", 124e6, 8),
    Need("1B", 1e9, 8),
    Need("8B", 8e9, 8),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """The measurements of a store."""

    store: Path
    num_tokens: int
    num_rows: int
    length: int
    batch_size: int
    wide: float
    """Tokens per second as int64 tensors."""
    narrow: float
    """Tokens per second in the narrow dtype of the store."""
    first_batch: float
    """Seconds from opening the store to the first batch."""
    resumes: tuple[float, ...]
    """Seconds from a loaded state to the next batch, at 20 positions of a run."""
    memory_bytes: int | None
    """Growth of anonymous memory; None if the system does not report it."""

    def to_json(self) -> dict[str, object]:
        """The measurements as an object for `--json`."""
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

    def show(self) -> None:
        """Print the measurements, and the speed that GPUs need."""
        memory = "not reported by this system"
        if self.memory_bytes is not None:
            memory = f"{size_text(self.memory_bytes)} more than before"
        median, worst = map(_short_text, (statistics.median(self.resumes), max(self.resumes)))
        batches = f"{number_of(self.batch_size, 'row')} of {self.length:,} tokens"
        rows = [
            ("batches", f"{batches}, out of {self.num_rows:,}"),
            ("int64", self._rate_text(self.wide)),
            ("narrow", self._rate_text(self.narrow)),
            ("first batch", f"{_short_text(self.first_batch)} after opening the store"),
            ("resume", f"{median}, {worst} at worst"),
            ("memory", memory),
        ]
        print_facts(str(self.store), rows)
        console().print("\nspeed that GPUs need", style="bold")
        for line in aligned([self._compared(need) for need in NEEDS]):
            write(f"  {line}")
        peak = f"{GPU_FLOPS / 1e12:.0f} TFLOP/s (H100, bfloat16)"
        console().print(f"  GPUs · {peak} · {UTILISATION:.0%} ÷ (6 FLOP · parameters)", style="dim")

    def _rate_text(self, rate: float) -> str:
        batch = _short_text(self.batch_size * self.length / rate)
        return f"{count_text(rate)} tokens/s, {batch} per batch"

    def _compared(self, need: Need) -> tuple[str, ...]:
        times = self.wide / need.tokens_per_second
        return (
            need.model,
            number_of(need.num_gpus, "GPU"),
            f"{count_text(need.tokens_per_second)} tokens/s",
            f"read {times:,.{1 if times < 10 else 0}f} times as fast",
        )


def _short_text(seconds: float) -> str:
    """A time in microseconds or milliseconds.

    >>> _short_text(0.0000634), _short_text(0.00412), _short_text(1.5)
    ('63 µs', '4.1 ms', '1500.0 ms')
    """
    # From 999.5 µs on, rounding would give "1000 µs".
    return f"{seconds * 1e6:.0f} µs" if seconds < 0.0009995 else f"{seconds * 1e3:.1f} ms"


def measure_speed(
    path: Path, *, length: int, batch_size: int, seconds: float, draw: Draw = lambda *_: None
) -> Speed:
    """Measure a store by reading it for about `seconds` seconds.

    Args:
        path: The directory of the store.
        length: Tokens per row.
        batch_size: Rows per batch.
        seconds: The time to read, in total.
        draw: Draws a progress bar.
    """
    from penstock.loader.loader import Loader
    from penstock.rows.windows import Windows
    from penstock.store.reader import TokenStore

    # Files are mapped, so only anonymous memory is memory that the loader needs.
    before = anonymous_bytes()
    started = time.perf_counter()
    rows = Windows(TokenStore(path), length)
    wide = Loader(rows, batch_size)
    batches = {"int64": iter(wide)}
    # The first batch includes opening the files and starting the prefetch thread.
    next(batches["int64"])
    first_batch = time.perf_counter() - started
    batches["narrow"] = iter(Loader(rows, batch_size, format="narrow"))
    rates: dict[str, list[float]] = {"int64": [], "narrow": []}
    peak = before or 0
    # The two kinds take turns, so that a slow moment of the machine affects both.
    for turn in range(2 * _NUM_TURNS):
        kind = "narrow" if turn % 2 else "int64"
        draw(turn, 2 * _NUM_TURNS, f"reading {kind}")
        batches_per_second = _read(batches[kind], seconds / (2 * _NUM_TURNS))
        rates[kind].append(batches_per_second * batch_size * length)
        peak = max(peak, anonymous_bytes() or 0)
    del batches  # ends their threads, which would slow down the next measurement
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


def _read(batches: "Iterator[dict[str, Tensor]]", seconds: float) -> float:
    """Read batches for some seconds; returns batches per second."""
    # Batches that were prefetched before this turn would be counted as read in no time.
    warm = time.perf_counter() + _WARM_UP_SHARE * seconds
    while time.perf_counter() < warm:
        next(batches)
    count = 0
    started = now = time.perf_counter()
    while now - started < seconds:
        next(batches)
        count += 1
        now = time.perf_counter()
    return count / (now - started)


def _resumes(loader: "Loader", fresh: "Loader", num_rows: int) -> Iterator[float]:
    """Seconds from a state to the next batch, at positions in the first thousand epochs."""
    # The time must not depend on the position: a state is a position, and nothing is replayed.
    for number in range(_NUM_RESUMES):
        loader.seek(1_000 * num_rows * number // (_NUM_RESUMES - 1))
        state = json.loads(json.dumps(loader.state_dict()))  # as a checkpoint would store it
        started = time.perf_counter()
        fresh.load_state_dict(state)
        for _ in islice(fresh, 1):
            yield time.perf_counter() - started


def anonymous_bytes() -> int | None:
    """Memory of this process that is not mapped from files; None if it is not reported."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:  # macOS and Windows
        return None
    # "RssAnon:  1234 kB" excludes pages of mapped files, which the kernel can drop at any time.
    found = (int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))
    return next(found, None)


def bench_command(
    store: options.Store,
    length: Annotated[int, option("Tokens per row.", "TOKENS", least=1)] = 1024,
    batch_size: Annotated[int, option("Rows per batch.", "ROWS", least=1)] = 32,
    seconds: Annotated[float, option("Seconds to read, in total.", "NUMBER", least=0.01)] = 5.0,
    as_json: options.AsJson = False,
) -> None:
    """Measure how fast a store is read on this machine.

    Prints tokens per second, the time to the first batch, the time to resume, and memory, and
    compares the speed with what GPUs need. Batches are shuffled over the whole store and stay on
    the CPU. Files that are not cached in memory are read at the speed of the disk: run it twice
    to see the difference.
    """
    # Of a split store, the training side is measured.
    path = next(iter(stores_at(store).values()))
    with bar(shown=not as_json) as draw:
        speed = measure_speed(
            path, length=length, batch_size=batch_size, seconds=seconds, draw=draw
        )
    if as_json:
        print_json(speed.to_json())
    else:
        speed.show()
