"""`penstock demo`: the whole of it, on text that is on every machine."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.decode import show_document
from penstock.cli.demo_batches import (
    mixture,
    show_batch,
    show_resume,
    show_speed,
    show_training,
)
from penstock.cli.info import show_summary
from penstock.cli.progress import Outcome, measured_build
from penstock.cli.terminal import console, shell_word, write
from penstock.cli.units import duration_text, size_text

if TYPE_CHECKING:
    from penstock.order.plan import Plan
    from penstock.store.reader import TokenStore
    from penstock.tokenize.tokenizer import Tokenizer

__all__ = ["demo_command"]

_SHOWN_LINES = 12
_LAMBDA = "help: lambda"


@dataclass(slots=True)
class Demo:
    """What the steps of the demo hand on to each other."""

    directory: Path
    train_seconds: float
    files: list[Path] = field(default_factory=list)
    pages: list[str] = field(default_factory=list)
    tokenizer: "Tokenizer | None" = None
    stores: dict[str, "TokenStore"] = field(default_factory=dict)
    plan: "Plan | None" = None


def demo_command(
    directory: Annotated[
        Path, typer.Option("--directory", "-d", metavar="DIRECTORY", help="Where to write it.")
    ] = Path("demo"),
    train_seconds: Annotated[
        float, typer.Option(min=0, help="How long to train at the end; 0 leaves it out.")
    ] = 60.0,
) -> None:
    """See it work, on Python's own standard library.

    Builds two stores, of its sources ("code") and of its documentation ("prose"), looks at
    them, reads batches of both, and trains a small model for a minute. Needs no network.
    """
    demo = Demo(directory, train_seconds)
    for number, (title, step) in enumerate(STEPS if train_seconds else STEPS[:-1], 1):
        console().print(f"\n{number}. {title}", style="bold cyan")
        step(demo)
    _advise(demo)


def collect(demo: Demo) -> None:
    """Find the sources, and write the documentation as JSON lines."""
    from penstock.demo import library_files, write_prose

    demo.directory.mkdir(parents=True, exist_ok=True)
    demo.files = library_files()
    demo.pages = write_prose(demo.directory / "prose.jsonl", demo.files)
    size = size_text(sum(file.stat().st_size for file in demo.files))
    prose = demo.directory / "prose.jsonl"
    write(f"code   {len(demo.files):,} modules in {demo.files[0].parent}, {size}")
    write(f"prose  {len(demo.pages):,} pages in {prose}, {size_text(prose.stat().st_size)}")


def build_both(demo: Demo) -> None:
    """Tokenize both with GPT-2's tokenizer."""
    from penstock.tokenize.tokenizer import load_tokenizer

    demo.tokenizer = load_tokenizer("gpt2")
    for name, outcome in _build(demo).items():
        demo.stores[name] = outcome.store
        size = f"{len(outcome.store):,} documents, {outcome.store.num_tokens:,} tokens"
        write(f"{name:<6} {size}, {_what_it_took(outcome)}")


def _what_it_took(outcome: Outcome) -> str:
    verb = "found finished" if outcome.finished_before else "built"
    return f"{verb} in {duration_text(outcome.seconds)}"


def _build(demo: Demo) -> dict[str, Outcome]:
    here, shared = demo.directory, {"tokenizer": demo.tokenizer}
    whole = {"documents": "file", "format": "text", **shared}
    return {
        "code": measured_build(demo.files, here / "code", whole, bar=True),
        "prose": measured_build(here / "prose.jsonl", here / "prose", shared, bar=True),
    }


def show_both(demo: Demo) -> None:
    """What `penstock info` says."""
    from penstock.store.summary import summarize

    for number, store in enumerate(demo.stores.values()):
        if number:
            write("")
        show_summary(summarize(store))


def decode_both(demo: Demo) -> None:
    """One document of each, back as text, with its origin."""
    code, prose = demo.stores["code"], demo.stores["prose"]
    names = [code.origin(number).file for number in range(len(code))]
    short = (number for number, name in enumerate(names) if Path(name).name == "antigravity.py")
    show_document(code, next(short, 0), num_lines=_SHOWN_LINES)
    write("")
    page = demo.pages.index(_LAMBDA) if _LAMBDA in demo.pages else 0
    show_document(prose, page, num_lines=_SHOWN_LINES)


def verify_both(demo: Demo) -> None:
    """Read every byte against the digests in the manifest."""
    from penstock.store.verify import verify

    for name, store in demo.stores.items():
        begun = time.monotonic()
        verify(store.path)
        write(f"{name:<6} is whole, read in {duration_text(time.monotonic() - begun)}")


def build_again(demo: Demo) -> None:
    """A finished store is recognised."""
    for name, outcome in _build(demo).items():
        write(f"{name:<6} {_what_it_took(outcome)}")


def mix_both(demo: Demo) -> None:
    """A mixture of the two."""
    demo.plan = mixture(demo.stores)


def show_first_batch(demo: Demo) -> None:
    """Tokens and what comes after each."""
    assert demo.plan is not None
    assert demo.tokenizer is not None
    show_batch(demo.plan, demo.tokenizer)


def measure(demo: Demo) -> None:
    """Tokens a second."""
    assert demo.plan is not None
    show_speed(demo.plan)


def resume(demo: Demo) -> None:
    """Stop, and go on with other ranks."""
    assert demo.plan is not None
    show_resume(demo.plan)


def train_shortly(demo: Demo) -> None:
    """A small model, on the prose."""
    show_training(demo.stores["prose"], demo.directory / "run", demo.train_seconds)


STEPS: list[tuple[str, Callable[[Demo], None]]] = [
    ("Text that is on every machine: Python's standard library", collect),
    ("Raw text to sealed stores: penstock build", build_both),
    ("What they hold: penstock info", show_both),
    ("One document of each, and where it came from: penstock decode", decode_both),
    ("Every byte checked: penstock verify", verify_both),
    ("The same builds again: there is nothing left to do", build_again),
    ("A mixture: penstock.Plan", mix_both),
    ("The first batch: penstock.Loader", show_first_batch),
    ("How fast", measure),
    ("Stopped, and gone on with two ranks", resume),
    ("A small GPT-2 for a minute: penstock train", train_shortly),
]


def _advise(demo: Demo) -> None:
    console().print("\nWhat to do next", style="bold cyan")
    code = shell_word(demo.directory / "code")
    for line in (
        "penstock build YOUR_FILES -o stores/mine    # .txt .jsonl .parquet, .gz .zst",
        f"penstock decode {code} --document 7 --count 2",
        "penstock build --help",
    ):
        write(f"  {line}")
