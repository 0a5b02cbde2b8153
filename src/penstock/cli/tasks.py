"""`penstock build --task I/N`: one share of a build."""

import re
import time
from typing import TYPE_CHECKING, Any

import typer

from penstock.cli import terminal
from penstock.cli.progress import build_bar
from penstock.cli.units import duration_text, number_of

if TYPE_CHECKING:
    from penstock.remote.address import StorePath


def run_task(
    task: str,
    inputs: list[str],
    directory: "StorePath",
    settings: dict[str, Any],
    *,
    bar: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Make the share of one task, and print what it holds."""
    from penstock.sources.document import Tally
    from penstock.store.tasks import build_task

    found = re.fullmatch(r"(\d+)/(\d+)", task)
    if found is None:
        raise typer.BadParameter(f"--task {task} is not I/N, such as 0/64 for the first of 64.")
    number, num_tasks = map(int, found.groups())
    started = time.monotonic()
    with build_bar(shown=bar) as (_, report):
        made = build_task(
            inputs, directory, task=number, num_tasks=num_tasks, progress=report, **settings
        )
    tally = Tally.total([Tally(), *(each.tally for each in made)])
    values: dict[str, Any] = {
        "task": number,
        "num_tasks": num_tasks,
        "slices": len(made),
        "num_documents": tally.documents,
        "num_tokens": sum(part.num_tokens for each in made for part in each.parts.values()),
        "num_rejected": tally.rejected,
        "seconds": round(time.monotonic() - started, 3),
    }
    if as_json:
        terminal.print_json(values)
    elif not quiet:
        took = duration_text(values["seconds"])
        rows: list[tuple[str, str | list[str]]] = [
            ("slices", f"{values['slices']:,}"),
            ("documents", f"{values['num_documents']:,}"),
            ("tokens", f"{values['num_tokens']:,}"),
            ("rejected", number_of(values["num_rejected"], "record")),
        ]
        terminal.print_facts(f"task {number} of {num_tasks} of {directory} ended in {took}", rows)
        terminal.write("next: when all tasks have ended, the same command with --commit")
