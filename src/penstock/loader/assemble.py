"""Positions to arrays: the one place where rows are put together.

A block is several batches read at once. Reading 500 rows in one call costs little more
than reading 32, and with many parts or sources far less: each is asked once a block. The
ids stay as narrow as they are stored until the very end.
"""

from copy import copy
from dataclasses import dataclass
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from penstock.errors import PlanError
from penstock.loader.fingerprint import combine, of_samples, of_tokens, source_keys
from penstock.loader.readahead import ReadAhead
from penstock.order.plan import Plan
from penstock.order.shard import PADDING, Shard

__all__ = ["IDS", "IGNORED", "MOST_STEPS", "Assembler", "Block", "ReadableRows"]

IGNORED = -100
"""The target that losses leave out."""
IDS = ("tokens", "labels", "targets")
"""The fields that hold ids, which are narrow until the very end; see `penstock.transform`."""

# So many rows are located at once: the arithmetic is vectorised, and cheap only in bulk.
_LOCATED_ROWS = 8_192
MOST_STEPS = 64
"""Steps of a block, at most."""
# A block holds at most so many bytes of narrow ids; more does not fit the cache.
_BLOCK_BYTES = 2 << 20
_NOTHING: tuple[int, int, NDArray[np.int64]] = (0, 0, np.zeros((4, 0), np.int64))


