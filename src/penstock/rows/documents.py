"""Rows of one document each, padded to the longest row of their batch.

    side="right"    a b c   attention_mask  1 1 1       side="left"   a b c   attention_mask  1 1 1
                    d e .                   1 1 0                     . d e                   0 1 1

A batch is as wide as the longest document of its step on all ranks together, so that all ranks
have the same shapes. A document of more than `max_length` tokens is either truncated, and the lost
tokens are counted, or split over several rows, with one token of overlap.
"""

from collections.abc import Sequence
from functools import cached_property, partial
from typing import Literal, final

import numpy as np

from penstock.digest import digest_json
from penstock.errors import PlanError
from penstock.ranges import whole_number
from penstock.rows.packing import PACKING_FORMAT, one_each
from penstock.rows.pieces import PieceRows
from penstock.rows.protocol import Fields, Integers, Settings, Side
from penstock.rows.tokens import Stream, StreamLike
from penstock.store.reader import TokenStore

Overflow = Literal["cut", "split"]


@final
class Documents(PieceRows):
    """One document per row, of at most `max_length` tokens. Safe to read from several threads."""

    side: Side

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
        """Open rows over a store, a path, or a list of them.

        Args:
            store: The documents to read.
            max_length: The largest number of tokens in a row, all of which are inputs; 2 or more.
            overflow: Whether a longer document is truncated (`cut_documents` and `cut_tokens`
                count the losses), or split over several rows.
            pad_to_multiple_of: The width of a batch is a multiple of this, for tensor cores.
            side: The side of the padding; "left" for generation, where rows must end together.
            pad_id: The id of padding. If None, it is the end token of the store, or 0 if there is
                none. Masks mark the padding, so its id does not change the loss.
        """
        if overflow not in ("cut", "split"):
            raise PlanError(f'overflow={overflow!r} is not "cut" or "split".')
        if side not in ("right", "left"):
            raise PlanError(f'side={side!r} is not "right" or "left".')
        self.max_length = whole_number("max_length", max_length)
        self.multiple = whole_number("pad_to_multiple_of", pad_to_multiple_of)
        if self.multiple < 1:
            raise PlanError(f"pad_to_multiple_of={self.multiple} must be at least 1.")
        self.overflow: Overflow = overflow
        self.side = side
        self.length = -(-self.max_length // self.multiple) * self.multiple
        """The width of the widest batch."""
        lay_out = partial(one_each, length=self.max_length, split=overflow == "split")
        super().__init__(store, f"documents-{overflow}", self.max_length, lay_out)
        self.pad_id = _end_id(self.stream) if pad_id is None else whole_number("pad_id", pad_id)
        if not 0 <= self.pad_id <= np.iinfo(self.stream.dtype).max:
            raise PlanError(
                f"pad_id={self.pad_id:,} does not fit the ids of the store, which are "
                f"{self.stream.dtype}. Use an id of its vocabulary."
            )

    def __repr__(self) -> str:
        if not self.stream.sealed:
            return f"Documents({self.stream.members[0]!r}, {self.max_length:,})"
        lost = f"; {self.cut_tokens:,} tokens cut off" if self.cut_tokens else ""
        rows = f"{len(self):,} row{'s' * (len(self) != 1)}"
        return f"Documents({self.stream}: {rows} of at most {self.max_length:,} tokens{lost})"

    @cached_property
    def digest(self) -> str:
        """A digest of the stores and of which tokens are in which row, without the padding."""
        return digest_json(
            ["documents", PACKING_FORMAT, self.stream.digest, self.max_length, self.overflow]
        )

    @property
    def cut_documents(self) -> int:
        """Documents that were truncated."""
        return self.index.num_long if self.overflow == "cut" else 0

    @property
    def cut_tokens(self) -> int:
        """Tokens that are in no row, because their documents were truncated."""
        return self.index.num_cut

    def unread(self, per_row: int) -> int:
        """Return `cut_tokens`: every other token but the first of a row is a target."""
        return self.cut_tokens

    @property
    def num_split(self) -> int:
        """Documents that take several rows."""
        return self.index.num_long if self.overflow == "split" else 0

    def describe(self) -> Settings:
        """Return the settings that determine the rows, so that messages can name a difference."""
        return {
            "kind": "documents",
            "store": self.stream.short_digest,
            "length": self.max_length,
            "overflow": self.overflow,
        }

    def widths(self, samples: Integers) -> Integers:
        """Return how wide a batch must be for each of the rows `samples`."""
        # A row is one piece, so its first piece is all of it.
        sizes = self.index.row_sizes(self._checked(samples))
        return np.asarray(-(-sizes // self.multiple) * self.multiple)

    def read(self, samples: Integers) -> Fields:
        """Return the rows `samples`: `tokens` (rows, length + 1), `attention_mask` (rows, length).

        Rows are padded to `length`; a loader narrows them to the widest row of a step. The other
        fields are those of `Packs.read`.
        """
        fields, spans = self._read(samples, self.length, pad_id=self.pad_id, side=self.side)
        if self.side == "right":
            fields["num_targets"] = spans.filled - 1
        return {**fields, "attention_mask": spans.real().view(np.uint8)}


def _end_id(stream: Stream) -> int:
    # Stores that are read together have one tokenizer, so all have the same end token.
    for member in stream.members:
        if isinstance(member, TokenStore) and member.manifest.contents["eos_id"] is not None:
            return int(member.manifest.contents["eos_id"])
    return 0
