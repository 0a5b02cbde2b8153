"""The file run.json: the settings of a run, from which its data can be opened again.

It has the recipe after all changes by flags, the directory in which the run was started (paths of a
recipe are relative to it), the digest of the plan, and the number of rows in a step, which a recipe
may leave to the device. If the plan is amended, a copy of the ledger is in ledger.jsonl beside it.
`penstock inspect RUN` and `penstock diff` read it.
"""

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from penstock.disk import read_file, write_file
from penstock.errors import PlanError, TrainError
from penstock.ledger import RUN_FILE, write_copy
from penstock.paths import is_remote, redacted
from penstock.recipe import Recipe, Tables
from penstock.train.config import TrainingJob

FILE_NAME = "run.json"
_FORMAT = 1
_CHECKPOINT_NAME = re.compile(r"step-(\d{8,})\.pt")


class RunRecord(NamedTuple):
    """The contents of run.json."""

    recipe: Tables | None
    """The tables of the recipe; None for a run that was started from Python without one."""
    directory: str
    """The working directory in which the run was started."""
    plan: str | None
    """The digest of the plan; None if the text was still being tokenized."""
    global_batch_size: int
    world_size: int


def recipe_tables(recipe: Recipe) -> Tables:
    """Return the tables of a recipe file with these settings; `parse_recipe` reads them."""
    found = {
        "data": _redacted(asdict(recipe.data)),
        "model": dict(recipe.model),
        "optimization": asdict(recipe.optimization),
        "training": asdict(recipe.training),
    }
    tables: Tables = _without_none(found)
    return {"output": str(recipe.output), **tables}


def _redacted(data: Any) -> Any:
    """Remove users, passwords and queries from all URLs: a run may be given to others."""
    if isinstance(data, dict):
        return {key: _redacted(each) for key, each in data.items()}
    return redacted(data) if isinstance(data, str) and is_remote(data) else data


def _without_none(value: Any) -> Any:
    # TOML has no null: a setting without a value is left out.
    if isinstance(value, dict):
        return {key: _without_none(each) for key, each in value.items() if each is not None}
    return value


def record_run(job: TrainingJob, step_rows: int, world_size: int) -> None:
    """Write run.json into the output of a job; called by the main process when training begins."""
    try:
        digest = job.plan.digest
    except PlanError:  # of a store that is still being written
        digest = None
    record = RunRecord(job.recipe, str(Path.cwd()), digest, step_rows, world_size)
    job.output.mkdir(parents=True, exist_ok=True)
    data = json.dumps({"format": _FORMAT, **record._asdict()}, indent=1).encode() + b"\n"
    if job.ledger:
        # First, because run.json has the digest of the amended plan.
        write_copy(job.output / RUN_FILE, job.ledger)
    write_file(job.output / FILE_NAME, [data])


def read_record(run: Path) -> RunRecord:
    """Return the contents of run.json of a run.

    Raises:
        TrainError: it is damaged, or of a later version.
    """
    path = run / FILE_NAME
    try:
        found = json.loads(read_file(path))
        if found.pop("format") != _FORMAT:
            raise ValueError("its format is of a later version of penstock")
        record = RunRecord(**found)
        if not isinstance(record.directory, str) or int(record.global_batch_size) < 1:
            raise ValueError("a value is out of range")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TrainError(
            f"{path} cannot be used: {error}. Name the recipe of the run instead of its directory."
        ) from error
    return record


def changed_step(run: Path, step_rows: int, world_size: int) -> str | None:
    """Return a message if the steps of a run had another number of rows before; None if not."""
    try:
        before = read_record(run)
    except (OSError, TrainError):  # training does not need this file
        return None
    if before.global_batch_size == step_rows:
        return None
    once, now = (f"{each} process{'es' * (each != 1)}" for each in (before.world_size, world_size))
    return (
        f"a step had {before.global_batch_size:,} rows before, on {once}, and now has "
        f"{step_rows:,}, on {now}. To keep the steps of a run the same on any number of processes, "
        f"set training.global_batch_size={before.global_batch_size}."
    )


def checkpoint_paths(directory: Path) -> dict[int, Path]:
    """Return the checkpoints in a directory by their step, oldest first."""
    # The pattern excludes temporary files of `write_file`, which a kill can leave.
    found = {
        int(match[1]): path
        for path in sorted(directory.glob("step-*"))
        if (match := _CHECKPOINT_NAME.fullmatch(path.name))
    }
    return dict(sorted(found.items()))
