"""Where passes begin and end when sources join and leave.

A pass reads every sample of its sources once. A source that joins in the middle of a pass
extends it: the rows that are left of the pass (the tail) and all rows of the new source are
shuffled together and become the rest of the pass. A source that leaves does so at the end of
the pass:

    position   0       8      16   20          30            42
    web        ├─ 0 ───┼─ 1 ──┼─ 2 |  2        ┼─ 3 ─────────┼─ 4 ──
    code                           ├─ 0 ───────┼─ 1 ─────────┼─ 2 ──
    segment    whole passes        | the rest  | whole passes

All segments are computed from the stages, before the first row is read.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from penstock.order.integers import Integers
from penstock.order.shuffle import Domain

__all__ = ["Members", "Segment", "find_segments"]


class Members(NamedTuple):
    """The sources that are read from position `start` on, as numbers, in this order."""

    start: int
    sources: Sequence[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """Whole passes over some sources, or the rest of one pass that a source has joined."""

    start: int
    domain: Domain
    """The rows of a pass: the tail, and then the rows of each source."""
    tail_from: int
    """Where the tail begins in the pass before; 0 if there is no tail."""
    sources: Integers
    ends: Integers
    """Where the tail ends in the domain, and then where each source does; 0 if no tail."""
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
            # If a second source joins the same pass, the pass still began before the first did.
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
