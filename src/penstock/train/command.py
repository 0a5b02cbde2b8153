"""The parts that `penstock train`, `penstock plan` and `python -m penstock.train` share.

A command names a recipe, a text file or a store. For the last two, a recipe is guessed, and each
guess is printed. Flags then change single settings of the recipe.
"""

import glob
import json
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path

import torch

from penstock.digest import derive_key
from penstock.errors import (
    MissingInputError,
    MissingTokenizerError,
    PlanError,
    RecipeError,
    SourceError,
    StoreError,
    TokenizerError,
    TrainError,
)
from penstock.formats.open import is_token_file
from penstock.paths import expand_user, is_remote, redacted
from penstock.recipe import Recipe, Tables, parse_recipe, read_recipe, set_value
from penstock.remote.address import store_path
from penstock.store.files import write_file
from penstock.store.reader import TokenStore
from penstock.train.config import TrainingJob
from penstock.train.data import TOKEN_FILES, open_data, store_sides
from penstock.train.distributed import select_device
from penstock.train.metrics import Log, RunResult
from penstock.train.model import GPT
from penstock.train.record import recipe_tables
from penstock.train.run import train
from penstock.train.vocabulary import stores_of, vocab_size_of

_FLAGS = {
    "train_file": "data.train",
    "val_file": "data.val",
    "batch_size": "training.batch_size",
    "max_length": "data.length",
    "prefetch_factor": "training.prefetch",
    "max_minutes": "training.max_minutes",
    "steps": "training.steps",
    "parallel": "training.parallel",
    "output": "output",
}
NO_VALIDATION = "there is no validation data; set it with data.val or --val_file"
_DEFAULT_TOKENIZER = "gpt2"
_MAX_HELD_OUT_BYTES = 10_000_000
_TEMPERATURE = 0.8  # below 1, likely tokens become more likely
_TOP_K = 50
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


