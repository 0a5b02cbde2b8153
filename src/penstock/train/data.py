"""The data of a run: which stores, cut into which rows, in which order.

Text is taken, too: it is built into a store under the output of the run, which takes seconds a
gigabyte, and is found there the next time; or it is trained on while that is still being done.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from penstock.errors import PlanError, SourceError, StoreBusyError, StoreError
from penstock.order.growing import GrowingPlan
from penstock.order.plan import Plan, Rows
from penstock.rows.packs import Packs
from penstock.rows.tokens import ArrayFile
from penstock.rows.windows import Windows
from penstock.store.explain import describe_rules
from penstock.store.manifest import FILE_NAME, builds, read_manifest
from penstock.store.reader import TokenStore
from penstock.train.vocabulary import vocab_size_of

__all__ = ["Data", "Opened", "Source", "open_data"]

_POLL_SECONDS = 0.2
_LEAST_TOKENS = 2  # of a row: an input and its target
_OTHER_SETTINGS = (
    "To say more of how {given} is read, build a store of it first with penstock build, and train "
    "on that."
)
_OTHER_TEXT = "It belongs to this run. For other text or settings, name another output (-o)."

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
    shuffle: Literal["full", "block", "part", "none"] | None = None
    """"full" if nothing is said; "part" of text that is still being tokenized."""
    tokenizer: str = "gpt2"
    """This, and what follows, are for text only; a store has its own."""
    documents: str = "auto"
    """What a document is, as `penstock.build` takes it."""
    eos: bool = True
    split: str | None = None
    """What to hold out of `train` for validation, such as "tail:0.1"."""
    stream: bool = False
    """Whether training begins while the text is still being tokenized."""

    def __post_init__(self) -> None:
        if (self.train is None) == (not self.sources):
            raise PlanError("Give either train, or sources by name: one of them.")
        if self.length < 1:
            raise PlanError(f"length={self.length} is no row; it has at least 1 token.")
        weights = [source.weight for source in self.sources.values()]
        if None in weights and any(weight is not None for weight in weights):
            raise PlanError(f"Give every source a weight, or none: they have {weights}.")
        for name in self.sources:
            if Path(name).name != name or (name == "val" and self.val is not None):
                raise PlanError(
                    f"A source cannot be called {name!r}: the store that is built of it would have "
                    'that name among those of the run. Use one word, and not "val" beside val.'
                )
        if self.split is not None and self.sources:
            raise PlanError(f"split={self.split!r} is of one text; for several sources, give val.")
        if self.stream:
            self._check_stream()

    def _check_stream(self) -> None:
        if self.sources or self.split is not None:
            raise PlanError(
                "stream=true reads one text from its beginning: it goes neither with sources nor "
                "with split. Give train, and for validation val; or build the stores first."
            )
        if self.shuffle not in (None, "part"):
            raise PlanError(
                f"shuffle={self.shuffle!r} needs all rows, and with stream=true they are still "
                'being made. Leave it out, or say "part".'
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Opened:
    """Data whose stores are there."""

    plan: Plan
    val: Rows | None
    vocab_size: int


def open_data(data: Data, output: Path, *, tell: Callable[[str], None]) -> Opened:
    """Open the stores, and build those that are text; `tell` hears of each that is built."""
    opener = _Opener(data, output, tell)
    held_out: Path | None = None
    sources: Any = {}
    if data.train is not None and data.stream:
        sources = opener.streamed(data.train)
    elif data.train is not None:
        train, held_out = opener.sides(data.train, "train")
        sources = opener.rows(train, data.rows)
    for name, source in data.sources.items():
        path = opener.sides(source.train, name)[0]
        sources[name] = opener.rows(path, source.rows or data.rows)
    val: Rows | None = None
    if data.val is not None:
        one, other = opener.sides(data.val, "val")
        val = opener.val_rows(other or one)
    elif held_out is not None and _num_tokens(held_out) < _LEAST_TOKENS:
        tell(f"no validation: {held_out} holds fewer than {_LEAST_TOKENS} tokens")
    elif held_out is not None:
        val = opener.val_rows(held_out)
    weights = {name: each.weight for name, each in data.sources.items() if each.weight is not None}
    plan: Any = (
        GrowingPlan(sources, seed=data.seed)
        if data.stream
        else Plan(sources, weights=weights or None, seed=data.seed, shuffle=data.shuffle or "full")
    )
    vocab_size = max(map(vocab_size_of, plan.sources.values()))
    return Opened(plan=plan, val=val, vocab_size=vocab_size)


def _num_tokens(path: Path) -> int:
    return TokenStore(path).num_tokens if path.is_dir() else _LEAST_TOKENS


def _is_store(path: Path) -> bool:
    """Whether a store is at `path`, or the two sides of one."""
    return any((path / each / FILE_NAME).exists() for each in (".", "train"))


def _document_in(store: Path) -> str:
    """What a document is in a store that was built, in words."""
    path = store if (store / FILE_NAME).exists() else store / "train"
    return describe_rules(builds(read_manifest(path)))


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
            is_new = not _is_store(self._stores / name)
            path = self._built(given, name)
            if is_new:
                self._tell(f"a document is {_document_in(path)}")
        if (path / FILE_NAME).exists():
            return path, None
        return path / "train", path / "val"

    def _built(self, given: str, name: str) -> Path:
        from penstock.store.build import build

        store = self._stores / name
        data = self._data
        if Path(given).is_dir() and store.resolve().is_relative_to(Path(given).resolve()):
            raise PlanError(
                f"The output {store.parent.parent} lies in {given}, which is read: what the run "
                "writes would be text of the next one. Name an output elsewhere (-o)."
            )
        there = _is_store(store)
        if not there:
            self._tell(f"building {store} of {given}")
        held_out = data.split if name == "train" and data.val is None else None
        while True:
            try:
                build(given, store, split=held_out, **self._settings)
            except StoreBusyError:
                # Another process of this run builds it; a lock never outlives its holder.
                time.sleep(_POLL_SECONDS)
            except StoreError as error:
                if there:
                    error.add_note(_OTHER_TEXT)
                raise
            except SourceError as error:
                if Path(given).exists():
                    error.add_note(_OTHER_SETTINGS.format(given=given))
                raise
            else:
                return store

    @property
    def _settings(self) -> dict[str, Any]:
        data = self._data
        return {"tokenizer": data.tokenizer, "documents": data.documents, "eos": data.eos}

    def streamed(self, given: str) -> Rows:
        """The rows of a text that is tokenized from now on, in the background."""
        from penstock.streaming.stream import stream

        store = self._stores / "train"
        if Path(given).suffix in (".npy", ".bin") or (Path(given) / FILE_NAME).exists():
            raise PlanError(f"{given} is not text, so there is nothing to wait for: stream=false.")
        if not (store / FILE_NAME).exists():
            self._tell(f"building {store} of {given}, and training on what is there")
        try:
            return self.rows(stream(given, store, **self._settings), self._data.rows)
        except StoreError as error:
            error.add_note(_OTHER_TEXT)
            raise

    def rows(self, store: Any, kind: Kind, **how: Any) -> Rows:
        """The rows of a store."""
        if isinstance(store, Path) and store.suffix == ".bin" and store.is_file():
            store = ArrayFile(store, "uint16")  # nanoGPT's, the only ones that have no header
        try:
            made: Rows = (Packs if kind == "packs" else Windows)(store, self._data.length, **how)
        except PlanError as error:
            where = getattr(store, "path", store)
            error.add_note(f"In {where}; the length of a row is data.length, or --max_length.")
            raise
        return made

    def val_rows(self, path: Path) -> Rows:
        """The rows of a store to validate on; less than a row of text is one that is filled up."""
        kind = self._data.rows
        if kind == "windows" and path.is_dir() and _num_tokens(path) <= self._data.length:
            return self.rows(path, kind, tail="pad")
        return self.rows(path, kind)
