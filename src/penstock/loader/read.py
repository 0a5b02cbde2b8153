"""From positions to arrays: the only module that reads the rows of batches.

A block is several batches that are read at once. Reading 500 rows in one call costs little more
than reading 32. With many parts or sources, blocks save even more, because each part or source is
read once per block. Ids stay in the dtype of the store until the batch is made.
"""

import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.errors import PlanError
from penstock.loader.prefetch import PartsAhead, ReadAhead
from penstock.loader.run import AnyPlan, Run
from penstock.loader.state import combine, of_samples, of_tokens, source_keys
from penstock.order.integers import Indices
from penstock.order.steps import PADDING, Shard
from penstock.ranges import group_rows
from penstock.rows.protocol import Array, Fields, Integers, Rows, Settings, Side
from penstock.rows.windows import JoinedWindows, Windows
from penstock.streaming.plan import StreamedPlan

IDS = ("tokens", "labels", "targets", "attention_mask")
"""The fields that become int64 on the device: ids (see `penstock.transforms`), and a mask."""

MOST_STEPS = 128
"""The largest number of steps in a block."""
# Bytes of ids in a block, at most. Few large blocks cost less than many small ones, because each
# hands the GIL back and forth between threads; but three or four blocks are in use at a time, and
# those that do not fit the cache are evicted before their batches are made. With an L3 of 32 MiB, a
# batch took 12.4 µs with 4 MiB, 13.6 with 6 and 14.1 with 8 on two quiet cores, and 20.1, 21.0 and
# 21.9 on busy ones. On one slow machine, 8 MiB were faster: 79 µs, and 99 with 4.
_BLOCK_BYTES = 4 << 20
# Blocks whose positions are located at once: the arithmetic is vectorised, and cheap only in bulk.
_LOT_BLOCKS = 8


@dataclass(slots=True)
class StepBlock:
    """The rows of consecutive steps."""

    first_step: int
    edges: list[int]
    """The row at which each step begins, and the number of rows."""
    spans: list[tuple[int, int]]
    """The first position of each step, and the position after its last row, without padding."""
    tokens: Array  # (rows, length + 1), in the dtype of the store
    targets: NDArray[np.bool_] | None  # (rows, length): False where the target is ignored
    extras: Fields  # (rows, length) each
    located: Integers  # (4, rows): source, epoch, sample, position
    fingerprints: list[int]
    widths: list[int] | None  # of each step, if rows are padded to the widest of the step


@dataclass(frozen=True, slots=True)
class _Lot:
    """The rows of some steps, located but not read yet."""

    shard: Shard | None
    end: int | None  # the end of the pass, if it was known
    first: int
    stop: int  # the step after the last
    edges: list[int]  # as in a block
    spans: list[tuple[int, int]]
    located: Integers
    values: NDArray[np.uint64] | None
    """The number that each row adds to a fingerprint; None if it depends on the row's tokens."""


_EMPTY = _Lot(None, None, 0, 0, [0], [], np.zeros((4, 0), np.int64), None)


