"""`penstock train`: train a model on a recipe, a text file or a store."""

from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from penstock.cli import options
from penstock.cli.options import argument, option, path_option
from penstock.cli.terminal import print_json, shell_word, write

# Flags have underscores as in the scripts that this command replaces; hyphens work too.
Source = Annotated[str | None, argument("A recipe (.toml), a text file or a store.", "SOURCE")]
TrainFile = Annotated[
    str | None, option("A store, or text with a document per line.", "FILE", "--train_file")
]
ValFile = Annotated[str | None, option("A store or text to validate on.", "FILE", "--val_file")]
BatchSize = Annotated[
    int | None, option("Rows of a micro-batch on each device.", "ROWS", "--batch_size", least=1)
]
MaxLength = Annotated[int | None, option("Tokens per row.", "TOKENS", "--max_length", least=1)]
Settings = Annotated[
    list[str] | None, option("A setting, such as training.steps=100.", "NAME=VALUE", "--set")
]


def train_command(
    source: Source = None,
    train_file: TrainFile = None,
    val_file: ValFile = None,
    batch_size: BatchSize = None,
    max_length: MaxLength = None,
    num_workers: Annotated[
        int | None,
        option(
            "0: prepare no batches ahead. Other values change nothing.",
            "NUMBER",
            "--num_workers",
            least=0,
        ),
    ] = None,
    prefetch_factor: Annotated[
        int | None,
        option(
            "How many blocks of batches to prepare ahead.", "NUMBER", "--prefetch_factor", least=0
        ),
    ] = None,
    steps: Annotated[int | None, option("Train for this many steps.", "NUMBER", least=1)] = None,
    max_minutes: Annotated[
        float | None,
        option(
            "Train for this many minutes, all sessions of a run together.",
            "MINUTES",
            "--max_minutes",
        ),
    ] = None,
    output: Annotated[
        Path | None, path_option("Directory of the run.", "DIRECTORY", "--output", "-o")
    ] = None,
    device: Annotated[
        str | None, option("cpu, cuda or cuda:1. By default the GPU if there is one.", "NAME")
    ] = None,
    settings: Settings = None,
    as_json: options.AsJson = False,
) -> None:
    """Train a GPT-2 on a text or a store, or with the settings of a recipe.

    Writes checkpoints, metrics.jsonl, curve.svg and sample.txt to the output. The run can be
    killed at any time: the same command resumes exactly from the last checkpoint. Each flag
    changes one setting of the recipe. Without a recipe, settings are guessed, and text is read as
    in penstock build. One thread prepares batches, so more than one worker has no effect.

    penstock train input.txt

    penstock train recipe.toml --max-minutes 90

    torchrun --nproc-per-node 8 -m penstock.train RECIPE
    """
    from penstock.train.command import choose_recipe, recipe_changes, run_recipe
    from penstock.train.display import Display, summary_line
    from penstock.train.logs import json_values

    changes = recipe_changes(
        settings or [],
        train_file=train_file,
        val_file=val_file,
        batch_size=batch_size,
        max_length=max_length,
        num_workers=num_workers,
        prefetch_factor=prefetch_factor,
        steps=steps,
        max_minutes=max_minutes,
        # A recipe holds TOML values, and TOML has no paths.
        output=None if output is None else str(output),
    )
    if as_json:
        # Progress would mix with the JSON object on stdout.
        recipe = choose_recipe(source, changes, device, lambda _: None)
        result = run_recipe(recipe, device=device, log=lambda _: None)
        values = {**asdict(result.progress), "seconds": round(result.progress.seconds, 3)}
        values |= {"finished": result.finished, "output": str(result.output)}
        # JSON has no NaN, but a loss can be NaN.
        print_json(json_values(values))
        return
    # Closing ends the live line, also after an error, so that a message starts on a new line.
    with closing(Display()) as display:
        recipe = choose_recipe(source, changes, device, display)
        result = run_recipe(recipe, device=device, log=display)
    write(summary_line(result.progress, finished=result.finished))
    if result.finished and (result.output / "curve.svg").exists():
        write(f"next: open {shell_word(result.output)}/curve.svg")
