"""Rows put together from pieces of documents.

    tokens          a a a a a b b .  .       the pieces, padding, and one place more
    position_ids    0 1 2 3 4 0 1 0          from 0 in each piece, and in the padding
    document_ids    0 0 0 0 0 1 1 2          numbered within the row
    same_document   1 1 1 1 0 1 0 0          whether what follows is of the same document:
                                             the targets that count
    target_mask     1 1 0 0 0 1 0 0          the same for what follows being trained on,
                                             where the store has loss masks

All `length` tokens of a row are inputs, and the last of a piece predicts nothing: so the
shifted formats and the unshifted one (`format="hf"`) train on the same targets.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from penstock.errors import PlanError, UnknownLengthError
from penstock.rows.growing import GrowingIndex
from penstock.rows.index import LONGEST, RowIndex, index_of, joined
from penstock.rows.packing import Layout
from penstock.rows.tokens import GROWING, ArrayFile, Stream, StreamLike, open_stream
from penstock.store.reader import TokenStore

__all__ = ["OfPieces", "PieceRows", "Side"]

Side = Literal["right", "left"]
Integers = NDArray[np.int64]


class PieceRows:
    """The rows of one or more stores as lists of pieces, and how they are read.

    Args:
        store: A store, a path, or a list of them.
        kind: A name for what `lay_out` does; it names the index on disk.
        length: Tokens of a row.
        lay_out: The rows of a part, from where its documents end.
    """

    def __init__(
        self,
        store: StreamLike | Stream | Sequence[StreamLike | ArrayFile],
        kind: str,
        length: int,
        lay_out: Callable[[NDArray[Any]], Layout],
    ) -> None:
        if not 2 <= length <= LONGEST:
            raise PlanError(
                f"Rows of {length:,} tokens cannot be: a row of documents has 2 tokens or more, an "
                f"input and its target, and at most {LONGEST:,}."
            )
        self.stream = store if isinstance(store, Stream) else open_stream(store)
        self.length = length
        stores = [member for member in self.stream.members if isinstance(member, TokenStore)]
        if len(stores) < len(self.stream.members):
            raise PlanError(
                "Rows of documents need stores; bare token files do not record where documents end."
            )
        self.complete = self.stream.grow()
        """Whether all rows are known: those of a store that is still being written are not."""
        self.index: RowIndex | GrowingIndex = (
            GrowingIndex(self.stream, kind, length, lay_out)
            if self.stream.growing
            else joined([index_of(each, kind, length, lay_out) for each in stores])
        )
        self._take_up()
        self._refuse_none()

    def _take_up(self) -> None:
        """Take up what the index knows."""
        self.part_rows = self.index.part_rows.astype(np.int64)
        self._row_ends = np.cumsum(self.part_rows)

    def settled(self) -> tuple[Integers, bool]:
        """How many rows each part has, as far as that is known; whether it is all."""
        if isinstance(self.index, GrowingIndex) and not self.complete:
            complete = self.stream.grow()
            self.index.grow()
            with GROWING:
                self._take_up()
                self.complete = self.complete or complete
            self._refuse_none()
        return self.part_rows, self.complete

    def _refuse_none(self) -> None:
        if self.complete and not self.index.num_rows:
            path = self.stream.members[0].path
            raise PlanError(f"{path} holds no documents with tokens, so it has no rows.")

    def __len__(self) -> int:
        if not self.complete:
            raise UnknownLengthError(
                "How many rows there are is not known while the store is still being written. Give "
                'them to a Loader, alone and with shuffle="part" or none: it reads rows as they '
                "come. For a mixture, another order or a length, build the store first."
            )
        return self.index.num_rows

    @cached_property
    def num_placed(self) -> int:
        """Tokens in all rows; the overlap of split documents counts twice."""
        return self.index.num_tokens

    @property
    def num_targets(self) -> int:
        """Places in all rows that are followed by a token of the same document."""
        return self.num_placed - self.index.num_pieces

    def checked(self, samples: Any) -> Integers:
        """The sample numbers as an array, if they are all among the rows."""
        numbers = np.asarray(samples, np.int64)
        # As unsigned numbers, those below 0 are the largest.
        if len(numbers) and numbers.view(np.uint64).max() >= self.index.num_rows:
            raise IndexError(
                f"rows {numbers.min():,} to {numbers.max():,} are not all among "
                f"{self.index.num_rows:,} rows"
            )
        return numbers

    def read(
        self, samples: Integers, width: int, *, pad_id: int = 0, side: Side = "right"
    ) -> tuple[dict[str, NDArray[Any]], "Spans"]:
        """`tokens` (rows, width + 1) and the masks of their targets, and where the pieces lie."""
        spans = Spans(self, samples, width, side)
        shape = (len(samples), width + 1)
        tokens = np.zeros(shape, self.stream.dtype)
        if pad_id:
            tokens.fill(pad_id)
        places = spans.rows * (width + 1) + spans.columns
        self._copy(tokens, places, spans, self.stream.piece, skipped=0)
        fields: dict[str, NDArray[Any]] = {"tokens": tokens, "same_document": spans.same_document()}
        if self.stream.has_loss:
            counted = np.zeros((len(samples), width), np.uint8)
            # What a place predicts is the next token, so it is that one's mark that counts.
            places = spans.rows * width + spans.columns
            self._copy(counted, places, spans, self._loss, skipped=1)
            fields["target_mask"] = counted != 0
        return fields, spans

    def _loss(self, number: int) -> NDArray[Any]:
        marks = self.stream.loss(number)
        if marks is not None:
            return marks
        return np.broadcast_to(np.uint8(1), len(self.stream.piece(number)))

    def _copy(
        self,
        made: NDArray[Any],
        places: Integers,
        spans: "Spans",
        source_of: Callable[[int], NDArray[Any]],
        *,
        skipped: int,
    ) -> None:
        """Copy each piece but for its first `skipped` items to its place."""
        flat = made.reshape(-1)
        numbers = np.searchsorted(self._row_ends, spans.samples, side="right")[spans.rows]
        order = np.argsort(numbers, kind="stable")
        for pieces in np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1):
            if not len(pieces):
                continue
            source = source_of(int(numbers[pieces[0]]))
            begins = (spans.starts[pieces] + skipped).tolist()
            sizes = (spans.sizes[pieces] - skipped).tolist()
            # One slice a piece: faster than one gather of all for pieces of 32 tokens or more,
            # by twenty times for whole rows.
            for place, begin, size in zip(places[pieces].tolist(), begins, sizes, strict=True):
                flat[place : place + size] = source[begin : begin + size]

    def read_ahead(self, samples: Integers) -> None:
        """Ask the kernel to fetch these rows from disk, without waiting."""
        counts, starts, sizes = self.index.spans(samples)
        numbers = np.searchsorted(self._row_ends, np.repeat(samples, counts), side="right")
        if len(sizes):
            self.stream.read_ahead(starts + self.stream.starts[numbers], int(sizes.max()))


class OfPieces:
    """What rows of whole documents have in common: all that `PieceRows` knows of them."""

    gives_loss = True
    """Rows of stores with loss masks say which targets count."""
    whole_documents = True
    """A row begins a document, or a piece of one: its first token is no target."""

    stream: Stream
    _rows: PieceRows

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def tokenizer_digest(self) -> str | None:
        """The digest of the tokenizer the stores were built with, where they say."""
        return self.stream.tokenizer_digest

    @property
    def num_tokens(self) -> int:
        """Targets in all rows: every token in them but the first of each document."""
        return self._rows.num_targets

    @property
    def num_empty(self) -> int:
        """Documents without tokens, which are in no row."""
        return self._rows.index.num_empty

    @property
    def part_rows(self) -> Integers:
        """How many rows each part of the store has."""
        return self._rows.part_rows

    def settled(self) -> tuple[Integers, bool]:
        """How many rows each part has, as far as that is known; whether it is all."""
        return self._rows.settled()

    def spans(self, sample: int) -> list[tuple[int, int]]:
        """Where the pieces of a row lie in `stream`: the offset and size of each, in order."""
        (number,) = self._rows.checked([sample])
        _, starts, sizes = self._rows.index.spans(np.array([number]))
        part = np.searchsorted(np.cumsum(self.part_rows), number, side="right")
        offsets = (starts + self.stream.starts[part]).tolist()
        return list(zip(offsets, sizes.tolist(), strict=True))

    def read_ahead(self, samples: Integers) -> None:
        """Ask the kernel to fetch these rows from disk, without waiting."""
        self._rows.read_ahead(self._rows.checked(samples))


class Spans:
    """Where the pieces of some rows come from, and where they go."""

    def __init__(self, rows: PieceRows, samples: Integers, width: int, side: Side) -> None:
        self.samples = samples
        self.width = width
        self.counts, self.starts, self.sizes = rows.index.spans(samples)
        self.rows = np.repeat(np.arange(len(samples)), self.counts)
        """The row of each piece, among those that are read."""
        self._first = np.cumsum(self.counts) - self.counts
        before = np.cumsum(self.sizes) - self.sizes
        self.columns = before - np.repeat(before[self._first], self.counts)
        self.filled = (
            np.add.reduceat(self.sizes, self._first) if len(samples) else self._first
        )  # a row has at least one piece
        if side == "left":
            self.columns += np.repeat(width - self.filled, self.counts)

    def same_document(self) -> NDArray[np.bool_]:
        """Whether each place is followed by a token of the same document."""
        same = self.real()
        same.reshape(-1)[self.rows * self.width + self.columns + self.sizes - 1] = False
        return same

    def real(self) -> NDArray[np.bool_]:
        """Whether each place holds a token, and no padding."""
        if (self.filled == self.width).all():
            return np.ones((len(self.samples), self.width), bool)
        begin = self.columns[self._first][:, None]
        places = np.arange(self.width)
        return np.asarray((places >= begin) & (places < begin + self.filled[:, None]))

    def borders(self) -> dict[str, NDArray[np.int32]]:
        """`document_ids` and `position_ids`, (rows, width); padding, on the right, is one more."""
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
