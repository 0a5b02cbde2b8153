"""`penstock train`: from a recipe or a text file to a loss curve."""

from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli.options import AsJson
from penstock.cli.terminal import print_json, shell_word, visible, write
from penstock.cli.units import duration_text

__all__ = [
    "BatchSize",
    "MaxLength",
    "NumWorkers",
    "PrefetchFactor",
    "Settings",
    "Source",
    "TrainFile",
    "ValFile",
    "train_command",
]

Source = Annotated[
    str | None,
    typer.Argument(
        metavar="SOURCE",
        show_default=False,
        help="A recipe (.toml), a text file, or a store; for the last two the rest is guessed. A "
        "text is read as penstock build reads it.",
    ),
]
TrainFile = Annotated[
    str | None,
    typer.Option(
        "--train_file",
        "--train-file",
        metavar="FILE",
        help="Text, of which every line is a document, or a store to train on.",
    ),
]
ValFile = Annotated[
    str | None,
    typer.Option("--val_file", "--val-file", metavar="FILE", help="Text or store to validate on."),
]
BatchSize = Annotated[
    int | None,
    typer.Option(
        "--batch_size", "--batch-size", min=1, metavar="ROWS", help="Rows at once on a device."
    ),
]
MaxLength = Annotated[
    int | None,
    typer.Option("--max_length", "--max-length", min=1, metavar="TOKENS", help="Tokens of a row."),
]
NumWorkers = Annotated[
    int | None,
    typer.Option(
        "--num_workers",
        "--num-workers",
        min=0,
        metavar="NUMBER",
        help="0 makes no batches ahead. Any other number changes nothing: a thread makes them.",
    ),
]
PrefetchFactor = Annotated[
    int | None,
    typer.Option(
        "--prefetch_factor",
        "--prefetch-factor",
        min=0,
        metavar="NUMBER",
        help="How many blocks of batches are made ahead.",
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="NAME=VALUE", help="Any setting of the recipe, as training.steps=100."
    ),
]


def train_command(
    source: Source = None,
    train_file: TrainFile = None,
    val_file: ValFile = None,
    batch_size: BatchSize = None,
    max_length: MaxLength = None,
    num_workers: NumWorkers = None,
    prefetch_factor: PrefetchFactor = None,
    steps: Annotated[
        int | None, typer.Option(min=1, metavar="NUMBER", help="Steps of the run.")
    ] = None,
    max_minutes: Annotated[
        float | None,
        typer.Option("--max-minutes", "--max_minutes", metavar="MINUTES", help="End it after."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="DIRECTORY", help="Where the run is written."),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="cpu, cuda, cuda:1; the GPU where there is one."),
    ] = None,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Train a GPT-2 on a text, a store, or by a recipe.

    Leaves checkpoints, metrics.jsonl, curve.svg and sample.txt in the output. Safe to kill:
    the same command goes on from the last checkpoint, exactly. Every flag changes one setting
    of the recipe.

    penstock train input.txt

    penstock train recipes/openwebtext-h100.toml --max-minutes 90

    torchrun --nproc-per-node 8 -m penstock.train RECIPE
    """
    from penstock.train.command import changes_of, execute, recipe_of
    from penstock.train.display import Display

    flags = {
        "train_file": train_file,
        "val_file": val_file,
        "batch_size": batch_size,
        "max_length": max_length,
        "num_workers": num_workers,
        "prefetch_factor": prefetch_factor,
        "steps": steps,
        "max_minutes": max_minutes,
        "output": None if output is None else str(output),
    }
    recipe, guessed = recipe_of(source, changes_of(flags, settings or []), device)
    if as_json:
        print_json(_spell(execute(recipe, device=device, tell=_silent)))
        return
    display = Display()
    try:
        for line in guessed:
            display(f"guessed {visible(line, lines=False)}")
        outcome = execute(recipe, device=device, tell=display)
    finally:
        display.close()
    now, where = outcome.now, shell_word(outcome.output)
    took = duration_text(now.seconds)
    if not outcome.finished:
        write(f"stopped as asked after step {now.step:,}; the same command goes on")
        return
    loss = "" if now.val_loss is None else f", validation loss {now.val_loss:.4f}"
    write(f"{now.step:,} steps, {now.tokens:,} tokens, {took}{loss}")
    write(f"next: look at {where}/curve.svg")


def _silent(_: Any) -> None:
    """Say nothing."""


def _spell(outcome: Any) -> dict[str, Any]:
    from dataclasses import asdict

    from penstock.train.metrics import spelled

    told = {**asdict(outcome.now), "finished": outcome.finished, "output": str(outcome.output)}
    return spelled({**told, "seconds": round(outcome.now.seconds, 3)})
