"""`penstock plan`: the data that a training run would read."""

from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.cli import options
from penstock.cli.terminal import print_json, write
from penstock.cli.train import BatchSize, MaxLength, Settings, Source, TrainFile, ValFile

if TYPE_CHECKING:
    from penstock.train import TrainingJob


def plan_command(
    source: Source = None,
    train_file: TrainFile = None,
    val_file: ValFile = None,
    batch_size: BatchSize = None,
    max_length: MaxLength = None,
    settings: Settings = None,
    as_json: options.AsJson = False,
) -> None:
    """Show the sources, rows, tokens, weights and epochs of a run.

    Text is first built into stores, as in penstock train.

    penstock plan recipe.toml
    """
    from penstock.train.command import choose_recipe, open_job, recipe_changes

    changes = recipe_changes(
        settings or [],
        train_file=train_file,
        val_file=val_file,
        batch_size=batch_size,
        max_length=max_length,
    )

    # With --json, stdout must hold one JSON object and nothing else.
    def log(event: object) -> None:
        if not as_json:
            write(str(event))

    recipe = choose_recipe(source, changes, None, log)
    if recipe.data.stream:  # a finished store has the same rows in the same order
        recipe = replace(recipe, data=replace(recipe.data, stream=False, shuffle="part"))
    job = open_job(recipe, log)
    rows = _run_rows(job)
    if as_json:
        print_json({**job.plan.describe(), "digest": job.plan.digest, "run_rows": rows})
        return
    write(job.plan.tree(rows))
    if job.val is not None:
        used = min(len(job.val), job.training.val_rows)
        write(f"validation: {used:,} of {len(job.val):,} rows, the same every time")
    if rows is not None:
        # Packs and documents may have padding, so the number of targets can be lower.
        tokens = f"{job.model.length:,} inputs, {rows * job.model.length:,} in total"
        write(f"the run: {job.training.steps:,} steps, {rows:,} rows of {tokens}")


def _run_rows(job: "TrainingJob") -> int | None:
    """The rows of the whole run; None if the recipe does not determine them."""
    config = job.training
    # "auto" is decided on the device, and `max_minutes` by the speed of the first steps.
    rows = config.global_batch_size or config.batch_size
    if config.steps is None or rows == "auto":
        return None
    # The data may end before the last step.
    return min(config.steps * rows, job.plan.end)
