"""Rows of a fixed length, cut from the stream of tokens.

    tokens   t0 t1 t2 t3 t4 t5 t6 t7 t8 …        length=3, stride=3
    row 0    t0 t1 t2 t3                         inputs t0 t1 t2   targets t1 t2 t3
    row 1             t3 t4 t5 t6                inputs t3 t4 t5   targets t4 t5 t6

A row holds `length + 1` tokens, so inputs and targets are two views of one buffer. With
`stride=length`, every token but the very first is a target exactly once. The tokens after the
last full row do not fill a row. `tail="drop"` leaves them out and counts the targets that are
lost. `tail="pad"` makes a last row of them, or several rows if rows overlap. A row may begin in
one part of the store and end in the next, or span several parts.

Models that shift labels themselves (`format="hf"`) get the inputs only. Then the first token of a
row is not a target, so rows must overlap by one token for every token to be a target:

    row 0    t0 t1 t2                            length=3, stride=2: targets t1 t2
    row 1          t2 t3 t4                                          targets t3 t4
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from penstock.digest import digest_json
from penstock.errors import PlanError
from penstock.ranges import checked_rows, group_rows, ranges, whole_number
from penstock.rows.gather import gather, gather_loss
from penstock.rows.protocol import Array, Fields, Integers, Settings
from penstock.rows.tokens import Stream, StreamRows, StreamSource


def borders(stream: Stream, starts: Integers, numbers: Integers, length: int) -> Fields:
    """Return `document_ids` and `position_ids` of rows that begin at `starts`, in pieces `numbers`.

    Padding after the last token of the stream counts as one more document.
    """
    found = begins(stream, starts, numbers, length)
    document_ids = np.cumsum(found, axis=1, dtype=np.int32)
    # Each column minus the column where its document begins: 0 1 2 | 0 1 for a begin at 3.
    columns = np.arange(length, dtype=np.int32)
    last_begin = np.maximum.accumulate(np.where(found, columns, np.int32(0)), axis=1)
    return {"document_ids": document_ids, "position_ids": columns - last_begin}


def begins(stream: Stream, starts: Integers, numbers: Integers, width: int) -> NDArray[np.bool_]:
    """Return where documents begin after the first column of each row, (rows, `width`).

    A document that is stored in several pieces begins once.
    """
    found = np.zeros((len(starts), width), bool)
    stops = np.minimum(starts + width, stream.num_tokens)
    numbers = numbers.copy()
    rows = np.arange(len(starts))
    while len(rows):  # once, and again for the few rows that reach into the next piece
        for number, chosen in group_rows(numbers[rows]):
            bounds, here = stream.bounds(number), rows[chosen]
            # A bound is where one document ends and the next begins. The last bound of this piece
            # is neither if the document continues in the next piece.
            if stream.continues(number):
                bounds = bounds[:-1]
            # Unsigned like the bounds: otherwise the search would convert all of them to floats.
            first = starts[here] - stream.starts[number]
            low = np.searchsorted(bounds, np.maximum(first, 0).astype(bounds.dtype), side="right")
            stop = (first + width).astype(bounds.dtype)
            counts = np.searchsorted(bounds, stop, side="left") - low
            columns = bounds[ranges(low, counts)].astype(np.int64) - np.repeat(first, counts)
            found[np.repeat(here, counts), columns] = True
        rows = rows[stream.ends[numbers[rows]] < stops[rows]]
        numbers[rows] += 1
    return found


def cu_seqlens(position_ids: Array) -> NDArray[np.int32]:
    """Return the offsets of documents in a flattened batch, and its size, for varlen attention.

    >>> cu_seqlens(np.array([[0, 1, 0], [0, 1, 2]], np.int32)).tolist()
    [0, 2, 3, 6]
    """
    starts = np.flatnonzero(position_ids.reshape(-1) == 0)
    return np.append(starts, position_ids.size).astype(np.int32)


class Windows(StreamRows):
    """Rows of `length + 1` tokens, `stride` apart.

    Safe to read from several threads. Opening costs the same for a store of any size.
    """

    stride: int
    part_rows: Integers
    """How many rows begin in each part of the store.

    In a snapshot, only parts whose rows are final are listed. The rows of a part are final when
    the last row that begins in the part is known to be full. That row may need tokens of later
    parts.
    """

    def __init__(
        self,
        store: StreamSource,
        length: int,
        *,
        stride: int | None = None,
        tail: Literal["drop", "pad"] = "drop",
        borders: bool | Literal["mask"] = False,
    ) -> None:
        """Open rows over a store, a path, a token file, or a list of them that is concatenated.

        Args:
            store: The tokens to cut.
            length: Tokens in the inputs of a row.
            stride: The distance between the first tokens of two rows. If None, it is `length`;
                the Hugging Face and Lightning integrations use `length - 1`, see `overlapping`.
            tail: Whether to drop the tokens after the last full row, or to pad them to a row.
            borders: True also returns `position_ids` and `document_ids`, computed from the ends
                of documents that the store records. "mask" ignores (-100) every target that
                belongs to another document than its input.
        """
        length = whole_number("length", length)
        self._stride_given = stride is not None
        stride = length if stride is None else whole_number("stride", stride)
        if length < 1 or stride < 1:
            raise PlanError(f"length={length} and stride={stride} must be at least 1.")
        if tail not in ("drop", "pad"):
            raise PlanError(f'tail={tail!r} is not "drop" or "pad".')
        if tail == "pad" and stride > length:
            raise PlanError(
                f'tail="pad" keeps the last tokens, but stride={stride} leaves gaps between rows '
                f"of length={length}. Use a stride of at most {length}, or leave tail out."
            )
        if borders not in (True, False, "mask"):
            raise PlanError(f'borders={borders!r} is not True, False or "mask".')
        super().__init__(store)
        self.length = length
        self.stride = stride
        self.tail = tail
        self.borders = borders
        self.gives_positions = borders is True
        if borders and not self.stream.has_documents:
            raise PlanError(
                f"borders={borders!r} needs stores: bare token files do not record where documents "
                "end. Leave borders out, or build a store."
            )
        self.tail_targets = 0
        """Tokens after the last target of the last full row."""
        self._count()

    def _count(self) -> None:
        """Count the full rows, and all rows if no more tokens will follow."""
        length, stride, num_tokens = self.length, self.stride, self.stream.num_tokens
        # Row r needs tokens r * stride to r * stride + length. With 10 tokens, length=3 and
        # stride=3: rows begin at 0, 3 and 6, and the last one ends with token 9.
        full = (num_tokens - length - 1) // stride + 1 if num_tokens > length else 0
        self._num_full = self.num_readable = full
        if not self.stream.sealed:
            # Rows that begin before each part's end: a division that rounds up.
            upto = -(-self.stream.ends // stride)
            # The last row that begins in a part must not be the padded or dropped tail.
            final = (upto - 1) * stride + length + 1 <= num_tokens
            self.part_rows = np.diff(upto[: int(final.sum())], prepend=0)
            return
        # `seen` is the last target of the last full row. The tokens after it are in no full row.
        seen = (full - 1) * stride + length if full else 0
        self.tail_targets = max(0, num_tokens - 1 - seen)
        # With padding, a row begins at every multiple of the stride that has a next token. So
        # each token is among the first `stride` targets of one row, which every format uses.
        if self.tail == "pad":
            self.num_readable = -(-max(0, num_tokens - 1) // stride)
        if self.num_readable == 0:
            raise PlanError(
                f"{num_tokens:,} tokens do not make one row of {length:,} inputs and their targets "
                f"({length + 1:,} tokens). Use a shorter length, or more text."
            )
        self.part_rows = self.begin_between(self.stream.ends)

    def begin_between(self, ends: Integers) -> Integers:
        """Return how many rows begin in each part, if parts end after these numbers of tokens."""
        return np.diff(np.minimum(-(-ends // self.stride), self.num_readable), prepend=0)

    def over(self, stream: Stream) -> "Windows":
        """Return the same rows over a later snapshot of a store that is being written."""
        return self._with(stream, self.stride)

    def overlapping(self) -> "Windows":
        """Return these windows with one token of overlap, for models that shift labels themselves.

        Windows that were made with `stride=` are returned unchanged.
        """
        # Rows of one token cannot overlap: a stride of 0 would never advance.
        if self._stride_given or self.length == 1:
            return self
        return self._with(self.stream, self.length - 1)

    def _with(self, stream: Stream, stride: int) -> "Windows":
        return Windows(stream, self.length, stride=stride, tail=self.tail, borders=self.borders)

    def __repr__(self) -> str:
        if not self.stream.sealed:
            return f"Windows({self.stream.members[0]!r}, {self.length:,}, stride={self.stride:,})"
        left = f"; {self.unread_targets:,} targets in no row" if self.unread_targets else ""
        rows = f"{len(self):,} row{'s' * (len(self) != 1)} of {self.length:,} tokens"
        return f"Windows({self.stream}: {rows}, {self.stride:,} apart{left})"

    @cached_property
    def digest(self) -> str:
        """A digest of the stores and of how they are cut.

        `borders=True` does not change the digest, because it adds fields and changes no target.
        `borders="mask"` changes it.
        """
        masked = ["mask"] if self.borders == "mask" else []
        return digest_json(
            ["windows", self.stream.digest, self.length, self.stride, self.tail, *masked]
        )

    @property
    def num_tokens(self) -> int:
        """Targets in all rows; if rows overlap, a token counts more than once.

        Targets that `borders="mask"` ignores are counted.
        """
        # Padded rows have fewer targets: the tokens that are left after their first one.
        rows = np.arange(min(len(self), self._num_full), len(self))
        padded = self.stream.num_tokens - 1 - rows * self.stride
        return self._num_full * self.length + int(padded.sum())

    @property
    def unread_targets(self) -> int:
        """Tokens that are the target of no row, except the very first token.

        These are the tail, if it is dropped, and the gaps between rows, if `stride` is larger
        than `length`. This number is for formats with shifted targets; `Loader.unread_targets` is
        the number for the format of a loader.
        """
        return self.unread(self.length)

    def unread(self, per_row: int) -> int:
        """Return how many tokens are the target of no row if a row trains on `per_row` targets."""
        last = len(self) - 1
        targets = self.stream.num_tokens - 1
        # Each row but the last adds `stride` new targets, or only `per_row` if there are gaps.
        before = last * min(self.stride, per_row)
        return targets - before - min(per_row, targets - last * self.stride)

    def describe(self) -> Settings:
        """Return the settings that determine the rows, so that messages can name a difference."""
        return {
            "kind": "windows",
            "store": self.stream.short_digest,
            "length": self.length,
            "stride": self.stride,
            "tail": self.tail,
            **({"borders": "mask"} if self.borders == "mask" else {}),
        }

    def read(self, samples: Integers) -> Fields:
        """Return the rows `samples`: `tokens` (rows, length + 1), in the dtype of the store.

        The arrays are new, and the caller may keep them. A padded row has `num_targets` less than
        `length`; its unused columns hold 0. With `borders=True`, also `position_ids` and
        `document_ids`, (rows, length) int32; with "mask", `same_document` (rows, length), False
        where the target belongs to another document than its input. If a store has loss masks,
        as chat stores do, `target_mask` is False where the target is not trained on.
        """
        starts = checked_rows(samples, self.num_readable) * self.stride
        # The piece in which each row begins: the first that ends after its start.
        if len(self.stream.ends) == 1:
            numbers = np.zeros_like(starts)
        else:
            numbers = np.searchsorted(self.stream.ends, starts, side="right")
        tokens = gather(self.stream, numbers, starts, self.length + 1)
        read = {"tokens": tokens}
        if self.num_readable > self._num_full:
            left = self.stream.num_tokens - 1 - starts
            read["num_targets"] = np.minimum(left, self.length)
        if self.borders == "mask":
            begin = begins(self.stream, starts, numbers, self.length + 1)
            read["same_document"] = ~begin[:, 1:]
        elif self.borders:
            read |= borders(self.stream, starts, numbers, self.length)
        if self.stream.has_loss:
            # Targets are one token after the inputs, and the mask of the target counts.
            numbers = np.searchsorted(self.stream.ends, starts + 1, side="right")
            read["target_mask"] = gather_loss(self.stream, numbers, starts + 1, self.length)
        return read

    def spans(self, sample: int) -> list[tuple[int, int]]:
        """Return the offset in `stream` and the number of the tokens of a row."""
        start = int(checked_rows(np.array([sample]), self.num_readable)[0]) * self.stride
        return [(start, min(self.length + 1, self.stream.num_tokens - start))]

    def holding(self, start: int, stop: int) -> Integers:
        """Return the rows that hold some of the tokens `[start, stop)` of `stream`, ascending."""
        # Row r holds tokens r * stride to r * stride + length. With length=3 and stride=3, token 6
        # is the last one of row 1 and the first one of row 2. The first division rounds up.
        first = max(0, -((self.length - start) // self.stride))
        last = (stop - 1) // self.stride if stop > start else first - 1
        rows = np.arange(first, min(last + 1, self.num_readable), dtype=np.int64)
        # With gaps between rows (stride > length + 1), no row may hold these tokens.
        return rows[rows * self.stride + self.length >= start]

    def read_ahead(self, samples: Integers) -> int:
        """As `Rows.read_ahead`."""
        kinds = ("tokens", "loss", "bounds") if self.borders else ("tokens", "loss")
        starts = np.asarray(samples, np.int64) * self.stride
        return self.stream.read_ahead(starts, self.length + 1, kinds)


class JoinedWindows:
    """The windows of several sources as one stream, so that one gather reads rows of all."""

    def __init__(self, sources: Sequence[Windows]) -> None:
        self._stream = Stream([member for each in sources for member in each.stream.members])
        self._width = sources[0].length + 1
        # Sources may have different strides, but one length, as the loader has checked.
        self._strides = np.array([each.stride for each in sources], np.int64)
        sizes = [each.stream.num_tokens for each in sources]
        self._before = np.cumsum([0, *sizes[:-1]], dtype=np.int64)

    def read(self, sources: Integers, samples: Integers) -> Array:
        """Return the tokens of row `samples[i]` of source `sources[i]`, for all i."""
        # Offset in the joined stream: the offset in the source plus the tokens of earlier sources.
        starts = samples * self._strides[sources] + self._before[sources]
        numbers = np.searchsorted(self._stream.ends, starts, side="right")
        return gather(self._stream, numbers, starts, self._width)
