"""Rows that are made of pieces of documents: the base of `Packs` and `Documents`.

    tokens          a a a a a b b .  .       the pieces, padding, and one more column
    position_ids    0 1 2 3 4 0 1 0          from 0 in each piece, and in the padding
    document_ids    0 0 0 0 0 1 1 2          numbered within the row
    same_document   1 1 1 1 0 1 0 0          whether the next token is of the same document:
                                             the targets that count
    target_mask     1 1 0 0 0 1 0 0          whether the next token is trained on, if the
                                             store has loss masks

All `length` tokens of a row are inputs, and the last token of a piece predicts nothing. So the
shifted formats and the unshifted one (`format="hf"`) train on the same targets.
"""

from collections.abc import Callable
from copy import copy
from functools import cached_property
from typing import Self

import numpy as np
from numpy.typing import NDArray

from penstock.errors import PlanError
from penstock.formats.mapped import Ids
from penstock.ranges import checked_rows, group_rows
from penstock.rows.index import index_of
from penstock.rows.packing import EMPTY, LONGEST, RowIndex, joined
from penstock.rows.protocol import Array, Fields, Integers, Settings, Side
from penstock.rows.tokens import Stream, StreamRows, StreamSource


class PieceRows(StreamRows):
    """Rows of one or more stores, each a list of pieces of documents.

    Args:
        store: A store, a path, or a list of them.
        kind: A name for what `lay_out` does; it is part of the name of the index on disk.
        length: The largest number of tokens in a row.
        lay_out: Computes the rows of a part from the offsets where its documents end.
    """

    whole_documents = True

    def __init__(
        self,
        store: StreamSource,
        kind: str,
        length: int,
        lay_out: Callable[[Array], RowIndex],
    ) -> None:
        if not 2 <= length <= LONGEST:
            raise PlanError(
                f"The length of a row of documents must be from 2 tokens (an input and its target) "
                f"to {LONGEST:,}; got {length:,}."
            )
        super().__init__(store)
        if not self.stream.has_documents:
            bare = next(each for each in self.stream.members if not each.has_documents)
            raise PlanError(
                f"{bare.path} does not record where documents end, so its rows cannot be whole "
                "documents. Use Windows, or build a store of the text."
            )
        self._kind, self._longest, self._lay_out = kind, length, lay_out
        self._open_index()

    def _open_index(self, known: RowIndex = EMPTY) -> None:
        """Open the index of the stores, or extend `known`, the index of their first parts."""
        if self.stream.sealed and known is EMPTY:
            lay_out = (self._kind, self._longest, self._lay_out)
            self.index = joined([index_of(each, *lay_out) for each in self.stream.members])
        else:
            # The rows of a part depend on that part only, so rows of earlier parts do not change.
            new = range(len(known.part_rows), len(self.stream.ends))
            added = [self._lay_out(self.stream.bounds(number)) for number in new]
            self.index = joined([known, *added])
        self.num_readable = self.index.num_rows
        self.part_rows = self.index.part_rows.astype(np.int64)
        # The number of rows up to the end of each part. A search in it finds the part of a row.
        self._row_ends = np.cumsum(self.part_rows)
        if self.stream.sealed and not self.index.num_rows:
            path = self.stream.members[0].path
            raise PlanError(f"{path} holds no documents with tokens, so it has no rows.")

    def over(self, stream: Stream) -> Self:
        """Return the same rows over a later snapshot of a store that is being written."""
        # A copy: threads may still read the rows over the earlier snapshot.
        later = copy(self)
        later.stream = stream
        later.__dict__.pop("num_placed", None)  # cached for fewer parts
        later._open_index(self.index)
        return later

    def __getstate__(self) -> Settings:
        # The index is mapped from a file, and a worker process maps it again. Pickling it would
        # copy 8 bytes per document to every worker.
        return {name: value for name, value in self.__dict__.items() if name != "index"}

    def __setstate__(self, state: Settings) -> None:
        self.__dict__.update(state)
        self._open_index()

    @cached_property
    def num_placed(self) -> int:
        """Tokens in all rows; the overlap of split documents counts twice."""
        return self.index.num_tokens

    @property
    def num_tokens(self) -> int:
        """Targets in all rows: every token in them except the first of each piece."""
        return self.num_placed - self.index.num_pieces

    @property
    def num_empty(self) -> int:
        """Documents without tokens, which are in no row."""
        return self.index.num_empty

    def spans(self, sample: int) -> list[tuple[int, int]]:
        """Return the offset in `stream` and the size of each piece of a row, in order."""
        number = self._checked(np.array([sample]))
        _, starts, sizes = self.index.spans(number)
        part = np.searchsorted(self._row_ends, number[0], side="right")
        offsets = (starts + self.stream.starts[part]).tolist()
        return list(zip(offsets, sizes.tolist(), strict=True))

    def holding(self, start: int, stop: int) -> Integers:
        """Return the rows that hold some of the tokens `[start, stop)` of `stream`, ascending.

        Reads the pieces of the parts that have these tokens, and no others.
        """
        first, last = np.searchsorted(self.stream.ends, [start, stop - 1], side="right").tolist()
        found = []
        for part in range(first, last + 1) if stop > start else ():
            end = int(self._row_ends[part])
            rows = np.arange(end - int(self.part_rows[part]), end)
            counts, begins, sizes = self.index.spans(rows)
            begins = begins + self.stream.starts[part]
            inside = (begins < stop) & (begins + sizes > start)
            found.append(np.unique(np.repeat(rows, counts)[inside]))
        return np.concatenate([np.zeros(0, np.int64), *found])

    def read_ahead(self, samples: Integers) -> int:
        """As `Rows.read_ahead`."""
        samples = self._checked(samples)
        counts, starts, sizes = self.index.spans(samples)
        # Each piece is in the part of its row; offsets in a part become offsets in the stream.
        numbers = np.searchsorted(self._row_ends, np.repeat(samples, counts), side="right")
        if not len(sizes):
            return 0
        return self.stream.read_ahead(starts + self.stream.starts[numbers], sizes)

    def _checked(self, samples: Integers) -> Integers:
        return checked_rows(samples, self.index.num_rows)

    def _read(
        self, samples: Integers, width: int, *, pad_id: int = 0, side: Side = "right"
    ) -> tuple[Fields, "PieceSpans"]:
        """Return `tokens` (rows, width + 1), the masks of their targets, and the pieces."""
        samples = self._checked(samples)
        spans = PieceSpans(self.index, samples, width, side)
        tokens = np.zeros((len(samples), width + 1), self.stream.dtype)
        if pad_id:
            tokens.fill(pad_id)
        # Where each piece begins in the flattened array.
        offsets = spans.rows * (width + 1) + spans.columns
        numbers = np.searchsorted(self._row_ends, samples, side="right")[spans.rows]
        starts = spans.starts + self.stream.starts[numbers]
        self.stream.check("tokens", numbers, starts, spans.sizes)
        self._copy(tokens, offsets, spans, numbers, self.stream.piece)
        fields: Fields = {"tokens": tokens, "same_document": spans.same_document()}
        if self.stream.has_loss:
            counted = np.zeros((len(samples), width), np.uint8)
            # A column predicts the next token, so the mask of the next token counts.
            offsets = spans.rows * width + spans.columns
            self.stream.check("loss", numbers, starts, spans.sizes)
            self._copy(counted, offsets, spans, numbers, self._loss, skipped=1)
            fields["target_mask"] = counted != 0
        return fields, spans

    def _loss(self, number: int) -> Array:
        mask = self.stream.loss(number)
        if mask is not None:
            return mask
        # A store without masks trains on every token. The array takes one byte.
        return np.broadcast_to(np.uint8(1), len(self.stream.piece(number)))

    def _copy(
        self,
        target: Array,
        offsets: Integers,
        spans: "PieceSpans",
        numbers: Integers,
        source_of: Callable[[int], Ids],
        *,
        skipped: int = 0,
    ) -> None:
        """Copy each piece, of part `numbers`, without its first items to its offset in `target`."""
        flat = target.reshape(-1)
        for number, pieces in group_rows(numbers):
            source = source_of(number)
            begins = (spans.starts[pieces] + skipped).tolist()
            sizes = (spans.sizes[pieces] - skipped).tolist()
            # One slice per piece. For pieces of 32 tokens or more this is faster than one gather
            # of all pieces, and twenty times faster for whole rows.
            for offset, begin, size in zip(offsets[pieces].tolist(), begins, sizes, strict=True):
                flat[offset : offset + size] = source[begin : begin + size]


