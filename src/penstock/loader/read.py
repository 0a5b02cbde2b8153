"""Positions to arrays: the one place where rows are put together.

A block is several batches read at once. Reading 500 rows in one call costs little more
than reading 32, and with many parts or sources far less: each is asked once a block. The
ids stay as narrow as they are stored until the very end.
"""

from bisect import bisect_right
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from penstock.errors import PlanError
from penstock.loader.fingerprint import combine, of_samples, of_tokens, source_keys
from penstock.loader.packed import gives_positions
from penstock.loader.readahead import ReadAhead
from penstock.order.plan import Plan
from penstock.order.steps import PADDING, Shard
from penstock.rows.gather import JoinedWindows
from penstock.rows.pieces import Side
from penstock.rows.supervised import supervised
from penstock.rows.windows import Windows

__all__ = ["IDS", "IGNORED", "MOST_STEPS", "Assembler", "Block", "ReadableRows"]

IGNORED = -100
"""The target that losses leave out."""
IDS = ("tokens", "labels", "targets", "attention_mask")
"""The fields that are narrow until the very end: ids (see `penstock.transforms`), and a mask."""

MOST_STEPS = 128
"""Steps of a block, at most."""
# A block holds at most so many bytes of narrow ids: few blocks cost less, and large ones leave the
# cache before they are read.
_BLOCK_BYTES = 4 << 20
# So many blocks are located at once: the arithmetic is vectorised, and cheap only in bulk.
_LOT_BLOCKS = 8


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
    widths: list[int] | None  # of each step, where rows are padded to the widest of it


@dataclass(frozen=True, slots=True)
class _Lot:
    """The rows of some steps, found and not yet read."""

    first: int
    stop: int  # the step after the last
    edges: list[int]  # as in a block
    spans: list[tuple[int, int]]
    located: NDArray[np.int64]
    values: NDArray[np.uint64] | None
    """What each row adds to a fingerprint, where that is known before it is read."""


