"""`penstock train`: from a recipe, a text file or a store to a trained model."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.options import AsJson
from penstock.cli.terminal import print_json, shell_word, visible, write
from penstock.cli.units import duration_text

if TYPE_CHECKING:
    from penstock.train import RunResult

__all__ = ["BatchSize", "MaxLength", "Settings", "Source", "TrainFile", "ValFile", "train_command"]


def _option(name: str, help_text: str, metavar: str, least: int | None = None) -> Any:
    """An option that can be written with underscores or with hyphens."""
    flags = dict.fromkeys([f"--{name}", f"--{name.replace('_', '-')}"])
    return typer.Option(*flags, metavar=metavar, min=least, help=help_text)


Source = Annotated[
    str | None,
    typer.Argument(
        metavar="SOURCE",
        show_default=False,
        help="A recipe (.toml), a text file or a store. Without a recipe, settings are guessed. "
        "Text is read as penstock build reads it.",
    ),
]
_TRAIN_FILE = "Text, of which each line is a document, or a store to train on."
TrainFile = Annotated[str | None, _option("train_file", _TRAIN_FILE, "FILE")]
ValFile = Annotated[str | None, _option("val_file", "Text or store to validate on.", "FILE")]
BatchSize = Annotated[
    int | None, _option("batch_size", "Rows of a micro-batch on each device.", "ROWS", 1)
]
MaxLength = Annotated[int | None, _option("max_length", "Tokens per row.", "TOKENS", 1)]
_NUM_WORKERS = "0 prepares no batches ahead. Other numbers have no effect: one thread does it."
NumWorkers = Annotated[int | None, _option("num_workers", _NUM_WORKERS, "NUMBER", 0)]
PrefetchFactor = Annotated[
    int | None, _option("prefetch_factor", "Blocks of batches to prepare ahead.", "NUMBER", 0)
]
Steps = Annotated[int | None, _option("steps", "Train for this many steps.", "NUMBER", 1)]
MaxMinutes = Annotated[float | None, _option("max_minutes", "Train for this long.", "MINUTES")]
Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="DIRECTORY", help="Where to write the run."),
]
Device = Annotated[
    str | None,
    _option("device", "cpu, cuda or cuda:1; by default the GPU if there is one.", "NAME"),
]
Settings = Annotated[
    list[str] | None,
    _option("set", "Any setting of the recipe, such as training.steps=100.", "NAME=VALUE"),
]


def train_command(
    source: Source = None,
    train_file: TrainFile = None,
    val_file: ValFile = None,
    batch_size: BatchSize = None,
    max_length: MaxLength = None,
    num_workers: NumWorkers = None,
    prefetch_factor: PrefetchFactor = None,
    steps: Steps = None,
    max_minutes: MaxMinutes = None,
    output: Output = None,
    device: Device = None,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Train a GPT-2 on a text, a store, or as a recipe says.

    Writes checkpoints, metrics.jsonl, curve.svg and sample.txt to the output. Safe to kill: the
    same command resumes exactly from the last checkpoint. Every flag changes one setting of the
    recipe.

    penstock train input.txt

    penstock train recipes/openwebtext-h100.toml --max-minutes 90

    torchrun --nproc-per-node 8 -m penstock.train RECIPE
    """
    from penstock.train.command import choose_recipe, recipe_changes, run_recipe
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
    recipe, guesses = choose_recipe(source, recipe_changes(flags, settings or []), device)
    if as_json:
        print_json(_to_json(run_recipe(recipe, device=device, log=lambda _: None)))
        return
    display = Display()
    try:
        for line in guesses:
            display(f"guessed {visible(line, lines=False)}")
        result = run_recipe(recipe, device=device, log=display)
    finally:
        display.close()
    progress = result.progress
    if not result.finished:
        write(f"stopped as requested after step {progress.step:,}; the same command resumes it")
        return
    loss = "" if progress.val_loss is None else f", validation loss {progress.val_loss:.4f}"
    took = duration_text(progress.seconds)
    write(f"{progress.step:,} steps, {progress.tokens:,} tokens, {took}{loss}")
    write(f"next: open {shell_word(result.output)}/curve.svg")


def _to_json(result: "RunResult") -> dict[str, Any]:
    from penstock.train.metrics import json_values

    values = asdict(result.progress)
    values |= {"finished": result.finished, "output": str(result.output)}
    return json_values({**values, "seconds": round(result.progress.seconds, 3)})
