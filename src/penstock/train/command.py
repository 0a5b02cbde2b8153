"""The parts that `penstock train`, `penstock plan` and `python -m penstock.train` share.

A command names a recipe, a text file or a store. For the last two, a recipe is guessed, and each
guess is printed. Flags then change single settings of the recipe.
"""

import glob
import tomllib
from pathlib import Path

import torch

from penstock.digest import derive_key
from penstock.errors import PenstockError, RecipeError, SourceError, TrainError
from penstock.recipe import Recipe, Tables, parse_recipe, read_recipe, set_value
from penstock.store.files import write_file
from penstock.store.manifest import FILE_NAME
from penstock.store.reader import TokenStore
from penstock.train.config import TrainingJob
from penstock.train.data import open_data, stores_of, vocab_size_of
from penstock.train.distributed import select_device
from penstock.train.metrics import Log
from penstock.train.model import GPT
from penstock.train.run import RunResult, train

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
_DOCUMENTS = "documents: the text between <|endoftext|> where it is found, otherwise whole files"
_TOKEN_FILES = {
    ".npy": "data: a token file of GPT-2's tokenizer; no validation",
    ".bin": "data: a token file of GPT-2's tokenizer, uint16 as nanoGPT writes it; no validation",
}
_MAX_HELD_OUT_BYTES = 10_000_000
_TEMPERATURE = 0.8  # below 1, likely tokens become more likely
_TOP_K = 50
# The settings that are guessed with and without a GPU.
_GPU_RECIPE = (
    'model = {size = "124M"}\n'
    "data = {length = 1024}\n"
    "optimization = {learning_rate = 6e-4, warmup_steps = 100}\n"
    'training = {global_batch_size = 256, precision = "bfloat16", compile = true, '
    "max_minutes = 10, val_every = 100, val_rows = 512, save_every = 500}\n"
)
_CPU_RECIPE = (
    'model = {size = "nano", positions = "rotary"}\n'
    "data = {length = 128}\n"
    "optimization = {learning_rate = 3e-3, warmup_steps = 50, betas = [0.9, 0.99]}\n"
    "training = {batch_size = 4, max_minutes = 10, val_every = 100, val_rows = 128, "
    "save_every = 100}\n"
)

Guesses = dict[str, tuple[str, ...]]
"""Lines about guessed settings. A line is not printed if a flag sets one of its settings."""


