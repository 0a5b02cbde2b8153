"""The inputs of cached stores: digests of files, and the texts of Hugging Face datasets.

A Hugging Face dataset may be a selection of rows in any order, or come over a network, so it
cannot be read in parallel slices as files can. Its texts are written once, in order, as Parquet
files with 64 MB of text each. Memory is bounded by one file.
"""

import hashlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from shutil import rmtree
from typing import TYPE_CHECKING, TypeGuard

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.digest import digest_json
from penstock.errors import SourceError
from penstock.store.files import digest_file, sync_directory, write_file

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

__all__ = ["digest_contents", "export_texts", "is_dataset"]

PathLike = str | os.PathLike[str]

_WHOLE_BYTES = 1 << 30
_SETTLED_NANOSECONDS = 2_500_000_000
_FILE_BYTES = 64_000_000
_BATCH_ROWS = 1_000


def digest_contents(path: Path, root: Path) -> str:
    """SHA-256 of a file; of a large file, the recorded one if nothing has changed the file since.

    Args:
        path: The file.
        root: The directory of cached stores, where digests of large files are recorded.
    """
    before = _state(path)
    if path.stat().st_size <= _WHOLE_BYTES:
        return digest_file(path)
    record = root / "digests" / digest_json([os.path.realpath(path), before])[:32]
    if record.is_file() and len(found := record.read_text()) == 64:
        return found
    digest = digest_file(path)
    # A write that follows soon may leave the same times, because clocks of file systems tick at
    # intervals (FAT: 2 s). So a file that has just been written is digested again next time.
    settled = time.time_ns() - max(before[1:3]) > _SETTLED_NANOSECONDS
    if settled and _state(path) == before:
        record.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_file(record, [digest.encode()])
    return digest


def _state(path: Path) -> list[int]:
    """What a write to a file changes: size and times; and which file it is."""
    found = path.stat()
    # `os.utime` can restore the time of the last write, but not ctime, which it sets to now.
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_dev]


def is_dataset(value: object) -> "TypeGuard[Dataset | IterableDataset]":
    """Whether `value` is a `datasets.Dataset` or `IterableDataset`; does not import `datasets`."""
    package = type(value).__module__.partition(".")[0]
    return package == "datasets" and bool(_class_names(value) & {"Dataset", "IterableDataset"})


def _class_names(value: object) -> set[str]:
    return {each.__name__ for each in type(value).__mro__}


def export_texts(
    dataset: "Dataset | IterableDataset", root: PathLike, column: str = "text"
) -> list[Path]:
    """Write the texts of a Hugging Face dataset as Parquet files under `root`; return their paths.

    A dataset that was exported before is recognised by its fingerprint. An `IterableDataset` has
    none: it is read again, and recognised by its contents.

    Raises:
        SourceError: there is no such column, or it does not hold text.
    """
    base = Path(root)
    base.mkdir(parents=True, exist_ok=True)
    target: Path | None = None
    # datasets changes the fingerprint with every change of the rows: select, shuffle, map.
    if "IterableDataset" not in _class_names(dataset):
        if column not in dataset.column_names:
            raise _no_column(column, dataset.column_names)
        target = base / f"texts-{digest_json([dataset._fingerprint, column, len(dataset)])[:32]}"
        if target.is_dir():
            return _exported(target)
    # Written under another name and renamed at the end: a directory with the final name is
    # complete, even after a kill. The process id keeps concurrent exports apart.
    fresh = base / f".texts-{os.getpid()}"
    rmtree(fresh, ignore_errors=True)
    fresh.mkdir()
    try:
        digest = _write_texts(dataset, fresh, column)
        target = target or base / f"texts-{digest[:32]}"
        try:
            fresh.rename(target)
        except OSError:  # another process was faster, with the same texts
            if not target.is_dir():
                raise
        sync_directory(base)
    finally:
        rmtree(fresh, ignore_errors=True)
    return _exported(target)


def _exported(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.parquet"))


def _write_texts(dataset: "Dataset | IterableDataset", directory: Path, column: str) -> str:
    """Write texts to files, in order; returns a digest of them."""
    total = hashlib.sha256()
    held: list[str] = []
    size = number = 0
    for texts in _column(dataset, column):
        for text in texts:
            data = text.encode("utf-8", "surrogatepass")
            # With the length in front, ["ab", "c"] and ["a", "bc"] have different digests.
            total.update(b"%d:" % len(data))
            total.update(data)
            size += len(data)
        held += texts
        if size >= _FILE_BYTES:
            _write_file(directory, number, held)
            held, size, number = [], 0, number + 1
    if held or not number:  # a dataset without rows still gets one file, which is empty
        _write_file(directory, number, held)
    return total.hexdigest()


def _write_file(directory: Path, number: int, texts: list[str]) -> None:
    table = pa.table({"text": pa.array(texts, pa.large_string())})
    path = directory / f"texts-{number:05d}.parquet"
    # Not compressed: the file is read once, and then only kept to recognise the dataset.
    pq.write_table(table, path, compression="none")
    with path.open("rb") as stream:
        os.fsync(stream.fileno())


def _column(dataset: "Dataset | IterableDataset", column: str) -> Iterator[list[str]]:
    """The texts of a dataset, in batches."""
    # Counted over all batches, so that a message names the row as the dataset does.
    row = 0
    for batch in dataset.iter(batch_size=_BATCH_ROWS):
        if column not in batch:
            raise _no_column(column, list(batch))
        for text in batch[column]:
            if not isinstance(text, str):
                raise SourceError(
                    f"Row {row:,} has {text!r:.60} in column {column!r}, which is not text."
                )
            row += 1
        yield batch[column]


def _no_column(column: str, names: list[str]) -> SourceError:
    return SourceError(
        f"The dataset has no column {column!r}; it has {', '.join(map(repr, names))}. Name the "
        "right one with column=."
    )
