"""Rows of whole documents.

    tokens          a a a a a b b c c .      length=10
    position_ids    0 1 2 3 4 0 1 0 1 0      from 0 in each piece
    document_ids    0 0 0 0 0 1 1 2 2 3      for attention that does not look across
    targets         a a a a - b - c - -      no target across a border: - is -100

Documents are fitted into rows part by part, as `penstock.rows.packing` draws it, so rows
of a store that grows stay what they were. Nothing is dropped: every token but a document's
first is a target exactly once, in every format. Borders come from where documents end in
the store, never from looking for end tokens.
"""

from collections.abc import Sequence
from functools import cached_property, partial
from operator import index
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from penstock.digest import digest_json
from penstock.rows.packing import PACKING_FORMAT, pack
from penstock.rows.pieces import OfPieces, PieceRows
from penstock.rows.tokens import StreamLike

__all__ = ["Packs"]


@final
class Packs(OfPieces):
    """Rows of `length` tokens, fitted together from whole documents.

    Opening packs the documents once, at half a microsecond each, and keeps the result as a
    file; after that it takes as long as reading that file, 8 bytes a piece and 8 a row. Safe to
    read from several threads.
    """

    def __init__(
        self, store: StreamLike | Sequence[StreamLike], length: int, *, borders: bool = True
    ) -> None:
        """Rows over a store, a path, or a list of them.

        Args:
            store: What to pack.
            length: Tokens of a row, all of which are inputs; 2 or more. A document that is
                longer is split, with one token of overlap.
            borders: Also give `position_ids` and `document_ids`. Without them a batch is inputs
                and targets alone, and attention looks across documents.
        """
        self.length = index(length)
        self.borders = borders
        self._rows = PieceRows(store, "packs", self.length, partial(pack, length=self.length))
        self.stream = self._rows.stream

    def __repr__(self) -> str:
        if not self._rows.complete:
            return f"Packs({self.stream.members[0]!r}, {self.length:,})"
        split = f"; {self.num_split:,} documents split" if self.num_split else ""
        return (
            f"Packs({len(self):,} rows of {self.length:,} tokens, "
            f"{self.padding_share:.3%} padding{split})"
        )

    def __getstate__(self) -> dict[str, Any]:
        return {"stream": self.stream, "length": self.length, "borders": self.borders}

    def __setstate__(self, state: dict[str, Any]) -> None:
        stream: Any = state["stream"]
        self.__init__(stream, state["length"], borders=state["borders"])

    @cached_property
    def digest(self) -> str:
        """A digest of the stores and of how they are packed.

        `borders` has no part in it: it tells more about the rows, and changes none.
        """
        return digest_json(["packs", PACKING_FORMAT, self.stream.digest, self.length])

    @property
    def num_padding(self) -> int:
        """Places in all rows that hold no token."""
        return len(self) * self.length - self._rows.num_placed

    @property
    def padding_share(self) -> float:
        """The share of all places that hold no token."""
        return self.num_padding / (len(self) * self.length)

    @property
    def num_split(self) -> int:
        """Documents that are longer than a row."""
        return self._rows.index.num_long

    def describe(self) -> dict[str, Any]:
        """What decides the rows, for telling apart two that differ."""
        return {
            "kind": "packs",
            "store": self.stream.digest[:16] if self._rows.complete else "",
            "length": self.length,
            "packing": PACKING_FORMAT,
        }

    def read(self, samples: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        """The rows `samples`: `tokens` of shape (rows, length + 1), as narrow as stored.

        The last column is never a target, and holds 0 as padding does. `same_document`
        (rows, length) is False where the target is of another document or padding; where the
        store has loss masks, `target_mask` is False where it is not trained on. `num_targets`
        is one less than the tokens of each row. With `borders`, also `position_ids` and
        `document_ids`, (rows, length) int32. The arrays are new, and the caller's to keep.
        """
        fields, spans = self._rows.read(self._rows.checked(samples), self.length)
        fields["num_targets"] = spans.filled - 1
        return {**fields, **spans.borders()} if self.borders else fields
