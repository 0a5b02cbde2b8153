"""`penstock diff`: whether two runs have read the same."""

import json
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli import options
from penstock.cli.options import argument
from penstock.cli.terminal import print_json, visible, write
from penstock.cli.units import number_of

if TYPE_CHECKING:
    from penstock.inspect import Comparison
    from penstock.inspect.compare import Difference, RowDifference, RowSide

_LONGEST_VALUE = 200
_FIRST = argument("The directory of a run, or its fingerprints.jsonl.", "RUN_A")
_SECOND = argument("Another one.", "RUN_B")


def diff_command(
    run_a: Annotated[str, _FIRST],
    run_b: Annotated[str, _SECOND],
    as_json: options.AsJson = False,
) -> None:
    """Compare what two runs have read.

    First lists the settings that differ. If the rows differ, then shows the first step that
    differs, with its rows and documents. Runs on different numbers of processes can be compared,
    and runs with different batch sizes where both end a step. The exit code is 0 if they have read
    the same as far as both go, 1 if they differ, and 2 after an error.

    penstock diff runs/a runs/b
    """
    from penstock.inspect import compare_runs

    found = compare_runs(run_a, run_b)
    if as_json:
        print_json(found.to_json())
    else:
        _show(found)
    if found.difference is not None:
        raise typer.Exit(1)


def _show(found: "Comparison") -> None:
    if found.settings:
        write("settings that differ:")
    for setting in found.settings or ():
        values = ", ".join(map(_value_text, setting.values))
        write(visible(f"  {setting.name}: {values}", lines=False))
    one, two = found.num_steps
    same = number_of(found.identical_steps[0], "step")
    if found.difference is None:
        write(f"identical for {same} ({found.identical_rows:,} rows)")
        rest = [one - found.identical_steps[0], two - found.identical_steps[1]]
        for name, more in zip(found.runs, rest, strict=True):
            if more:
                write(f"{name} has {number_of(more, 'more step')}, which the other run lacks")
        return
    write(f"identical for {same} ({found.identical_rows:,} rows), then they differ")
    _show_difference(found, found.difference)


def _value_text(value: object) -> str:
    text = "not set" if value is None else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}…"


def _show_difference(found: "Comparison", difference: "Difference") -> None:
    for name, (first, last) in zip(found.runs, difference.steps, strict=True):
        steps = f"step {first:,}" if first == last else f"steps {first:,} to {last:,}"
        write(f"  {name}: {steps}")
    start, stop = difference.positions
    what = {"rows": "other rows", "tokens": "the same rows with other tokens"}[difference.kind]
    write(f"  positions {start:,} to {stop - 1:,}: {what}")
    if difference.note is not None:
        write(f"  {difference.note}")
    for each in difference.documents:
        place = " and ".join(dict.fromkeys(each.places))
        write(f"  the first document of {each.source} that differs: {each.document:,} ({place})")
    for row in difference.rows:
        _show_row(found, row)
    if difference.num_rows is not None and difference.num_rows > len(difference.rows):
        write(f"  … and {difference.num_rows - len(difference.rows):,} more rows")


def _show_row(found: "Comparison", row: "RowDifference") -> None:
    write(f"  row {row.row} (position {row.position:,}) differs from token {row.column:,} on:")
    for name, side in zip(found.runs, row.sides, strict=True):
        write(f"    {name}: {_side_text(side)}")


def _side_text(side: "RowSide") -> str:
    parts = [f"row {side.sample:,} of {side.source}, epoch {side.epoch:,}"]
    if side.document is not None:
        each = side.document
        parts.append(f"document {each.document:,} of {each.store} ({each.file}:{each.record})")
    if side.token is not None:
        parts.append(f"token {side.token}")
    if side.text is not None:
        parts.append(visible(repr(side.text), lines=False))
    return ", ".join(parts)
