"""Whatever people train on, as stores: files, lists, stores, Hugging Face datasets, the catalog.

    ~/.cache/penstock/modules/     or $PENSTOCK_CACHE/modules, or cache_dir=
    └── 4f0c…e1/                   a store, under a digest of what it was made from

The digest is of the files' names, sizes and times, of the tokenizer and of the settings; a
changed file is another name. Several processes may ask for one: the first builds it, the
others wait.
"""

import os
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from shutil import rmtree
from typing import Any

from penstock.digest import digest_json
from penstock.errors import SourceError, StoreBusyError
from penstock.integrations.cache import cache_directory
from penstock.integrations.spool import is_dataset, spool
from penstock.sources.listing import list_files
from penstock.sources.settings import ReadSettings
from penstock.sources.texts import Texts
from penstock.store.build import build
from penstock.store.manifest import FILE_NAME
from penstock.store.reader import TokenStore
from penstock.tokenize.tokenizer import Tokenizer

__all__ = ["Making", "blank_rows", "named_sides", "place_of", "store_of", "streamed"]

_SIDES = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}
_BUSY_SECONDS = 3_600.0


@dataclass(frozen=True, kw_only=True)
class Making:
    """How text becomes a store."""

    tokenizer: Tokenizer
    eos: bool = False
    documents: str = "lines"
    column: str = "text"
    cache_dir: str | os.PathLike[str] | None = None
    threads: int | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """What `penstock.build` is given."""
        return {
            "tokenizer": self.tokenizer,
            "eos": self.eos,
            "documents": self.documents,
            "field": self.column,
        }


def named_sides(data: Mapping[str, Any]) -> dict[str, Any]:
    """What to train, validate and test on, under one spelling: "train", "val", "test".

    >>> named_sides({"train": "a.txt", "validation": "b.txt"})
    {'train': 'a.txt', 'val': 'b.txt'}
    """
    unknown = [name for name in data if name not in _SIDES]
    if unknown:
        raise SourceError(
            f"{unknown[0]!r} is no side of the data; name train, val (or validation) and test."
        )
    return {_SIDES[name]: value for name, value in data.items()}


def store_of(inputs: Any, making: Making) -> TokenStore:
    """A store of `inputs`: found, or built now.

    Args:
        inputs: A store or its directory; files, as `penstock.build` takes them; a list of texts
            as `penstock.Texts`; a Hugging Face dataset with a column of text.
        making: How it is built.
    """
    if isinstance(inputs, TokenStore):
        return inputs
    if isinstance(inputs, str | os.PathLike) and (Path(inputs) / FILE_NAME).is_file():
        return TokenStore(inputs)
    inputs, making = _as_files(inputs, making)
    place = place_of(inputs, making)
    if place is None:
        return _temporary(inputs, making)
    return _waiting(lambda: build(inputs, place, threads=making.threads, **making.settings), place)


def streamed(inputs: Any, making: Making) -> Any:
    """A store of `inputs` that is read while it is written; the same store in the end."""
    from penstock.streaming.stream import stream

    if isinstance(inputs, TokenStore):
        return inputs
    inputs, making = _as_files(inputs, making)
    place = place_of(inputs, making)
    if place is None:
        raise SourceError(
            f"{making.tokenizer.name} has no digest, so a store that is still being written could "
            "not be told from one of another tokenizer. Use streaming=False."
        )
    return stream(inputs, place, threads=making.threads, **making.settings)


def place_of(inputs: Any, making: Making) -> Path | None:
    """Where the store of `inputs` lies; None where they, or the tokenizer, have no digest."""
    if making.tokenizer.digest is None:
        return None
    if isinstance(inputs, Texts):
        told: Any = inputs.digest
    else:
        reading = ReadSettings(documents=making.documents, field=making.column)
        told = [
            [_absolute(each.name), each.size, each.stamp] for each in list_files(inputs, reading)
        ]
    names = {**making.settings, "tokenizer": [making.tokenizer.digest, making.tokenizer.canary]}
    return _root(making) / digest_json([told, names])[:32]


def blank_rows(store: TokenStore) -> int:
    """Rows of the text that were blank, and so are no document."""
    return sum(int(each["counts"]["skipped"]) for each in store.manifest.contents["builds"])


def _as_files(inputs: Any, making: Making) -> tuple[Any, Making]:
    """The texts of a Hugging Face dataset as files, and how those are read."""
    if not is_dataset(inputs):
        return inputs, making
    files = spool(inputs, _root(making), making.column)
    return files, replace(making, column="text")


def _root(making: Making) -> Path:
    base = Path(making.cache_dir) if making.cache_dir is not None else cache_directory()
    return base / "modules"


def _absolute(name: str) -> str:
    return name if "://" in name else str(Path(name).absolute())


def _temporary(inputs: Any, making: Making) -> TokenStore:
    """A store for this process alone: nothing says whether an older one would be the same."""
    place = Path(tempfile.mkdtemp(prefix="penstock-module-"))
    store = build(inputs, place / "store", threads=making.threads, **making.settings)
    weakref.finalize(store, _remove, place, os.getpid())
    return store


def _remove(place: Path, owner: int) -> None:
    # A forked worker holds a copy of the store; when its copy goes, ours is still in use.
    if os.getpid() == owner:
        rmtree(place, ignore_errors=True)


def _waiting(make: Callable[[], TokenStore], place: Path) -> TokenStore:
    """What `make` gives, once no other process is making it."""
    until = time.monotonic() + _BUSY_SECONDS
    while True:
        try:
            return make()
        except StoreBusyError:
            if time.monotonic() > until:
                raise
            time.sleep(0.1)
