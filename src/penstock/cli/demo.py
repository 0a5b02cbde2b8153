"""`penstock demo`: the whole pipeline, on text that every machine with Python has.

The sources of Python's standard library are one corpus ("code"). Its documentation is the other
("prose"): the docstrings of each module as one page, and the topics of `help()`. No network and no
data in the package are needed. Tests are left out, because some distributions do not ship them.
"""

import ast
import importlib
import inspect
import json
import os
import sysconfig
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.decode import show_document
from penstock.cli.info import show_summary
from penstock.cli.progress import Outcome, measured_build
from penstock.cli.terminal import console, shell_word, write
from penstock.cli.units import duration_text, size_text
from penstock.errors import SourceError

if TYPE_CHECKING:
    from penstock.loader.loader import Loader
    from penstock.order.plan import Plan
    from penstock.store.reader import TokenStore
    from penstock.tokenize.tokenizer import Tokenizer
    from penstock.train import RunResult

__all__ = ["demo_command"]

_OTHER_FOLDERS = frozenset(
    ("site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__")
)
_SHOWN_LINES = 12
_SHOWN_TOKENS = 9
_LENGTH = 64
_BATCH = 16
_Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def demo_command(
    directory: Annotated[
        Path, typer.Option("--directory", "-d", metavar="DIRECTORY", help="Where to write.")
    ] = Path("demo"),
    train_seconds: Annotated[
        float, typer.Option(min=0, help="How long to train at the end; 0 skips it.")
    ] = 60.0,
) -> None:
    """Run the whole pipeline on Python's standard library.

    Builds two stores, of its source files ("code") and of its documentation ("prose"), inspects
    them, reads batches of both, and trains a small model for a minute. Needs no network.
    """
    files, pages = _collect(directory)
    tokenizer, stores = _build_stores(directory, files)
    _inspect(stores, pages)
    _title("6. The same builds again: the stores are already finished")
    for name, outcome in _build(directory, files, tokenizer).items():
        write(f"{name:<6} {_time_taken(outcome)}")
    _title("7. A mixture: penstock.Plan")
    plan = _mixture(stores)
    write(str(plan))
    _title("8. The first batch: penstock.Loader")
    _show_batch(plan, tokenizer)
    _title("9. Speed")
    _show_speed(plan)
    _title("10. Stopped, and resumed with two ranks")
    _show_resume(plan)
    if train_seconds:
        _title("11. A small GPT-2 for a minute: penstock train")
        _show_training(stores["prose"], directory / "run", train_seconds)
    _title("What to do next")
    write("  penstock build YOUR_FILES -o stores/mine    # .txt .jsonl .parquet, .gz .zst")
    write(f"  penstock decode {shell_word(directory / 'code')} --document 7 --count 2")
    write("  penstock build --help")


def _collect(directory: Path) -> tuple[list[Path], list[str]]:
    """The source files, and the names of the pages of documentation."""
    _title("1. Text that every machine has: Python's standard library")
    directory.mkdir(parents=True, exist_ok=True)
    files, prose = library_files(), directory / "prose.jsonl"
    pages = write_prose(prose, files)
    size = size_text(sum(file.stat().st_size for file in files))
    write(f"code   {len(files):,} modules in {files[0].parent}, {size}")
    write(f"prose  {len(pages):,} pages in {prose}, {size_text(prose.stat().st_size)}")
    return files, pages


def _build_stores(directory: Path, files: list[Path]) -> "tuple[Tokenizer, dict[str, TokenStore]]":
    from penstock.tokenize.tokenizer import load_tokenizer

    _title("2. From raw text to finished stores: penstock build")
    tokenizer = load_tokenizer("gpt2")
    stores = {}
    for name, outcome in _build(directory, files, tokenizer).items():
        store = stores[name] = outcome.store
        size = f"{len(store):,} documents, {store.num_tokens:,} tokens"
        write(f"{name:<6} {size}, {_time_taken(outcome)}")
    return tokenizer, stores


