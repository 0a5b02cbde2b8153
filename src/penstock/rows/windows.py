"""Rows cut from the stream of tokens.

    tokens   t0 t1 t2 t3 t4 t5 t6 t7 t8 …        length=3, stride=3
    row 0    t0 t1 t2 t3                         inputs t0 t1 t2   targets t1 t2 t3
    row 1             t3 t4 t5 t6                inputs t3 t4 t5   targets t4 t5 t6

A row holds `length + 1` tokens, so inputs and targets are two views of one buffer, and
with `stride=length` every token but the very first is a target exactly once. What is left
at the end is less than a row: `tail="drop"` leaves it out (and says how many targets that
are), `tail="pad"` makes a last row of it, or several where rows overlap. No row knows of parts:
one may begin in a part and end in the next, or run through several.

Models that shift labels themselves (`format="hf"`) get the inputs alone. The first token of
a row is then no target, so rows must overlap by one token to have every token as a target:

    row 0    t0 t1 t2                            length=3, stride=2: targets t1 t2
    row 1          t2 t3 t4                                          targets t3 t4
"""

from collections.abc import Sequence
from functools import cached_property
from operator import index
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from penstock.digest import digest_json
from penstock.errors import PlanError, UnknownLengthError
from penstock.rows.gather import gather
from penstock.rows.tokens import ArrayFile, Stream, StreamLike, open_stream

__all__ = ["Windows", "begins", "borders", "cu_seqlens"]


def borders(
    stream: Stream, starts: NDArray[np.int64], numbers: NDArray[np.int64], length: int
) -> dict[str, NDArray[Any]]:
    """Document and position numbers for rows that begin at `starts`, in pieces `numbers`.

    What fills up a row after the last token of the stream counts as one more document.
    """
    found = begins(stream, starts, numbers, length)
    document_ids = np.cumsum(found, axis=1, dtype=np.int32)
    columns = np.arange(length, dtype=np.int32)
    last_begin = np.maximum.accumulate(np.where(found, columns, np.int32(0)), axis=1)
    return {"document_ids": document_ids, "position_ids": columns - last_begin}


def begins(
    stream: Stream, starts: NDArray[np.int64], numbers: NDArray[np.int64], width: int
) -> NDArray[np.bool_]:
    """Whether a document begins at each place after the first of a row, (rows, `width`).

    A document that is stored in pieces (see `penstock.sources.whole`) begins once.
    """
    found = np.zeros((len(starts), width), bool)
    stops = np.minimum(starts + width, stream.num_tokens)
    numbers = numbers.copy()
    rows = np.arange(len(starts))
    while len(rows):  # once, and again for the few rows that reach into the next piece
        for number in np.unique(numbers[rows]).tolist():
            _mark(found, stream, starts, rows[numbers[rows] == number], number)
        rows = rows[stream.ends[numbers[rows]] < stops[rows]]
        numbers[rows] += 1
    return found


def _mark(
    begins: NDArray[np.bool_],
    stream: Stream,
    starts: NDArray[np.int64],
    rows: NDArray[np.int64],
    number: int,
) -> None:
    """Mark where documents begin in `rows`, as far as one piece knows."""
    bounds = stream.bounds(number)
    if stream.continues(number):
        bounds = bounds[:-1]
    # As unsigned as the bounds are: otherwise the search would turn all of them into floats.
    first = starts[rows] - stream.starts[number]
    low = np.searchsorted(bounds, np.maximum(first, 0).astype(bounds.dtype), side="right")
    stop = (first + begins.shape[1]).astype(bounds.dtype)
    counts = np.searchsorted(bounds, stop, side="left") - low
    # Bounds 5 and 6 of one row, 9 of the next: [0, 1, 2] + [5, 5, 9 - 2].
    found = np.arange(counts.sum()) + np.repeat(low - np.cumsum(counts) + counts, counts)
    columns = bounds[found].astype(np.int64) - np.repeat(first, counts)
    begins[np.repeat(rows, counts), columns] = True


