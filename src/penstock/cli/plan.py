"""`penstock plan`: the data that a training run would read."""

import math
from fractions import Fraction
from typing import TYPE_CHECKING, Annotated

from penstock.cli import options
from penstock.cli.options import option
from penstock.cli.terminal import aligned, console, print_json, visible, write
from penstock.cli.train import BatchSize, MaxLength, Settings, Source, TrainFile, ValFile
from penstock.cli.units import count_text, estimate_text, size_text

if TYPE_CHECKING:
    from penstock.inspect import Forecast, OpenedRun
    from penstock.order.plan import Plan

_BAR = 20  # columns of the longest bar
_MOST_STAGES = 10  # as in the tree of the plan


def plan_command(
    source: Source = None,
    train_file: TrainFile = None,
    val_file: ValFile = None,
    batch_size: BatchSize = None,
    max_length: MaxLength = None,
    settings: Settings = None,
    quick: Annotated[
        bool, option("Do not measure how fast this machine prepares batches.", None, "--quick")
    ] = False,
    as_json: options.AsJson = False,
) -> None:
    """Show the sources, rows, tokens, weights and epochs of a run, without starting it.

    Text is first built into stores, as in penstock train. The numbers of rows are exact: they are
    computed by the code that a run uses. The speed is measured for half a second.

    penstock plan recipe.toml
    """
    from penstock.inspect import forecast, open_run
    from penstock.train.command import recipe_changes

    changes = recipe_changes(
        settings or [],
        train_file=train_file,
        val_file=val_file,
        batch_size=batch_size,
        max_length=max_length,
    )

    # With --json, stdout must hold one JSON object and nothing else.
    def log(event: str) -> None:
        if not as_json:
            write(event)

    run = open_run(source, changes, log, guess=True)
    found = forecast(run, measured=not quick)
    if as_json:
        rows = None if found.steps is None else found.rows
        described = {**run.plan.describe(), "digest": run.plan.digest, "run_rows": rows}
        print_json({**described, "forecast": found.to_json()})
        return
    _show(run, found)


def _show(run: "OpenedRun", found: "Forecast") -> None:
    from penstock.train.command import NO_VALIDATION

    write(run.plan.tree(found.rows))
    for line in _normalised_weights(run.plan):
        write(line)
    job = run.job
    if job.val is None:
        write(NO_VALIDATION)
    else:
        used = min(len(job.val), job.training.val_rows)
        write(f"validation: {used:,} of {len(job.val):,} rows, the same every time")
    if found.steps is not None:
        # Packs and documents may have padding, so the number of targets can be lower.
        tokens = f"{job.model.length:,} inputs, {found.rows * job.model.length:,} in total"
        write(f"the run: {found.steps:,} steps, {found.rows:,} rows of {tokens}")
    _show_sources(found)
    if len(found.sources) > 1 and found.intervals:
        _show_intervals(found)
    write("")
    disk = (
        f"stores {size_text(found.store_bytes)}, a checkpoint {size_text(found.checkpoint_bytes)}"
    )
    write(f"disk: {disk}; memory to read the data: about {size_text(found.memory_bytes)}")
    if found.speed is not None:
        speed, needed = found.speed.tokens_per_second, found.speed.gpu_tokens_per_second
        waits = "would wait" if speed < needed else "would not wait"
        write(
            f"speed: one process reads {count_text(speed)} tokens/s here; one {found.speed.gpu} at "
            f"half its peak would need {count_text(needed)} for this model, so it {waits} for data"
        )
    for warning in found.warnings:
        console().print(visible(f"warning: {warning}"), style="yellow", soft_wrap=True)


def _normalised_weights(plan: "Plan") -> list[str]:
    """Return a line for each stage whose weights do not sum to 1, and so are read as ratios."""
    lines = []
    for stage in plan.describe()["stages"][:_MOST_STAGES]:
        given = stage.get("weights", {}).values()
        numbers = [Fraction(weight) for weight in given]  # "1/3" is a string in JSON
        total = sum(numbers)
        if not numbers or math.isclose(total, 1, rel_tol=1e-9):
            continue
        cells = [f"{float(number):.4g}" for number in numbers]
        shares = [f"{float(number / total):.4g}" for number in numbers]
        since = f" from position {stage['position']:,}" if stage["position"] else ""
        lines.append(f"weights{since}: given {', '.join(cells)}: read as {', '.join(shares)}")
    return lines


def _show_sources(found: "Forecast") -> None:
    """Print a table of the tokens of each source over the run."""
    write("")
    table = [["", "epochs", "repeats from", "targets", "trained on", "padding", "split", "cut"]]
    for each in found.sources:
        repeats = "-" if each.repeats_from is None else f"step {each.repeats_from:,}"
        table.append(
            [
                each.source,
                f"{each.epochs:,.2f}",
                repeats,
                estimate_text(each.run_tokens, is_exact=each.tokens_exact),
                estimate_text(each.trained_tokens, is_exact=each.tokens_exact),
                f"{each.padding:.2%}",
                f"{each.split_documents:,}",
                f"{each.cut_documents:,}",
            ]
        )
    for line in aligned(table):
        write(line)


def _show_intervals(found: "Forecast") -> None:
    """Print the shares of the sources over the run, as bars."""
    write("")
    names = [each.source for each in found.sources]
    widest = max(map(len, names))
    for each in found.intervals:
        total = max(1, sum(each.rows.values()))
        write(f"steps {each.first_step:,} to {each.last_step:,}, {total:,} rows")
        for name in names:
            share = each.rows[name] / total
            bar = "█" * round(_BAR * share)
            write(f"  {name.ljust(widest)}  {share:7.2%}  {bar}")
        if all(one.rows == each.rows for one in found.intervals):
            if len(found.intervals) > 1:
                write("  the same in all later steps of the run")
            break
