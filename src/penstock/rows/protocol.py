"""The interface of rows: every field and method that penstock uses, each with its default.

A `Rows` object, such as `Windows`, gives random access to training sequences. A plan needs `len()`
and `digest`. A loader also needs `length` and `read`. All other fields and methods are optional,
and their defaults are defined only here. Row classes of penstock inherit from `Rows`. A user's
object that has the methods but does not inherit is wrapped once, by `as_rows`, when a plan
receives it. No other code tests which methods an object has. This module imports NumPy only.
"""

from collections.abc import Iterator, Sequence
from operator import index
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.errors import PlanError

if TYPE_CHECKING:
    from penstock.rows.origins import RowOrigin as RowOrigin  # plans import it from here
    from penstock.rows.tokens import Stream


Array = NDArray[Any]
"""An array of ids, offsets or masks, in the dtype of its file."""
Fields = dict[str, Array]
"""The arrays of some rows, by field name; `penstock.transforms.transform` lists the fields."""
Integers = NDArray[np.int64]
Settings = dict[str, Any]
"""Settings as JSON, for states and messages."""
Side = Literal["right", "left"]


class RowsLike(Protocol):
    """The interface that a plan needs to order rows; a loader needs more, see `Rows`."""

    def __len__(self) -> int:
        """Return the number of rows, which must not change."""
        ...

    @property
    def digest(self) -> str:
        """A digest of the contents of all rows."""
        ...


class Rows:
    """Random-access rows of tokens; the base class of all rows in penstock."""

    length: int = 0
    """Input tokens per row. 0 means that a plan can order the rows, but no loader can read them."""
    stream: "Stream | None" = None
    """The tokens that the rows are cut from, if they come from stores or token files."""
    stride: int | None = None
    """The distance between the first tokens of two rows, if it is the same for all rows."""
    side: Side | None = None
    """The side on which `Documents` are padded to the widest row of a step; None if all rows are
    equally wide."""
    multiple: int = 1
    """The width of a padded step is a multiple of this."""
    gives_positions: bool = False
    """Whether `read` returns `position_ids` and `document_ids`."""
    gives_loss: bool = False
    """Whether `read` returns `target_mask` for stores that have loss masks."""
    gives_labels: bool = False
    """Whether `read` returns `labels`, as masked language modelling does."""
    whole_documents: bool = False
    """Whether every row begins with a document or a piece of one: its first token is no target."""
    part_rows: Sequence[int] | Integers | None = None
    """Rows of each part of the store, for `shuffle="part"`; None if there are no parts."""
    tokenizer_digest: str | None = None
    """The digest of the tokenizer, if it is known."""
    fetches_parts: bool = False
    """Whether a part is downloaded as a whole when its first row is read. Then plans read few parts
    at a time by default, and loaders ask `read_ahead` for the rows of later steps."""

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, sample: int | slice) -> Fields:
        """Return one row: the fields of `read`, without their first dimension.

        A slice returns several rows, as `read` does. `Documents` are padded to the widest of
        them only. Negative numbers count from the end, as in a list.
        """
        if isinstance(sample, slice):
            numbers = np.arange(*sample.indices(len(self)))
        else:
            numbers = np.array([self._number(sample)])
        fields = self.read(numbers)
        if self.side is not None and len(numbers):
            fields = narrowed(fields, int(self.widths(numbers).max()), self.length, self.side)
        if isinstance(sample, slice):
            return fields
        return {name: values[0] for name, values in fields.items()}

    def __iter__(self) -> Iterator[Fields]:
        """Yield each row, in the order of the store. A `Loader` reads many rows at once."""
        return (self[number] for number in range(len(self)))

    def _number(self, sample: int) -> int:
        """Return the number of the row `sample`; a negative `sample` counts from the end."""
        number = index(sample)
        if 0 <= number < self.num_readable:
            return number
        size = len(self)  # not known while a store is being written, which raises an error
        if not -size <= number < size:
            raise IndexError(f"row {number:,} is not among {size:,} rows")
        return number % size

    @property
    def digest(self) -> str:
        """A digest of the contents of all rows."""
        raise NotImplementedError

    @property
    def type_name(self) -> str:
        """The name of the class, for messages."""
        return type(self).__name__

    @property
    def num_tokens(self) -> int | None:
        """Targets in all rows, if that is known; for display."""
        return None

    def describe(self) -> Settings:
        """Return the settings that determine the rows, so that messages can name a difference."""
        return {}

    def read(self, samples: Integers) -> Fields:
        """Return the rows `samples`: `tokens` (rows, length + 1), and optional fields."""
        raise NotImplementedError

    def read_epochs(self, samples: Integers, epochs: Integers) -> Fields:
        """Return row `samples[i]` as it is in epoch `epochs[i]`; only transforms use the epoch."""
        return self.read(samples)

    def read_ahead(self, samples: Integers) -> int:
        """Begin to load these rows, from disk or from a server; return without waiting.

        Returns:
            The bytes of the files that are downloaded.
        """
        return 0

    def widths(self, samples: Integers) -> Integers:
        """Return how wide a batch must be for each of the rows `samples`."""
        return np.full(len(samples), self.length)

    def spans(self, sample: int) -> list[tuple[int, int]]:
        """Return the offset in `stream` and the size of each piece of a row, in order."""
        return []

    def origins(self, sample: int) -> "list[RowOrigin]":
        """Return the documents in a row, in the order of its tokens, and where they come from.

        The list is empty if that is not recorded: for bare token files, and rows of your own.
        Transforms change tokens after this.
        """
        return [] if self.stream is None else self.stream.origins(self.spans(self._number(sample)))

    def holding(self, start: int, stop: int) -> Integers:
        """Return the rows that hold some of the tokens `[start, stop)` of `stream`, ascending.

        Raises:
            NotImplementedError: rows of your own do not say it.
        """
        raise NotImplementedError(
            f"{self!r:.80} has no method holding(start, stop), which finds the rows of a token."
        )

    def unread(self, per_row: int) -> int:
        """Return how many tokens are the target of no row if a row trains on `per_row` targets."""
        return 0

    @property
    def num_readable(self) -> int:
        """Rows that can be read now; fewer than all only while the store is being written."""
        return len(self)

    def over(self, stream: "Stream") -> "Rows":
        """Return the same rows over a later snapshot of a store that is being written."""
        raise PlanError(
            f"{self.type_name} cannot read a store that is still being written. Use Windows, Packs "
            "or Documents, or build the store first."
        )


