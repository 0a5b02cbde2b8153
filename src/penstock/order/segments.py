"""Where passes begin and end when sources join and leave.

A pass reads every sample of its sources once. A source that joins in the middle of one
extends it: the rows that are left, the tail, and all rows of the newcomer make up the
rest of the pass. A source that leaves does so at the end of the pass:

    position   0       8      16   20          30            42
    web        ├─ 0 ───┼─ 1 ──┼─ 2 |  2        ┼─ 3 ─────────┼─ 4 ──
    code                           ├─ 0 ───────┼─ 1 ─────────┼─ 2 ──
    segment    whole passes        | the rest  | whole passes

Everything is computed from the stages, before the first row is read.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from penstock.order.integers import Integers
from penstock.order.shuffle import Domain

__all__ = ["Members", "Segment", "find_segments"]


class Members(NamedTuple):
    """From `start` on, these sources are read, by number and in this order."""

    start: int
    sources: Sequence[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """Whole passes over some sources, or the rest of one pass that a source has joined."""

    start: int
    domain: Domain
    """The rows of a pass: the tail, then the sources end to end."""
    tail_from: int
    """Where the tail begins in the pass before."""
    sources: Integers
    ends: Integers
    """Where the tail ends, then where each source does; no tail ends at 0."""
    pass_start: int
    """The position at which the first pass begins: before `start` where there is a tail."""
    pass_number: int
    """How many passes were complete by then."""
    epochs: tuple[int, ...]
    """How many epochs each source of the plan had completed by then."""
    members: frozenset[int]
    """The sources of a pass, those in the tail among them."""

    @property
    def size(self) -> int:
        """The rows of a pass, or of the rest of it."""
        return self.domain.num_rows

    def offset(self, position: int) -> int:
        """How far into its pass a position is."""
        return (position - self.start) % self.size


def find_segments(stages: Sequence[Members], domains: Sequence[Domain]) -> list[Segment]:
    """The segments of a run whose sources change at `stages`.

    The first segment begins at 0, each goes on to the start of the next, and the last
    one without end.

    >>> web, code = Domain(8), Domain(6)
    >>> segments = find_segments([Members(0, [0]), Members(20, [0, 1])], [web, code])
    >>> [(segment.start, segment.size) for segment in segments]
    [(0, 8), (20, 10), (30, 14)]
    """
    first, *later = stages
    segments = [_whole_passes(None, first.start, first.sources, domains)]
    pending: Members | None = None  # who is read from the end of the pass on
    for stage in later:
        if pending is not None and pending.start <= stage.start:
            segments.append(_whole_passes(segments[-1], *pending, domains))
            pending = None
        last = segments[-1]
        newcomers = [source for source in stage.sources if source not in last.members]
        offset = last.offset(stage.start)
        if offset == 0:
            if last.start == stage.start:
                segments.pop()  # it would have begun here and now
            segments.append(_whole_passes(last, *stage, domains))
        elif newcomers:
            rest = _rest_of_pass(last, stage.start, newcomers, domains)
            segments.append(rest)
            pending = Members(rest.start + rest.size, stage.sources)
        else:
            pending = Members(stage.start + last.size - offset, stage.sources)
    if pending is not None:
        segments.append(_whole_passes(segments[-1], *pending, domains))
    return segments


def _whole_passes(
    before: Segment | None, start: int, sources: Sequence[int], domains: Sequence[Domain]
) -> Segment:
    pass_number, epochs = _completed(before, start, len(domains))
    sizes = [domains[source].num_rows for source in sources]
    parts = [rows for source in sources for rows in domains[source].part_rows]
    return Segment(
        start=start,
        domain=Domain(sum(sizes), parts),
        tail_from=0,
        sources=np.array(sources, dtype=np.int64),
        ends=np.cumsum([0, *sizes], dtype=np.int64),
        pass_start=start,
        pass_number=pass_number,
        epochs=epochs,
        members=frozenset(sources),
    )


def _rest_of_pass(
    before: Segment, start: int, newcomers: Sequence[int], domains: Sequence[Domain]
) -> Segment:
    pass_number, epochs = _completed(before, start, len(domains))
    offset = before.offset(start)
    tail = before.size - offset
    sizes = [domains[source].num_rows for source in newcomers]
    parts = [rows for source in newcomers for rows in domains[source].part_rows]
    return Segment(
        start=start,
        domain=Domain(tail + sum(sizes), [*_parts_after(before.domain, offset), *parts]),
        tail_from=offset,
        sources=np.array(newcomers, dtype=np.int64),
        ends=np.cumsum([tail, *sizes], dtype=np.int64),
        # The rest of a rest goes back to the pass in which the first source joined.
        pass_start=start - offset if before.tail_from == 0 else before.pass_start,
        pass_number=pass_number,
        epochs=epochs,
        members=before.members.union(newcomers),
    )


def _completed(before: Segment | None, start: int, num_sources: int) -> tuple[int, tuple[int, ...]]:
    """The passes, and the epochs of each source, that are complete at `start`."""
    if before is None:
        return 0, (0,) * num_sources
    passes = (start - before.start) // before.size
    epochs = (
        epoch + passes if source in before.members else epoch
        for source, epoch in enumerate(before.epochs)
    )
    return before.pass_number + passes, tuple(epochs)


def _parts_after(domain: Domain, offset: int) -> list[int]:
    """The rows of each part from `offset` on, of the first one what is left of it."""
    ends = np.cumsum(domain.part_rows, dtype=np.int64)
    lasting = ends[ends > offset]
    return [int(rows) for rows in np.diff(lasting, prepend=offset)]
