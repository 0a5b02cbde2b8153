"""`penstock demo`: the whole pipeline on Python's standard library.

The sources of Python's standard library are one corpus ("code"). Its documentation is the other
("prose"): the docstrings of each module as one page, and the topics of `help()`. The demo needs no
network, and the package contains no data for it. Tests are left out, because some distributions do
not ship them.
"""

import ast
import importlib
import json
import sysconfig
import time
import warnings
from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from penstock.cli.build import measured_build
from penstock.cli.decode import show_document
from penstock.cli.info import info_command
from penstock.cli.options import option, path_option
from penstock.cli.terminal import console, shell_word, write
from penstock.cli.units import duration_text, size_text
from penstock.cli.verify import verify_command
from penstock.errors import SourceError

if TYPE_CHECKING:
    from penstock.order.plan import Plan
    from penstock.store.reader import TokenStore
    from penstock.tokenize.tokenizer import Tokenizer
    from penstock.train import RunResult

# Folders inside the standard library that hold installed packages, tests or compiled files.
_OTHER_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_SHOWN_LINES = 12
_SHOWN_TOKENS = 9
_LENGTH = 64
_BATCH = 16
_SPEED_SECONDS = 1.0
_Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def demo_command(
    directory: Annotated[
        Path, path_option("Directory to write to.", "DIRECTORY", "--directory", "-d")
    ] = Path("demo"),
    train_seconds: Annotated[
        float, option("Seconds of training at the end. 0 skips it.", "NUMBER", least=0)
    ] = 60.0,
) -> None:
    """Run the whole pipeline on Python's standard library.

    Builds two stores, one of its source files ("code") and one of its documentation ("prose"),
    inspects them, reads batches of both, trains a small model for a minute, and writes a page about
    the run. Needs no network.
    """
    from penstock.tokenize.tokenizer import load_tokenizer

    _title("1. The text: Python's standard library")
    directory.mkdir(parents=True, exist_ok=True)
    files, prose = library_files(), directory / "prose.jsonl"
    pages = write_prose(prose, files)
    size = size_text(sum(file.stat().st_size for file in files))
    write(f"code   {len(files):,} modules in {files[0].parent}, {size}")
    write(f"prose  {len(pages):,} pages in {prose}, {size_text(prose.stat().st_size)}")
    _title("2. From raw text to finished stores: penstock build")
    tokenizer = load_tokenizer("gpt2")
    stores = _build_stores(directory, files, tokenizer)
    _title("3. The contents of the stores: penstock info")
    for name in stores:
        info_command(directory / name)
    _title("4. One document of each, and its origin: penstock decode")
    _show_documents(stores, pages)
    _title("5. Every byte checked: penstock verify")
    for name in stores:
        verify_command(directory / name)
    _title("6. The same builds again: the stores are already finished")
    _build_stores(directory, files, tokenizer)
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
        _title(f"11. A small GPT-2 for {train_seconds:g} seconds: penstock train")
        progress = train_shortly(directory / "prose", directory / "run", train_seconds).progress
        write(f"{progress.step:,} steps, {progress.tokens:,} tokens, loss {progress.loss:.2f}")
        write("an untrained model has a loss of 10.8")
    number, about = (12, "run") if train_seconds else (11, "prose")
    _write_report(number, directory / about, directory / "report.html")
    _title("What to do next")
    write("  penstock build YOUR_FILES -o stores/mine    # .txt .jsonl .parquet, .gz .zst")
    write(f"  penstock decode {shell_word(directory / 'code')} --document 7 --count 2")
    write("  penstock build --help")


def _write_report(number: int, source: Path, page: Path) -> None:
    """Write the page, and print its path; without matplotlib, print how to install it."""
    from penstock.errors import MissingExtraError
    from penstock.report.write import write_report

    _title(f"{number}. A page about it: penstock report")
    try:
        write_report(source, page)
    except MissingExtraError as error:
        write(str(error))
        return
    write(f"open {shell_word(page)} in a browser")