class PieceSpans:
    """The pieces of some rows: their offsets in the parts, and the columns that they fill."""

    def __init__(self, index: RowIndex, samples: Integers, width: int, side: Side) -> None:
        self.samples = samples
        self.width = width
        self.counts, self.starts, self.sizes = index.spans(samples)
        self.rows = np.repeat(np.arange(len(samples)), self.counts)
        """The row of each piece, numbered among the rows that are read."""
        self._first = np.cumsum(self.counts) - self.counts
        # Tokens before each piece in all rows, less those before the first piece of its row.
        before = np.cumsum(self.sizes) - self.sizes
        self.columns = before - np.repeat(before[self._first], self.counts)
        self.filled = (
            np.add.reduceat(self.sizes, self._first) if len(samples) else self._first
        )  # a row has at least one piece
        if side == "left":
            self.columns += np.repeat(width - self.filled, self.counts)

    def same_document(self) -> NDArray[np.bool_]:
        """Return whether the next column holds a token of the same document."""
        same = self.real()
        # The last token of each piece predicts nothing.
        same.reshape(-1)[self.rows * self.width + self.columns + self.sizes - 1] = False
        return same

    def real(self) -> NDArray[np.bool_]:
        """Return whether each column holds a token, not padding."""
        if (self.filled == self.width).all():
            return np.ones((len(self.samples), self.width), bool)
        begin = self.columns[self._first][:, None]
        columns = np.arange(self.width)
        return np.asarray((columns >= begin) & (columns < begin + self.filled[:, None]))

    def borders(self) -> Fields:
        """Return `document_ids` and `position_ids`, (rows, width), for padding on the right.

        The padding of a row counts as one more document.
        """
        # One more piece per row, the padding: rows of 2 and 1 pieces have the pieces
        # [a, b, padding, c, padding], numbered [0, 1, 2, 0, 1].
        stops = self._first + self.counts
        sizes = np.insert(self.sizes, stops, self.width - self.filled)
        numbers = np.arange(len(sizes)) - np.repeat(
            self._first + np.arange(len(stops)), self.counts + 1
        )
        begins = (np.cumsum(sizes) - sizes).astype(np.int32)
        shape = (len(stops), self.width)
        document_ids = np.repeat(numbers.astype(np.int32), sizes).reshape(shape)
        position_ids = np.arange(document_ids.size, dtype=np.int32) - np.repeat(begins, sizes)
        return {"document_ids": document_ids, "position_ids": position_ids.reshape(shape)}