def _inspect(stores: "dict[str, TokenStore]", pages: list[str]) -> None:
    """Summaries of both stores, one document of each, and a check of every byte."""
    from penstock.store.summary import summarize
    from penstock.store.verify import verify

    code, prose = stores["code"], stores["prose"]
    _title("3. What the stores contain: penstock info")
    show_summary(summarize(code))
    write("")
    show_summary(summarize(prose))
    _title("4. One document of each, and its origin: penstock decode")
    names = [Path(code.origin(number).file).name for number in range(len(code))]
    short = names.index("antigravity.py") if "antigravity.py" in names else 0
    show_document(code, short, num_lines=_SHOWN_LINES)
    write("")
    page = pages.index("help: lambda") if "help: lambda" in pages else 0
    show_document(prose, page, num_lines=_SHOWN_LINES)
    _title("5. Every byte checked: penstock verify")
    for name, store in stores.items():
        started = time.monotonic()
        verify(store.path)
        write(f"{name:<6} is intact, checked in {duration_text(time.monotonic() - started)}")


def _title(text: str) -> None:
    console().print(f"\n{text}", style="bold cyan")


def _build(directory: Path, files: list[Path], tokenizer: "Tokenizer") -> dict[str, Outcome]:
    whole = {"documents": "file", "format": "text", "tokenizer": tokenizer}
    records = {"tokenizer": tokenizer}
    prose = directory / "prose.jsonl"
    return {
        "code": measured_build(files, directory / "code", whole, bar=True),
        "prose": measured_build(prose, directory / "prose", records, bar=True),
    }


def _time_taken(outcome: Outcome) -> str:
    verb = "found finished" if outcome.finished_before else "built"
    return f"{verb} in {duration_text(outcome.seconds)}"


def _mixture(stores: "dict[str, TokenStore]") -> "Plan":
    """Three rows of code for each row of prose, shuffled."""
    from penstock.order.plan import Plan
    from penstock.rows.windows import Windows

    sources = {name: Windows(store, _LENGTH) for name, store in stores.items()}
    return Plan(sources, weights={"code": 3, "prose": 1}, seed=17)


def _loader(plan: "Plan", **options: Any) -> "Loader":
    from penstock.loader.loader import Loader

    return Loader(plan, global_batch_size=_BATCH, **options)


def _show_batch(plan: "Plan", tokenizer: "Tokenizer") -> None:
    """The inputs and targets of the first two rows, as text."""
    batch = _loader(plan, ids=True)[0]
    inputs, targets = batch["inputs"], batch["targets"]
    write(f"inputs {tuple(inputs.shape)} {inputs.dtype}, targets {tuple(targets.shape)}")
    for row in (0, 1):
        source = plan.names[int(batch["source"][row])]
        write(f"\nrow {row}: {source}, sample {int(batch['sample'][row]):,}")
        for name, ids in (("inputs", inputs[row]), ("targets", targets[row])):
            texts = (tokenizer.decode([each]) for each in ids[:_SHOWN_TOKENS].tolist())
            # In quotes, so that spaces and line ends can be seen.
            quoted = " ".join(json.dumps(text.decode(errors="replace")) for text in texts)
            write(f"  {name:<8} {quoted} …")


def _show_speed(plan: "Plan") -> None:
    """The time to the first batch, and tokens per second over one second."""
    started = time.perf_counter()
    batches = iter(_loader(plan))
    next(batches)
    first = time.perf_counter() - started
    started, count = time.perf_counter(), 0
    while time.perf_counter() - started < 1.0:
        count += sum(1 for _ in islice(batches, 100))
    speed = count * _BATCH * _LENGTH / (time.perf_counter() - started)
    write(f"first batch after {duration_text(first)}, then {speed / 1e6:,.0f} M tokens/s")


def _show_resume(plan: "Plan") -> None:
    """Stop after 1,000 steps, resume with two ranks, and compare the rows."""
    import torch

    # The state holds the position in global rows, so it fits any number of ranks.
    single = _loader(plan)
    for _ in islice(single, 1_000):
        pass
    state = json.dumps(single.state_dict())
    write(f"the state after 1,000 steps: {len(state):,} bytes of JSON")
    ranks = [_loader(plan, rank=rank, world_size=2) for rank in (0, 1)]
    for each in ranks:
        each.load_state_dict(json.loads(state))
    num_steps = 0
    for batch, *halves in zip(islice(single, 200), *ranks, strict=False):
        if not torch.equal(torch.cat([half["inputs"] for half in halves]), batch["inputs"]):
            raise AssertionError("Two ranks did not read the rows of one process: a bug, report it")
        num_steps += 1
    write(f"two ranks resumed from it: {num_steps} steps, the same rows as with one process")


