"""A Hugging Face dataset's texts as files that a build reads.

A map-style dataset may be a selection of rows in any order, and a streaming one comes over a
network: neither can be cut into slices and read in parallel. So their texts are written once,
in order, to Parquet files of 64 MB of text under a name that stands for the dataset; from
there on everything is as with other files. Memory is bounded by one file.
"""

import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.digest import digest_json
from penstock.errors import SourceError
from penstock.store.files import sync_directory

__all__ = ["is_dataset", "spool"]

_FILE_BYTES = 64_000_000
_BATCH_ROWS = 1_000


def is_dataset(value: Any) -> bool:
    """Whether `value` is a `datasets.Dataset` or `IterableDataset`, without importing those."""
    named = {each.__name__ for each in type(value).__mro__}
    home = type(value).__module__.partition(".")[0]
    return home == "datasets" and bool(named & {"Dataset", "IterableDataset"})


def spool(dataset: Any, root: str | os.PathLike[str], column: str = "text") -> list[Path]:
    """Write the texts of `dataset` under `root`, unless they are there, and name the files.

    The same dataset gets the same name: by its fingerprint, or, where it streams and has none,
    by its contents, which are then read each time.

    Raises:
        SourceError: there is no such column, or it does not hold text.
    """
    base = Path(root)
    base.mkdir(parents=True, exist_ok=True)
    mark = getattr(dataset, "_fingerprint", None)
    if mark is not None:
        _check_column(dataset, column)
        place = base / f"texts-{digest_json([str(mark), column, len(dataset)])[:32]}"
        if place.is_dir():
            return _files(place)
    fresh = base / f".texts-{os.getpid()}"
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir()
    try:
        digest = _write(dataset, fresh, column)
        if mark is None:
            place = base / f"texts-{digest[:32]}"
        if not place.is_dir():
            _rename(fresh, place)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return _files(place)


def _rename(fresh: Path, place: Path) -> None:
    try:
        fresh.rename(place)
    except OSError:  # another process was faster, with the same texts
        if not place.is_dir():
            raise
    sync_directory(place.parent)


def _files(place: Path) -> list[Path]:
    return sorted(place.glob("*.parquet"))


def _write(dataset: Any, directory: Path, column: str) -> str:
    """Write texts to files in order; returns a digest of them."""
    total = hashlib.sha256()
    held: list[str] = []
    size = number = 0
    for texts in _texts(dataset, column):
        for text in texts:
            data = text.encode("utf-8", "surrogatepass")
            total.update(b"%d:" % len(data))
            total.update(data)
            size += len(data)
        held += texts
        if size >= _FILE_BYTES:
            _file(directory, number, held)
            held, size, number = [], 0, number + 1
    if held or not number:
        _file(directory, number, held)
    return total.hexdigest()


def _file(directory: Path, number: int, texts: list[str]) -> None:
    table = pa.table({"text": pa.array(texts, pa.large_string())})
    path = directory / f"texts-{number:05d}.parquet"
    pq.write_table(table, path, compression="none")
    with path.open("rb") as stream:
        os.fsync(stream.fileno())


def _texts(dataset: Any, column: str) -> Iterator[list[str]]:
    """The texts of a dataset, some at a time."""
    row = 0
    for batch in dataset.iter(batch_size=_BATCH_ROWS):
        if column not in batch:
            raise _no_column(column, list(batch))
        for text in batch[column]:
            if not isinstance(text, str):
                raise SourceError(
                    f"Row {row:,} has {text!r:.60} in column {column!r}, which is no text."
                )
            row += 1
        yield batch[column]


def _check_column(dataset: Any, column: str) -> None:
    names = dataset.column_names
    if names is not None and column not in names:
        raise _no_column(column, names)


def _no_column(column: str, names: list[str]) -> SourceError:
    return SourceError(
        f"The dataset has no column {column!r}; it has {', '.join(map(repr, names))}. Name the "
        "right one with column=."
    )
