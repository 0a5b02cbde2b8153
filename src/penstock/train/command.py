"""The parts that `penstock train`, `penstock plan` and `python -m penstock.train` share.

A command names a recipe, a text file or a store. For the last two, a recipe is guessed, and each
guess is printed. Flags then change single settings of the recipe. torch is imported by functions
that need it: `penstock inspect` opens the data of a recipe without it.
"""

import glob
import json
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.disk import write_file
from penstock.errors import (
    MissingInputError,
    PlanError,
    RecipeError,
    SourceError,
    StoreError,
    TokenizerError,
)
from penstock.formats.open import TOKEN_SUFFIXES, is_token_file
from penstock.paths import expand_user, is_remote, nearby_names, redacted, store_path
from penstock.recipe import (
    DEFAULT_SIZE,
    DEFAULT_TOKENIZER,
    Recipe,
    Tables,
    parse_recipe,
    read_recipe,
    set_value,
)
from penstock.train.bundled import bundled_recipes
from penstock.train.config import TrainingConfig, TrainingJob
from penstock.train.data import open_data, store_sides
from penstock.train.record import continuing, recipe_tables
from penstock.train.vocabulary import vocab_size_of

if TYPE_CHECKING:
    from penstock.train.metrics import Log, RunResult

_FLAGS = {
    "train_file": "data.train",
    "val_file": "data.val",
    "batch_size": "training.batch_size",
    "max_length": "data.length",
    "prefetch_factor": "training.prefetch",
    "max_minutes": "training.max_minutes",
    "steps": "training.steps",
    "output": "output",
}
NO_VALIDATION = "there is no validation data; set it with data.val or --val_file"
_MAX_HELD_OUT_BYTES = 10_000_000
# The settings that are guessed with and without a GPU.
_GPU_GUESSES: Tables = {
    "data.length": 1024,
    "model.size": "124M",
    "optimization.learning_rate": 6e-4,
    "training.global_batch_size": 256,
    "training.precision": "bfloat16",
    "training.compile": True,
    "training.max_minutes": 10,
    "training.val_every": 100,
    "training.val_rows": 512,
}
_CPU_GUESSES: Tables = {
    "data.length": 128,
    "model.size": "nano",
    "model.positions": "rotary",
    "optimization.learning_rate": 3e-3,
    "optimization.warmup_steps": 50,
    "optimization.betas": [0.9, 0.99],
    "training.batch_size": 4,
    "training.max_minutes": 10,
    "training.val_every": 100,
    "training.val_rows": 128,
    "training.save_every": 100,
}


def recipe_changes(settings: list[str], **flags: str | float | None) -> Tables:
    """The changes to a recipe that `NAME=VALUE` settings and flags ask for, by dotted names.

    >>> recipe_changes(["training.compile=true"], batch_size=4, num_workers=0)
    {'training.batch_size': 4, 'training.prefetch': 0, 'training.compile': True}
    """
    given = {name: value for name, value in flags.items() if value is not None}
    # Scripts pass --num_workers out of habit, but a thread makes the batches, so there are no
    # worker processes to count. 0 means that nothing is prepared ahead.
    if given.pop("num_workers", None) == 0:
        given["prefetch_factor"] = 0
    changes = {_FLAGS[name]: value for name, value in given.items()}
    if "train_file" in given:  # LocalOpenWebTextDataModule reads its train_file like this
        changes["data.documents"] = "lines"
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals:
            raise RecipeError(f"--set {setting} is not NAME=VALUE, such as training.steps=100.")
        # The value is TOML, so that numbers, booleans and lists get their types.
        try:
            changes[name.strip()] = tomllib.loads(f"value = {text}")["value"]
        # Not TOML, or a number of thousands of digits, or lists that are nested as deep.
        except (ValueError, RecursionError):
            changes[name.strip()] = text  # a string without quotes
    return changes


def choose_recipe(source: str | None, changes: Tables, device: str | None, log: "Log") -> Recipe:
    """The recipe that a command names; otherwise a guessed recipe, and each guess is logged."""
    if source is not None and Path(source).suffix == ".toml":
        return _read(source, changes, log)
    # A text or a store of this name is read; only a name that is not there may be a recipe's.
    if source in (bundled := bundled_recipes()) and not Path(source).exists():
        log(f"the recipe {source} is {bundled[source]}; copy it to change it")
        return _read(bundled[source], changes, log)
    source = changes.get("data.train", source)
    if not source:
        raise RecipeError("Give a recipe (.toml), a text file or a store, or --train_file.")
    if not isinstance(source, str) or Path(source).suffix == ".toml":
        raise RecipeError(
            f"{source!r} cannot be the data to train on. data.train and --train_file take the path "
            "of a text or a store; a recipe is given without a flag."
        )
    has_tokens = any(name.split(".")[:2] == ["data", "tokens"] for name in changes)
    guesses = _guess_recipe(source, device, is_tokens=has_tokens)
    if changes.get("data.val") or changes.get("data.stream"):
        # With separate validation data, no text needs to be held out; a stream cannot be split.
        guesses.pop("data.split", None)
    _fit_to_steps(guesses, changes.get("training.steps"))
    tables: Tables = {}
    for name, value in {"data.train": source, **guesses, **changes}.items():
        set_value(tables, name, value)
    for name, value in guesses.items():
        if name not in changes:
            log(f"guessed {name} = {json.dumps(value)}")
    # The values come from options and guesses, and not from the file of the text.
    return parse_recipe(tables, "the command line")


