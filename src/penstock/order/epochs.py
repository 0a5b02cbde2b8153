"""The order of a plan without weights: every sample of every source once per epoch.

A pass is one shuffled order of the rows of all sources together. Passes follow each other
without end, each with a separate key. A source that joins in the middle of a pass extends it:
the rows that are left of the pass (the tail) and all rows of the new source are shuffled
together and become the rest of the pass. A source that leaves does so at the end of the pass.
In this example, `web` has 8 rows, and `code` (6 rows) joins at position 20, in the third pass:

    position   0       8      16   20          30            44
    web        ├─ 0 ───┼─ 1 ──┼─ 2 |  2        ┼─ 3 ─────────┼─ 4 ──
    code                           ├─ 0 ───────┼─ 1 ─────────┼─ 2 ──
    segment    whole passes        | the rest  | whole passes

All segments are computed from the stages, before the first row is read. The tail needs no list of
rows: it is the end of an order that can be computed, so the order of the rest of the pass refers
to positions of that tail.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.digest import derive_key
from penstock.order.integers import END, Integers, check_starts, label_pairs
from penstock.order.shuffle import Domain, Orders, Sources, arrange, epoch_key
from penstock.ranges import group_rows

_COUNT_ROWS = 2**18  # rows located at a time when rows have to be counted: 2 MiB per array


class Members(NamedTuple):
    """The sources that are read from position `start` on, as numbers, in this order."""

    start: int
    sources: Sequence[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """A range of positions: whole passes, or the rest of a pass after a source has joined it."""

    start: int
    domain: Domain
    """The rows of a pass: the tail, and then the rows of each source."""
    tail_from: int
    """The row of the earlier pass at which the tail begins; 0 if there is no tail."""
    sources: Integers
    ends: Integers
    """The end of the tail in the domain (0 without a tail), and then the end of each source."""
    pass_start: int
    """The position at which the first pass begins; before `start` if there is a tail."""
    pass_number: int
    """How many passes are complete at `start`."""
    epochs: tuple[int, ...]
    """How many epochs of each source of the plan are complete at `start`."""
    members: frozenset[int]
    """The sources that have rows in a pass, including those of the tail."""

    @property
    def size(self) -> int:
        """The number of rows in a pass, or in the rest of it."""
        return self.domain.num_rows

    def offset(self, position: int) -> int:
        """Return how many rows of its pass come before a position."""
        return (position - self.start) % self.size


def find_segments(stages: Sequence[Members], domains: Sequence[Domain]) -> list[Segment]:
    """Return the segments of a run whose sources change at `stages`.

    The first segment begins at 0. Each ends where the next one begins; the last has no end.

    >>> web, code = Domain(8), Domain(6)
    >>> segments = find_segments([Members(0, [0]), Members(20, [0, 1])], [web, code])
    >>> [(segment.start, segment.size) for segment in segments]
    [(0, 8), (20, 10), (30, 14)]
    """
    first, *later = stages
    segments = [_segment(None, first, domains)]
    pending: Members | None = None  # the sources that are read after the end of this pass
    for stage in later:
        if pending is not None and pending.start <= stage.start:
            segments.append(_segment(segments[-1], pending, domains))
            pending = None
        last = segments[-1]
        newcomers = [source for source in stage.sources if source not in last.members]
        offset = last.offset(stage.start)
        if offset == 0:
            # The stage begins between two passes. If the last segment begins here too, it would
            # have no rows.
            if last.start == stage.start:
                segments.pop()
            segments.append(_segment(last, stage, domains))
        elif newcomers:
            rest = _segment(last, Members(stage.start, newcomers), domains, offset)
            segments.append(rest)
            pending = Members(rest.start + rest.size, stage.sources)
        else:
            # Sources only leave: the pass is read to its end first.
            pending = Members(stage.start + last.size - offset, stage.sources)
    if pending is not None:
        segments.append(_segment(segments[-1], pending, domains))
    return segments


def _segment(
    before: Segment | None, stage: Members, domains: Sequence[Domain], offset: int = 0
) -> Segment:
    """Return the segment that begins with `stage` and follows `before`.

    Args:
        before: The segment that ends here; None for the first one.
        stage: Its start, and the sources that it reads completely.
        domains: The rows of each source of the plan.
        offset: Where `before` is cut inside a pass. The rows after that are the tail.
    """
    sizes = [domains[source].num_rows for source in stage.sources]
    parts = [rows for source in stage.sources for rows in domains[source].part_rows]
    tail, pass_start, members = 0, stage.start, frozenset(stage.sources)
    pass_number, epochs = 0, (0,) * len(domains)
    if before is not None:
        # Complete passes only: an incomplete one continues in the new segment as its tail.
        passes = (stage.start - before.start) // before.size
        pass_number = before.pass_number + passes
        epochs = tuple(
            epoch + passes * (source in before.members)
            for source, epoch in enumerate(before.epochs)
        )
        if offset:
            tail = before.size - offset
            parts = [*_parts_after(before.domain, offset), *parts]
            members |= before.members
            # If a second source joins the same pass, the pass began before the first one joined.
            pass_start = before.pass_start if before.tail_from else stage.start - offset
    return Segment(
        start=stage.start,
        domain=Domain(tail + sum(sizes), parts),
        tail_from=offset,
        sources=np.array(stage.sources, dtype=np.int64),
        ends=np.cumsum([tail, *sizes], dtype=np.int64),
        pass_start=pass_start,
        pass_number=pass_number,
        epochs=epochs,
        members=members,
    )


def _parts_after(domain: Domain, offset: int) -> list[int]:
    """Return the rows of each part after the first `offset` rows; the first part may be cut.

    >>> _parts_after(Domain(9, part_rows=[4, 3, 2]), 5)
    [2, 2]
    """
    ends = np.cumsum(domain.part_rows, dtype=np.int64)
    lasting = ends[ends > offset]
    return [int(rows) for rows in np.diff(lasting, prepend=offset)]


@lru_cache(maxsize=1024)
def _join_key(seed: int, names: tuple[str, ...], position: int) -> int:
    return derive_key("join", seed, *names, position)


class EpochOrder:
    """Maps positions to (source, epoch, sample) and back; each sample occurs once a pass.

    Immutable. Sources are numbers into `names`.
    """

    def __init__(self, stages: Sequence[Members], plan: Sources) -> None:
        check_starts([stage.start for stage in stages])
        self.end = END
        self.segments = find_segments(stages, plan.domains)
        self.epoch_rows = self.segments[0].size if len(self.segments) == 1 else None
        self._starts = np.array([segment.start for segment in self.segments], dtype=np.int64)
        self._stops = [*self._starts[1:].tolist(), END]
        self._sizes = np.array([segment.size for segment in self.segments], dtype=np.int64)
        self._names = [tuple(plan.names[i] for i in segment.sources) for segment in self.segments]
        self._num_rows = [domain.num_rows for domain in plan.domains]
        self._arrangement = arrange(plan.shuffle, [segment.domain for segment in self.segments])
        self._seed = plan.seed

    def locate(self, positions: Integers) -> tuple[Integers, Integers, Integers]:
        """Return the source, epoch and sample at each position."""
        if len(self.segments) == 1:
            # The usual case, and much faster: NumPy divides by a constant with multiplications.
            size = self.segments[0].size
            passes = positions // size
            orders = self._orders(*label_pairs(np.zeros_like(passes), passes))
            rows = self._arrangement.map(positions - passes * size, orders)
            return self._resolve(0, passes, rows)
        # Several segments: find the segment of each position, then its pass within the segment.
        numbers = np.searchsorted(self._starts, positions, side="right") - 1
        inside = positions - self._starts[numbers]
        passes = inside // self._sizes[numbers]
        orders = self._orders(*label_pairs(numbers, passes))
        rows = self._arrangement.map(inside - passes * self._sizes[numbers], orders)
        located = np.empty((3, len(positions)), dtype=np.int64)
        for number, here in group_rows(numbers):
            located[:, here] = self._resolve(number, passes[here], rows[here])
        return located[0], located[1], located[2]

    def _resolve(
        self, number: int, passes: Integers, rows: Integers
    ) -> tuple[Integers, Integers, Integers]:
        """Return the source, epoch and sample of rows of a segment's domain."""
        segment = self.segments[number]
        # `ends` is [end of the tail, end of the first source, …]: -1 is the tail.
        columns = np.searchsorted(segment.ends, rows, side="right") - 1
        sources = segment.sources[columns]
        epochs = np.array(segment.epochs, dtype=np.int64)[sources] + passes
        samples = rows - segment.ends[columns]
        tail = np.flatnonzero(columns < 0)
        if tail.size:
            # Row r of the tail is position tail_from + r of the pass that was cut.
            before = self.segments[number - 1]
            cut_pass = (segment.start - before.start) // before.size
            orders = self._one_order(number - 1, cut_pass, len(tail))
            earlier = self._arrangement.map(rows[tail] + segment.tail_from, orders)
            resolved = self._resolve(number - 1, np.full_like(earlier, cut_pass), earlier)
            sources[tail], epochs[tail], samples[tail] = resolved
        return sources, epochs, samples

    def positions_of(self, source: int, samples: npt.ArrayLike, epochs: Integers) -> Integers:
        """Return the positions of samples, each in its epoch, without epochs that lack it."""
        numbers = np.broadcast_to(np.asarray(samples, dtype=np.int64), epochs.shape)
        found = [np.empty(0, dtype=np.int64)]
        for number, segment in enumerate(self.segments):
            if source not in segment.sources:
                continue
            first_row = int(segment.ends[segment.sources.tolist().index(source)])
            first = segment.epochs[source]
            begun = -(-(self._stops[number] - segment.start) // segment.size)  # rounded up
            # Only the epochs that begin in this segment; others are found in other segments.
            here = (epochs >= first) & (epochs < first + begun)
            passes = epochs[here] - first
            orders = self._orders(*label_pairs(np.full_like(passes, number), passes))
            inside = self._arrangement.map(first_row + numbers[here], orders, inverse=True)
            positions = segment.start + passes * segment.size + inside
            # Few rows: only one pass of a segment is cut, the pass that a source joins.
            for row in np.flatnonzero(positions >= self._stops[number]).tolist():
                positions[row] = self._follow(number, int(inside[row]))
            found.append(positions)
        return np.concatenate(found)

    def _follow(self, number: int, inside: int) -> int:
        """Return the position of a row that its segment does not reach: it is in a later tail."""
        while True:
            number += 1
            segment = self.segments[number]
            row = np.array([inside - segment.tail_from], dtype=np.int64)
            inside = int(self._arrangement.map(row, self._one_order(number, 0, 1), inverse=True)[0])
            if segment.start + inside < self._stops[number]:
                return segment.start + inside

    def num_epochs(self, source: int, before: int) -> int:
        """Return how many epochs of a source have begun before a position."""
        # The last segment that begins before the position.
        segment = self.segments[max(0, int(np.searchsorted(self._starts, before)) - 1)]
        begun = -(-(before - segment.start) // segment.size)  # rounded up
        return segment.epochs[source] + begun * (source in segment.members)

    def counts(self, num_rows: int) -> list[int]:
        """Return how many of the first `num_rows` rows belong to each source.

        Rows of complete passes are computed by a multiplication. Rows of the incomplete pass are
        counted one by one, at about 30 ns each.
        """
        if len(self._num_rows) == 1:
            return [num_rows]
        number = int(np.searchsorted(self._starts, num_rows, side="right")) - 1
        segment = self.segments[number]
        passes = (num_rows - segment.start) // segment.size
        counts = np.zeros(len(self._num_rows), dtype=np.int64)
        for source, (epochs, size) in enumerate(zip(segment.epochs, self._num_rows, strict=True)):
            counts[source] = (epochs + passes * (source in segment.members)) * size
        # A pass that began before the segment (one with a tail) is counted from its beginning.
        for start in range(segment.pass_start + passes * segment.size, num_rows, _COUNT_ROWS):
            stop = min(start + _COUNT_ROWS, num_rows)
            sources, _, _ = self.locate(np.arange(start, stop, dtype=np.int64))
            counts += np.bincount(sources, minlength=len(counts))
        return counts.tolist()

    @property
    def default_num_rows(self) -> int:
        """The number of rows up to the end of the first pass over the last stage's sources."""
        return self.segments[-1].start + self.segments[-1].size

    def asked(self, num_rows: int) -> None:
        """Return None: without weights, each source is read once an epoch."""

    ended_by = None  # it has no end

    @property
    def num_stages(self) -> int:
        """The number of segments."""
        return len(self.segments)

    def stage(self, number: int) -> tuple[int, str]:
        """Return where a segment begins, and its sources as text."""
        segment, names = self.segments[number], list(self._names[number])
        if segment.ends[0]:
            names.append(f"and {int(segment.ends[0]):,} rows left of the pass")
        return segment.start, ", ".join(names)

    def _orders(self, which: Integers, numbers: Integers, passes: Integers) -> Orders:
        pairs = zip(numbers.tolist(), passes.tolist(), strict=True)
        keys = [self._key(number, pass_number) for number, pass_number in pairs]
        return Orders(which, numbers, np.array(keys, dtype=np.uint64))

    def _one_order(self, number: int, pass_number: int, num_rows: int) -> Orders:
        which = np.zeros(num_rows, dtype=np.intp)
        return self._orders(which, np.array([number]), np.array([pass_number]))

    def _key(self, number: int, pass_number: int) -> int:
        segment = self.segments[number]
        # The rest of a pass has no pass number, so its key is derived from the position.
        if segment.ends[0]:
            return _join_key(self._seed, self._names[number], segment.start)
        return epoch_key(self._seed, self._names[number], segment.pass_number + pass_number)
