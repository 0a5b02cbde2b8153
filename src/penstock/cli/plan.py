"""`penstock plan`: what a run would read, before it runs."""

from dataclasses import replace
from typing import Any

from penstock.cli.options import AsJson
from penstock.cli.terminal import print_json, visible, write
from penstock.cli.train import BatchSize, MaxLength, Settings, Source, TrainFile, ValFile

__all__ = ["plan_command"]


def plan_command(
    source: Source = None,
    train_file: TrainFile = None,
    val_file: ValFile = None,
    batch_size: BatchSize = None,
    max_length: MaxLength = None,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Show the plan of a recipe: sources, rows, tokens, weights and epochs.

    Text is built into stores first, as training would.

    penstock plan recipes/openwebtext-h100.toml
    """
    from penstock.train.command import changes_of, job_of, recipe_of

    flags = {
        "train_file": train_file,
        "val_file": val_file,
        "batch_size": batch_size,
        "max_length": max_length,
    }
    recipe, guessed = recipe_of(source, changes_of(flags, settings or []))
    if recipe.data.stream:  # the same rows in the same order, once they are all there
        recipe = replace(recipe, data=replace(recipe.data, stream=False, shuffle="part"))

    def tell(told: Any) -> None:
        if not as_json:
            write(str(told))

    for line in guessed:
        tell(f"guessed {line}")
    job = job_of(recipe, tell)
    rows = _rows_of(job)
    if as_json:
        print_json({**job.plan.describe(), "digest": job.plan.digest, "run_rows": rows})
        return
    write(visible(job.plan.tree(rows)))
    if job.val is not None:
        used = min(len(job.val), job.training.val_rows)
        write(f"validation: {used:,} of {len(job.val):,} rows, always the same")
    length = job.shape.length
    if rows is not None:
        write(f"the run: {job.training.steps:,} steps, {rows:,} rows, {rows * length:,} tokens")


def _rows_of(job: Any) -> int | None:
    """The rows of the whole run, where the recipe settles that."""
    settings = job.training
    rows = settings.global_batch_size or settings.batch_size
    if settings.steps is None or rows == "auto":
        return None
    whole: int = min(settings.steps * rows, job.plan.end)
    return whole