class WrappedRows(Rows):
    """Rows that forward everything to other rows; a base class for wrappers."""

    def __init__(self, rows: RowsLike) -> None:
        self.rows = as_rows(rows)
        # Copied, because otherwise this object would have the defaults of the class `Rows`.
        self.length, self.stream, self.stride = self.rows.length, self.rows.stream, self.rows.stride
        self.side, self.multiple = self.rows.side, self.rows.multiple
        self.gives_positions = self.rows.gives_positions
        self.gives_loss, self.gives_labels = self.rows.gives_loss, self.rows.gives_labels
        self.whole_documents, self.part_rows = self.rows.whole_documents, self.rows.part_rows
        self.tokenizer_digest = self.rows.tokenizer_digest
        self.fetches_parts = self.rows.fetches_parts

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def digest(self) -> str:
        """The digest of the inner rows."""
        return self.rows.digest

    @property
    def num_tokens(self) -> int | None:
        """Targets in all rows, if that is known; for display."""
        return self.rows.num_tokens

    def describe(self) -> Settings:
        """Return the settings that determine the inner rows."""
        return self.rows.describe()

    def read(self, samples: Integers) -> Fields:
        """Return the rows `samples`."""
        return self.rows.read(samples)

    def read_ahead(self, samples: Integers) -> int:
        """As `Rows.read_ahead`."""
        return self.rows.read_ahead(samples)

    def widths(self, samples: Integers) -> Integers:
        """Return how wide a batch must be for each of the rows `samples`."""
        return self.rows.widths(samples)

    def spans(self, sample: int) -> list[tuple[int, int]]:
        """Return the offset in `stream` and the size of each piece of a row, in order."""
        return self.rows.spans(sample)

    def holding(self, start: int, stop: int) -> Integers:
        """Return the rows that hold some of the tokens `[start, stop)` of `stream`, ascending."""
        return self.rows.holding(start, stop)

    def unread(self, per_row: int) -> int:
        """Return how many tokens are the target of no row if a row trains on `per_row` targets."""
        return self.rows.unread(per_row)

    @property
    def num_readable(self) -> int:
        """Rows that can be read now; fewer than all only while the store is being written."""
        return self.rows.num_readable