class ReadableRows(Protocol):
    """Rows that a loader can read; see `penstock.rows`."""

    length: int

    def __len__(self) -> int:
        """How many rows there are."""

    @property
    def digest(self) -> str:
        """A name computed from the contents."""

    def read(self, samples: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        """The rows `samples`: `tokens` (rows, length + 1), and what else they have."""


@dataclass(slots=True)
class Block:
    """Rows of consecutive steps, one after the other."""

    first_step: int
    edges: list[int]
    """Row at which each step begins, and the end."""
    spans: list[tuple[int, int]]
    """Positions of each step: the first, and the one after the last."""
    tokens: NDArray[Any]  # (rows, length + 1), narrow
    targets: NDArray[np.bool_] | None  # (rows, length): False where the target is ignored
    extras: dict[str, NDArray[Any]]  # (rows, length) each
    located: NDArray[np.int64]  # (4, rows): source, epoch, sample, position
    fingerprints: list[int]


class Assembler:
    """Reads the rows of one rank, block by block."""

    def __init__(
        self,
        plan: Plan,
        shard: Shard,
        *,
        end: int | None,
        by_tokens: bool,
        read_ahead: bool | None = None,
    ) -> None:
        self.plan = plan
        self.shard = shard
        self.end = end
        self._by_tokens = by_tokens
        self._rows: list[ReadableRows] = _readable(plan)
        self._ahead = ReadAhead(self._rows, read_ahead)
        self.length = self._rows[0].length
        self._keys = source_keys(plan.names)
        self._cache = _NOTHING

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_cache": _NOTHING}  # a quarter of a megabyte, quickly made

    def sharing(self, shard: Shard) -> Self:
        """One that reads the same plan in other steps; the sources are not looked at again."""
        other = copy(self)
        other.shard = shard
        return other

    def block(self, first_step: int, last_step: int, most: int = MOST_STEPS) -> Block:
        """As many steps from `first_step` on as make a block, and at most up to `last_step`.

        Args:
            first_step: The first step.
            last_step: The step before which the run ends.
            most: No more steps than these; fewer are ready sooner.
        """
        num_steps, rows = self._num_steps(first_step, min(last_step, first_step + most))
        upto = last_step if most >= MOST_STEPS else first_step + num_steps
        located = self._located(first_step, first_step + num_steps, upto)
        if self._ahead.begin() and first_step + num_steps < last_step:
            following = first_step + num_steps
            stop = following + self._num_steps(following, last_step)[0]
            self._ahead.name(self._located(following, stop, last_step))
        edges = np.concatenate(([0], np.cumsum(rows[:num_steps]))).tolist()
        starts, sizes = self.shard.steps.spans(first_step, first_step + num_steps)
        spans = list(zip(starts.tolist(), (starts + sizes).tolist(), strict=True))
        tokens, targets, extras = self.read(located)
        self._ahead.end()
        values = (
            of_tokens(tokens, targets, located[3])
            if self._by_tokens
            else of_samples(self._keys[located[0]], located[1], located[2], located[3])
        )
        values[located[3] == PADDING] = 0
        fingerprints = combine(values, edges[:-1])
        return Block(first_step, edges, spans, tokens, targets, extras, located, fingerprints)

    def _num_steps(self, first: int, last: int) -> tuple[int, NDArray[np.int64]]:
        """How many steps from `first` on make a block, and the rows of each of some steps."""
        rows = self.shard.rows(first, min(last, first + MOST_STEPS))
        size = max(1, _BLOCK_BYTES // (2 * (self.length + 1)))
        return max(1, int(np.searchsorted(np.cumsum(rows), size, side="right"))), rows

    def _located(self, first: int, stop: int, last: int) -> NDArray[np.int64]:
        """Source, epoch, sample and position of this rank's rows in some steps."""
        begin, end, kept = self._cache
        if not begin <= first < stop <= end:
            ahead = max(1, _LOCATED_ROWS // max(1, int(self.shard.rows(first, first + 1)[0])))
            begin, end = first, max(stop, min(last, first + ahead))
            kept = self._locate(self.shard.positions(begin, end, end=self.end))
            if last > stop:  # otherwise asked for in passing, or at the beginning of a run
                self._cache = (begin, end, kept)
        offsets = np.cumsum(self.shard.rows(begin, stop))
        low = int(offsets[first - begin - 1]) if first > begin else 0
        return kept[:, low : int(offsets[-1])]

    def _locate(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        located = np.zeros((4, len(positions)), np.int64)
        located[3] = positions
        real = positions != PADDING
        if real.all():
            located[:3] = self.plan.locate(positions)
        else:
            located[:3, real] = self.plan.locate(positions[real])
        return located

    def read(
        self, located: NDArray[np.int64]
    ) -> tuple[NDArray[Any], NDArray[np.bool_] | None, dict[str, NDArray[Any]]]:
        """The tokens of located rows, which targets count, and what else the rows give."""
        numbers, positions = located[0], located[3]
        first = int(numbers[0]) if len(numbers) else 0
        if (numbers == first).all():
            parts: list[tuple[Any, dict[str, NDArray[Any]]]]
            parts = [(slice(None), _read(self._rows[first], located))]
        else:
            order = np.argsort(numbers, kind="stable")
            cuts = np.flatnonzero(np.diff(numbers[order])) + 1
            parts = [
                (rows, _read(self._rows[int(numbers[rows[0]])], located[:, rows]))
                for rows in np.split(order, cuts)
            ]
        fields = _scattered(parts, len(numbers))
        tokens = fields.pop("tokens")
        targets = self._targets(fields.pop("num_targets", None), positions, tokens)
        mask = fields.pop("target_mask", None)
        if mask is not None:
            targets = mask.astype(bool) if targets is None else targets & mask.astype(bool)
        return tokens, targets, fields

    def _targets(
        self,
        num_targets: NDArray[np.int64] | None,
        positions: NDArray[np.int64],
        tokens: NDArray[Any],
    ) -> NDArray[np.bool_] | None:
        padding = positions == PADDING
        short = num_targets is not None and (num_targets < self.length).any()
        if not short and not padding.any():
            return None
        counts = np.full(len(tokens), self.length) if num_targets is None else num_targets.copy()
        counts[padding] = 0
        tokens[padding] = 0
        mask: NDArray[np.bool_] = np.arange(self.length) < counts[:, None]
        return mask


def _read(rows: Any, located: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
    """Rows of one source; those that a transform changes are other ones in every epoch."""
    fields: dict[str, NDArray[Any]]
    if hasattr(rows, "read_epochs"):
        fields = rows.read_epochs(located[2], located[1])
    else:
        fields = rows.read(located[2])
    return fields


def _readable(plan: Plan) -> list[ReadableRows]:
    """The rows of a plan, if they can share a batch."""
    found: list[Any] = [plan.sources[name] for name in plan.names]
    for name, rows in zip(plan.names, found, strict=True):
        if not hasattr(rows, "read") or not hasattr(rows, "length"):
            raise PlanError(
                f'Source "{name}" is a {type(rows).__name__}, which a plan can order and a loader '
                "cannot read: it has no read() and length. Give rows, such as Windows(store, 1024)."
            )
    lengths = {name: rows.length for name, rows in zip(plan.names, found, strict=True)}
    if len(set(lengths.values())) > 1:
        shown = ", ".join(f'"{name}" {length:,}' for name, length in list(lengths.items())[:5])
        raise PlanError(f"Rows of one batch must be equally long; these are not: {shown}.")
    made_by: dict[str, str] = {}
    for name, rows in zip(plan.names, found, strict=True):
        if tokenizer := getattr(rows, "tokenizer_digest", None):
            made_by.setdefault(tokenizer, name)
    if len(made_by) > 1:
        shown = ", ".join(f'"{name}" {digest[:8]}' for digest, name in list(made_by.items())[:5])
        raise PlanError(
            f"The sources of this plan come from different tokenizers (digests: {shown}). The same "
            "id would mean different text, so they cannot share a batch. Build them with one "
            "tokenizer."
        )
    return found


def _scattered(
    parts: list[tuple[Any, dict[str, NDArray[Any]]]], num_rows: int
) -> dict[str, NDArray[Any]]:
    """The fields of several sources' rows, each row at its own place."""
    if len(parts) == 1:
        return parts[0][1]
    names = {name for _, fields in parts for name in fields}
    gathered = {}
    for name in sorted(names):
        found = [
            (rows, fields[name] if name in fields else _unsaid(name, fields))
            for rows, fields in parts
        ]
        arrays = [values for _, values in found if values is not None]
        if len(arrays) < len(found):
            raise PlanError(f"Some sources of this plan give {name!r} and others do not.")
        dtype = np.result_type(*{array.dtype for array in arrays})
        gathered[name] = np.empty((num_rows, *arrays[0].shape[1:]), dtype)
        for rows, values in found:
            gathered[name][rows] = values
    return gathered


def _unsaid(name: str, fields: dict[str, NDArray[Any]]) -> NDArray[Any] | None:
    """What holds for rows that do not give a field, where that is known: all targets count."""
    following = fields["tokens"][:, 1:]
    if name == "num_targets":
        return np.full(len(following), following.shape[1])
    if name == "target_mask":
        return np.ones(following.shape, bool)
    return following if name == "targets" else None
