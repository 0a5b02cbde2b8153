"""`penstock seen`: what a run has read when a step is done."""

from typing import TYPE_CHECKING, Annotated

from penstock.cli import options
from penstock.cli.inspect import Run, opened
from penstock.cli.options import option
from penstock.cli.terminal import aligned, print_json, write
from penstock.cli.train import Settings
from penstock.cli.units import estimate_text

if TYPE_CHECKING:
    from penstock.inspect import Seen


def seen_command(
    run: Run,
    step: Annotated[
        int,
        option(
            "The step, such as that of a checkpoint; the first one is 1.", "NUMBER", "--step", "-s"
        ),
    ],
    settings: Settings = None,
    as_json: options.AsJson = False,
) -> None:
    """Show what a checkpoint has seen of each source.

    These are its rows, targets and epochs.

    penstock seen runs/mine --step 500
    """
    from penstock.inspect import seen

    found = opened(run, settings, as_json=as_json)
    has_seen = seen(found.plan, found.steps, step)
    line = found.metrics.get(step)
    if as_json:
        print_json({**has_seen.to_json(), "trained_tokens": line and line.get("tokens")})
        return
    _show(has_seen)
    if line is not None:
        write(f"the run has trained on {line['tokens']:,} targets up to this step")


def _show(has_seen: "Seen") -> None:
    write(f"after step {has_seen.step:,}, {has_seen.position:,} rows were read:")
    table = [["", "rows", "targets", "epochs", "of the next epoch"]]
    for each in has_seen.sources:
        share = f"{each.rows_in_last_epoch:,} of {each.rows_in_epoch:,} rows"
        targets = estimate_text(each.tokens, is_exact=each.tokens_exact)
        table.append([each.source, f"{each.rows:,}", targets, f"{each.epochs:,}", share])
    for row in aligned(table):
        write(row)
