"""The data of a run: which stores, cut into which rows, in which order.

Text is taken, too: it is built into a store under the output of the run, which takes seconds a
gigabyte, and is found there the next time.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from penstock.errors import PlanError, StoreBusyError
from penstock.order.plan import Plan, Rows
from penstock.rows.packs import Packs
from penstock.rows.windows import Windows
from penstock.store.manifest import FILE_NAME

__all__ = ["Data", "Opened", "Source", "open_data"]

_GPT2_VOCAB = 50_257
_POLL_SECONDS = 0.2

Kind = Literal["windows", "packs"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """One of several sources of a mixture."""

    train: str
    """A store, or text to build one of."""
    weight: float | None = None
    """Its share of the rows, as a ratio; given for every source or for none."""
    rows: Kind | None = None
    """How it is cut, where otherwise than the rest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Data:
    """What to train on."""

    train: str | None = None
    """A store, a directory with a store's two sides, a token file, or text to build one of."""
    val: str | None = None
    """The same for validation; without it, the other side of the store that was split."""
    sources: dict[str, Source] = field(default_factory=dict)
    """Several in place of `train`, by name."""
    length: int = 1024
    rows: Kind = "windows"
    """Windows cut from the stream, or documents packed whole, which do not see each other."""
    seed: int = 0
    """Of the order."""
    shuffle: Literal["full", "block", "part", "none"] = "full"
    tokenizer: str = "gpt2"
    """This, and what follows, are for text only; a store has its own."""
    documents: str = "lines"
    eos: bool = True
    split: str | None = None
    """What to hold out for validation, such as "tail:0.1"."""

    def __post_init__(self) -> None:
        if (self.train is None) == (not self.sources):
            raise PlanError("Give either train, or sources by name: one of them.")
        weights = [source.weight for source in self.sources.values()]
        if None in weights and any(weight is not None for weight in weights):
            raise PlanError(f"Give every source a weight, or none: they have {weights}.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Opened:
    """Data whose stores are there."""

    plan: Plan
    val: Rows | None
    vocab_size: int


def open_data(data: Data, output: Path, *, tell: Callable[[str], None]) -> Opened:
    """Open the stores, and build those that are text; `tell` hears of each that is built."""
    opener = _Opener(data, output, tell)
    if data.train is not None:
        train, val = opener.sides(data.train, "train")
        sources: Any = opener.rows(train, data.rows)
    else:
        val = None
        kinds = {name: source.rows or data.rows for name, source in data.sources.items()}
        sources = {
            name: opener.rows(opener.sides(source.train, name)[0], kinds[name])
            for name, source in data.sources.items()
        }
    if data.val is not None:
        val = opener.sides(data.val, "val")[0]
    weights = {name: each.weight for name, each in data.sources.items() if each.weight is not None}
    plan = Plan(sources, weights=weights or None, seed=data.seed, shuffle=data.shuffle)
    return Opened(
        plan=plan,
        val=None if val is None else opener.rows(val, data.rows),
        vocab_size=max(map(_vocab_size, plan.sources.values())),
    )


class _Opener:
    """Paths to rows."""

    def __init__(self, data: Data, output: Path, tell: Callable[[str], None]) -> None:
        self._data = data
        self._stores = output / "stores"
        self._tell = tell

    def sides(self, given: str, name: str) -> tuple[Path, Path | None]:
        """The store to train on that a path means, and its other side, if it has one."""
        path = Path(given)
        if path.suffix in (".npy", ".bin") or (path / FILE_NAME).exists():
            return path, None
        if not (path / "train" / FILE_NAME).exists():
            path = self._built(given, name)
        if (path / FILE_NAME).exists():
            return path, None
        return path / "train", path / "val"

    def _built(self, given: str, name: str) -> Path:
        from penstock.store.build import build

        store = self._stores / name
        data = self._data
        if not any((store / each / FILE_NAME).exists() for each in (".", "train")):
            self._tell(f"building {store} of {given}")
        settings = {"tokenizer": data.tokenizer, "documents": data.documents, "eos": data.eos}
        held_out = data.split if name == "train" and data.val is None else None
        while True:
            try:
                build(given, store, split=held_out, **settings)  # type: ignore[arg-type]
            except StoreBusyError:
                # Another process of this run builds it; a lock never outlives its holder.
                time.sleep(_POLL_SECONDS)
            else:
                return store

    def rows(self, path: Path, kind: Kind) -> Rows:
        """The rows of a store."""
        made: Rows = (Packs if kind == "packs" else Windows)(path, self._data.length)
        return made


def _vocab_size(rows: Any) -> int:
    """How many ids the tokenizer of some rows has; GPT-2's where a file does not say."""
    for member in rows.stream.members:
        manifest = getattr(member, "manifest", None)
        if manifest is not None:
            return int(manifest.contents["tokenizer"]["vocab_size"])
    return _GPT2_VOCAB
