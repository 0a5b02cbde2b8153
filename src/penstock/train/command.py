"""What `penstock train` and `python -m penstock.train` do alike."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.errors import PenstockError, RecipeError, TrainError
from penstock.recipe import Recipe, parse_recipe, read_recipe, set_value
from penstock.store.files import write_file
from penstock.store.reader import TokenStore
from penstock.train.data import open_data
from penstock.train.guess import guess
from penstock.train.job import Job, Outcome, Tell
from penstock.train.run import train
from penstock.train.sample import write_on
from penstock.train.world import device_of

__all__ = ["changes_of", "execute", "job_of", "recipe_of"]


def changes_of(flags: Mapping[str, Any], settings: list[str]) -> dict[str, Any]:
    """Flags and `NAME=VALUE` settings as changes to a recipe, by dotted names.

    >>> changes_of({"batch_size": 4, "num_workers": 0}, ["training.compile=true"])
    {'training.batch_size': 4, 'training.prefetch': 0, 'training.compile': True}
    """
    import tomllib

    names = {
        "train_file": "data.train",
        "val_file": "data.val",
        "batch_size": "training.batch_size",
        "max_length": "data.length",
        "prefetch_factor": "training.prefetch",
        "max_minutes": "training.max_minutes",
        "steps": "training.steps",
        "output": "output",
    }
    given = {name: value for name, value in flags.items() if value is not None}
    # Rows are made by a thread, never by processes: what is left to choose is whether ahead.
    if given.pop("num_workers", None) == 0:
        given["prefetch_factor"] = 0
    changes = {names[name]: value for name, value in given.items()}
    if "train_file" in given:  # read as LocalOpenWebTextDataModule reads it
        changes["data.documents"] = "lines"
    for setting in settings:
        name, equals, spelled = setting.partition("=")
        if not equals:
            raise RecipeError(f"--set {setting} is not NAME=VALUE, such as training.steps=100.")
        try:
            changes[name.strip()] = tomllib.loads(f"value = {spelled}")["value"]
        except tomllib.TOMLDecodeError:
            changes[name.strip()] = spelled
    return changes


def recipe_of(
    source: str | None, changes: Mapping[str, Any], device: str | None = None
) -> tuple[Recipe, list[str]]:
    """The recipe that a command means, and what was guessed where it names no recipe."""
    if source is not None and Path(source).suffix == ".toml":
        return read_recipe(source, changes), []
    source = changes.get("data.train", source)
    if not source:
        raise RecipeError("Give a recipe (.toml), a text file or a store, or --train_file.")
    if not isinstance(source, str) or Path(source).suffix == ".toml":
        raise RecipeError(
            f"{source!r} is no text to train on. Give a recipe as it is, and in data.train or "
            "--train_file the path of a text or a store."
        )
    tables, told = guess(source, device)
    for name, value in changes.items():
        set_value(tables, name, value)
    data = tables["data"]
    alone = isinstance(data, dict) and (data.get("val") or data.get("stream"))
    if alone and "data.split" not in changes:
        data.pop("split", None)
    return parse_recipe(tables, source), [each.line for each in told if each.holds(changes)]


def job_of(recipe: Recipe, tell: Tell) -> Job:
    """The job of a recipe: its stores opened, and built where they are text."""
    opened = open_data(recipe.data, recipe.output, tell=tell)
    return Job(
        plan=opened.plan,
        val=opened.val,
        shape=recipe.shape(opened.vocab_size),
        training=recipe.training,
        optimization=recipe.optimization,
        output=recipe.output,
    )


def execute(recipe: Recipe, *, device: str | None, tell: Tell) -> Outcome:
    """Train by a recipe; leaves checkpoints, metrics.jsonl, curve.svg and sample.txt."""
    device_of(device)  # a name that is wrong is told before text is built
    job = job_of(recipe, tell)
    outcome = train(job, device=device, tell=tell)
    if outcome.finished and outcome.rank == 0:
        _write_sample(job, outcome, tell)
    return outcome


def _write_sample(job: Job, outcome: Outcome, tell: Tell) -> None:
    """A few words of the model, where its tokenizer is at hand."""
    rows: Any = next(iter(job.plan.sources.values()))
    store = rows.stream.members[0]
    if not isinstance(store, TokenStore):
        tell(f"no sample of text: {store.path} does not say which tokenizer it is of")
        return
    try:
        from penstock.store.reader import tokenizer_of

        tokenizer = tokenizer_of(store.manifest)
    except (ImportError, PenstockError) as error:
        tell(f"no sample of text: {str(error).splitlines()[0]}")
        return
    begin = store.manifest.contents["eos_id"]
    first = [int(begin)] if begin is not None else [int(store.tokens(0, 1)[0])]
    try:
        known = tokenizer.vocab_size
        written = write_on(outcome.model, first, num_tokens=100, vocab_size=known)
    except TrainError as error:
        tell(f"no sample of text: {error}")
        return
    text = tokenizer.decode(written[len(first) :]).decode(errors="replace")
    write_file(job.output / "sample.txt", [text.encode()])
    tell(f"a sample of {job.output / 'sample.txt'}:\n{text}")
