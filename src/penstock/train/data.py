"""The data of a run: from the paths in a recipe to a plan.

    paths ── stores (text is built into one first) ── rows ── plan

Commands open the data without torch; `penstock.train.loaders` makes batches of it.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from penstock.cli.progress import build_lines
from penstock.errors import PlanError, SourceError, StoreBusyError, StoreError
from penstock.formats.open import (
    TOKEN_SUFFIXES,
    holds_files,
    is_token_file,
    open_tokens,
    recognised,
)
from penstock.formats.options import TokenOptions
from penstock.formats.tables import holds_text
from penstock.formats.token_files import TokenFiles
from penstock.loader.run import AnyPlan
from penstock.order.plan import Plan
from penstock.paths import StorePath, expand_user, is_remote, store_path
from penstock.recipe import DataConfig, EarlierSources, RowKind, SourceConfig
from penstock.rows.packs import Packs
from penstock.rows.protocol import Rows
from penstock.rows.tokens import ArrayFile
from penstock.rows.windows import Windows
from penstock.store.manifest import FILE_NAME
from penstock.store.reader import TokenStore, manifest_at
from penstock.store.sides import has_file, open_stores
from penstock.store.summary import describe_rules
from penstock.streaming.plan import StreamedPlan

_POLL_SECONDS = 0.2
_LEAST_TOKENS = 2  # of a row: an input and its target
_OTHER_TEXT = "That store belongs to this output. For other text or settings, use another one (-o)."


def open_data(
    config: DataConfig,
    output: Path,
    *,
    log: Callable[[str], None],
    earlier: Sequence[EarlierSources] = (),
) -> tuple[AnyPlan, Rows | None]:
    """The plan to train on and the rows to validate on; text is built into stores first.

    The stores go into `output`. A later run with the same text and settings finds them there. The
    plan begins with the sources of `earlier`, and continues with those of `config`.
    """
    opener = _Opener(config, output, log)
    if config.stream and config.train is not None:
        streamed = StreamedPlan(opener.streamed(config.train), seed=config.seed)
        return streamed, opener.val_rows(opener.val_path(None))
    held_out: StorePath | None = None
    if config.train is not None:
        train, held_out = opener.sides(config.train, "train", config.tokens)
    named = {name: each for leg in earlier for name, each in leg.sources.items()}
    named |= config.sources  # their paths are those of now
    paths = {
        name: opener.sides(each.train, name, each.tokens, each.field)[0]
        for name, each in named.items()
    }
    held_out = opener.val_path(held_out)
    # Together, so that no build can replace the two sides of a store in between.
    opener.open([*([] if config.train is None else [train]), *paths.values(), held_out])
    rows = {
        name: opener.rows(paths[name], each.rows or config.rows, each.tokens)
        for name, each in named.items()
    }
    if config.train is not None:
        rows = {"data": opener.rows(train, config.rows, config.tokens)}
    legs = [*(each.sources for each in earlier), config.sources]
    first = {name: rows[name] for name in legs[0]} or rows
    plan = Plan(first, weights=_weights(legs[0]) or None, seed=config.seed, shuffle=config.shuffle)
    for (position, _), sources in zip(earlier, legs[1:], strict=True):
        chosen = {name: rows[name] for name in sources}
        plan = plan.continued(position, weights=_weights(sources), sources=chosen)
    return plan, opener.val_rows(held_out)


def _weights(sources: Mapping[str, SourceConfig]) -> dict[str, float]:
    return {name: each.weight for name, each in sources.items() if each.weight is not None}


def store_sides(path: StorePath) -> tuple[StorePath, StorePath | None] | None:
    """The training and the validation side of a split store at `path`.

    A store that is not split has no validation side (None). Without a store, the result is None.
    """
    if Path(path.name).suffix in TOKEN_SUFFIXES or has_file(path, FILE_NAME):
        return path, None
    # Token files of another tool. A table that has both text and ids is built into a store, as it
    # was before ids were read.
    if isinstance(path, Path) and is_token_file(path) and not holds_text(path):
        return path, None
    return (path / "train", path / "val") if has_file(path / "train", FILE_NAME) else None


class _Opener:
    """Turns the paths of a `DataConfig` into rows."""

    def __init__(self, config: DataConfig, output: Path, log: Callable[[str], None]) -> None:
        self._config = config
        self._stores = output / "stores"
        self._log = log
        self._settings: dict[str, Any] = {"tokenizer": config.tokenizer, "eos": config.eos}
        self._settings |= {"documents": config.documents, "field": config.field}
        self._opened: dict[StorePath, TokenStore] = {}
        self._split_note = (
            f'data.split = "{config.split}" holds out a part of the text for validation. If you '
            "did not set it, it was guessed. To validate on another file instead, name that with "
            "--val_file (data.val)."
        )

    def sides(
        self, given: str, name: str, tokens: TokenOptions | None = None, field: str | None = None
    ) -> tuple[StorePath, StorePath | None]:
        """The training store of a path or URL, and the validation store if it was split."""
        store = self._stores / name
        if tokens is not None:
            if is_remote(given) or has_file(expand_user(given), FILE_NAME):
                raise PlanError(
                    f"{given} is not a path of token files of another tool. Remove the table "
                    f"tokens of {name} from the recipe."
                )
            return expand_user(given), None
        # A name with a suffix is that of a text: a store is a prefix of names.
        if is_remote(given) and not Path(store_path(given).name).suffix:
            return store_sides(store_path(given)) or self._built(given, store, field)
        path = expand_user(given)
        sides = store_sides(path)
        if sides is None and path.is_dir() and store.resolve().is_relative_to(path.resolve()):
            raise PlanError(
                f"The output {store.parent.parent} is inside {given}, which is the text to read: "
                "the next run would read the files of this one. Use an output elsewhere (-o)."
            )
        return sides or self._built(given, store, field)

    def _built(
        self, given: str, store: Path, field: str | None
    ) -> tuple[StorePath, StorePath | None]:
        """Build the store of a text, unless an earlier run has built it; returns its sides."""
        from penstock.store.build import build

        existed = store_sides(store) is not None
        if not existed:
            self._log(f"building {store} from {store_path(given)}")
        # With other validation data, nothing needs to be held out of the text.
        is_split = store.name == "train" and self._config.val is None
        split = self._config.split if is_split else None
        report = build_lines(self._log)
        settings = self._settings | ({} if field is None else {"field": field})
        while True:
            try:
                build(given, store, split=split, progress=report, **settings)
            except StoreBusyError:
                # Another process of this run is building the store. Its lock is released when that
                # process ends, for whatever reason, so this loop ends too.
                time.sleep(_POLL_SECONDS)
            except StoreError as error:
                if existed or split is not None:
                    error.add_note(_OTHER_TEXT if existed else self._split_note)
                raise
            except SourceError as error:
                if expand_user(given).exists():
                    error.add_note(
                        "data.field names the field of the text in a recipe. To set more of how "
                        f"{store_path(given)} is read, run penstock build on it first."
                    )
                raise
            else:
                break
        sides = store_sides(store)
        assert sides is not None  # `build` has returned
        if not existed:
            self._log(f"a document is {describe_rules(manifest_at(sides[0]).contents)}")
        return sides

    def streamed(self, given: str) -> Any:
        """Start to build a store of a text in the background, and return its rows."""
        from penstock.streaming.stream import stream

        store = self._stores / "train"
        if store_sides(store_path(given)) is not None:
            raise PlanError(f"{store_path(given)} is already tokenized. Use stream=false.")
        if not (store / FILE_NAME).exists():
            self._log(
                f"building {store} from {store_path(given)} while training on its finished parts"
            )
        try:
            return self.rows(stream(given, store, **self._settings), self._config.rows)
        except StoreError as error:
            error.add_note(_OTHER_TEXT)
            raise

    def open(self, paths: list[StorePath | None]) -> None:
        """Open all of these that are stores; two sides of a split store are of one build."""
        stores = {path for path in paths if path is not None and has_file(path, FILE_NAME)}
        opened = open_stores(sorted(stores, key=str))
        self._opened = {store.path: store for store in opened}

    def rows(
        self, store: Any, kind: RowKind, tokens: TokenOptions | None = None, **options: Any
    ) -> Rows:
        """The rows of a store or token file."""
        store = self._opened.get(store, store)
        if tokens is not None:
            store = open_tokens(store, **asdict(tokens))
        is_bin = isinstance(store, Path) and store.suffix == ".bin" and store.is_file()
        # A file of llm.c or Megatron is opened as that: its header is not tokens.
        if is_bin and not recognised(store):
            self._log(f"{store} is read as uint16, as nanoGPT writes it")
            store = ArrayFile(store, "uint16")
        try:
            return (Packs if kind == "packs" else Windows)(store, self._config.length, **options)
        except PlanError as error:
            path = store.path if isinstance(store, ArrayFile | TokenFiles | TokenStore) else store
            error.add_note(f"In {path}. Set the length of rows with data.length or --max_length.")
            if self._config.split is not None and self._stores in Path(str(path)).parents:
                error.add_note(self._split_note)
            raise

    def val_path(self, held_out: StorePath | None) -> StorePath | None:
        """The store to validate on: that of `val`, or else the held-out side."""
        if self._config.val is None:
            return held_out
        one, other = self.sides(self._config.val, "val", self._val_tokens())
        return other or one

    def _val_tokens(self) -> TokenOptions | None:
        """The options for token files in `val`; None if it is a store or text."""
        val = self._config.val
        path = None if val is None or is_remote(val) else expand_user(val)
        is_files = path is not None and (holds_files(path) or is_token_file(path))
        return self._config.tokens if is_files else None

    def val_rows(self, held_out: StorePath | None) -> Rows | None:
        """The rows to validate on."""
        config = self._config
        if held_out is None:
            return None
        if isinstance(held_out, Path) and not has_file(held_out, FILE_NAME):
            return self.rows(held_out, config.rows, self._val_tokens())
        store = self._opened.get(held_out) or TokenStore(held_out)
        num_tokens = store.num_tokens
        if num_tokens < _LEAST_TOKENS and config.val is None:
            self._log(f"no validation: {held_out} has fewer than {_LEAST_TOKENS} tokens")
            return None
        # Less text than one window is still one row, padded.
        if config.rows == "windows" and num_tokens <= config.length:
            return self.rows(held_out, config.rows, tail="pad")
        return self.rows(held_out, config.rows)
