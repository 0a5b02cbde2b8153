"""Columns of ids and masks in Arrow tables: Hugging Face datasets and Parquet.

    input_ids         the ids; a row is a document
    attention_mask    0 is padding, which is removed; it must be at the ends of a row
    labels            -100 is not trained on; any other label must be the id at the same place
    loss_mask         0 is not trained on, 1 is; also completion_mask and assistant_masks of TRL

Other columns are ignored. Tokens that are not trained on stay in the documents.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from penstock.errors import StoreError
from penstock.formats.member import Array, Integers
from penstock.formats.sample import check_dtype
from penstock.formats.token_files import Settings

ID_COLUMNS = ("input_ids", "tokens")
"""The names of the column of ids, if the caller names none."""
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
    return any(_is_list(each.type) for each in schema if each.name in ID_COLUMNS)


def ids_column(schema: Any, column: str | None) -> str | None:
    """Return the name of the column with the ids; None if there is none, or two."""
    # A column `tokens` of strings may be beside `input_ids`.
    found = [each.name for each in schema if _is_list(each.type)]
    found = [each for each in found if each == column or (column is None and each in ID_COLUMNS)]
    return found[0] if len(found) == 1 else None


def _is_list(kind: Any, *, of_masks: bool = False) -> bool:
    """Return whether a type is that of rows of integers; or of other numbers, as masks may be."""
    import pyarrow as pa

    if not isinstance(kind, pa.ListType | pa.LargeListType | pa.FixedSizeListType):
        return False
    item, types = kind.value_type, pa.types
    is_mask = types.is_boolean(item) or types.is_floating(item)
    return bool(types.is_integer(item) or (of_masks and is_mask))


def token_columns(schema: Any, path: Path, given: Settings) -> list[str]:
    """Return the names of the column with the ids, and of the masks.

    Raises:
        StoreError: no column holds ids, or it is not clear which.
    """
    counts = Counter(schema.names)
    for each in (given.column, *ID_COLUMNS, *MASKS):
        if counts[each] > 1:
            raise StoreError(f"{path} has {counts[each]} columns named {each}. Rename all but one.")
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
        if not _is_list(schema.field(each).type, of_masks=True):
            raise StoreError(
                f"{path}: the column {each!r} ({schema.field(each).type}) is not a list for each "
                "row, with a number for each token, as labels and masks are. Remove or rename it."
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


def kept_rows(batches: Iterable[Any], names: list[str], path: Path) -> Iterator[Kept]:
    """Yield the tokens of each record batch of a file, by the rules at the top of this module."""
    first = 0
    for batch in batches:
        yield _kept_tokens(batch, names, path, first)
        first += batch.num_rows


def _kept_tokens(batch: Any, names: list[str], path: Path, first: int) -> Kept:
    """Return the tokens of a record batch; `first` is the number of its first row in the file."""
    with arrow_errors(path, "a table"):
        batch.validate()
    ids, lengths = _flat(batch, names[0], path)
    check_dtype(ids.dtype, path)
    rows = _Rows(path, lengths, first)
    loss = np.ones(len(ids), bool)
    keep = np.ones(len(ids), bool)
    for name in names[1:]:
        mask, counts = _flat(batch, name, path)
        if not np.array_equal(counts, lengths):
            row = int(np.flatnonzero(counts != lengths)[0])
            raise StoreError(
                f"{path}: row {first + row:,} has {int(lengths[row]):,} ids, but "
                f"{int(counts[row]):,} values in {name!r}."
            )
        if name == "labels":
            loss &= rows.trained(mask, ids, keep)
        elif name == "attention_mask":
            keep &= rows.zero_or_one(mask, name)
        else:
            loss &= rows.zero_or_one(mask, name)
    if keep.all():
        return Kept(ids, lengths, None if loss.all() else loss.view(np.uint8), False)
    lengths = rows.kept_lengths(keep)
    loss = loss[keep]
    return Kept(ids[keep], lengths, None if loss.all() else loss.view(np.uint8), True)


class _Rows(NamedTuple):
    """Rows of a file, whose numbers are in the errors about their values."""

    path: Path
    lengths: Integers
    first: int
    """The number of the first row in the file."""

    def _at(self, value: int) -> tuple[int, int]:
        """Return the row of a value, and its number in the row."""
        ends = np.cumsum(self.lengths)
        row = int(np.searchsorted(ends, value, side="right"))
        return self.first + row, value - int(ends[row] - self.lengths[row])

    def zero_or_one(self, mask: Array, name: str) -> Array:
        """Return where a mask is 1."""
        is_one = mask == 1
        known = is_one | (mask == 0)
        if not known.all():
            at = int(np.flatnonzero(~known)[0])
            raise StoreError(
                f"{self.path}: row {self._at(at)[0]:,} has the value {mask[at]} in the column "
                f"{name!r}, which is neither 0 nor 1."
            )
        return np.asarray(is_one)

    def trained(self, labels: Array, ids: Array, keep: Array) -> Array:
        """Return which tokens have a label that is not -100, which must be their id."""
        trained = labels != _NOT_TRAINED
        differs = trained & (labels != ids) & keep
        if differs.any():
            at = int(np.flatnonzero(differs)[0])
            row, token = self._at(at)
            raise StoreError(
                f"{self.path}: row {row:,} has the id {ids[at]} and the label {labels[at]} at "
                f"token {token:,}. A model is trained on the next id, so a label must be the id at "
                "the same place, or -100. Labels of another task cannot be read, and labels that "
                "were shifted already must be shifted back."
            )
        return np.asarray(trained)

    def kept_lengths(self, keep: Array) -> Integers:
        """Return the number of tokens of each row without padding, which must be at its ends."""
        ends = np.cumsum(self.lengths)
        starts = ends - self.lengths
        # A run of kept tokens begins where a kept token follows padding, or is the first of its
        # row.
        begins = keep.copy()
        begins[1:] &= ~keep[:-1]
        firsts = starts[self.lengths > 0]
        begins[firsts] = keep[firsts]
        runs = np.concatenate(([0], np.cumsum(begins)))
        counts = np.concatenate(([0], np.cumsum(keep)))
        if (runs[ends] - runs[starts] > 1).any():
            row = self.first + int(np.flatnonzero(runs[ends] - runs[starts] > 1)[0])
            raise StoreError(
                f"{self.path}: the attention mask of row {row:,} is 0 between tokens. Only padding "
                "at the ends of a row can be removed."
            )
        found: Integers = counts[ends] - counts[starts]
        return found