_NOTHING = _Lot(0, 0, [0], [], np.zeros((4, 0), np.int64), None)


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
        self._joined = _join(self._rows)
        self._ahead = ReadAhead(self._rows, read_ahead)
        self.length = self._rows[0].length
        self.whole_documents = any(hasattr(each, "whole_documents") for each in self._rows)
        """Whether some rows begin a document, so that their first token is no target."""
        self._gives_positions = self.whole_documents and gives_positions(self._rows)
        self.side: Side | None = _padded_side(self._rows)
        """Where rows are padded, if they are padded to the widest of a step."""
        self._keys = source_keys(plan.names)
        self._lot = _NOTHING

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_lot": _NOTHING}  # a quarter of a megabyte, quickly made

    def sharing(self, shard: Shard, *, end: int | None) -> Self:
        """One that reads the same plan in other steps; the sources are not looked at again."""
        other = copy(self)
        other.shard = shard
        other.end = end
        other._lot = _NOTHING
        return other

    def block(self, first_step: int, last_step: int, most: int = MOST_STEPS) -> Block:
        """As many steps from `first_step` on as make a block, and at most up to `last_step`.

        Args:
            first_step: The first step.
            last_step: The step before which the run ends.
            most: No more steps than these; fewer are ready sooner.
        """
        lot, stop = self._steps(first_step, last_step, most)
        rows = slice(lot.edges[first_step - lot.first], lot.edges[stop - lot.first])
        located = lot.located[:, rows]
        if self._ahead.begin() and stop < last_step:
            # As many as the next block will have: of a run's first batch, nothing is waited for.
            self._name(stop, last_step, 4 * most)
        tokens, targets, extras = self.read(located)
        self._ahead.end()
        values = of_tokens(tokens, targets, located[3]) if lot.values is None else lot.values[rows]
        if lot.values is None:
            values[located[3] == PADDING] = 0
        edges = [edge - rows.start for edge in lot.edges[first_step - lot.first : stop - lot.first]]
        return Block(
            first_step,
            [*edges, rows.stop - rows.start],
            lot.spans[first_step - lot.first : stop - lot.first],
            tokens,
            targets,
            extras,
            located,
            combine(values, edges),
            self._widths(first_step, stop) if self.side else None,
        )

    def _name(self, first: int, last: int, most: int) -> None:
        """Tell the disk which rows the block after this one will want."""
        lot, stop = self._steps(first, last, most)
        rows = slice(lot.edges[first - lot.first], lot.edges[stop - lot.first])
        self._ahead.name(lot.located[:, rows])

    def _widths(self, first: int, stop: int) -> list[int]:
        """The width of the widest row of each step, on all ranks: so that their shapes agree."""
        everyone = type(self.shard)(self.shard.steps)
        rows = everyone.rows(first, stop)
        located = self._locate(everyone.positions(first, stop, end=self.end))
        widths = np.zeros(located.shape[1], np.int64)
        for number in np.unique(located[0]).tolist():
            chosen = (located[0] == number) & (located[3] != PADDING)
            source: Any = self._rows[number]
            widths[chosen] = source.widths(located[2, chosen])
        widest: list[int] = np.maximum.reduceat(widths, np.cumsum(rows) - rows).tolist()
        return widest

    def _steps(self, first: int, last: int, most: int) -> tuple[_Lot, int]:
        """A lot that holds the steps of the block from `first` on, and the step after it."""
        size = max(1, _BLOCK_BYTES // (2 * (self.length + 1)))
        lot = self._lot
        if not lot.first <= first < lot.stop:
            rows = max(1, int(self.shard.rows(first, first + 1)[0]))
            blocks = _LOT_BLOCKS if most >= MOST_STEPS else 1  # the first of a run is wanted soon
            ahead = blocks * max(1, min(most, size // rows))
            lot = self._locate_steps(first, min(last, first + ahead))
            if lot.stop - first > 1:  # otherwise asked for in passing
                self._lot = lot
        begin = first - lot.first
        full = bisect_right(lot.edges, lot.edges[begin] + size) - 1
        return lot, min(last, lot.stop, first + most, lot.first + max(begin + 1, full))

    def _locate_steps(self, first: int, stop: int) -> _Lot:
        located = self._locate(self.shard.positions(first, stop, end=self.end))
        values = None
        if not self._by_tokens:
            values = of_samples(self._keys[located[0]], located[1], located[2], located[3])
            values[located[3] == PADDING] = 0
        starts, sizes = self.shard.steps.spans(first, stop)
        edges = np.concatenate(([0], np.cumsum(self.shard.rows(first, stop)))).tolist()
        spans = list(zip(starts.tolist(), (starts + sizes).tolist(), strict=True))
        return _Lot(first, stop, edges, spans, located, values)

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
        elif self._joined is not None:
            parts = [(slice(None), {"tokens": self._joined.read(numbers, located[2])})]
        else:
            order = np.argsort(numbers, kind="stable")
            cuts = np.flatnonzero(np.diff(numbers[order])) + 1
            parts = [
                (rows, _read(self._rows[int(numbers[rows[0]])], located[:, rows]))
                for rows in np.split(order, cuts)
            ]
        fields = _scattered(parts, len(numbers), whole_documents=self.whole_documents)
        if self._gives_positions:
            # Beside packed rows, batches of windows alone have the same keys as all the others.
            for name in ("document_ids", "position_ids"):
                if name not in fields:
                    fields[name] = np.array(_unsaid(name, fields, whole_documents=True))
        tokens = fields.pop("tokens")
        targets = self._targets(fields.pop("num_targets", None), positions, tokens)
        masks = [fields.pop("target_mask", None), fields.pop("same_document", None)]
        if "labels" in fields:  # what a place predicts of itself crosses no border
            masks.pop()
        for mask in masks:
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


def _join(rows: Sequence[Any]) -> JoinedWindows | None:
    """All sources in one, if each is nothing but full windows over ids of one tokenizer."""
    if len(rows) < 2:
        return None
    plain = all(
        type(each) is Windows
        and not each.borders
        and not each.stream.has_loss
        and each.num_tokens == len(each) * each.length
        for each in rows
    )
    if not plain or len({each.tokenizer_digest for each in rows}) > 1:
        return None
    return JoinedWindows(rows)


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
    return [supervised(name, rows) for name, rows in zip(plan.names, found, strict=True)]


def _padded_side(found: list[Any]) -> Side | None:
    """Where rows are padded that are as wide as they must be; None where some are not so."""
    sides = {rows.side if hasattr(rows, "widths") else None for rows in found}
    if len(sides - {None}) > 1:
        raise PlanError("Some sources of this plan are padded on the left and others on the right.")
    return sides.pop() if len(sides) == 1 else None


def _scattered(
    parts: list[tuple[Any, dict[str, NDArray[Any]]]], num_rows: int, *, whole_documents: bool
) -> dict[str, NDArray[Any]]:
    """The fields of several sources' rows, each row at its own place."""
    if len(parts) == 1:
        return parts[0][1]
    names = {name for _, fields in parts for name in fields}
    gathered = {}
    for name in sorted(names):
        found = [
            (rows, fields[name] if name in fields else _unsaid(name, fields, whole_documents))
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


def _unsaid(
    name: str, fields: dict[str, NDArray[Any]], whole_documents: bool
) -> NDArray[Any] | None:
    """What holds for rows that do not give a field, where that is known: all targets count.

    Beside rows of whole documents, a row without borders is one piece, as it is by itself.
    """
    following = fields["tokens"][:, 1:]
    if name == "num_targets":
        return np.full(len(following), following.shape[1])
    if name in ("target_mask", "same_document"):
        return np.ones(following.shape, bool)
    if whole_documents and name in ("document_ids", "position_ids"):
        columns = np.arange(following.shape[1], dtype=np.int32) * (name == "position_ids")
        return np.broadcast_to(columns, following.shape)
    return following if name == "targets" else None