def choose_recipe(source: str | None, changes: Tables, device: str | None, log: Log) -> Recipe:
    """The recipe that a command names; otherwise a guessed recipe, and each guess is logged."""
    if source is not None and Path(source).suffix == ".toml":
        return read_recipe(source, changes)
    source = changes.get("data.train", source)
    if not source:
        raise RecipeError("Give a recipe (.toml), a text file or a store, or --train_file.")
    if not isinstance(source, str) or Path(source).suffix == ".toml":
        raise RecipeError(
            f"{source!r} cannot be the data to train on. data.train and --train_file take the path "
            "of a text or a store; a recipe is given without a flag."
        )
    guesses = _guess_recipe(source, device)
    if changes.get("data.val") or changes.get("data.stream"):
        # With separate validation data, no text needs to be held out; a stream cannot be split.
        guesses.pop("data.split", None)
    if changes.get("training.steps"):
        del guesses["training.max_minutes"]  # a guess must not end the run before these steps
    steps, warmup = changes.get("training.steps"), guesses.get("optimization.warmup_steps")
    if isinstance(steps, int) and warmup is not None:
        guesses["optimization.warmup_steps"] = min(warmup, steps // 10)
    tables: Tables = {}
    for name, value in {"data.train": source, **guesses, **changes}.items():
        set_value(tables, name, value)
    for name, value in guesses.items():
        if name not in changes:
            log(f"guessed {name} = {json.dumps(value)}")
    # The values come from options and guesses, and not from the file of the text.
    return parse_recipe(tables, "the command line")


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


def open_job(recipe: Recipe, log: Log) -> TrainingJob:
    """Open the stores of a recipe and return the job; if the data is text, build them first."""
    with _naming_settings(recipe, "data"):
        plan, val = open_data(recipe.data, recipe.output, log=log, ledger=recipe.ledger)
    return TrainingJob(
        plan=plan,
        val=val,
        model=recipe.model_config(vocab_size_of(plan)),
        training=recipe.training,
        optimization=recipe.optimization,
        output=recipe.output,
        recipe=recipe_tables(recipe),
        ledger=recipe.ledger,
    )


def run_recipe(recipe: Recipe, *, device: str | None, log: Log) -> RunResult:
    """Train with the settings of a recipe, then write sample.txt beside the run's other files."""
    select_device(device)  # reports a wrong name now, before any text is tokenized
    job = open_job(recipe, log)
    if job.val is None:
        log(NO_VALIDATION)
    with _naming_settings(recipe, "training"):
        result = train(job, device=device, log=log)
    if result.finished and result.rank == 0:
        # The model is trained and saved by now: a sample that cannot be made is no error.
        try:
            text = _sample_text(job, result.model, recipe.data.tokenizer)
        except Exception as error:  # noqa: BLE001  (a Hub's library has many classes of errors)
            first = (str(error).splitlines() or [type(error).__name__])[0]
            log(f"no sample of text: {first}")
        else:
            write_file(job.output / "sample.txt", [text.encode()])
            log(f"a sample of the model's text, from {job.output / 'sample.txt'}:\n{text}")
    return result


def _sample_text(job: TrainingJob, model: GPT, named: str) -> str:
    """A hundred tokens that the model generates, decoded with the tokenizer of the data.

    Args:
        job: The job, which has the data.
        model: The trained model.
        named: The tokenizer of the recipe, for a store whose tokenizer was not loaded before.
    """
    store = stores_of(next(iter(job.plan.sources.values())))[0]
    if not isinstance(store, TokenStore):
        raise TrainError(f"{store.path} does not record its tokenizer")
    from penstock.store.reader import tokenizer_of  # needs packages that training does not

    # The model may have more ids than the tokenizer, and these have no text.
    try:
        tokenizer = tokenizer_of(store.manifest)
    except MissingTokenizerError as error:
        if named == _DEFAULT_TOKENIZER:  # nobody named it
            raise TrainError(f"{error} In a recipe, that is data.tokenizer.") from None
        tokenizer = tokenizer_of(store.manifest, named)
    # The end token precedes the first token of every document but the first, so after it the model
    # writes the beginning of a document.
    end = store.manifest.contents["eos_id"]
    first = [int(end)] if end is not None else [int(store.tokens(0, 1)[0])]
    tokens = generate(model, first, num_tokens=100, vocab_size=tokenizer.vocab_size)
    return tokenizer.decode(tokens[len(first) :])


@torch.no_grad()
def generate(
    model: GPT,
    tokens: list[int],
    *,
    num_tokens: int = 100,
    seed: int = 0,
    vocab_size: int | None = None,
) -> list[int]:
    """`tokens`, continued by the model; the same seed draws the same tokens.

    Args:
        model: A model, which is left in the mode it was in: training or evaluation.
        tokens: The beginning, at least one token.
        num_tokens: The number of tokens to add.
        seed: The seed of the draws.
        vocab_size: Draw ids below this number, if the tokenizer has fewer than the model.

    Raises:
        TrainError: the logits are not finite.
    """
    device = model.token_embedding.weight.device
    # A separate generator is used, so that the state of torch's global one does not change.
    generator = torch.Generator(device).manual_seed(derive_key("sample", seed) >> 1)
    was_training = model.training
    model.eval()
    written = torch.tensor([tokens], device=device)
    try:
        for _ in range(num_tokens):
            # There is no cache of keys and values: for a hundred tokens it is not worth its code.
            # The model was trained on rows of `length` tokens, so it sees the last ones.
            logits = model(written[:, -model.config.length :])[0, -1, :vocab_size].float()
            if not bool(logits.isfinite().all()):
                raise TrainError(
                    "The logits of the model are not finite, so no token can be drawn."
                )
            likeliest, ids = (logits / _TEMPERATURE).topk(min(_TOP_K, len(logits)))
            drawn = torch.multinomial(likeliest.softmax(0), 1, generator=generator)
            written = torch.cat([written, ids[drawn][None]], dim=1)
    finally:
        model.train(was_training)
    return [int(each) for each in written[0]]


def _guess_recipe(source: str, device: str | None) -> Tables:
    """The settings of a recipe for a store or a text, by dotted names."""
    has_gpu = (device or ("cuda" if torch.cuda.is_available() else "cpu")).startswith("cuda")
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
    is_pattern = is_pattern and (path.suffix not in TOKEN_FILES or is_token_file(path))
    if not is_pattern and not path.exists():
        raise MissingInputError(f"{path} does not exist (working directory: {Path.cwd()}).")
    guesses: Tables = {}
    if store_sides(path) is None:  # text, which is not tokenized yet
        size = path.stat().st_size if path.is_file() else 0
        # A tenth of the text is held out, but no more than 10 MB.
        share = min(0.1, _MAX_HELD_OUT_BYTES / max(1, size))
        guesses = {"data.tokenizer": _DEFAULT_TOKENIZER, "data.documents": "auto"}
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
