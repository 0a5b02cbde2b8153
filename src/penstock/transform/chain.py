"""What a transform is, and several in order.

    fields              given by rows                       added by transforms
    tokens              (rows, length + 1) narrow ids
    num_targets         (rows,) where rows are padded on
                        the right: the places, from the
                        first on, that a token follows;
                        one less than the row has tokens
    attention_mask      (rows, length) where they are
                        padded on either side: 1 = token
    same_document       (rows, length) where rows hold
                        whole documents: whether the next
                        token is of the same one
    document_ids        (rows, length) where borders are known
    labels                                                  (rows, length): what a place predicts
                                                            of itself; no format shifts it
    targets                                                 (rows, length): what a place predicts
                                                            of the next, where not `tokens[:, 1:]`
    target_mask                                             (rows, length): False = ignored (-100)

Ids stay as narrow as they are stored; -100 is written where batches are dressed.
"""

from typing import Any, Protocol, final

import numpy as np
from numpy.typing import NDArray

from penstock.errors import PlanError
from penstock.transform.draw import Integers, Unsigned, subkeys

__all__ = [
    "Chain",
    "Fields",
    "Transform",
    "from_first",
    "holding",
    "refuse_after",
    "token_spans",
    "without_padding",
]

Fields = dict[str, NDArray[Any]]


class Transform(Protocol):
    """Rows to rows; a pure function of the row and its key.

    No row may depend on another, nor on how many there are. Safe to call from several threads.
    """

    def apply(self, fields: Fields, keys: Unsigned, length: int | None = None) -> Fields:
        """New fields for rows of these keys; the arrays given are left as they are.

        Args:
            fields: `tokens` (rows, length) or (rows, length + 1), and what else rows have.
            keys: One for each row; see `row_keys`.
            length: How many tokens of a row are inputs; all of them where not given.
        """

    def describe(self) -> dict[str, Any]:
        """All that decides what it does, as JSON; `kind` is its name."""


@final
class Chain:
    """Transforms one after the other, each with keys of its own."""

    def __init__(self, *transforms: Transform) -> None:
        if not transforms:
            raise PlanError("A chain needs at least one transform; this one has none.")
        self.transforms = transforms

    @property
    def gives_labels(self) -> bool:
        """Whether places predict themselves, which is so after `MaskedTokens`."""
        return any(getattr(each, "gives_labels", False) for each in self.transforms)

    def __repr__(self) -> str:
        return f"Chain({', '.join(map(repr, self.transforms))})"

    def apply(self, fields: Fields, keys: Unsigned, length: int | None = None) -> Fields:
        """The fields after the last transform; see `Transform.apply`."""
        for number, transform in enumerate(self.transforms):
            fields = transform.apply(fields, subkeys(keys, number), length)
        return fields

    def describe(self) -> dict[str, Any]:
        """The transforms in order."""
        return {"kind": "chain", "transforms": [each.describe() for each in self.transforms]}


def holding(tokens: NDArray[Any], largest_id: int) -> NDArray[Any]:
    """A copy of `tokens`, row after row, wider where their type cannot hold `largest_id`.

    >>> holding(np.array([1, 2], np.uint16), 65_536).dtype
    dtype('uint32')
    """
    fits = largest_id <= np.iinfo(tokens.dtype).max
    wide = tokens.dtype if fits else np.promote_types(tokens.dtype, np.uint32)
    return tokens.astype(wide, order="C")


def token_spans(fields: Fields) -> tuple[Integers, Integers]:
    """Where the tokens of each row begin, and where they end: what is outside is padding.

    >>> token_spans({"tokens": np.zeros((2, 6)), "num_targets": np.array([5, 2])})
    (array([0, 0]), array([6, 3]))
    >>> token_spans({"tokens": np.zeros((1, 6)), "attention_mask": np.array([[0, 0, 1, 1, 1]])})
    (array([2]), array([5]))
    """
    num_rows, width = fields["tokens"].shape
    if "attention_mask" in fields:
        real = fields["attention_mask"].astype(np.bool_)
        starts = real.argmax(axis=1)
        return starts, starts + real.sum(axis=1)
    starts = np.zeros(num_rows, np.int64)
    if "num_targets" in fields:
        return starts, np.minimum(fields["num_targets"].astype(np.int64) + 1, width)
    return starts, np.full(num_rows, width, np.int64)


def without_padding(mask: NDArray[np.bool_], fields: Fields) -> NDArray[np.bool_]:
    """`mask`, (rows, length), and False where a row holds no token."""
    starts, stops = token_spans(fields)
    if not starts.any() and (stops >= mask.shape[1]).all():
        return mask
    places = np.arange(mask.shape[1])
    real: NDArray[np.bool_] = (places >= starts[:, np.newaxis]) & (places < stops[:, np.newaxis])
    return mask & real


def from_first(values: NDArray[Any], starts: Integers) -> NDArray[Any]:
    """What was drawn place by place, (rows, length), counted from each row's first token.

    So a document is changed alike on whichever side it is padded, and to whatever width.

    >>> from_first(np.array([[7, 8, 9], [7, 8, 9]]), np.array([0, 1])).tolist()
    [[7, 8, 9], [7, 7, 8]]
    """
    if not starts.any():
        return values
    places = np.arange(values.shape[1]) - starts[:, np.newaxis]
    return np.take_along_axis(values, np.maximum(places, 0), axis=1)


def refuse_after(fields: Fields, name: str, *fitted: str) -> None:
    """Raise where rows have one of the fields `fitted`, which `name` would make untrue."""
    found = [field for field in fitted if field in fields]
    if found:
        raise PlanError(
            f"{name} would change tokens that {' and '.join(map(repr, found))} of these rows "
            f"belong to. Put it before the transform that gives them, or use rows without them."
        )