def _title(text: str) -> None:
    console().print(f"\n{text}", style="bold cyan")


def _build_stores(
    directory: Path, files: list[Path], tokenizer: "Tokenizer"
) -> dict[str, "TokenStore"]:
    """Build both stores, or find them finished."""
    # Each module is one document: documents="auto" would also split a file at an end token in it.
    settings = {"code": {"documents": "file", "format": "text"}, "prose": {}}
    inputs = {"code": files, "prose": [directory / "prose.jsonl"]}
    found = {}
    for name, paths in inputs.items():
        stores, values = measured_build(
            paths, directory / name, bar=True, tokenizer=tokenizer, **settings[name]
        )
        found[name] = stores[""]
        verb = "found finished" if values["finished_before"] else "built"
        size = f"{values['num_documents']:,} documents, {values['num_tokens']:,} tokens"
        write(f"{name:<6} {size}, {verb} in {duration_text(values['seconds'])}")
    return found


def _show_documents(stores: "dict[str, TokenStore]", pages: list[str]) -> None:
    """Print one document of each store; short ones, if this Python has them."""
    # antigravity.py and the page about lambda are short enough for the screen.
    code = stores["code"]
    names = [Path(code.origin(number).file).name for number in range(len(code))]
    short = names.index("antigravity.py") if "antigravity.py" in names else 0
    page = pages.index("help: lambda") if "help: lambda" in pages else 0
    for store, number in ((code, short), (stores["prose"], page)):
        show_document(store, number, num_lines=_SHOWN_LINES)
        write("")


def _mixture(stores: "dict[str, TokenStore]") -> "Plan":
    """A plan with three rows of code for each row of prose, shuffled."""
    from penstock.order.plan import Plan
    from penstock.rows.windows import Windows

    sources = {name: Windows(store, _LENGTH) for name, store in stores.items()}
    return Plan(sources, weights={"code": 3, "prose": 1}, seed=17)


def _show_batch(plan: "Plan", tokenizer: "Tokenizer") -> None:
    """Print the inputs and targets of the first two rows, as text."""
    from penstock.loader.batch_format import BatchFormat
    from penstock.loader.loader import Loader

    # ids=True adds the source and the number of each row to the batch.
    batch = Loader(plan, global_batch_size=_BATCH, format=BatchFormat(ids=True))[0]
    inputs, targets = batch["inputs"], batch["targets"]
    write(f"inputs {tuple(inputs.shape)} {inputs.dtype}, targets {tuple(targets.shape)}")
    for row in (0, 1):
        source = plan.names[int(batch["source"][row])]
        write(f"\nrow {row}: {source}, sample {int(batch['sample'][row]):,}")
        for name, ids in (("inputs", inputs[row]), ("targets", targets[row])):
            texts = (tokenizer.decode([each]) for each in ids[:_SHOWN_TOKENS].tolist())
            # Tokens are quoted, so that spaces and line ends can be seen.
            quoted = " ".join(json.dumps(text) for text in texts)
            write(f"  {name:<8} {quoted} …")


def _show_speed(plan: "Plan") -> None:
    """Measure and print the time to the first batch, and the tokens per second over one second."""
    from penstock.loader.loader import Loader

    started = time.perf_counter()
    batches = iter(Loader(plan, global_batch_size=_BATCH))
    next(batches)
    first = time.perf_counter() - started
    speed = _batches_per_second(batches, _SPEED_SECONDS) * _BATCH * _LENGTH
    write(f"first batch after {duration_text(first)}, then {speed / 1e6:,.0f} M tokens/s")


def _batches_per_second(batches: Iterator[object], seconds: float) -> float:
    """The speed of reading batches, measured for some seconds."""
    # Batches that were prefetched before the measurement would be counted as read in no time.
    warm = time.perf_counter() + seconds / 10
    while time.perf_counter() < warm:
        next(batches)
    count = 0
    started = now = time.perf_counter()
    while now - started < seconds:
        next(batches)
        count += 1
        now = time.perf_counter()
    return count / (now - started)


