"""A build as the command line runs it: with a bar, a clock and a few last lines."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.progress import build_bar
from penstock.cli.stores import stores_at
from penstock.cli.tables import documents_text, facts, reasons_text
from penstock.cli.terminal import console, shell_word, visible
from penstock.cli.units import duration_text, number_of, size_text

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
        from penstock.store.rules import describe_rules
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
