"""The interface of transforms, `Chain`, `Transformed`, and functions that transforms share.

Rows are a dictionary of arrays, its fields. `length` is the number of inputs per row.

    field            shape               set by      meaning
    tokens           (rows, length + 1)  rows        token ids, in the store's narrow dtype
    num_targets      (rows,)             rows        if rows are padded on the right: how many
                                                     leading columns have a next token
    attention_mask   (rows, length)      rows        if rows are padded on either side: 1 = token
    same_document    (rows, length)      rows        if rows hold whole documents: whether the
                                                     next token belongs to the same document
    document_ids     (rows, length)      rows        if rows know where documents begin
    labels           (rows, length)      transforms  the token to predict here; not shifted
    targets          (rows, length)      transforms  the next token to predict, if it is not
                                                     `tokens[:, 1:]`
    target_mask      (rows, length)      transforms  False = ignored by the loss (-100)

Ids keep the dtype of the store. The loader writes -100 when it makes a batch.

Transformed rows can be used like any other rows, in a plan or a loader:

    Plan({"web": Windows(web, 1024), "code": Transformed(Windows(code, 1024), middle, seed=17)})

A changed row depends only on (seed, rows, epoch, sample). A plan's position determines epoch
and sample, so it determines the row. Each sample occurs once per epoch of its source, so the
random choices for a row are new in every epoch. The position itself is not used: then a row would
change with the weights of the mixture. As it is, two runs that differ only in weights read
the same rows in a different order.
"""

from functools import cached_property
from operator import index
from typing import Any, Protocol, final, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.digest import Unsigned, digest_json
from penstock.errors import PlanError
from penstock.rows.protocol import RowsLike, WrappedRows, token_spans
from penstock.transforms.draws import Integers, row_keys, subkeys

# A version number that is part of every digest. It is increased when the same arguments begin to
# produce different rows.
_FORMAT = 2
Fields = dict[str, NDArray[Any]]


@runtime_checkable
class Transform(Protocol):
    """Changes rows; a pure function of each row and its key.

    The result for a row must not depend on other rows or on their number. A transform must be
    safe to call from several threads.
    """

    def apply(self, fields: Fields, keys: Unsigned, length: int | None = None) -> Fields:
        """Return new fields; the arrays in `fields` are not modified.

        Args:
            fields: `tokens` (rows, length) or (rows, length + 1), and the rows' other fields.
            keys: One key per row; see `row_keys`.
            length: Number of inputs per row; all columns if None.
        """

    def describe(self) -> dict[str, Any]:
        """Return every setting that affects the result, in a dict that JSON can represent.

        The key `kind` names the transform.
        """


def gives_labels(transform: Transform) -> bool:
    """Return whether each position predicts its own token; False if `transform` does not say."""
    return bool(getattr(transform, "gives_labels", False))


def needs_borders(transform: Transform) -> bool:
    """Return whether rows must say where documents begin; False if `transform` does not say."""
    return bool(getattr(transform, "needs_borders", False))


def _checked(transform: Transform) -> Transform:
    """Return `transform`; raise if it is none."""
    if not isinstance(transform, Transform):
        raise PlanError(
            f"transform={transform!r:.80} has no apply() and describe(). Use one of "
            "penstock.transforms, such as MaskTokens, or a class of your own with both."
        )
    return transform


@final
class Chain:
    """Applies several transforms in order; each one gets separate keys."""

    def __init__(self, *transforms: Transform) -> None:
        if not transforms:
            raise PlanError("Chain() needs at least one transform; got none.")
        self.transforms = tuple(map(_checked, transforms))

    @property
    def gives_labels(self) -> bool:
        """Whether each position predicts its own token, as after `MaskTokens`."""
        return any(map(gives_labels, self.transforms))

    @property
    def needs_borders(self) -> bool:
        """Whether rows must say where documents begin, as for `FillInTheMiddle`."""
        return any(map(needs_borders, self.transforms))

    def __repr__(self) -> str:
        return f"Chain({', '.join(map(repr, self.transforms))})"

    def apply(self, fields: Fields, keys: Unsigned, length: int | None = None) -> Fields:
        """Return the fields after the last transform; see `Transform.apply`."""
        for number, transform in enumerate(self.transforms):
            # Separate keys: with shared keys, two dropouts would drop the same tokens.
            fields = transform.apply(fields, subkeys(keys, number), length)
        return fields

    def describe(self) -> dict[str, Any]:
        """Return the settings of all transforms, in order."""
        return {"kind": "chain", "transforms": [each.describe() for each in self.transforms]}


