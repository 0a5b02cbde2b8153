"""The file run.json: the settings of a run, from which its data can be opened again.

It has the recipe after all changes by flags, the directory in which the run was started (paths of a
recipe are relative to it), the digest of the plan, and the number of rows in a step, which a recipe
may leave to the device. If sources or weights were changed in the recipe after some steps, it has
the earlier ones too, each up to a position.
`penstock inspect RUN` and `penstock diff` read it.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from penstock.disk import read_file, write_file
from penstock.errors import PlanError, TrainError
from penstock.loader.fingerprints import FILE_NAME as LOG_NAME
from penstock.loader.fingerprints import read_fingerprints
from penstock.order.integers import END
from penstock.paths import is_remote, redacted
from penstock.recipe import EarlierSources, Recipe, SourceConfig, Tables, parse_recipe
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
    earlier: Sequence[Tables] = ()
    """The sources that the run had before its recipe was changed, each up to a position."""

    def sources(self) -> list[EarlierSources]:
        """Return `earlier` as settings, and after them the sources of the recipe."""
        assert self.recipe is not None  # without a recipe, a run has no sources by name
        data = self.recipe["data"]
        legs = [*self.earlier, {"until": END, "sources": data.get("sources", {})}]
        found = []
        for each in legs:
            tables = {**self.recipe, "data": {**data, "sources": each["sources"]}}
            sources = parse_recipe(tables, FILE_NAME).data.sources
            found.append(EarlierSources(each["until"], sources))
        return found


def recipe_tables(recipe: Recipe) -> Tables:
    """Return the tables of a recipe file with these settings; `parse_recipe` reads them."""
    found = {
        "data": asdict(recipe.data),
        "model": dict(recipe.model),
        "optimization": asdict(recipe.optimization),
        "training": asdict(recipe.training),
    }
    return {"output": str(recipe.output), **_tables(found)}


def _tables(settings: Tables) -> Tables:
    """Return settings as the tables of a TOML file that others may read."""
    found: Tables = _without_none(_redacted(settings))
    return found


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
    earlier = [
        {"until": until, "sources": _tables({name: asdict(each) for name, each in sources.items()})}
        for until, sources in job.earlier
    ]
    record = RunRecord(job.recipe, str(Path.cwd()), digest, step_rows, world_size, earlier)
    job.output.mkdir(parents=True, exist_ok=True)
    data = json.dumps({"format": _FORMAT, **record._asdict()}, indent=1).encode() + b"\n"
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
        if not all(type(each["until"]) is int and each["sources"] for each in record.earlier):
            raise ValueError("its earlier sources are not complete")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TrainError(
            f"{path} cannot be used: {error}. Name the recipe of the run instead of its directory."
        ) from error
    return record


def continuing(recipe: Recipe, log: Callable[[str], None]) -> Recipe:
    """Return a recipe with the sources that its run has trained on before, if they were others.

    A run whose recipe has got other sources or weights continues with them after its last
    checkpoint. Rows before that, which are trained on already, stay as they were.

    Args:
        recipe: The recipe.
        log: Called with a line of text if sources or weights have changed.

    Raises:
        TrainError: they have changed, and it is not known at which position.
    """
    steps = [each for each in checkpoint_paths(recipe.output / "checkpoints") if each]
    if not steps or not recipe.data.sources:
        return recipe
    try:
        record = read_record(recipe.output)
    except (OSError, TrainError):  # the state of the loader decides without it
        return recipe
    if record.recipe is None or not record.recipe["data"].get("sources"):
        return recipe
    asked, legs = _weights(recipe.data.sources), record.sources()
    if asked == _weights(legs[-1].sources):
        return replace(recipe, earlier=tuple(legs[:-1]))
    # Without weights there is one order of all sources, which cannot begin in the middle of a run.
    # The state of the loader does not fit then, and says so.
    if None in asked.values():
        return recipe
    position = _position_after(recipe.output, steps[-1])
    # What the run had planned after its last checkpoint was never trained on.
    begins = [0, *(each.until for each in legs[:-1])]
    *before, last = [leg for begin, leg in zip(begins, legs, strict=True) if begin < position]
    if asked != _weights(last.sources):
        before.append(last._replace(until=position))
        changes = ", ".join(f"{name} {weight:g}" for name, weight in asked.items())
        log(f"the sources or weights have changed: from position {position:,} on, {changes}")
    return replace(recipe, earlier=tuple(before))


def _weights(sources: Mapping[str, SourceConfig]) -> dict[str, float | None]:
    return {name: each.weight for name, each in sources.items()}


def _position_after(run: Path, step: int) -> int:
    """Return the position after a step that a run has taken."""
    for each in read_fingerprints(run / LOG_NAME):
        if each.step == step:
            return each.position
    raise TrainError(
        f"The recipe has other sources or weights than the run in {run}, and {LOG_NAME} has no "
        f"line of step {step:,}, the last checkpoint, so the position at which they change is not "
        "known. Restore that file, or the sources and weights of the recipe."
    )


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
