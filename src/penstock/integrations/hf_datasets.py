"""Stores from Hugging Face datasets.

A dataset may be a selection of rows in any order, or come over a network, so it cannot be read in
parallel slices as files can. Its texts are written once, in order, to a Parquet file with row
groups of 64 MB. Memory is bounded by one row group.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.digest import digest_json
from penstock.disk import digest_file, rename, sync_file
from penstock.errors import PlanError, SourceError
from penstock.paths import expand_user
from penstock.store.build import build
from penstock.store.reader import TokenStore

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

_GROUP_CHARACTERS = 64_000_000
_BATCH_ROWS = 1_000
_SCHEMA = pa.schema({"text": pa.large_string()})
_CONVERSATIONS = (
    ' Conversations are read from files: write them with dataset.to_json("chats.jsonl"), then call '
    'penstock.build("chats.jsonl", store, chat="chatml").'
)


def build_dataset(
    dataset: object,
    store: str | os.PathLike[str],
    *,
    field: str | None = None,
    column: str | None = None,
    **settings: Any,
) -> TokenStore:
    """Tokenize a Hugging Face dataset, map-style or streaming, into a store.

    Its texts are first written to files beside the store, in a directory `STORE.texts`, which
    may be removed afterwards. A streaming dataset must have an end: `dataset.take(n)`.

    Args:
        dataset: A `datasets.Dataset` or `IterableDataset` with a column of text.
        store: The directory to write.
        field: The column that contains the text; "text" if not given.
        column: Another name of `field`.
        **settings: The other arguments of `penstock.build`, except `chat` and `format`.
    """
    if not is_dataset(dataset):
        raise PlanError(
            f"{dataset!r:.80} is not a datasets.Dataset or IterableDataset. If it is a "
            'DatasetDict, pass one of its splits: dataset["train"].'
        )
    if field is not None and column not in (None, field):
        raise PlanError(f"field={field!r} and column={column!r} mean the same; give one of them.")
    if settings.get("chat") is not None:
        raise PlanError(f"build_dataset reads a column of text.{_CONVERSATIONS}")
    target = expand_user(store)
    files = export_texts(
        dataset, target.with_name(f"{target.name}.texts"), field or column or "text"
    )
    return build(files, target, format="parquet", field="text", **settings)


def is_dataset(value: object) -> "TypeGuard[Dataset | IterableDataset]":
    """Whether `value` is a `datasets.Dataset` or `IterableDataset`; does not import `datasets`."""
    datasets = sys.modules.get("datasets")  # if nothing imported it, there is no dataset
    return datasets is not None and isinstance(value, datasets.Dataset | datasets.IterableDataset)


def export_texts(
    dataset: "Dataset | IterableDataset", root: str | os.PathLike[str], column: str = "text"
) -> list[Path]:
    """Write the texts of a Hugging Face dataset to a Parquet file under `root`; return its path.

    A dataset that was exported before is recognised by its fingerprint. An `IterableDataset` has
    none: it is read again, and recognised by its contents.

    Raises:
        SourceError: there is no such column, or it does not hold text.
    """
    from datasets import IterableDataset

    base = Path(root)
    base.mkdir(parents=True, exist_ok=True)
    name = ""
    # datasets changes the fingerprint with every change of the rows: select, shuffle, map.
    if not isinstance(dataset, IterableDataset):
        name = digest_json([dataset._fingerprint, column, len(dataset)])
        if (target := base / f"texts-{name[:32]}.parquet").is_file():
            return [target]
    # Written under another name and renamed at the end: a file with the final name is complete,
    # even after a kill. The name is random, so it is neither a link nor of a concurrent export.
    fresh = base / f".texts-{os.urandom(8).hex()}.parquet"
    try:
        # Not compressed: the file is read once, and then only kept to recognise the dataset.
        with pq.ParquetWriter(fresh, _SCHEMA, compression="none") as writer:
            for texts in _row_groups(dataset, column):
                writer.write_table(pa.table([texts], schema=_SCHEMA))
        sync_file(fresh)
        target = base / f"texts-{(name or digest_file(fresh))[:32]}.parquet"
        if not target.is_file():  # a file that is replaced would look changed to a build of it
            rename(fresh, target)
    finally:
        fresh.unlink(missing_ok=True)
    return [target]


def _row_groups(dataset: "Dataset | IterableDataset", column: str) -> Iterator[list[str]]:
    """The texts of a dataset, in lists of about 64 million characters."""
    held: list[str] = []
    size = row = 0
    for batch in dataset.iter(batch_size=_BATCH_ROWS):
        if column not in batch:
            raise SourceError(
                f"The dataset has no column {column!r}; it has {', '.join(map(repr, batch))}. Name "
                "the right one with column=, or build_dataset(…, field=…)."
                f"{_CONVERSATIONS if 'messages' in batch else ''}"
            )
        for text in batch[column]:
            if not isinstance(text, str):
                raise SourceError(
                    f"Row {row:,} has {text!r:.60} in column {column!r}, which is not text."
                    + (_CONVERSATIONS if isinstance(text, list) else "")
                )
            row += 1
            size += len(text)
        held += batch[column]
        if size >= _GROUP_CHARACTERS:
            yield held
            held, size = [], 0
    yield held
