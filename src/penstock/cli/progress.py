"""Progress bars: on stderr, and only where somebody looks.

━━━━━━━━━━━━━━━╸              52%  312 MB/s  71.2M tokens/s  0:12 left  3 rejected
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.options import stores_at
from penstock.cli.tables import documents_text, facts, reasons_text
from penstock.cli.terminal import console, shell_word, visible
from penstock.cli.units import clock_text, count_text, duration_text, number_of, size_text

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress

    from penstock.store.job import BuildProgress

__all__ = ["Meter", "bar", "build_bar"]


class Meter:
    """Speed and remaining time of a build, from what its progress callback is told.

    Measured from the first call on, so that parts which an earlier run sealed do not count
    as work of this one.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._begun = 0.0
        self.first: BuildProgress | None = None

    def line(self, now: "BuildProgress") -> str:
        """What stands behind the bar."""
        if self.first is None:
            self.first, self._begun = now, self._clock()
        seconds = self._clock() - self._begun
        pieces = []
        if seconds > 0 and now.text_bytes > self.first.text_bytes:
            bytes_a_second = (now.text_bytes - self.first.text_bytes) / seconds
            tokens_a_second = (now.num_tokens - self.first.num_tokens) / seconds
            pieces.append(f"{size_text(bytes_a_second)}/s")
            pieces.append(f"{count_text(tokens_a_second)} tokens/s")
        done_a_second = (now.done_bytes - self.first.done_bytes) / max(seconds, 1e-9)
        if done_a_second > 0:
            left = (now.total_bytes - now.done_bytes) / done_a_second
            pieces.append(f"{clock_text(left)} left")
        if now.num_rejects:
            pieces.append(f"{now.num_rejects:,} rejected")
        return "  ".join(pieces)


@contextmanager
def build_bar(*, shown: bool) -> Iterator[tuple[Meter, "Callable[[BuildProgress], None]"]]:
    """A bar for `penstock.build`: the meter behind it and the callback to pass."""
    meter = Meter()
    with bar(shown=shown) as draw:

        def tell(now: "BuildProgress") -> None:
            draw(now.done_bytes, now.total_bytes, meter.line(now))

        yield meter, tell


@contextmanager
def bar(*, shown: bool = True) -> Iterator[Callable[[int, int, str], None]]:
    """A bar that is drawn by calling it with (done, total, words), and is wiped at the end."""
    if not (shown and sys.stderr.isatty()):
        yield _draw_nothing
        return
    progress = _rich_bar()
    task = progress.add_task("", total=None, words="starting")

    def draw(done: int, total: int, words: str) -> None:
        progress.update(task, completed=done, total=total, words=words)

    with progress:
        yield draw


def _draw_nothing(done: int, total: int, words: str) -> None:
    pass


def _rich_bar() -> "RichProgress":
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    return Progress(
        BarColumn(bar_width=None),
        TaskProgressColumn(),
        TextColumn("{task.fields[words]}", markup=False),
        console=console(stderr=True),
        transient=True,
        expand=True,
        refresh_per_second=10,
    )


if TYPE_CHECKING:
    from penstock.store.reader import TokenStore

