"""`penstock bench`: how fast a store is read here, beside what GPUs need."""

import statistics
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.options import AsJson, StoreArgument
from penstock.cli.progress import bar
from penstock.cli.stores import stores_at
from penstock.cli.tables import facts
from penstock.cli.terminal import console, print_json, visible
from penstock.cli.units import count_text, number_of, size_text

if TYPE_CHECKING:
    from penstock.cli.speed import Speed

__all__ = ["bench_command"]


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
    from penstock.cli.speed import measure_speed

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
    from penstock.cli.speed import GPU_FLOPS, UTILISATION

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

    from penstock.cli.speed import NEEDS

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
