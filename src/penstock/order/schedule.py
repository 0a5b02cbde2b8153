"""Mixtures whose weights change during the run.

A schedule is a list of stages. Each begins at a position and has weights. A source's rows are
counted through all stages: the next stage continues with the row after the last one. The counts
are computed from the weights, not saved by a run. So no row is lost or repeated at a change,
wherever a run stopped or skipped to.

The debt of a source is the number of rows that it should have had by its weights (the integral
of its weight), minus the rows that it has had. Rounding makes debts of a fraction of a row, and
the next stage begins with the debts of the one before (see `settle`). So the error does not grow
with the number of stages. The first stage begins without debts and is a plain `Mix`.

How far a source can be from the integral of its weight:

- In the first stage, and in later ones that begin without debts: less than 2 rows. `interleave`
  has the proof.
- After the table of a later stage (see `settle`): less than the bound that `fit_phases` found
  for it. That was at most 1.68 rows in all random schedules.
- Within a table: no method that doesn't know the next weights can promise less than
  1/2 + 1/3 + … + 1/n rows (3.1 for 32 sources, 6.5 for 1,000). An adversary who always gives
  weight to exactly those sources that were not drawn yet makes their debts add up in the last
  one. A search for harmful weights found nothing worse.
- Random schedules stay within 2 rows, with up to 1,000 sources and 10,000 stages. The tests of
  random schedules and the search are in `tests/order/test_changing_weights.py`.

When the weight of a source becomes 0, its debt is divided among the other sources by weight, and
it comes back without a debt. The guarantees above hold for the integral with this adjustment.

A source may be capped at a number of rows. Either the schedule ends before the first row above a
cap. Or a new stage begins after the last row of a capped source, in which the other sources share
its weight. The position of that last row is computed by the inverse of the mixture.
"""

from bisect import bisect_left
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from operator import add, attrgetter
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.errors import PlanError
from penstock.order.integers import END, Integers, as_unsigned, check_starts
from penstock.order.interleave import Mix
from penstock.order.settle import ONE_ROW, Begin, DebtTable, debts_of_present, num_table_rows
from penstock.order.weights import Weight, exact_weights
from penstock.ranges import group_rows

Exhausted = Literal["error", "redistribute"]


class Stage(NamedTuple):
    """Weights, one per source, that are valid from position `start` on."""

    start: int
    weights: Sequence[Weight]


class StartingPoint(NamedTuple):
    """A position, and everything about earlier rows that later rows depend on."""

    position: int
    counts: list[int]
    """How many rows of each source come before the position."""
    debts: list[int]
    """The debt of each source at the position, in units of 2^-40 rows."""


@dataclass(frozen=True)
class _Segment:
    """Consecutive rows with the same weights.

    A stage that begins with debts has two segments: first the rows of a table that settles the
    debts (see `settle`), then all later rows.
    """

    start: int
    counts: Integers
    """How many rows of each source come before the segment."""
    begin: Begin
    table_rows: int
    """The rows of the table; 0 in a segment without one."""

    @cached_property
    def mix(self) -> Mix | DebtTable:
        """The order of the rows; made when needed, because many stages end within their tables."""
        begin = self.begin
        if self.table_rows:
            return DebtTable(begin.exact, begin.debts, self.table_rows)
        if not begin.debts.any():
            return Mix(begin.exact)
        debts = begin.debts_at(self.start, self.counts)
        return Mix(begin.exact, (debts / ONE_ROW).tolist())


