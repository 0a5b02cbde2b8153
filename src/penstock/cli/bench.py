"""`penstock bench`: the reading speed of a store on this machine, and the speed that GPUs need."""

import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from penstock.cli import options
from penstock.cli.options import option
from penstock.cli.progress import Draw, bar
from penstock.cli.terminal import aligned, console, print_facts, print_json, write
from penstock.cli.units import count_text, number_of, size_text

if TYPE_CHECKING:
    from penstock.loader.loader import Loader
    from penstock.remote.address import StorePath

GPU_FLOPS = 989e12
"""Peak floating-point operations per second of an H100: bfloat16, dense."""
UTILISATION = 0.5
"""The share of the peak that a well tuned training run reaches."""
_FLOPS_PER_PARAMETER = 6  # and token: 2 in the forward pass, 4 in the backward pass

_NUM_TURNS = 3  # the median ignores one turn that other programs have slowed down
_NUM_RESUMES = 20
# The share of a turn that is not measured. It uses up the batches that the prefetch thread made
# while batches of the other dtype were read.
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
    Need("GPT-2, 124M", 124_000_000, 1),
    Need("GPT-2, 124M", 124_000_000, 8),
    Need("1B", 1_000_000_000, 8),
    Need("8B", 8_000_000_000, 8),
)


def _show(speed: dict[str, Any]) -> None:
    """Print the measurements, and the speed that GPUs need."""
    length, memory = speed["length"], speed["memory_bytes"]
    grown = f"{size_text(memory or 0)} more than before"
    rates = {}
    for kind, rate in speed["tokens_per_second"].items():
        batch = _short_text(speed["batch_size"] * length / rate)
        rates[kind] = f"{count_text(rate)} tokens/s, {batch} per batch"
    batches = f"{number_of(speed['batch_size'], 'row')} of {length:,} tokens"
    resume = speed["resume_seconds"]
    rows = [
        ("batches", f"{batches}, out of {speed['num_rows']:,}"),
        *rates.items(),
        ("first batch", f"{_short_text(speed['first_batch_seconds'])} after opening the store"),
        ("resume", f"{_short_text(resume['median'])}, {_short_text(resume['worst'])} at worst"),
        ("memory", "not reported by this system" if memory is None else grown),
    ]
    print_facts(speed["store"], rows)
    console().print("\nspeed that GPUs need", style="bold")
    needs = [
        (
            need["model"],
            number_of(need["num_gpus"], "GPU"),
            f"{count_text(need['tokens_per_second'])} tokens/s",
            f"read {need['headroom']:,.{1 if need['headroom'] < 10 else 0}f} times as fast",
        )
        for need in speed["needs"]
    ]
    for line in aligned(needs):
        write(f"  {line}")
    peak = f"{GPU_FLOPS / 1e12:.0f} TFLOP/s (H100, bfloat16)"
    console().print(f"  GPUs · {peak} · {UTILISATION:.0%} ÷ (6 FLOP · parameters)", style="dim")


def _short_text(seconds: float) -> str:
    """A time in microseconds or milliseconds.

    >>> _short_text(0.0000634), _short_text(0.00412), _short_text(1.5)
    ('63 µs', '4.1 ms', '1500.0 ms')
    """
    # From 999.5 µs on, rounding would give "1000 µs".
    return f"{seconds * 1e6:.0f} µs" if seconds < 0.0009995 else f"{seconds * 1e3:.1f} ms"


def measure_speed(
    path: "StorePath", *, length: int, batch_size: int, seconds: float, draw: Draw = lambda *_: None
) -> dict[str, Any]:
    """The speed of a store, as an object for `--json`, from reading it for about `seconds`.

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
    batches: dict[str, Iterator[object]] = {"int64": iter(wide)}
    # The time to the first batch includes opening the files and starting the prefetch thread.
    next(batches["int64"])
    first_batch = time.perf_counter() - started
    batches["narrow"] = iter(Loader(rows, batch_size, format="narrow"))
    rates: dict[str, list[float]] = {"int64": [], "narrow": []}
    peak = before or 0
    # Batches of int64 and of the store's narrow dtype take turns, so that a slow moment of the
    # machine affects both.
    for turn in range(2 * _NUM_TURNS):
        kind = "narrow" if turn % 2 else "int64"
        draw(turn, 2 * _NUM_TURNS, f"reading {kind}")
        rate = batches_per_second(batches[kind], seconds / (2 * _NUM_TURNS))
        rates[kind].append(rate * batch_size * length)
        peak = max(peak, anonymous_bytes() or 0)
    del batches  # ends their threads, which would slow down the next measurement
    resumes = list(_resumes(wide, Loader(rows, batch_size), len(rows)))
    speeds = {kind: statistics.median(each) for kind, each in rates.items()}
    return {
        "store": str(path),
        "num_tokens": rows.stream.num_tokens,
        "num_rows": len(rows),
        "length": length,
        "batch_size": batch_size,
        "tokens_per_second": {kind: round(speed) for kind, speed in speeds.items()},
        "first_batch_seconds": first_batch,
        "resume_seconds": {"median": statistics.median(resumes), "worst": max(resumes)},
        # Growth of anonymous memory; None if the system does not report it.
        "memory_bytes": None if before is None else peak - before,
        "needs": [
            {
                **asdict(need),
                "tokens_per_second": round(need.tokens_per_second),
                "headroom": speeds["int64"] / need.tokens_per_second,
            }
            for need in NEEDS
        ],
    }


def batches_per_second(batches: "Iterator[object]", seconds: float) -> float:
    """The speed of reading batches, measured for some seconds."""
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


def _resumes(loader: "Loader[Any]", fresh: "Loader[Any]", num_rows: int) -> Iterator[float]:
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
    store: options.AnyStore,
    length: Annotated[int, option("Tokens per row.", "TOKENS", least=1)] = 1024,
    batch_size: Annotated[int, option("Rows per batch.", "ROWS", least=1)] = 32,
    seconds: Annotated[float, option("Seconds to read, in total.", "NUMBER", least=0.01)] = 5.0,
    as_json: options.AsJson = False,
) -> None:
    """Measure how fast a store is read on this machine.

    Prints tokens per second, the time to the first batch, the time to resume, and memory, and
    compares the speed with what GPUs need. Batches are shuffled over the whole store and stay on
    the CPU. Files that are not cached in memory are read at the speed of the disk: run the
    command twice to see the difference.
    """
    # Of a split store, the training side is measured.
    from penstock.store.sides import stores_at

    path = next(iter(stores_at(store).values()))
    with bar(shown=not as_json) as draw:
        speed = measure_speed(
            path, length=length, batch_size=batch_size, seconds=seconds, draw=draw
        )
    if as_json:
        print_json(speed)
    else:
        _show(speed)