def recipe_changes(settings: list[str], **flags: str | float | None) -> Tables:
    """`NAME=VALUE` settings and flags, as changes to a recipe by dotted names.

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
        except tomllib.TOMLDecodeError:
            changes[name.strip()] = text  # a string without quotes
    return changes


def choose_recipe(
    source: str | None, changes: Tables, device: str | None = None
) -> tuple[Recipe, list[str]]:
    """The recipe of a command, and a line for each guess if the command named no recipe."""
    if source is not None and Path(source).suffix == ".toml":
        return read_recipe(source, changes), []
    source = changes.get("data.train", source)
    if not source:
        raise RecipeError("Give a recipe (.toml), a text file or a store, or --train_file.")
    if not isinstance(source, str) or Path(source).suffix == ".toml":
        raise RecipeError(
            f"{source!r} cannot be the data to train on. data.train and --train_file take the path "
            "of a text or a store; a recipe is given without a flag."
        )
    tables, guesses = _guess_recipe(source, device)
    for name, value in changes.items():
        set_value(tables, name, value)
    data = tables["data"]
    # Nothing is held out of a text that is streamed, or if there is other validation data.
    no_split = isinstance(data, dict) and (data.get("val") or data.get("stream"))
    if no_split and "data.split" not in changes:
        data.pop("split", None)
    # A setting that a flag has set was not guessed.
    lines = [line for line, names in guesses.items() if not set(names) & set(changes)]
    return parse_recipe(tables, source), lines


def open_job(recipe: Recipe, log: Log) -> TrainingJob:
    """The job of a recipe, with its stores opened, and built first if the data is text."""
    plan, val = open_data(recipe.data, recipe.output, log=log)
    return TrainingJob(
        plan=plan,
        val=val,
        model=recipe.model_config(vocab_size_of(plan)),
        training=recipe.training,
        optimization=recipe.optimization,
        output=recipe.output,
    )


def run_recipe(recipe: Recipe, *, device: str | None, log: Log) -> RunResult:
    """Train as a recipe says, then write sample.txt beside the other files of the run."""
    select_device(device)  # reports a wrong name now, before any text is tokenized
    job = open_job(recipe, log)
    result = train(job, device=device, log=log)
    if result.finished and result.rank == 0:
        # The model is trained and saved by now: a sample that cannot be made is no error.
        try:
            text = _sample_text(job, result.model)
        except (ImportError, PenstockError) as error:
            log(f"no sample of text: {str(error).splitlines()[0]}")
        else:
            write_file(job.output / "sample.txt", [text.encode()])
            log(f"a sample of the model's text, from {job.output / 'sample.txt'}:\n{text}")
    return result


def _sample_text(job: TrainingJob, model: GPT) -> str:
    """A hundred tokens that the model generates, decoded with the tokenizer of the data."""
    store = stores_of(next(iter(job.plan.sources.values())))[0]
    if not isinstance(store, TokenStore):
        raise TrainError(f"{store.path} does not record its tokenizer")
    from penstock.store.reader import tokenizer_of  # needs packages that training does not

    # The model may have more ids than the tokenizer, and these have no text.
    tokenizer = tokenizer_of(store.manifest)
    # The end token precedes the first token of every document but the first, so after it the model
    # writes the beginning of a document.
    end = store.manifest.contents["eos_id"]
    first = [int(end)] if end is not None else [int(store.tokens(0, 1)[0])]
    tokens = generate(model, first, num_tokens=100, vocab_size=tokenizer.vocab_size)
    return tokenizer.decode(tokens[len(first) :]).decode(errors="replace")


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
    # A separate generator: the global one stays as it was.
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


def _guess_recipe(source: str, device: str | None) -> tuple[Tables, Guesses]:
    """The tables of a recipe for a store or a text, and the guesses in them."""
    if "://" in source:
        raise SourceError(
            f"{source} is not a local file. Build a store from it with penstock build, then train "
            "on that store."
        )
    path = Path(source)
    is_pattern = glob.has_magic(source) and not path.exists() and path.suffix not in _TOKEN_FILES
    if not is_pattern and not path.exists():
        raise SourceError(
            f"{path} does not exist (working directory: {Path.cwd()}). Give a text file, a store "
            "or a recipe (.toml)."
        )
    data, data_guesses = _guess_data(path)
    has_gpu = (device or ("cuda" if torch.cuda.is_available() else "cpu")).startswith("cuda")
    tables, guesses = _guess_settings(gpu=has_gpu)
    tables["data"] |= data
    named = path
    if is_pattern:  # the run is named after the last folder without a wildcard
        named = next(each for each in path.parents if not glob.has_magic(str(each)))
    name = named.stem if named.is_file() else named.resolve().name
    tables["output"] = f"runs/{name or 'data'}"
    return tables, {**data_guesses, **guesses, f"output: {tables['output']}": ("output",)}


def _guess_data(path: Path) -> tuple[Tables, Guesses]:
    finished: str | None = _TOKEN_FILES.get(path.suffix)
    if (path / FILE_NAME).exists():
        finished = "data: a finished store; no validation (set --val_file)"
    elif (path / "train" / FILE_NAME).exists():
        finished = "data: a finished store and its validation side"
    if finished is not None:
        return {"train": str(path)}, {finished: ("data.val",)}
    size = path.stat().st_size if path.is_file() else 0
    # A tenth of the text is held out, but no more than 10 MB.
    share = 0.1 if size <= 10 * _MAX_HELD_OUT_BYTES else _MAX_HELD_OUT_BYTES / size
    return {"train": str(path), "split": f"tail:{share:.6f}"}, {
        "tokenizer: gpt2": ("data.tokenizer",),
        _DOCUMENTS: ("data.documents",),
        f"validation: the last {share:.1%} of the text": ("data.split", "data.val", "data.stream"),
    }


def _guess_settings(*, gpu: bool) -> tuple[Tables, Guesses]:
    """The tables of a recipe for this kind of device, and the guesses in them."""
    tables = tomllib.loads(_GPU_RECIPE if gpu else _CPU_RECIPE)
    training = tables["training"]
    rows = training.get("global_batch_size") or training["batch_size"]
    model = f"model: {tables['model']['size']}" + ("" if gpu else ", since there is no GPU")
    guesses: Guesses = {
        model: ("model.size", "model.layers", "model.width"),
        f"length: {tables['data']['length']:,} tokens per row": ("data.length",),
        f"batch: {rows} rows per step": ("training.global_batch_size", "training.batch_size"),
        f"time: at most {training['max_minutes']} minutes": ("training.max_minutes",),
    }
    if gpu:
        guesses["precision: bfloat16, compiled (training.compile=false starts sooner)"] = (
            "training.precision",
            "training.compile",
        )
        # The size of a micro-batch says nothing about the rows of a step.
        guesses[f"batch: {rows} rows per step"] = ("training.global_batch_size",)
    return tables, guesses