class Schedule:
    """Maps positions to (source, ordinal) and back, by weights that change in stages.

    Ordinals number the rows of a source from 0, in the order of positions and without gaps.
    Immutable. A call costs as much as a call of `Mix`, plus a search among the stages. Creating
    a stage costs 10 µs per source, or 2 µs if it ends within its table.

    Args:
        stages: The first begins at 0, or at the position of `origin`. Each later stage begins
            after the one before it.
        caps: The largest number of rows of each source; None means no limit.
        exhausted: What happens when a cap is reached: the schedule ends ("error"), or the other
            sources continue ("redistribute").
        origin: Where the first stage begins, if not at 0. Earlier positions raise PlanError.

    >>> schedule = Schedule([Stage(0, [1, 0]), Stage(4, [1, 1])])
    >>> schedule.at(range(8))
    (array([0, 0, 0, 0, 0, 1, 0, 1]), array([0, 1, 2, 3, 4, 0, 5, 1]))
    >>> [schedule.position(0, ordinal) for ordinal in (3, 4, 5)]
    [3, 4, 6]
    >>> Schedule([Stage(0, [1, 1])], caps=[None, 2], exhausted="redistribute").stages
    [Stage(start=0, weights=[1, 1]), Stage(start=4, weights=[1, 0])]
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        *,
        caps: Sequence[int | None] | None = None,
        exhausted: Exhausted = "error",
        origin: StartingPoint | None = None,
    ) -> None:
        check_starts([stage.start for stage in stages], 0 if origin is None else origin.position)
        num_sources = len(stages[0].weights)
        self.origin = origin or StartingPoint(0, [0] * num_sources, [0] * num_sources)
        """The first position that has a row, and what later rows depend on."""
        self.end = END
        """The first position that has no row."""
        self.ended_by: int | None = None
        """The source whose cap ends the schedule; None if no single source does."""
        # No schedule reaches END, so this cap is no limit.
        self._caps = [END if cap is None else cap for cap in caps or [None] * num_sources]
        self._asked = list(stages)
        self._redistributes = exhausted == "redistribute"
        self._segments: list[_Segment] = []
        self._add_segments(stages, self.origin)
        if not self._redistributes:
            self._end_at_first_cap()

    def _add_segments(self, stages: Sequence[Stage], origin: StartingPoint) -> None:
        """Add the segments of `stages`, the first of which begins at `origin`."""
        start, counts = origin.position, np.array(origin.counts, dtype=np.int64)
        debts, begin = np.array(origin.debts, dtype=np.int64), None
        for stage, end in zip(stages, [*(stage.start for stage in stages[1:]), END], strict=True):
            exact, known = exact_weights(stage.weights), None
            while start < end:
                used_up = self._used_up(counts)
                # At the start of the stage, and where a source has reached its cap.
                if begin is None or used_up != known:
                    debts = debts if begin is None else begin.debts_at(start, counts)
                    weights = [0 if i in used_up else each for i, each in enumerate(stage.weights)]
                    present = [0 if i in used_up else each for i, each in enumerate(exact)]
                    # All sources with a weight are used up, so nothing can be read any more.
                    if not any(present):
                        self.end = start
                        return
                    debts, known = debts_of_present(debts, present), used_up
                    begin = Begin(start, weights, present, counts, debts)
                settles = start == begin.position and bool(debts.any())
                num_rows = min(end - start, num_table_rows(len(exact)) if settles else END)
                segment = _Segment(start, counts, begin, num_rows if settles else 0)
                self._segments.append(segment)
                num_rows = min(num_rows, self._rows_to_next_cap(segment))
                start += num_rows
                if start < END:
                    counts = counts + segment.mix.counts(num_rows)

    def _used_up(self, counts: Integers) -> set[int]:
        """Return the sources that have reached their caps; none if a cap ends the schedule."""
        if not self._redistributes:
            return set()
        rows = counts.tolist()
        return {i for i, cap in enumerate(self._caps) if cap <= rows[i]}

    def _rows_to_next_cap(self, segment: _Segment) -> int:
        """Return how many rows a segment has until the first source reaches its cap."""
        if not self._redistributes:
            return END
        # The exact position of a source's last row costs much more than a lower bound of it. So
        # sources are tried in the order of their bounds, until a bound is past the best found.
        mix, lasts = segment.mix, []  # (lower bound of its last row's position, source, last row)
        for source, (weight, cap) in enumerate(zip(mix.weights, self._caps, strict=True)):
            if weight and cap < END:
                last = cap - int(segment.counts[source]) - 1
                lasts.append((mix.not_before(source, last), source, last))
        nearest = END
        for earliest, source, last in sorted(lasts):
            if earliest > nearest:
                break
            position = mix.position(source, last)
            nearest = nearest if position is None else min(nearest, position + 1)
        return nearest

    def _end_at_first_cap(self) -> None:
        # Row number `cap` is the first one too many: rows are numbered from 0.
        for source, cap in enumerate(self._caps):
            position = self.position(source, cap)
            if position is not None and position < self.end:
                self.end, self.ended_by = position, source

    @property
    def stages(self) -> list[Stage]:
        """The stages that are used, including those that begin because a cap is reached."""
        begins = [each.begin for each in self._segments if each.start == each.begin.position]
        return [Stage(begin.position, begin.weights) for begin in begins]

    def changed(self, position: int, weights: Sequence[Weight]) -> "Schedule":
        """Return a schedule that is equal up to `position` and has other weights after it.

        Only for schedules without caps. Costs as much as one stage, however many there are.
        """
        return self.amended([Stage(position, weights)])

    def amended(
        self, stages: Sequence[Stage], caps: Sequence[int | None] | None = None
    ) -> "Schedule":
        """Return a schedule that is equal before the first of `stages`, and continues with them.

        The new stages may have more sources, whose rows are counted from 0. Earlier segments keep
        their number of sources: the size of a table depends on it.
        """
        position, kept = stages[0].start, _num_before(self._segments, stages[0].start)
        more = [0] * (len(stages[0].weights) - len(self._caps))
        earlier = self._asked[: _num_before(self._asked, position)]
        _, counts, debts = self.origin_at(position)
        changed = copy(self)
        changed.end, changed.ended_by = END, None
        asked_caps = caps or [*self._caps, *([None] * len(more))]
        changed._caps = [END if cap is None else cap for cap in asked_caps]
        changed._segments = self._segments[:kept]
        changed._asked = [*(Stage(at, [*each, *more]) for at, each in earlier), *stages]
        changed._add_segments(stages, StartingPoint(position, counts + more, debts + more))
        # The caches of the copy belong to the old segments: update one, drop the other.
        added = [segment.start for segment in changed._segments[kept:]]
        changed._starts = np.append(self._starts[:kept], np.array(added, np.int64))
        changed.__dict__.pop("_bases", None)
        if caps and not self._redistributes:
            changed._end_at_first_cap()
        return changed

    def origin_at(self, position: int) -> StartingPoint:
        """Return the starting point of a schedule that continues this one at `position`."""
        number = _num_before(self._segments, position) - 1
        if number < 0:
            counts, debts = self.origin.counts, self.origin.debts
            position = self.origin.position
        else:
            segment = self._segments[number]
            drawn = segment.counts + segment.mix.counts(position - segment.start)
            counts, debts = drawn.tolist(), segment.begin.debts_at(position, drawn).tolist()
        # Sources that joined later have no rows yet.
        more = [0] * (len(self._caps) - len(counts))
        return StartingPoint(position, counts + more, debts + more)

    def owed(self, num_rows: int) -> list[float]:
        """Return the debt of each source after `num_rows` rows, in rows."""
        return [debt / ONE_ROW for debt in self.origin_at(num_rows).debts]

    @cached_property
    def _starts(self) -> Integers:
        return np.array([segment.start for segment in self._segments], dtype=np.int64)

    @cached_property
    def _bases(self) -> Integers:
        """How many rows of each source come before each segment: (segments, sources)."""
        bases = np.zeros((len(self._segments), len(self._caps)), dtype=np.int64)
        for number, segment in enumerate(self._segments):
            bases[number, : len(segment.counts)] = segment.counts
        return bases

    def at(self, positions: npt.ArrayLike) -> tuple[Integers, Integers]:
        """Return the source at each of `positions`, and its ordinal among the source's rows."""
        numbers = as_unsigned(positions, self.end).view(np.int64)
        if self.origin.position and numbers.size and int(numbers.min()) < self.origin.position:
            raise self._forgotten(int(numbers.min()))
        # Constant weights, the usual case: no search and no copies.
        if len(self._segments) == 1 and not self.origin.position:
            return self._segments[0].mix.at(numbers)
        sources, ordinals = np.empty_like(numbers), np.empty_like(numbers)
        for number, rows in group_rows(np.searchsorted(self._starts, numbers, side="right") - 1):
            segment = self._segments[number]
            drawn, inside = segment.mix.at(numbers[rows] - segment.start)
            sources[rows], ordinals[rows] = drawn, inside + segment.counts[drawn]
        return sources, ordinals

    def position(self, source: int, ordinal: int) -> int | None:
        """Return the position of one row of a source: the inverse of `at`.

        None if the schedule ends before the row, or never draws it.
        """
        # The last segment that begins with at most `ordinal` rows of the source. A segment in
        # which the source has weight 0 begins with as many rows as the next one, so it is never
        # found.
        number = int(np.searchsorted(self._bases[:, source], ordinal, side="right")) - 1
        if number < 0:
            raise self._forgotten(self.origin.position - 1)
        segment = self._segments[number]
        inside = segment.mix.position(source, ordinal - int(segment.counts[source]))
        position = None if inside is None else inside + segment.start
        return position if position is not None and position < self.end else None

    def counts(self, num_rows: int) -> list[int]:
        """Return how many of the first `num_rows` rows belong to each source, in O(sources)."""
        if num_rows < self.origin.position:
            raise self._forgotten(num_rows)
        return self.origin_at(num_rows).counts

    def asked(self, num_rows: int) -> list[float]:
        """Return how many of the first `num_rows` rows the weights ask for, for each source.

        Caps are ignored.
        """
        ends = [stage.start for stage in self._asked[1:]] + [END]
        rows = [0.0] * len(self._caps)
        for (start, weights), end in zip(self._asked, ends, strict=True):
            length, exact = max(0, min(end, num_rows) - start), exact_weights(weights)
            total = sum(exact)
            rows = list(map(add, rows, [length * weight / total for weight in exact]))
        return rows

    def _forgotten(self, position: int) -> PlanError:
        return PlanError(
            f"Position {position:,} is before position {self.origin.position:,}, where this order "
            "was resumed. Its rows depend on earlier weights, which a state does not contain. Read "
            "this position in the run that set those weights, or pass all weights as schedule= "
            "from the start."
        )


def _num_before(items: Sequence[Stage] | Sequence[_Segment], position: int) -> int:
    """Return how many of `items` begin before a position."""
    return bisect_left(items, position, key=attrgetter("start"))
