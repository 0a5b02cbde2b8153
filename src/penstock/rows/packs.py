"""Rows that are filled with whole documents.

    tokens          a a a a a b b c c .      length=10
    position_ids    0 1 2 3 4 0 1 0 1 0      from 0 in each piece
    document_ids    0 0 0 0 0 1 1 2 2 3      for attention that stays within a document
    targets         a a a a - b - c - -      no target across a border: - is -100

Documents are packed part by part (`penstock.rows.packing`), so the rows of earlier parts do not
change when parts are added to a store. No token is dropped: every token but a document's first
is a target exactly once, in every format. Borders come from the offsets that the store records,
not from a search for end tokens.
"""

import warnings
from collections.abc import Sequence
from functools import cached_property, partial
from typing import final

from penstock.digest import digest_json
from penstock.ranges import whole_number
from penstock.rows.packing import PACKING_FORMAT, pack
from penstock.rows.pieces import PieceRows
from penstock.rows.protocol import Fields, Integers, Settings
from penstock.rows.tokens import StreamLike
from penstock.store.reader import TokenStore


@final
class Packs(PieceRows):
    """Rows of `length` tokens, packed from whole documents.

    When a store is opened for the first time, its documents are packed, in about 0.5 µs per
    document, and the result is cached in a file of 8 bytes per piece and 8 bytes per row. Later,
    only that file is read. Safe to read from several threads.
    """

    def __init__(
        self, store: StreamLike | Sequence[StreamLike], length: int, *, borders: bool = True
    ) -> None:
        """Open rows over a store, a path, or a list of them.

        Args:
            store: The documents to pack.
            length: Tokens per row, all of which are inputs; 2 or more. A longer document is
                split, with one token of overlap.
            borders: Also return `position_ids` and `document_ids`. Without them a batch has only
                inputs and targets, and attention crosses documents.
        """
        self.length = whole_number("length", length)
        self.borders = self.gives_positions = borders
        super().__init__(store, "packs", self.length, partial(pack, length=self.length))
        self._warn_of_one_document()

    def _warn_of_one_document(self) -> None:
        """Warn if all rows are pieces of one document: a text whose separator was not found."""
        store, *others = self.stream.members
        if others or not isinstance(store, TokenStore) or not store.sealed:
            return
        if store.manifest.num_documents == 1 and self.num_split:
            advice = (
                "build the store again and say where they end, for example with "
                'documents="paragraphs" (--documents paragraphs) of penstock.build.'
            )
            if "imported" in store.manifest.builds[0]["reading"]:
                advice = (
                    "import token files of a format that records where they end, such as Megatron, "
                    "datatrove, MDS or Parquet, or build the store from the text."
                )
            warnings.warn(
                f"{self.stream} is one document, so these rows keep nothing apart. If its text has "
                f"several documents, {advice}",
                stacklevel=3,
            )

    def __repr__(self) -> str:
        if not self.stream.sealed:
            return f"Packs({self.stream.members[0]!r}, {self.length:,})"
        long, rows = self.num_split, f"{len(self):,} row{'s' * (len(self) != 1)}"
        split = f"; {long:,} document{'s' * (long != 1)} split" if long else ""
        return (
            f"Packs({self.stream}: {rows} of {self.length:,} tokens, "
            f"{self.padding_share:.3%} padding{split})"
        )

    @cached_property
    def digest(self) -> str:
        """A digest of the stores and of how they are packed.

        `borders` does not change it, because it adds fields and changes no row.
        """
        return digest_json(["packs", PACKING_FORMAT, self.stream.digest, self.length])

    @property
    def num_padding(self) -> int:
        """Columns in all rows that hold no token."""
        return len(self) * self.length - self.num_placed

    @property
    def padding_share(self) -> float:
        """The share of all columns that hold no token."""
        return self.num_padding / (len(self) * self.length)

    @property
    def num_split(self) -> int:
        """Documents that are longer than a row."""
        return self.index.num_long

    def describe(self) -> Settings:
        """Return the settings that determine the rows, so that messages can name a difference."""
        return {
            "kind": "packs",
            "store": self.stream.short_digest,
            "length": self.length,
            "packing": PACKING_FORMAT,
        }

    def read(self, samples: Integers) -> Fields:
        """Return the rows `samples`: `tokens` (rows, length + 1), in the dtype of the store.

        The last column is never a target; it holds 0, like padding. `same_document`
        (rows, length) is False where the target is padding or belongs to another document. If the
        store has loss masks, `target_mask` is False where the target is not trained on.
        `num_targets` is the number of tokens of each row minus 1. With `borders`, the result also
        has `position_ids` and `document_ids`, (rows, length) int32. The arrays are new, and the
        caller may keep them.
        """
        fields, spans = self._read(samples, self.length)
        fields["num_targets"] = spans.filled - 1
        return {**fields, **spans.borders()} if self.borders else fields