__all__ = ["Outcome", "measured_build"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a build did."""

    directory: Path
    stores: dict[str, "TokenStore"]
    """By the side of the split; without one, the side is ""."""
    seconds: float
    text_bytes: int
    """Read in this run: nothing if the store was finished before."""
    finished_before: bool
    resumed: bool
    """Whether parts that an earlier run sealed were kept."""

    @property
    def store(self) -> "TokenStore":
        """The store, or its training side."""
        return next(iter(self.stores.values()))

    def spell(self) -> dict[str, Any]:
        """As plain JSON."""
        from penstock.store.explain import describe_rules
        from penstock.store.summary import bytes_per_token
        from penstock.tokenize.extend import padded

        done = self.store.manifest.contents["builds"][-1]
        vocab_size = self.store.manifest.contents["tokenizer"]["vocab_size"]
        return {
            "stores": [_spell(side, store) for side, store in self.stores.items()],
            "num_documents": sum(store.manifest.num_documents for store in self.stores.values()),
            "num_pieces": sum(len(store) for store in self.stores.values()),
            "documents": describe_rules(self.store.manifest.contents["builds"]),
            "num_tokens": sum(store.num_tokens for store in self.stores.values()),
            "vocab_size": vocab_size,
            "padded_vocab_size": padded(vocab_size),
            "bytes_per_token": bytes_per_token(self.store),
            "rejects": done["rejects"]["reasons"],
            "num_skipped": done["counts"].get("skipped", 0),
            "num_replaced": done["counts"].get("replaced", 0),
            "text_bytes": self.text_bytes,
            "seconds": round(self.seconds, 3),
            "finished_before": self.finished_before,
            "resumed": self.resumed,
        }

    def headline(self) -> str:
        """One line that says what happened."""
        where, took = visible(str(self.directory), lines=False), duration_text(self.seconds)
        if self.finished_before:
            return f"{where} was finished before; there was nothing to do ({took})"
        verb = "finished, from where an earlier run stopped," if self.resumed else "built"
        # Less than a megabyte measures how fast Python starts.
        speed = f", {size_text(self.text_bytes / self.seconds)}/s" if self.text_bytes > 1e6 else ""
        return f"{where} {verb} in {took}{speed}"

    def show(self) -> None:
        """Print it for people, with the next command to type."""
        out = console()
        out.print(self.headline(), style="bold", soft_wrap=True)
        out.print(facts(_rows(self)))
        out.print(f"next: penstock info {shell_word(self.directory)}", soft_wrap=True)


def measured_build(inputs: Any, directory: Path, settings: dict[str, Any], *, bar: bool) -> Outcome:
    """Build as `penstock.build` does, under a progress bar if somebody looks."""
    from penstock.store.build import build
    from penstock.store.reader import TokenStore

    before = _digests(directory)
    resumed = any(directory.glob(".slice-*.json"))
    begun = time.monotonic()
    try:
        with build_bar(shown=bar) as (meter, tell):
            build(inputs, directory, progress=tell, **settings)
    except KeyboardInterrupt as error:
        error.add_note("What is sealed is kept: the same command goes on where it stopped.")
        raise
    seconds = time.monotonic() - begun
    stores = {side: TokenStore(path) for side, path in stores_at(directory).items()}
    finished_before = before == [store.digest for store in stores.values()]
    counts = next(iter(stores.values())).manifest.contents["builds"][-1]["counts"]
    read = sum(counts.get(f"{kind}_bytes", 0) for kind in _KINDS)
    if resumed and meter.first:
        read -= meter.first.text_bytes
    return Outcome(
        directory=directory,
        stores=stores,
        seconds=seconds,
        text_bytes=0 if finished_before else max(0, read),
        finished_before=finished_before,
        resumed=resumed,
    )


_KINDS = ("document", "separator", "skipped", "rejected")


def _digests(directory: Path) -> list[str]:
    """The digests of the finished stores in `directory`, if it holds any."""
    from penstock.errors import StoreError
    from penstock.store.manifest import read_manifest

    try:
        return [read_manifest(path).digest for path in stores_at(directory).values()]
    except StoreError:
        return []


def _spell(side: str, store: "TokenStore") -> dict[str, Any]:
    return {
        "path": str(store.path),
        "side": side or None,
        "num_documents": store.manifest.num_documents,
        "num_tokens": store.num_tokens,
        "digest": store.digest,
    }


def _rows(outcome: Outcome) -> list[tuple[str, str]]:
    told = outcome.spell()
    rows = [
        ("documents", documents_text(told["num_documents"], told["num_pieces"])),
        ("document is", visible(told["documents"], lines=False)),
        ("tokens", f"{told['num_tokens']:,}"),
    ]
    if told["bytes_per_token"] is not None:
        rows.append(("bytes/token", f"{told['bytes_per_token']:.2f}"))
    for side, store in outcome.stores.items():
        if side:
            documents = number_of(store.manifest.num_documents, "document")
            rows.append((side, f"{documents}, {number_of(store.num_tokens, 'token')}"))
    rejected = reasons_text(told["rejects"])
    if told["rejects"]:
        rejected += f"\n{visible(str(outcome.store.path / 'rejects.jsonl'), lines=False)}"
    rows.append(("rejected", rejected))
    return rows