class Assembler:
    """Reads the rows of one rank, block by block.

    Args:
        run: The steps of the pass, and the positions of this rank in each.
        by_tokens: Whether fingerprints cover the tokens of rows.
    """

    def __init__(self, run: Run, *, by_tokens: bool = False) -> None:
        self.run = run
        self.plan = plan = run.plan
        self._by_tokens = by_tokens
        self._rows = _readable(plan)
        self._joined = _join(self._rows)
        self._ahead = ReadAhead()
        self._parts = PartsAhead(self._rows)
        self.length = self._rows[0].length
        self.whole_documents = any(rows.whole_documents for rows in self._rows)
        """Whether some rows begin a document, so that their first token is not a target."""
        self._gives_positions = self.whole_documents and any(
            rows.gives_positions for rows in self._rows
        )
        self.side: Side | None = _padded_side(self._rows)
        """The side on which rows are padded to the widest of a step; None if they are not."""
        self._keys = source_keys(plan.names)
        self._lot = _EMPTY

    def __getstate__(self) -> Settings:
        return {**self.__dict__, "_lot": _EMPTY}  # 256 KB that are quickly computed again

    def block(self, first_step: int, last_step: int, most: int = MOST_STEPS) -> StepBlock:
        """Read the steps from `first_step` on, as many as fit into one block.

        Args:
            first_step: The first step.
            last_step: The step before which the block must end.
            most: The largest number of steps; a smaller block is ready sooner.
        """
        lot, stop = self._steps(first_step, last_step, most)
        steps = slice(first_step - lot.first, stop - lot.first)
        rows = slice(lot.edges[steps.start], lot.edges[steps.stop])
        located, spans = lot.located[:, rows], lot.spans[steps]
        if self._ahead.begin() and stop < last_step:
            # Four times as many steps, because the first blocks of a run grow by this factor.
            self._request(stop, last_step, 4 * most)
        try:
            tokens, targets, extras = self.read(located)
            self._parts.ask(self.run, stop)
        except Exception as error:
            error.add_note(
                f"While reading a block of steps from step {first_step:,} on (position "
                f"{spans[0][0]:,}), as rank {self.run.rank} of {self.run.world_size}."
            )
            raise
        self._ahead.end()
        values = of_tokens(tokens, targets, located[3]) if lot.values is None else lot.values[rows]
        # Padding adds 0, so the sum over all ranks does not depend on their number.
        values = np.where(located[3] == PADDING, np.uint64(0), values)
        edges = [edge - rows.start for edge in lot.edges[steps]]
        prints = combine(values, edges)
        widths = self._widths(first_step, stop) if self.side else None
        edges.append(rows.stop - rows.start)
        return StepBlock(first_step, edges, spans, tokens, targets, extras, located, prints, widths)

    def ask_ahead(self, step: int) -> None:
        """Begin to download the parts that steps from `step` on need; return without waiting."""
        self._parts.ask(self.run, step)

    def _request(self, first: int, last: int, most: int) -> None:
        """Ask the kernel to load the rows that the next block will read."""
        lot, stop = self._steps(first, last, most)
        rows = slice(lot.edges[first - lot.first], lot.edges[stop - lot.first])
        numbers, samples = lot.located[0, rows], lot.located[2, rows]
        for number, chosen_rows in group_rows(numbers):
            source = self.plan.rows if isinstance(self.plan, StreamedPlan) else self._rows[number]
            chosen = samples[chosen_rows]
            source.read_ahead(chosen[chosen < source.num_readable])

    def _widths(self, first: int, stop: int) -> list[int]:
        """Return the width of the widest row of each step on all ranks, so that shapes agree."""
        all_ranks = Shard(self.run.steps)
        rows = all_ranks.rows(first, stop)
        located = self._locate(all_ranks.positions(first, stop, end=self.run.end))
        widths = np.zeros(located.shape[1], np.int64)
        for number in np.unique(located[0]).tolist():
            chosen = (located[0] == number) & (located[3] != PADDING)
            samples = located[2, chosen]
            widths[chosen] = self._source(number, samples).widths(samples)
        widest: list[int] = np.maximum.reduceat(widths, np.cumsum(rows) - rows).tolist()
        return widest

    def _steps(self, first: int, last: int, most: int) -> tuple[_Lot, int]:
        """Return a lot with the steps of a block from `first` on, and the step after the block."""
        size = max(1, _BLOCK_BYTES // (2 * (self.length + 1)))
        lot, shard, end = self._lot, self.run.shard, self.run.end
        is_current = lot.shard is shard and lot.end == end  # the run may be in another pass now
        if not is_current or not lot.first <= first < lot.stop:
            rows = max(1, int(shard.rows(first, first + 1)[0]))
            blocks = _LOT_BLOCKS if most >= MOST_STEPS else 1  # the first blocks are needed soon
            ahead = blocks * max(1, min(most, size // rows))
            lot = self._locate_steps(shard, end, first, min(last, first + ahead))
            if lot.stop - first > 1:  # a single step may be from loader[step]
                self._lot = lot
        begin = first - lot.first
        full = bisect_right(lot.edges, lot.edges[begin] + size) - 1
        return lot, min(last, lot.stop, first + most, lot.first + max(begin + 1, full))

    def _locate_steps(self, shard: Shard, end: int | None, first: int, stop: int) -> _Lot:
        located = self._locate(shard.positions(first, stop, end=end))
        values = None if self._by_tokens else of_samples(self._keys[located[0]], *located[1:])
        starts, sizes = shard.steps.spans(first, stop)
        stops = starts + sizes if end is None else np.minimum(starts + sizes, end)
        edges = np.concatenate(([0], np.cumsum(shard.rows(first, stop)))).tolist()
        spans = list(zip(starts.tolist(), stops.tolist(), strict=True))
        return _Lot(shard, end, first, stop, edges, spans, located, values)

    def _locate(self, positions: Integers) -> Integers:
        located = np.zeros((4, len(positions)), np.int64)
        located[3] = positions
        real = positions != PADDING
        if real.all():  # the usual case, in which nothing has to be copied
            located[:3] = self.plan.locate(positions)
        else:
            located[:3, real] = self.plan.locate(positions[real])
        return located

    def _source(self, number: int, samples: Integers) -> Rows:
        """Return the rows of a source; of a streamed one, over a snapshot that has `samples`."""
        if isinstance(self.plan, StreamedPlan):
            return self.plan.readable(samples)
        return self._rows[number]

    def _read(self, number: int, located: Integers) -> Fields:
        return self._source(number, located[2]).read_epochs(located[2], located[1])

    def read(self, located: Integers) -> tuple[Array, NDArray[np.bool_] | None, Fields]:
        """Return the tokens of located rows, which targets count, and the other fields."""
        numbers, positions = located[0], located[3]
        parts: list[tuple[slice | Indices, Fields]]
        if self._joined is not None and (numbers != numbers[:1]).any():
            parts = [(slice(None), {"tokens": self._joined.read(numbers, located[2])})]
        elif len(self._rows) == 1:
            parts = [(slice(None), self._read(0, located))]
        else:
            groups = group_rows(numbers)
            parts = [(rows, self._read(number, located[:, rows])) for number, rows in groups]
            # Without rows, the fields still have their names and dtypes.
            parts = parts or [(slice(None), self._read(0, located))]
        fields = _merged(parts, len(numbers), whole_documents=self.whole_documents)
        if self._gives_positions:
            # A batch without packed rows has the same fields as the other batches of the run.
            for name in ("document_ids", "position_ids"):
                if name not in fields:
                    fields[name] = np.array(_default(name, fields, whole_documents=True))
        tokens = fields.pop("tokens")
        targets = self._targets(fields.pop("num_targets", None), positions, tokens)
        masks = [fields.pop("target_mask", None), fields.pop("same_document", None)]
        if "labels" in fields:  # a label belongs to its own column, so it crosses no border
            masks.pop()
        for mask in masks:
            if mask is not None:
                targets = mask.astype(bool) if targets is None else targets & mask.astype(bool)
        return tokens, targets, fields

    def _targets(
        self, num_targets: Array | None, positions: Integers, tokens: Array
    ) -> NDArray[np.bool_] | None:
        """Return which targets of padded rows count; None if no row is padded."""
        padding = positions == PADDING
        short = num_targets is not None and (num_targets < self.length).any()
        if not short and not padding.any():
            return None
        counts = np.full(len(tokens), self.length) if num_targets is None else num_targets.copy()
        counts[padding] = 0
        # A padding row was read as row 0 of the first source, to keep shapes. Remove its tokens.
        tokens[padding] = 0
        return np.asarray(np.arange(self.length) < counts[:, None])


def _join(rows: Sequence[Rows]) -> JoinedWindows | None:
    """Return all sources as one, if all have only full windows, and one tokenizer."""
    if len(rows) < 2:
        return None
    # A joined read returns tokens only: no borders, no loss masks, no number of targets.
    plain = [
        each
        for each in rows
        if isinstance(each, Windows)
        and not each.borders
        and not each.stream.has_loss
        and each.num_tokens == len(each) * each.length
    ]
    tokenizers = {each.tokenizer_digest for each in rows}
    return JoinedWindows(plain) if len(plain) == len(rows) and len(tokenizers) == 1 else None


def _readable(plan: AnyPlan) -> list[Rows]:
    """Return the rows of a plan; raise if they cannot share a batch."""
    found = [(name, plan.sources[name]) for name in plan.names]
    for name, rows in found:
        if not rows.length:
            raise PlanError(
                f'Source "{name}" is a {rows.type_name}, which a plan can order but a loader '
                "cannot read: it has no read() and length. Pass rows, such as Windows(store, 1024)."
            )
    if len({rows.length for _, rows in found}) > 1:
        shown = ", ".join(f'"{name}" {rows.length:,}' for name, rows in found[:5])
        raise PlanError(
            f"Rows of one batch must have the same length; these have: {shown}. Use the same "
            "length for all sources."
        )
    names = {digest: name for name, rows in found if (digest := rows.tokenizer_digest)}
    if len(names) > 1:
        if differing := _added_tokens(found):
            shown = ", ".join(
                f'"{name}" {" ".join(tokens) or "none"}' for name, tokens in differing[:5]
            )
            every = list(dict.fromkeys(token for _, tokens in differing for token in tokens))
            raise PlanError(
                f"The tokenizers of these sources differ by added tokens ({shown}), so they cannot "
                "share a batch. Build all of them with the same tokens, in the same order: "
                f"add_tokens={json.dumps(every, ensure_ascii=False)} of penstock.load_tokenizer "
                "(--add-tokens of penstock build)."
            )
        shown = ", ".join(f'"{name}" {digest[:8]}' for digest, name in list(names.items())[:5])
        raise PlanError(
            f"The sources of this plan come from different tokenizers (digests: {shown}). The same "
            "id would mean different text, so they cannot share a batch. Build them with one "
            "tokenizer."
        )
    return [rows for _, rows in found]


def _added_tokens(found: list[tuple[str, Rows]]) -> list[tuple[str, list[str]]]:
    """Return the added tokens of each source; none if their tokenizers differ in more than that."""
    added, bases = [], set()
    for name, rows in found:
        members = [] if rows.stream is None else rows.stream.members
        records = [each.tokenizer_record for each in members]
        if record := next(filter(None, records), None):
            tokens = list(record.get("added_tokens", ()))
            added.append((name, tokens))
            bases.add((record["name"], record.get("vocab_size", 0) - len(tokens)))
    return added if len(bases) == 1 and any(tokens != added[0][1] for _, tokens in added) else []


def _padded_side(found: list[Rows]) -> Side | None:
    """Return the side on which all rows are padded; None if some have a fixed width."""
    sides = {rows.side for rows in found}
    if len(sides - {None}) > 1:
        raise PlanError(
            "Some sources of this plan are padded on the left and others on the right. Use the "
            "same Documents(side=…) for all of them."
        )
    return sides.pop() if len(sides) == 1 else None


def _merged(
    parts: list[tuple[slice | Indices, Fields]], num_rows: int, *, whole_documents: bool
) -> Fields:
    """Return the fields of several sources' rows, in the order of the batch."""
    if len(parts) == 1:
        return parts[0][1]
    merged: Fields = {}
    for name in sorted({name for _, fields in parts for name in fields}):
        found = [
            (rows, fields[name] if name in fields else _default(name, fields, whole_documents))
            for rows, fields in parts
        ]
        arrays = [values for _, values in found if values is not None]
        if len(arrays) < len(found):
            raise PlanError(f"Some sources of this plan give {name!r} and others do not.")
        # The widest dtype of the sources, so that no id is truncated.
        dtype = np.result_type(*{array.dtype for array in arrays})
        merged[name] = np.empty((num_rows, *arrays[0].shape[1:]), dtype)
        for rows, values in found:
            merged[name][rows] = values
    return merged


def _default(name: str, fields: Fields, whole_documents: bool) -> Array | None:
    """Return the default of a field that some rows do not give; None if there is none.

    By default, all targets count. If other rows of the batch hold whole documents, a row without
    borders counts as one document.
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
