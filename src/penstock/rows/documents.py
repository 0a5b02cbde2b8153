"""Rows of one document each, padded to the longest of their batch.

    side="right"    a b c        side="left"    a b c       attention_mask   1 1 1
                    d e .                       . d e                        1 1 0

A batch is as wide as the longest document of its step on all ranks together, so that the
shapes agree everywhere, and no wider. A document of more than `max_length` tokens is cut
off (and how much that loses is counted), or split over rows with one token of overlap.
"""

from collections.abc import Sequence
from functools import cached_property, partial
from operator import index
from typing import Any, Literal, final

import numpy as np
from numpy.typing import NDArray

from penstock.digest import digest_json
from penstock.errors import PlanError
from penstock.rows.packing import PACKING_FORMAT, one_each
from penstock.rows.pieces import OfPieces, PieceRows, Side
from penstock.rows.tokens import Stream, StreamLike
from penstock.store.reader import TokenStore

__all__ = ["Documents", "narrowed"]

Overflow = Literal["cut", "split"]


@final
class Documents(OfPieces):
    """One document a row, of at most `max_length` tokens. Safe to read from several threads."""

    def __init__(
        self,
        store: StreamLike | Sequence[StreamLike],
        max_length: int,
        *,
        overflow: Overflow = "cut",
        pad_to_multiple_of: int = 1,
        side: Side = "right",
        pad_id: int | None = None,
    ) -> None:
        """Rows over a store, a path, or a list of them.

        Args:
            store: What to read.
            max_length: Tokens of a row at most, all of which are inputs; 2 or more.
            overflow: Whether a longer document is cut off (`cut_documents` and `cut_tokens` say
                what that loses), or split over several rows.
            pad_to_multiple_of: Batches are as wide as a multiple of this, as tensor cores like.
            side: Where padding stands: "left" for generation, so that rows end together.
            pad_id: What padding holds; the store's end token, or 0, where not given. Pads are
                told by the masks, so it makes no difference to a loss.
        """
        if overflow not in ("cut", "split"):
            raise PlanError(f'overflow={overflow!r} is not "cut" or "split".')
        if side not in ("right", "left"):
            raise PlanError(f'side={side!r} is not "right" or "left".')
        self.max_length, self.multiple = index(max_length), index(pad_to_multiple_of)
        if self.multiple < 1:
            raise PlanError(f"pad_to_multiple_of={self.multiple} must be at least 1.")
        self.overflow: Overflow = overflow
        self.side: Side = side
        self.length = self._padded(self.max_length)
        """The width of the widest batch."""
        lay_out = partial(one_each, length=self.max_length, split=overflow == "split")
        self._rows = PieceRows(store, f"documents-{overflow}", self.max_length, lay_out)
        self.stream = self._rows.stream
        self.pad_id = _end_id(self.stream) if pad_id is None else index(pad_id)
        if not 0 <= self.pad_id <= np.iinfo(self.stream.dtype).max:
            raise PlanError(f"pad_id={self.pad_id:,} does not fit ids of {self.stream.dtype}.")

    def __repr__(self) -> str:
        if not self._rows.complete:
            return f"Documents({self.stream.members[0]!r}, {self.max_length:,})"
        lost = f"; {self.cut_tokens:,} tokens cut off" if self.cut_tokens else ""
        return f"Documents({len(self):,} rows of at most {self.max_length:,} tokens{lost})"

    def __getstate__(self) -> dict[str, Any]:
        return {
            "store": self.stream,
            "max_length": self.max_length,
            "overflow": self.overflow,
            "pad_to_multiple_of": self.multiple,
            "side": self.side,
            "pad_id": self.pad_id,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)

    @cached_property
    def digest(self) -> str:
        """A digest of the stores and of what of them is in which row; not of the padding."""
        return digest_json(
            ["documents", PACKING_FORMAT, self.stream.digest, self.max_length, self.overflow]
        )

    @property
    def cut_documents(self) -> int:
        """Documents that lost their end."""
        return self._rows.index.num_long if self.overflow == "cut" else 0

    @property
    def cut_tokens(self) -> int:
        """Tokens that are in no row, because their documents were cut off."""
        return self._rows.index.num_cut

    @property
    def num_split(self) -> int:
        """Documents that take several rows."""
        return self._rows.index.num_long if self.overflow == "split" else 0

    def describe(self) -> dict[str, Any]:
        """What decides the rows, for telling apart two that differ."""
        return {
            "kind": "documents",
            "store": self.stream.digest[:16] if self._rows.complete else "",
            "length": self.max_length,
            "overflow": self.overflow,
        }

    def widths(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """How wide a batch must be for each of the rows `samples`."""
        sizes = self._rows.index.row_sizes(self._rows.checked(samples))
        return np.asarray(self._padded(sizes))

    def read(self, samples: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        """The rows `samples`: `tokens` (rows, length + 1) and `attention_mask` (rows, length).

        Padded to `length`; a loader narrows them to the widest row of a step. What else there
        is, is as in `Packs.read`.
        """
        numbers = self._rows.checked(samples)
        fields, spans = self._rows.read(numbers, self.length, pad_id=self.pad_id, side=self.side)
        if self.side == "right":
            fields["num_targets"] = spans.filled - 1
        return {**fields, "attention_mask": spans.real().view(np.uint8)}

    def _padded(self, sizes: Any) -> Any:
        return -(-sizes // self.multiple) * self.multiple


def _end_id(stream: Stream) -> int:
    for member in stream.members:
        if isinstance(member, TokenStore) and member.manifest.contents["eos_id"] is not None:
            return int(member.manifest.contents["eos_id"])
    return 0


def narrowed(
    arrays: dict[str, NDArray[Any]], width: int, length: int, side: Side
) -> dict[str, NDArray[Any]]:
    """The arrays of a batch without the columns that hold padding in every row, as views.

    >>> batch = {"tokens": np.array([[7, 8, 0, 0, 0]]), "position": np.array([4])}
    >>> narrowed(batch, width=2, length=4, side="right")["tokens"].tolist()
    [[7, 8, 0]]
    """
    spare = length - width
    cut = slice(spare, None) if side == "left" else slice(0, -spare or None)
    return {name: each[:, cut] if each.ndim == 2 else each for name, each in arrays.items()}
