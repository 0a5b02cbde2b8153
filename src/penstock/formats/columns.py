"""Columns of ids and masks in Arrow tables: Hugging Face datasets and Parquet.

    input_ids         the ids; a row is a document
    attention_mask    0 is padding, which is removed; it must be at the ends of a row
    labels            -100 is not trained on; any other label must be the id at the same place
    loss_mask         0 is not trained on, 1 is; also completion_mask and assistant_masks of TRL

Other columns are ignored. Tokens that are not trained on stay in the documents.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from penstock.errors import StoreError
from penstock.formats.member import Array, Integers
from penstock.formats.sample import check_dtype
from penstock.formats.token_files import Settings

_IDS = ("input_ids", "tokens")
_LOSS = ("loss_mask", "completion_mask", "assistant_masks")
MASKS = ("attention_mask", "labels", *_LOSS)
"""The columns that say which tokens are padding, or not trained on."""
_NOT_TRAINED = -100


class Kept(NamedTuple):
    """The tokens of some rows, without padding."""

    ids: Array
    lengths: Integers
    """The number of tokens of each row."""
    loss: Array | None
    """1 for each token that is trained on; None if all are."""
    is_padded: bool
    """Whether padding was removed."""


@contextmanager
def arrow_errors(path: Path, kind: str) -> Iterator[None]:
    """Turn the errors that Arrow raises for damaged files into a StoreError."""
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError, OverflowError) as error:
        if isinstance(error, StoreError):
            raise
        raise StoreError(f"{path} cannot be read as {kind}: {str(error)[:300]}.") from error


def has_ids(schema: Any) -> bool:
    """Return whether a table has a column of ids, or several that could be."""
    return any(_is_list(each.type) for each in schema if each.name in _IDS)


def ids_column(schema: Any, column: str | None) -> str | None:
    """Return the name of the column with the ids; None if there is none, or two."""
    # A column `tokens` of strings may be beside `input_ids`.
    found = [each.name for each in schema if _is_list(each.type)]
    found = [each for each in found if each == column or (column is None and each in _IDS)]
    return found[0] if len(found) == 1 else None


def _is_list(kind: Any) -> bool:
    """Return whether a type is that of rows of integers."""
    import pyarrow as pa

    is_list = isinstance(kind, _lists())
    return is_list and pa.types.is_integer(kind.value_type)


def _lists() -> tuple[type, ...]:
    import pyarrow as pa

    return pa.ListType, pa.LargeListType, pa.FixedSizeListType


def token_columns(schema: Any, path: Path, given: Settings) -> list[str]:
    """Return the names of the column with the ids, and of the masks.

    Raises:
        StoreError: no column holds ids, or it is not clear which.
    """
    name = ids_column(schema, given.column)
    if name is None:
        shown = ", ".join(f"{each.name} ({each.type})" for each in list(schema)[:8])
        lists = [each.name for each in schema if _is_list(each.type)]
        wanted = "input_ids" if given.column is None else given.column
        advice = (
            f'Name the column: open_tokens(path, column="{lists[0]}"), or --column {lists[0]}.'
            if lists
            else "None of them holds lists of integers. Text is tokenized with penstock build."
        )
        raise StoreError(
            f"{path} has no column {wanted} of lists of integers, or several that could be: "
            f"{shown}. {advice}"
        )
    masks = [each for each in MASKS if each in schema.names and each != name]
    for each in masks:
        if not isinstance(schema.field(each).type, _lists()):
            raise StoreError(
                f"{path}: the column {each!r} ({schema.field(each).type}) is not a list for each "
                "row, as labels and masks of tokens are. Remove or rename it."
            )
    return [name, *masks]


def row_lists(column: Any, name: str, path: Path) -> tuple[Any, Integers]:
    """Return the values of a column of lists, and where the list of each row begins and ends.

    Raises:
        StoreError: a row or a value is null, or the offsets are damaged.
    """
    import pyarrow as pa

    with arrow_errors(path, "a table"):
        column.validate(full=True)
    values, size = column.values, len(column)
    if isinstance(column.type, pa.FixedSizeListType):
        width = column.type.list_size
        offsets = (np.arange(size + 1) + column.offset) * width
    else:
        offsets = column.offsets.to_numpy(zero_copy_only=False).astype(np.int64)
    if column.null_count or values.null_count:
        raise StoreError(f"{path}: the column {name!r} has a null. Remove such rows first.")
    inside = len(offsets) == size + 1 and offsets[0] >= 0 and offsets[-1] <= len(values)
    if not inside or (offsets[1:] < offsets[:-1]).any():
        raise StoreError(f"{path}: the offsets of the column {name!r} are damaged.")
    return values, offsets


def _flat(batch: Any, name: str, path: Path) -> tuple[Array, Integers]:
    """Return the values of all rows of a column, and the number of values of each row."""
    values, offsets = row_lists(batch.column(name), name, path)
    first, last = int(offsets[0]), int(offsets[-1])
    found = values.slice(first, last - first).to_numpy(zero_copy_only=False)
    return found, np.diff(offsets)


def kept_tokens(batch: Any, names: list[str], path: Path) -> Kept:
    """Return the tokens of a record batch, by the rules at the top of this module."""
    with arrow_errors(path, "a table"):
        batch.validate()
    ids, lengths = _flat(batch, names[0], path)
    check_dtype(ids.dtype, path)
    loss = np.ones(len(ids), bool)
    keep = np.ones(len(ids), bool)
    for name in names[1:]:
        mask, counts = _flat(batch, name, path)
        if not np.array_equal(counts, lengths):
            row = int(np.flatnonzero(counts != lengths)[0])
            raise StoreError(
                f"{path}: row {row:,} of a batch has {int(lengths[row]):,} ids, but "
                f"{int(counts[row]):,} values in {name!r}."
            )
        if name == "labels":
            loss &= _trained(mask, ids, keep, path)
        elif name == "attention_mask":
            keep &= _zero_or_one(mask, name, path)
        else:
            loss &= _zero_or_one(mask, name, path)
    if keep.all():
        return Kept(ids, lengths, None if loss.all() else loss.view(np.uint8), False)
    lengths = _kept_lengths(keep, lengths, path)
    loss = loss[keep]
    return Kept(ids[keep], lengths, None if loss.all() else loss.view(np.uint8), True)


def _zero_or_one(mask: Array, name: str, path: Path) -> Array:
    is_one = mask == 1
    if not (is_one | (mask == 0)).all():
        raise StoreError(f"{path}: the column {name!r} has values that are neither 0 nor 1.")
    return np.asarray(is_one)


def _trained(labels: Array, ids: Array, keep: Array, path: Path) -> Array:
    trained = labels != _NOT_TRAINED
    differs = trained & (labels != ids) & keep
    if differs.any():
        at = int(np.flatnonzero(differs)[0])
        raise StoreError(
            f"{path}: token {at:,} of a batch has the id {int(ids[at])} and the label "
            f"{int(labels[at])}. A model is trained on the next id, so a label must be the id at "
            "the same place, or -100. Labels of another task cannot be read, and labels that were "
            "shifted already must be shifted back."
        )
    return np.asarray(trained)


def _kept_lengths(keep: Array, lengths: Integers, path: Path) -> Integers:
    """Return the number of tokens of each row without padding, which must be at its ends."""
    ends = np.cumsum(lengths)
    starts = ends - lengths
    # A run of kept tokens begins where a kept token follows padding, or is the first of its row.
    begins = keep.copy()
    begins[1:] &= ~keep[:-1]
    firsts = starts[lengths > 0]
    begins[firsts] = keep[firsts]
    runs = np.concatenate(([0], np.cumsum(begins)))
    counts = np.concatenate(([0], np.cumsum(keep)))
    if (runs[ends] - runs[starts] > 1).any():
        row = int(np.flatnonzero(runs[ends] - runs[starts] > 1)[0])
        raise StoreError(
            f"{path}: the attention mask of row {row:,} of a batch is 0 between tokens. Only "
            "padding at the ends of a row can be removed."
        )
    found: Integers = counts[ends] - counts[starts]
    return found