def cu_seqlens(position_ids: NDArray[np.int32]) -> NDArray[np.int32]:
    """Where documents begin in a batch laid end to end, and its end, for varlen attention.

    >>> cu_seqlens(np.array([[0, 1, 0], [0, 1, 2]], np.int32)).tolist()
    [0, 2, 3, 6]
    """
    starts = np.flatnonzero(position_ids.reshape(-1) == 0)
    return np.append(starts, position_ids.size).astype(np.int32)


_UNKNOWN = 2**62  # rows, of a store that is still being written


class Windows:
    """Rows of `length + 1` tokens, `stride` apart.

    Safe to read from several threads. Opening costs nothing that grows with the store.
    """

    def __init__(
        self,
        store: StreamLike | ArrayFile | Sequence[StreamLike | ArrayFile],
        length: int,
        *,
        stride: int | None = None,
        tail: Literal["drop", "pad"] = "drop",
        borders: bool | Literal["mask"] = False,
    ) -> None:
        """Rows over a store, a path, a token file, or a list of them read as one.

        Args:
            store: What to cut.
            length: Tokens in the inputs of a row.
            stride: How far apart rows begin; `length` where not given. The Hugging Face and
                Lightning APIs use `length - 1` where it is not given, see `overlapping`.
            tail: What becomes of the tokens after the last full row.
            borders: True also gives `position_ids` and `document_ids`, from where documents end.
                "mask" ignores (-100) every target that is of another document than its input.
        """
        length = index(length)
        self._stride_given = stride is not None
        stride = length if stride is None else index(stride)
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
        self.stream = open_stream(store)
        self.length = length
        self.stride = stride
        self.tail = tail
        self.borders = borders
        if borders and not self.stream.has_documents:
            raise PlanError(
                f"borders={borders!r} needs stores; bare token files do not record documents."
            )
        self.tail_targets = 0
        """Tokens after the last target of the last full row."""
        self._num_full = self._num_rows = _UNKNOWN
        if self.stream.grow():
            self._count()

    def _count(self) -> None:
        """Count the rows, once all tokens are there."""
        length, num_tokens = self.length, self.stream.num_tokens
        full = max(0, (num_tokens - length - 1) // self.stride + 1) if num_tokens > length else 0
        # The target after the last full row's is the first that no row holds.
        seen = (full - 1) * self.stride + length if full else 0
        self.tail_targets = max(0, num_tokens - 1 - seen)
        # Padded, a row begins at every multiple of the stride that a token follows. So each token
        # is among the first `stride` targets of one row, which every format trains on.
        num_rows = full if self.tail == "drop" else -(-max(0, num_tokens - 1) // self.stride)
        if num_rows == 0:
            raise PlanError(
                f"{num_tokens:,} tokens do not make one row of {length:,} inputs and their targets "
                f"({length + 1:,} tokens). Use a shorter length, or more text."
            )
        self._num_full, self._num_rows = full, num_rows

    def overlapping(self) -> "Windows":
        """These windows for models that shift labels themselves: one token of overlap.

        Windows that were made with `stride=` stay as they are.
        """
        if self._stride_given or self.length == 1:
            return self
        return Windows(
            self.stream.members,
            self.length,
            stride=self.length - 1,
            tail=self.tail,
            borders=self.borders,
        )

    def settled(self) -> tuple[NDArray[np.int64], bool]:
        """How many rows begin in each part, as far as that is known; whether it is all.

        The rows of a part are known when the last of them is known to be full, which may take
        tokens of parts after it, or when there are no more tokens.
        """
        if self.stream.grow():
            if self._num_rows == _UNKNOWN:
                self._count()
            return self.part_rows, True
        ends, least = self.stream.ends, self.stream.least_tokens
        begins = -(-ends // self.stride)
        known = (begins - 1) * self.stride + self.length + 1 <= least
        return np.diff(begins[: int(known.sum())], prepend=0), False

    def __len__(self) -> int:
        if self._num_rows == _UNKNOWN:
            raise UnknownLengthError(
                "How many rows there are is not known while the store is still being written. Give "
                'them to a Loader, alone and with shuffle="part" or none: it reads rows as they '
                "come. For a mixture, another order or a length, build the store first."
            )
        return self._num_rows

    def __repr__(self) -> str:
        if self._num_rows == _UNKNOWN:
            return f"Windows({self.stream.members[0]!r}, {self.length:,}, stride={self.stride:,})"
        left = f"; {self.unread_targets:,} targets in none" if self.unread_targets else ""
        return f"Windows({len(self):,} rows of {self.length:,} tokens, {self.stride:,} apart{left})"

    @cached_property
    def digest(self) -> str:
        """A digest of the stores and of how they are cut.

        `borders=True` is not part of it: it adds fields, and changes no target. "mask" is.
        """
        masked = ["mask"] if self.borders == "mask" else []
        return digest_json(
            ["windows", self.stream.digest, self.length, self.stride, self.tail, *masked]
        )

    @property
    def tokenizer_digest(self) -> str | None:
        """The digest of the tokenizer the stores were built with, where they say."""
        return self.stream.tokenizer_digest

    @property
    def num_tokens(self) -> int:
        """Targets in all rows; with overlapping rows a token counts more than once.

        Targets that `borders="mask"` ignores are counted.
        """
        rows = np.arange(min(len(self), self._num_full), len(self))  # the length may not be known
        padded = self.stream.num_tokens - 1 - rows * self.stride
        return self._num_full * self.length + int(padded.sum())

    @property
    def unread_targets(self) -> int:
        """Tokens that are the target of no row, though one comes before them.

        This counts the inputs and targets of shifted formats; `Loader.unread_targets` counts
        those of the format in use. They are the tail, where it is dropped, and the gaps between
        rows, where `stride` is larger than `length`.
        """
        return self.unread(self.length)

    def unread(self, per_row: int) -> int:
        """Tokens that are the target of no row, where a row trains on its first `per_row`."""
        last = len(self) - 1
        targets = self.stream.num_tokens - 1
        before = last * min(self.stride, per_row)
        return targets - before - min(per_row, targets - last * self.stride)

    @property
    def part_rows(self) -> NDArray[np.int64]:
        """How many rows begin in each part of the store."""
        begins = -(-self.stream.ends // self.stride)  # rows that begin before each part's end
        return np.diff(np.minimum(begins, len(self)), prepend=0)

    def describe(self) -> dict[str, Any]:
        """What decides the rows, for telling apart two that differ."""
        return {
            "kind": "windows",
            "store": self.stream.digest[:16] if self._num_rows < _UNKNOWN else "",
            "length": self.length,
            "stride": self.stride,
            "tail": self.tail,
            **({"borders": "mask"} if self.borders == "mask" else {}),
        }

    def read(self, samples: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        """The rows `samples`: `tokens` of shape (rows, length + 1), as narrow as stored.

        The arrays are new, and the caller's to keep. A padded row has `num_targets` less than
        `length`; its unused places hold 0. With `borders=True`, also `position_ids` and
        `document_ids`, (rows, length) int32; with "mask", `same_document` (rows, length), False
        where the target is of another document than its input.
        """
        samples = np.asarray(samples, np.int64)
        # As unsigned numbers, those below 0 are the largest.
        if len(samples) and samples.view(np.uint64).max() >= self._num_rows:
            raise IndexError(
                f"rows {samples.min():,} to {samples.max():,} are not all among {len(self):,} rows"
            )
        starts = samples * self.stride
        if self.stream.growing and len(starts):
            self.stream.await_tokens(int(starts.max()) + self.length + 1)
        numbers = np.searchsorted(self.stream.ends, starts, side="right")
        tokens = gather(self.stream, numbers, starts, self.length + 1)
        read = {"tokens": tokens}
        if self._num_rows > self._num_full:
            left = self.stream.num_tokens - 1 - starts
            read["num_targets"] = np.minimum(left, self.length)
        if self.borders == "mask":
            begin = begins(self.stream, starts, numbers, self.length + 1)
            read["same_document"] = ~begin[:, 1:]
        elif self.borders:
            read |= borders(self.stream, starts, numbers, self.length)
        return read

    def read_ahead(self, samples: NDArray[np.int64]) -> None:
        """Ask the kernel to fetch these rows from disk, without waiting."""
        self.stream.read_ahead(np.asarray(samples, np.int64) * self.stride, self.length + 1)