def _show_resume(plan: "Plan") -> None:
    """Stop after 1,000 steps, resume with two ranks, and compare the rows."""
    import torch

    from penstock.loader.loader import Loader

    # The state contains the position in global rows, so any number of ranks can load it.
    single = Loader(plan, global_batch_size=_BATCH)
    for _ in islice(single, 1_000):
        pass
    state = json.dumps(single.state_dict())
    write(f"the state after 1,000 steps: {len(state):,} bytes of JSON")
    ranks = [Loader(plan, global_batch_size=_BATCH, rank=rank, world_size=2) for rank in (0, 1)]
    for each in ranks:
        each.load_state_dict(json.loads(state))
    num_steps = 0
    # Rank 0 reads the first half of each global batch, rank 1 the second.
    for batch, *halves in zip(islice(single, 200), *ranks, strict=False):
        if not torch.equal(torch.cat([half["inputs"] for half in halves]), batch["inputs"]):
            raise AssertionError(
                "Two ranks read other rows than one process. Please report this bug."
            )
        num_steps += 1
    write(f"two ranks resumed from it: {num_steps} steps, the same rows as with one process")


def train_shortly(store: Path, output: Path, seconds: float) -> "RunResult":
    """Train the smallest model on a store, or resume a run that was stopped."""
    from penstock.recipe import parse_recipe
    from penstock.train import Display, train
    from penstock.train.command import open_job

    # The run takes about a minute, so a checkpoint is saved only at its end.
    tables = {
        "output": str(output),
        "data": {"train": str(store), "length": 128},
        "model": {"size": "nano", "positions": "rotary"},
        "optimization": {"learning_rate": 3e-3, "warmup_steps": 20, "betas": [0.9, 0.99]},
        "training": {"max_minutes": seconds / 60, "batch_size": 4, "save_every": 1_000_000},
    }
    with closing(Display()) as display:
        return train(open_job(parse_recipe(tables, "the demo"), display), log=display)


def library_files() -> list[Path]:
    """The modules of the standard library, sorted.

    Raises:
        SourceError: this Python was installed without them.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    # Debian installs some modules as links to others, and a build refuses the same file twice.
    found = [
        path
        for path in root.rglob("*.py")
        if not (path.is_symlink() or _OTHER_FOLDERS & set(path.relative_to(root).parts))
    ]
    if not found:
        raise SourceError(
            f"{root} has no source files of the standard library. Use a Python that has them."
        )
    return sorted(found)


def write_prose(path: Path, files: list[Path]) -> list[str]:
    """Write the pages of documentation to `path` as JSON lines; returns their names.

    A file with the same contents is left as it is, so that an interrupted build can resume.
    """
    from penstock.disk import write_file

    pages = dict(prose_pages(files))
    lines = [json.dumps({"name": name, "text": text}) + "\n" for name, text in pages.items()]
    data = "".join(lines).encode()
    if not path.exists() or path.read_bytes() != data:
        write_file(path, [data])  # complete or absent after a kill: the next build reads it
    return list(pages)


def prose_pages(files: list[Path]) -> Iterator[tuple[str, str]]:
    """The name and text of each page: topics of `help()`, then one page per module."""
    try:
        topics = importlib.import_module("pydoc_data.topics").topics
    except ImportError:  # some distributions leave it out
        topics = {}
    # Sorted, so that the same Python always writes the same file, and builds the same store.
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
        sections = [
            f"{module if isinstance(node, ast.Module) else node.name}\n\n{text}"
            for node in ast.walk(tree)
            if isinstance(node, _Documented) and (text := ast.get_docstring(node))
        ]
        if sections:
            yield module, "\n\n".join(sections) + "\n"