def _read(path: str | Path, changes: Tables, log: "Log") -> Recipe:
    """The recipe in a file. If it says nothing about the size of the model, that is logged."""
    recipe = read_recipe(path, changes)
    if not recipe.model.keys() & {"size", "layers", "width"}:
        log(f"guessed model.size = {json.dumps(DEFAULT_SIZE)}")
    return recipe


def _fit_to_steps(guesses: Tables, steps: object) -> None:
    """Change guesses for a run of this many steps, if it is a number."""
    if steps:
        del guesses["training.max_minutes"]  # a guess must not end the run before these steps
    if not isinstance(steps, int) or steps < 1:
        return
    if (warmup := guesses.get("optimization.warmup_steps")) is not None:
        guesses["optimization.warmup_steps"] = min(warmup, steps // 10)
    # Five steps or more are validated at least five times, and saved at least twice.
    usual = TrainingConfig(steps=steps)
    validates = guesses.get("training.val_every", usual.val_every)
    saves = guesses.get("training.save_every", usual.save_every)
    guesses["training.val_every"] = min(validates, max(1, steps // 5))
    guesses["training.save_every"] = min(saves, max(1, steps // 2))


@contextmanager
def _naming_settings(recipe: Recipe, table: str) -> Iterator[None]:
    """Let an error of a `with` block name the file of the recipe, and what a table of it sets."""
    try:
        yield
    except (PlanError, SourceError, StoreError, TokenizerError) as error:
        if recipe.path is not None:
            config = recipe.data if table == "data" else recipe.training
            usual = {each.name: each.default for each in fields(config)}
            given = [
                f"{key} = {value!r}" for key, value in asdict(config).items() if value != usual[key]
            ]
            error.add_note(f"In [{table}] of {recipe.path}: {', '.join(given):.300}.")
        raise


def open_job(recipe: Recipe, log: "Log") -> TrainingJob:
    """Open the stores of a recipe and return the job; if the data is text, build them first."""
    with _naming_settings(recipe, "data"):
        plan, val = open_data(recipe.data, recipe.output, log=log, earlier=recipe.earlier)
    return TrainingJob(
        plan=plan,
        val=val,
        model=recipe.model_config(vocab_size_of(plan)),
        training=recipe.training,
        optimization=recipe.optimization,
        output=recipe.output,
        recipe=recipe_tables(recipe),
        earlier=recipe.earlier,
    )


def run_recipe(recipe: Recipe, *, device: str | None, log: "Log") -> "RunResult":
    """Train with the settings of a recipe, then write sample.txt beside the run's other files."""
    from penstock.train.distributed import select_device
    from penstock.train.run import train
    from penstock.train.sample import sample_text

    select_device(device)  # reports a wrong name now, before any text is tokenized
    job = open_job(continuing(recipe, log), log)
    if job.val is None:
        log(NO_VALIDATION)
    with _naming_settings(recipe, "training"):
        result = train(job, device=device, log=log)
    if result.finished and result.rank == 0:
        # The model is trained and saved by now: a sample that cannot be made is no error.
        try:
            text = sample_text(job, result.model, recipe.data.named_tokenizer)
        except Exception as error:  # noqa: BLE001  (a Hub's library has many classes of errors)
            first = (str(error).splitlines() or [type(error).__name__])[0]
            log(f"no sample of text: {first}")
        else:
            write_file(job.output / "sample.txt", [text.encode()])
            log(f"a sample of the model's text, from {job.output / 'sample.txt'}:\n{text}")
    return result


def _guess_recipe(source: str, device: str | None, *, is_tokens: bool) -> Tables:
    """The settings of a recipe for a store or a text, by dotted names."""
    if device is None:
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
    has_gpu = device.startswith("cuda")
    settings = _GPU_GUESSES if has_gpu else _CPU_GUESSES
    if "://" in source:
        url = store_path(source)
        # A pattern names texts, so no server is asked whether it is a store.
        if glob.has_magic(source) or not is_remote(source) or store_sides(url) is None:
            raise SourceError(
                f"{redacted(source)} is not a local file, and not a store. Build a store from it "
                "first, with penstock build."
            )
        return {**settings, "output": f"runs/{url.name}"}
    path = expand_user(source)
    is_pattern = glob.has_magic(source) and not path.exists()
    is_pattern = is_pattern and (path.suffix not in TOKEN_SUFFIXES or is_token_file(path))
    # The prefix of Megatron's two files is not the name of a file.
    if not is_pattern and not path.exists() and not is_token_file(path):
        recipe = get_close_matches(source, bundled_recipes(), 1, 0.75)
        advice = f" Did you mean the recipe {recipe[0]}?" if recipe else nearby_names(path)
        raise MissingInputError(f"{path} does not exist (working directory: {Path.cwd()}).{advice}")
    guesses: Tables = {}
    if not is_tokens and store_sides(path) is None:  # text, which is not tokenized yet
        size = path.stat().st_size if path.is_file() else 0
        # A tenth of the text is held out, but no more than 10 MB.
        share = min(0.1, _MAX_HELD_OUT_BYTES / max(1, size))
        guesses = {"data.tokenizer": DEFAULT_TOKENIZER, "data.documents": "auto"}
        guesses["data.split"] = f"tail:{share:.6f}".rstrip("0")
    named = path
    if is_pattern:  # the run is named after the last folder without a wildcard
        named = next(each for each in path.parents if not glob.has_magic(str(each)))
    name = named.stem if named.is_file() else named.resolve().name
    return {
        **guesses,
        **settings,
        "output": f"runs/{name or 'data'}",
    }