def narrowed(arrays: Fields, width: int, length: int, side: Side) -> Fields:
    """Return the arrays of a batch, as views, without the columns that are padding in every row.

    >>> batch = {"tokens": np.array([[7, 8, 0, 0, 0]]), "position": np.array([4])}
    >>> narrowed(batch, width=2, length=4, side="right")["tokens"].tolist()
    [[7, 8, 0]]
    """
    # `tokens` has one column more than the other fields, and keeps it.
    spare = length - width
    kept = slice(spare, None) if side == "left" else slice(0, -spare or None)
    return {name: each[:, kept] if each.ndim == 2 else each for name, each in arrays.items()}


def token_spans(fields: Fields) -> tuple[Integers, Integers]:
    """Return the first column of each row's tokens and the column after the last one.

    All other columns are padding.

    >>> token_spans({"tokens": np.zeros((2, 6)), "num_targets": np.array([5, 2])})
    (array([0, 0]), array([6, 3]))
    >>> token_spans({"tokens": np.zeros((1, 6)), "attention_mask": np.array([[0, 0, 1, 1, 1]])})
    (array([2]), array([5]))
    """
    num_rows, width = fields["tokens"].shape
    if "attention_mask" in fields:
        # Tokens are contiguous, so the first 1 and the number of 1s describe them.
        real = fields["attention_mask"].astype(np.bool_)
        starts = real.argmax(axis=1)
        return starts, starts + real.sum(axis=1)
    starts = np.zeros(num_rows, np.int64)
    if "num_targets" in fields:
        # n targets come from n + 1 tokens, as the first token is not a target.
        return starts, np.minimum(fields["num_targets"].astype(np.int64) + 1, width)
    return starts, np.full(num_rows, width, np.int64)


def as_rows(rows: RowsLike, name: str = "data") -> Rows:
    """Return `rows` themselves, or an adapter if they do not inherit from `Rows`.

    Raises:
        PlanError: the object has no digest; the message names the source, `name`.
    """
    if isinstance(rows, Rows):
        return rows
    if not isinstance(getattr(rows, "digest", None), str):
        advice = "Your own class must have __len__ and a string digest."
        if isinstance(rows, dict | list | tuple):
            advice = 'A mixture of several is Plan({"web": …, "code": …}, weights={…}).'
        raise PlanError(
            f'Source "{name}" must be rows, such as Windows("stores/web", length=1024); got a '
            f"{type(rows).__name__}. {advice}"
        )
    return _AdaptedRows(rows)


_OPTIONAL = """stream stride side multiple gives_positions gives_loss gives_labels whole_documents
part_rows tokenizer_digest fetches_parts describe read_epochs read_ahead widths spans
origins holding unread"""


class _AdaptedRows(Rows):
    """Adds to a user's object the defaults of all fields and methods of `Rows` that it lacks."""

    def __init__(self, rows: RowsLike) -> None:
        self._rows = rows
        # Without `read`, the length stays 0: a plan can order the object, a loader cannot read it.
        if self._get("read") is not None:
            self.length = self._get("length") or 0
            self.read = self._get("read")  # type: ignore[method-assign]
        # Attributes of an object come before methods of its class, so each of these replaces
        # the default.
        for each in _OPTIONAL.split():
            if (found := self._get(each)) is not None:
                setattr(self, each, found)

    def _get(self, name: str) -> Any:
        return getattr(self._rows, name, None)

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        return repr(self._rows)

    @property
    def digest(self) -> str:
        """The digest of the object."""
        return self._rows.digest

    @property
    def type_name(self) -> str:
        """The name of the object's class."""
        return type(self._rows).__name__

    @property
    def num_tokens(self) -> int | None:
        """The object's `num_tokens`, if it has any."""
        found: int | None = self._get("num_tokens")
        return found
