"""Adds an amendment to the ledger of a recipe: from a step of its run to a position of its plan."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.errors import PlanError, RecipeError
from penstock.inspect.documents import FoundDocument, find_documents
from penstock.inspect.members import members
from penstock.inspect.runs import Log, OpenedRun, open_run
from penstock.ledger import AddedStore as AddedStore  # exported with this module
from penstock.ledger import LedgerLine, append_line, ledger_path
from penstock.loader.fingerprints import RowReader
from penstock.order.amend import Amendment, Span
from penstock.order.plan import Plan
from penstock.order.weights import Weight
from penstock.paths import expand_user, is_remote, redacted
from penstock.recipe import Tables, read_recipe
from penstock.store.reader import TokenStore
from penstock.train.data import open_added
from penstock.train.record import checkpoint_paths

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class AmendedRecipe:
    """An amendment that was added to a ledger, or would be."""

    ledger: Path
    number: int
    """Its number in the ledger; the first is 1."""
    step: int
    amendment: Amendment
    plan: Plan
    """The plan with this amendment."""
    rows_before: dict[str, int]
    """Rows of each source from the step to the end of the run, without it; empty without an end."""
    rows: dict[str, int]
    """The same with the amendment."""
    written: bool
    """False after a dry run, which leaves the ledger as it is."""
    excluded: tuple[FoundDocument, ...] = ()
    """The documents that this amendment excludes."""

    def to_json(self) -> Json:
        """Return it as JSON."""
        found = {"ledger": str(self.ledger), "number": self.number, "step": self.step}
        rows = {"rows_before": self.rows_before, "rows": self.rows, "plan": self.plan.digest}
        amendment = self.amendment.to_json()
        return {**found, "amendment": amendment, **rows, "written": self.written}


def amend_recipe(  # noqa: PLR0913  (one keyword for each change that an amendment can make)
    recipe: str | Path,
    *,
    from_step: int | None = None,
    weights: Mapping[str, Weight] | None = None,
    add: Mapping[str, AddedStore | None] | None = None,
    drop: Sequence[str] = (),
    skip: tuple[int, int] | None = None,
    exclude: Sequence[tuple[str, int]] = (),
    settings: Tables | None = None,
    dry_run: bool = False,
    log: Log | None = None,
) -> AmendedRecipe:
    """Add an amendment to the ledger of a recipe.

    Args:
        recipe: The path of the recipe.
        from_step: The first step that changes; the first step of a run is 1. With `skip`, it is
            the first step that is left out.
        weights: The weights of all sources that are read from there on.
        add: Stores by name; None stands for a source that was dropped before.
        drop: Sources that are not read any more.
        skip: The first and the last step to leave out. Their numbers go to the steps after them.
        exclude: Documents whose tokens become no targets any more: input file and record. If
            several stores have such a document, `NAME=FILE` names the source.
        settings: Settings of the recipe that a run was started with, by dotted names.
        dry_run: Return the amendment without writing it.
        log: Called with a line of text.

    Raises:
        PlanError: the step is before the last amendment or the last checkpoint, or the arguments
            do not fit the plan.
    """
    path = expand_user(recipe)
    _check_settings(path, settings or {})
    run = open_run(str(path), settings, log)
    step, position, num_rows = _place(run, from_step, skip)
    if run.plan.amendments and position < (last := run.plan.amendments[-1].position):
        raise PlanError(
            f"Step {step:,} is before the last amendment, which begins with step "
            f"{run.steps.at(last):,}. What was amended stays as it is: amend from that step on."
        )
    _refuse_trained(run, position)
    stores = {name: each for name, each in (add or {}).items() if each is not None}
    new = {
        name: open_added(
            run.recipe.data, run.recipe.output, _checked(each), log or (lambda _: None)
        )
        for name, each in stores.items()
    }
    excluded = _excluded(run.plan, exclude)
    amended = run.plan.amend(
        position,
        weights=weights,
        add={name: new.get(name) for name in add or ()},
        drop=drop,
        skip=num_rows,
        exclude=_spans(excluded),
    )
    made = amended.amendments[-1]
    documents = tuple(f"{file}:{record}" for file, record in exclude)
    line = LedgerLine(run.plan.digest, step, made.to_json(), stores, documents)
    before, after = (_rows_after(run, each, position) for each in (run.plan, amended))
    # Lines are never removed, so everything that a run would refuse is refused before.
    RowReader(amended)
    ledger, number = ledger_path(path), len(amended.amendments)
    if not dry_run:
        append_line(ledger, run.recipe.ledger, line)
    return AmendedRecipe(
        ledger, number, step, made, amended, before, after, not dry_run, tuple(excluded)
    )


def _check_settings(path: Path, settings: Tables) -> None:
    changed = [name for name in settings if name.partition(".")[0] == "data"]
    if changed:
        raise RecipeError(
            f"--set {changed[0]} would amend another plan than that of {path}. Change the recipe "
            "before its first run, or add an amendment that changes sources and weights."
        )
    if path.suffix != ".toml":
        raise RecipeError(f"{path} is not a recipe (.toml). A ledger is a file beside a recipe.")
    if read_recipe(path, settings).data.stream:
        raise RecipeError(
            f"{path} has stream=true: its store is still being built, and cannot be amended. When "
            'it is finished, set stream=false and shuffle="part"; the rows stay the same.'
        )


def _place(
    run: OpenedRun, from_step: int | None, skip: tuple[int, int] | None
) -> tuple[int, int, int]:
    """Return the first step of an amendment, its position, and the number of rows to leave out."""
    if skip is None:
        if from_step is None:
            raise PlanError("An amendment needs the step that it begins with: --from-step.")
        return from_step, run.steps.span(from_step)[0], 0
    first, last = skip
    if first > last:
        raise PlanError(f"There are no steps from {first:,} to {last:,} to skip.")
    if from_step not in (None, first):
        raise PlanError(
            f"--from-step {from_step} and --skip {first}:{last} begin at different steps. An "
            "amendment that skips begins with the first step that it leaves out."
        )
    start = run.steps.span(first)[0]
    # Of a run with an end, the last steps may be left out too: later rows take their place.
    return first, start, run.steps.open_ended().span(last)[1] - start


def _refuse_trained(run: OpenedRun, position: int) -> None:
    """Raise if the run of a recipe has a checkpoint after the position of an amendment."""
    directory = run.recipe.output / "checkpoints"
    steps = list(checkpoint_paths(directory)) if run.record is not None else []
    if not steps:
        return
    trained = run.steps.open_ended().span(steps[-1])[1]
    if trained > position:
        begin = run.steps.at(position)
        raise PlanError(
            f"The run in {run.recipe.output} has trained {steps[-1]:,} steps (its last checkpoint "
            f"is step {steps[-1]}), so steps from {begin:,} on cannot be changed any more. Amend "
            f"from step {steps[-1] + 1} on. To go back, remove the checkpoints after step "
            f"{begin - 1} from {directory} first."
        )


def _checked(store: AddedStore) -> AddedStore:
    if is_remote(store.train) and redacted(store.train) != store.train:
        raise PlanError(
            f"{redacted(store.train)} was given with a user, a password or a query. A ledger is "
            "read by others, so give the URL without them, and set the credentials in the "
            "environment."
        )
    return store


def _excluded(plan: Plan, documents: Sequence[tuple[str, int]]) -> list[FoundDocument]:
    found: list[FoundDocument] = []
    for file, record in documents:
        matches, name = _documents(plan, file, record)
        if len({(each.store, each.file) for each in matches}) > 1:
            shown = "; ".join(f'source "{each.source}": {each}' for each in matches[:5])
            sources = sorted({each.source for each in matches})
            source = f", or the source, such as {sources[0]}={name}:{record}"
            raise PlanError(
                f"{file}:{record} are several documents ({shown}). Name one: more of the path of "
                f"the file{source if len(sources) > 1 else ''}."
            )
        found += matches
    return found


def _spans(documents: Sequence[FoundDocument]) -> dict[str, list[Span]]:
    found: dict[str, list[Span]] = {}
    for each in documents:
        found.setdefault(each.source, []).append(each.span)
    return found


def _documents(plan: Plan, file: str, record: int) -> tuple[list[FoundDocument], str]:
    """Return the documents of `FILE` or `SOURCE=FILE`, and the name of the file."""
    source, _, name = file.partition("=")
    if not name or source not in plan.sources:
        return find_documents(plan, file, record), file
    names = [
        each["name"]
        for *_, store in members(plan, None)
        if isinstance(store, TokenStore)
        for each in store.manifest.inputs
    ]
    if any(f"/{each}".endswith(f"/{file}") for each in names):  # its name has "=", too
        return find_documents(plan, file, record), file
    return find_documents(plan, name, record, source), name


def _rows_after(run: OpenedRun, plan: Plan, position: int) -> dict[str, int]:
    end = run.steps.end
    if end is None or end > plan.end:
        return {}
    before, after = plan.counts(position), plan.counts(end)
    return {name: after[name] - before[name] for name in plan.names}