def _show_training(store: "TokenStore", output: Path, seconds: float) -> None:
    result = train_shortly(store, output, seconds)
    progress = result.progress
    write(f"{progress.step:,} steps, {progress.tokens:,} tokens, loss {progress.loss:.2f}")
    write("an untrained model has a loss of 10.8")
    write(f"the curve: {output / 'curve.svg'}")


def train_shortly(store: "TokenStore", output: Path, seconds: float) -> "RunResult":
    """Train the smallest model on a store, or resume a run that was stopped."""
    from penstock.order.plan import Plan
    from penstock.rows.windows import Windows
    from penstock.train import (
        SIZES,
        Display,
        OptimizationConfig,
        TrainingConfig,
        TrainingJob,
        train,
    )

    model = replace(
        SIZES["nano"],
        vocab_size=int(store.manifest.contents["tokenizer"]["vocab_size"]),
        positions="rotary",
    )
    job = TrainingJob(
        plan=Plan(Windows(store, model.length)),
        val=None,
        model=model,
        training=TrainingConfig(max_minutes=seconds / 60, batch_size=4, save_every=1_000_000),
        optimization=OptimizationConfig(learning_rate=3e-3, warmup_steps=20, betas=(0.9, 0.99)),
        output=output,
    )
    display = Display()
    try:
        return train(job, log=display)
    finally:
        display.close()


def library_files() -> list[Path]:
    """The modules of the standard library, sorted.

    Raises:
        SourceError: this Python was installed without them.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _OTHER_FOLDERS]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    if not found:
        raise SourceError(
            f"{root} has no source files of the standard library, which are the text of the demo. "
            "Run it with a Python that has them."
        )
    return sorted(found)


def write_prose(path: Path, files: list[Path]) -> list[str]:
    """Write the pages of documentation to `path` as JSON lines; returns their names.

    A file with the same contents is left as it is, so that an interrupted build can resume.
    """
    pages = list(prose_pages(files))
    lines = [json.dumps({"name": name, "text": text}) + "\n" for name, text in pages]
    data = "".join(lines).encode()
    if not path.exists() or path.read_bytes() != data:
        # A kill must not leave half a file, which the next build would read.
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.write_bytes(data)
        temporary.replace(path)
    return [name for name, _ in pages]


def prose_pages(files: list[Path]) -> Iterator[tuple[str, str]]:
    """The name and text of each page: topics of `help()`, then one page per module."""
    try:
        topics = importlib.import_module("pydoc_data.topics").topics
    except ImportError:  # some distributions leave it out
        topics = {}
    for name, text in sorted(topics.items()):
        yield f"help: {name}", text
    root = Path(sysconfig.get_paths()["stdlib"])
    for file in files:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # some old modules have invalid escapes
                tree = ast.parse(file.read_bytes())
        except (SyntaxError, ValueError):  # templates and samples that are not modules
            continue
        module = ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        sections = [f"{name}\n\n{text}" for name, text in _docstrings(tree, module)]
        if sections:
            yield module, "\n\n".join(sections) + "\n"


def _docstrings(node: ast.Module | _Definition, name: str) -> Iterator[tuple[str, str]]:
    """The docstrings of a module, class or function and of all inside it, by dotted names."""
    text = ast.get_docstring(node)
    if text:
        yield name, inspect.cleandoc(text)
    for child in _definitions(node):
        yield from _docstrings(child, f"{name}.{child.name}")


def _definitions(node: ast.AST) -> Iterator[_Definition]:
    """Classes and functions directly inside `node`, including those under an `if` or `try`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _Definition):
            yield child
        elif isinstance(child, ast.stmt | ast.excepthandler):
            yield from _definitions(child)