@final
class Transformed(WrappedRows):
    """Rows changed by a transform. They work like all other rows, and have a separate digest.

    All other attributes (`num_tokens`, `part_rows`, `read_ahead`) are those of the original rows.
    Immutable, and safe to read from several threads if the original rows are.

    Args:
        rows: The rows to change, such as `Windows`, or rows that are already transformed.
        transform: The transform; use `Chain` for several.
        seed: Any integer. Another seed gives other random choices.
    """

    def __init__(self, rows: RowsLike, transform: Transform, *, seed: int = 0) -> None:
        super().__init__(rows)
        self.transform = _checked(transform)
        self.seed = index(seed)
        self.gives_labels = self.gives_labels or gives_labels(transform)

    def __repr__(self) -> str:
        return f"Transformed({self.rows!r}, {self.transform!r}, seed={self.seed})"

    @cached_property
    def digest(self) -> str:
        """A digest of rows, transform and seed; the plan's digest is computed from it."""
        return digest_json(["transformed", _FORMAT, self.rows.digest, self.seed, self._described])

    def describe(self) -> dict[str, Any]:
        """Return the description of the rows, with a short description of the transform added."""
        described = self.rows.describe()
        # Eight digits of the settings' digest: a state names the transform in under 100 bytes.
        short = f"{self._described['kind']} {digest_json(self._described)[:8]}"
        before = f"{described['transform']}, " if "transform" in described else ""
        return {**described, "transform": f"{before}{short} seed {self.seed}"}

    def read(self, samples: ArrayLike) -> Fields:
        """Return the rows `samples` as they are in epoch 0."""
        samples = np.asarray(samples, np.int64)
        return self.read_epochs(samples, np.zeros(len(samples), np.int64))

    def read_epochs(self, samples: ArrayLike, epochs: ArrayLike) -> Fields:
        """Return the rows `samples`, each as it is in its epoch; the loader calls this."""
        samples, epochs = np.asarray(samples, np.int64), np.asarray(epochs, np.int64)
        # Inner rows that are transformed too must be read in the same epoch.
        fields = self.rows.read_epochs(samples, epochs)
        # The digest of the rows is part of the key, so two sources make independent choices.
        keys = row_keys(self.seed, self.rows.digest, epochs, samples)
        return self.transform.apply(fields, keys, self.length)

    @cached_property
    def _described(self) -> dict[str, Any]:
        return self.transform.describe()


def copy_for_ids(tokens: NDArray[Any], largest_id: int) -> NDArray[Any]:
    """Return a C-ordered copy of `tokens` whose dtype can hold `largest_id`.

    >>> copy_for_ids(np.array([1, 2], np.uint16), 65_536).dtype
    dtype('uint32')
    """
    fits = largest_id <= np.iinfo(tokens.dtype).max
    # NumPy would store 65,536 in a uint16 array as 0, so the dtype is widened first.
    dtype = tokens.dtype if fits else np.promote_types(tokens.dtype, np.uint32)
    return tokens.astype(dtype, order="C")


def exclude_padding(mask: NDArray[np.bool_], fields: Fields) -> NDArray[np.bool_]:
    """Return `mask`, (rows, length), with False in every padding column."""
    starts, stops = token_spans(fields)
    # No padding, the usual case: nothing to compute.
    if not starts.any() and (stops >= mask.shape[1]).all():
        return mask
    return mask & spanned(starts, stops, mask.shape[1])


def spanned(starts: Integers, stops: Integers, width: int) -> NDArray[np.bool_]:
    """Return (rows, width), True from column `start` of each row up to its `stop`."""
    columns = np.arange(width)
    return np.asarray((columns >= starts[:, np.newaxis]) & (columns < stops[:, np.newaxis]))


def align_to_first_token(values: NDArray[Any], starts: Integers) -> NDArray[Any]:
    """Return random values, (rows, length), shifted to begin at the first token of each row.

    A document is then changed the same way whichever side it is padded on, and to any width.

    >>> align_to_first_token(np.array([[7, 8, 9], [7, 8, 9]]), np.array([0, 1])).tolist()
    [[7, 8, 9], [7, 7, 8]]
    """
    if not starts.any():
        return values
    columns = np.arange(values.shape[1]) - starts[:, np.newaxis]
    # Padding columns get an arbitrary value (that of column 0); callers exclude padding.
    return np.take_along_axis(values, np.maximum(columns, 0), axis=1)


def refuse_fields(fields: Fields, name: str, *refused: str) -> None:
    """Raise PlanError if rows have a `refused` field, which the transform `name` would break."""
    found = [field for field in refused if field in fields]
    if found:
        raise PlanError(
            f"{name} changes tokens, which would make {' and '.join(map(repr, found))} of these "
            "rows wrong. Put it before the transform that adds them, or use rows without them."
        )
