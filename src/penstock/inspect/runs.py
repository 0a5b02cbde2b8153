"""Opens a recipe or a run: its plan, and which positions each step reads.

    RECIPE    positions follow from the batch size of the recipe
    RUN       positions are those in fingerprints.jsonl, which has a line for each step that was
              taken; later steps follow from the batch size in run.json

Steps are numbered as in metrics.jsonl and in the names of checkpoints: the first step is 1. The
batches of a loader are numbered from 0, so step 1 is `loader[0]`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Self, final

import numpy as np

from penstock.errors import PlanError, TrainError
from penstock.loader.fingerprints import FILE_NAME as LOG_NAME
from penstock.loader.fingerprints import LoggedStep, read_fingerprints
from penstock.order.integers import END
from penstock.order.plan import Plan
from penstock.order.steps import Steps
from penstock.paths import expand_user, store_path
from penstock.recipe import DataConfig, Recipe, Tables, parse_recipe, set_value
from penstock.store.manifest import FILE_NAME as STORE_NAME
from penstock.train.bundled import bundled_recipes
from penstock.train.command import choose_recipe, open_job
from penstock.train.config import TrainingJob
from penstock.train.data import store_sides
from penstock.train.logs import Line, read_metrics
from penstock.train.record import FILE_NAME as RECORD_NAME
from penstock.train.record import RunRecord, continuing, read_record

if TYPE_CHECKING:
    from penstock.loader.loader import Loader

_ROWS_ADVICE = (
    "the recipe leaves the rows of a step to the device. Give them with "
    "--set training.global_batch_size=256, or name the directory of a run"
)


@final
class RunSteps:
    """Maps the steps of a run to positions and back.

    Args:
        steps: Steps that follow from a batch size, for the steps after `edges`.
        edges: The position at which the first step begins, and where each recorded step ends.
        first: The number of the first step.
        total: The number of steps of the run; None if it is not known.
        limit: The position at which the plan ends.
    """

    def __init__(
        self,
        steps: Steps | None,
        *,
        edges: Sequence[int] = (0,),
        first: int = 1,
        total: int | None = None,
        limit: int = 2**62,
    ) -> None:
        self._later, self.first, self.total, self._limit = steps, first, total, limit
        self._edges = np.array(edges, np.int64)

    def __repr__(self) -> str:
        total = "no known end" if self.total is None else f"{self.total:,} steps"
        return f"RunSteps({total}, the first is {self.first}; {self.num_recorded:,} recorded)"

    @classmethod
    def of(cls, loader: "Loader[object]") -> Self:
        """Return the steps of a loader, which are numbered from 0."""
        run = loader.run
        return cls(run.steps, edges=(run.steps.start,), first=0, total=run.num_steps)

    @property
    def num_recorded(self) -> int:
        """The number of steps that were recorded by a run."""
        return len(self._edges) - 1

    @property
    def last(self) -> int | None:
        """The number of the last step; None if the run has no known end."""
        return None if self.total is None else self.first + self.total - 1

    @property
    def end(self) -> int | None:
        """The position after the last step; None if the run has no known end."""
        if self.total is None:
            return None
        return self.span(self.first + self.total - 1)[1] if self.total else int(self._edges[0])

    def span(self, step: int) -> tuple[int, int]:
        """Return the first position of a step, and the position after its last.

        Raises:
            PlanError: the run has no such step.
        """
        number = step - self.first
        if number < 0:
            raise PlanError(f"There is no step {step:,}: the first step of a run is {self.first}.")
        if self.total is not None and number >= self.total:
            last = f"its last step is {self.last:,}" if self.total else "it has no steps"
            raise PlanError(f"Step {step:,} is after the end of this run: {last}.")
        if number < self.num_recorded:
            return int(self._edges[number]), int(self._edges[number + 1])
        later = number - self.num_recorded
        start, stop = self._steps.span(later)
        if stop > self._limit:
            raise PlanError(
                f"Step {step:,} is after the end of the data, which has {self._limit:,} rows."
            )
        return start, stop

    def at(self, position: int) -> int:
        """Return the number of the step that reads a position."""
        if position < int(self._edges[-1]):
            return int(np.searchsorted(self._edges, position, side="right")) - 1 + self.first
        return self._steps.at(position) + self.num_recorded + self.first

    @property
    def _steps(self) -> Steps:
        if self._later is None:
            raise PlanError(f"This step was not recorded, and {_ROWS_ADVICE}.")
        return self._later


@dataclass(frozen=True)
class OpenedRun:
    """The data of a recipe or a run."""

    plan: Plan
    steps: RunSteps
    job: TrainingJob
    recipe: Recipe
    record: RunRecord | None
    """The contents of run.json; None if the recipe was not run yet."""

    @property
    def tokenizer(self) -> str | None:
        """The tokenizer that the recipe names, for a store whose tokenizer is not known here."""
        return self.recipe.data.named_tokenizer

    @cached_property
    def metrics(self) -> dict[int, Line]:
        """The lines of metrics.jsonl about steps, by their numbers; empty without a run."""
        if self.record is None:
            return {}
        lines = read_metrics(self.job.output / "metrics.jsonl")
        return {each["step"]: each for each in lines if each["kind"] == "step"}

    @cached_property
    def logged(self) -> list[LoggedStep]:
        """The lines of fingerprints.jsonl; empty without a run."""
        return [] if self.record is None else list(read_fingerprints(self.job.output / LOG_NAME))


Log = Callable[[str], None]


def open_run(
    source: str | None,
    changes: Tables | None = None,
    log: Log | None = None,
    *,
    guess: bool = False,
) -> OpenedRun:
    """Open the data of a recipe (.toml), or of the directory of a run.

    If the recipe was run before, its steps are those of that run.

    Args:
        source: The path.
        changes: Settings of the recipe that are changed first, by dotted names.
        log: Called with a line of text, for example before text is tokenized.
        guess: Also take a text or a store, with a guessed recipe, as `penstock train` does.

    Raises:
        RecipeError: the recipe does not exist or is not valid.
        TrainError: the directory holds no run, or the data is not that of the run any more.
    """
    report = log or (lambda _: None)
    path = None if source is None else expand_user(source)
    record = None
    if path is not None and (path / RECORD_NAME).is_file():
        record = read_record(path)
        recipe = _recorded_recipe(path, record, changes or {})
    else:
        is_recipe = source is None or source in bundled_recipes()
        if path is not None and path.suffix != ".toml" and not (is_recipe or guess):
            raise _no_run(path)
        recipe = choose_recipe(source, changes or {}, None, lambda event: report(str(event)))
        recipe = continuing(recipe, report)
    recipe = _with_data(recipe, lambda data: _built(data, recipe.output))
    if record is not None:
        _refuse_text(recipe)
    job = open_job(recipe, lambda event: report(str(event)))
    plan = job.plan
    assert isinstance(plan, Plan)  # `_built` has removed `stream`
    if record is not None and record.plan not in (None, plan.digest):
        raise TrainError(
            f"The data of {path} has changed since the run: its plan had the digest "
            f"{str(record.plan)[:8]}, and now has {plan.digest[:8]}. Restore the stores, or name a "
            "recipe to inspect the data as it is now."
        )
    if record is None and (recipe.output / RECORD_NAME).is_file():
        found = read_record(recipe.output)
        # The recipe may have been changed since the last step of the run.
        plans = [plan, *(each for each, _ in plan.ancestors())]
        record = found if found.plan in [each.digest for each in plans] else None
    return OpenedRun(plan, _steps(job, plan, record), job, recipe, record)


def _no_run(path: Path) -> TrainError:
    if not path.exists():
        return TrainError(f"{path} does not exist (working directory: {Path.cwd()}).")
    runs = [f"{each.parent}" for each in sorted(path.glob(f"*/{RECORD_NAME}"))[:5]]
    advice = f"Name one of its runs: {', '.join(runs)}." if runs else "Name a recipe (.toml)."
    if (path / STORE_NAME).is_file():
        return TrainError(
            f"{path} is a store and not a run: a store has no steps. Name a recipe (.toml) or the "
            f"directory of a run that reads it, or use penstock info or penstock decode {path}."
        )
    why = f"{path} is not the directory of a run: it has no {RECORD_NAME}."
    if (path / "metrics.jsonl").exists():
        why += " Earlier versions wrote none."
    return TrainError(f"{why} {advice}")


def _recorded_recipe(path: Path, record: RunRecord, changes: Tables) -> Recipe:
    if record.recipe is None:
        raise TrainError(
            f"{path} was started from Python, without a recipe, so its data cannot be opened from "
            f"{RECORD_NAME}. Use penstock.inspect with the plan of the run."
        )
    tables: Tables = {**record.recipe, "output": str(path)}
    for name, value in changes.items():
        set_value(tables, name, value)
    recipe = parse_recipe(tables, str(path / RECORD_NAME))
    directory = Path(record.directory)
    recipe = replace(recipe, earlier=tuple(record.sources()[:-1]))
    return _with_data(recipe, lambda data: _located_data(data, directory))


def _with_data(recipe: Recipe, change: Callable[[DataConfig], DataConfig]) -> Recipe:
    """Return a recipe with a change of its data and of the sources that its run had before."""
    earlier = [
        each._replace(sources=change(replace(recipe.data, sources=each.sources)).sources)
        for each in recipe.earlier
    ]
    return replace(recipe, data=change(recipe.data), earlier=tuple(earlier))


def _located(path: str | None, directory: Path) -> str | None:
    """Return a path that is relative to the directory in which a run started."""
    # If the whole project was moved, its paths are relative to the current directory.
    is_there = path is not None and "://" not in path and (directory / path).exists()
    return str(directory / path) if is_there and path is not None else path


def _located_data(data: DataConfig, directory: Path) -> DataConfig:
    sources = {
        name: replace(each, train=_located(each.train, directory) or each.train)
        for name, each in data.sources.items()
    }
    train, val = _located(data.train, directory), _located(data.val, directory)
    return replace(data, train=train, val=val, sources=sources)


def _built(data: DataConfig, output: Path) -> DataConfig:
    """Return the data with the stores that a run has built, instead of the text of each."""

    def built(path: str | None, name: str) -> str | None:
        store = output / "stores" / name
        is_text = path is not None and store_sides(store_path(path)) is None
        # Only a finished store: an unfinished one is continued from its text.
        whole = store_sides(store) is not None and not (store / ".building.json").exists()
        return str(store) if is_text and whole else path

    sources = {
        name: replace(each, train=built(each.train, name) or each.train)
        for name, each in data.sources.items()
    }
    train = built(data.train, "train")
    # A finished store has the same rows in the same order as the stream.
    if data.stream:
        data = replace(data, stream=False, shuffle="part")
    return replace(data, train=train, val=built(data.val, "val"), sources=sources)


def _refuse_text(recipe: Recipe) -> None:
    """Raise if some data of a run is not a store: run.json may come from somebody else.

    A text that it names would be read and copied into the directory of the run.
    """
    data, run = recipe.data, recipe.output
    legs = [data.sources, *(each.sources for each in recipe.earlier)]
    paths = [data.train, data.val, *(each.train for leg in legs for each in leg.values())]
    for path in paths:
        place = None if path is None else store_path(path)
        if place is not None and store_sides(place) is None:
            raise TrainError(
                f"{place}, which {run / RECORD_NAME} names, is not a store, and {run} has no store "
                "built from it. Restore the store, or name the recipe of the run."
            )


def _steps(job: TrainingJob, plan: Plan, record: RunRecord | None) -> RunSteps:
    training = job.training
    rows = training.global_batch_size or training.batch_size
    edges, total = [0], training.steps
    if record is not None:
        # As a run that resumes would: the settings of now, on as many processes as before.
        if rows == "auto":
            rows = record.global_batch_size
        elif training.global_batch_size is None:
            rows *= record.world_size
        logged = list(read_fingerprints(job.output / LOG_NAME))
        # A log that begins later does not say where its first step begins.
        if [each.step for each in logged] == list(range(1, len(logged) + 1)):
            edges += [each.position for each in logged]
        total = total or (len(edges) - 1) or None
    steps = None if rows == "auto" else Steps(rows, start=edges[-1])
    if steps is None:
        total = None  # how many rows they have is not known
    elif total is not None and plan.end < END:
        # The data may end before the last step.
        left = max(0, total - len(edges) + 1)
        total = len(edges) - 1 + min(left, steps.count(plan.end, drop_last=True))
    return RunSteps(steps, edges=edges, total=total, limit=plan.end)
