"""Weights that change on the way.

A schedule is a list of stages; each begins at a position and has weights. A source's rows
are counted through all stages: the next stage continues with the row after the last one.
The counts are derived from the weights, not stored in a run, so that no row is lost or
repeated at a change, wherever a run stopped or skipped to.

Rounding is carried from stage to stage. What a source is owed at the end of a stage (the
integral of its weight, less its rows) is where the next stage begins; see `debts` for the
arithmetic and `settle` for the rows. So the error does not grow with the number of stages.
The first stage begins without debts and is a plain `Mix`.

How far a source can be from the integral:

- In the first stage, and wherever nothing is owed: below 2 rows. `mix` has the proof.
- After the table of a later stage: below the bound that `phases` found for it, which was
  at most 1.68 rows in all random schedules.
- In a table: no method that does not know the next weights can promise less than
  1/2 + 1/3 + … + 1/n rows (3.1 for 32 sources, 6.5 for 1,000). Someone who always gives
  weight to exactly those sources that were not drawn yet makes them add up for the last
  one. A search for harmful weights found nothing worse than that.
- Random schedules stay within 2 rows, up to 1,000 sources and 10,000 stages: that, and the
  search, are in `tests/order/test_changing_weights.py`.

When the weight of a source becomes 0, what it is owed passes to the others, by weight, and
it comes back with no debt. The integral that counts is the one adjusted by that.

A source may be capped at a number of rows. Either the schedule ends at the position
that would take one more; or a new stage begins right after the last one, in which the
other sources share its weight. That position is computed by the inverse of the mix.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from copy import copy
from functools import cached_property
from itertools import pairwise
from operator import add
from typing import Literal, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from penstock.errors import PlanError
from penstock.order.integers import END, Indices, Integers, as_unsigned
from penstock.order.interleave import Mix
from penstock.order.settle import ONE_ROW, SettlingMix, debts_after, debts_of_present
from penstock.order.weights import Weight, exact_weights

__all__ = ["Exhausted", "Schedule", "Stage", "StartingPoint", "check_starts"]

AnyWeight = TypeVar("AnyWeight", int, Weight)
Exhausted = Literal["error", "redistribute"]


class Stage(NamedTuple):
    """From `start` on, rows are drawn by `weights`, one a source."""

    start: int
    weights: Sequence[Weight]


class StartingPoint(NamedTuple):
    """What happened before a position, as far as later rows depend on it."""

    position: int
    counts: list[int]
    """The rows of each source before the position."""
    debts: list[int]
    """What each source is owed there, in units of 2^-40 row."""


class _Segment(NamedTuple):
    """The rows of a stage, or of a part of it that a reached cap began or ended."""

    start: int
    weights: Sequence[Weight]
    counts: Integers
    """The rows of each source before it."""
    debts: Integers
    mix: Mix | SettlingMix


class Schedule:
    """Stages of weights: position → (source, ordinal), and back.

    Ordinals number the rows of a source from 0 in the order of positions, without
    gaps. Immutable; a call costs what `Mix` costs, and a search among the stages. A stage
    costs 10 µs a source to make, or 2 µs where it ends within its table.

    Args:
        stages: The first begins at 0 or at the origin, the others later and later.
        caps: The most rows of each source; None is any number.
        exhausted: Whether a reached cap ends the schedule or leaves the rest to the
            other sources.
        origin: Where the first stage begins, if not at 0. Positions before it have no answer.

    >>> schedule = Schedule([Stage(0, [1, 0]), Stage(4, [1, 1])])
    >>> schedule.at(range(8))
    (array([0, 0, 0, 0, 0, 1, 0, 1]), array([0, 1, 2, 3, 4, 0, 5, 1]))
    >>> schedule.positions(0, [3, 4, 5])
    array([3, 4, 6])
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
        """The first position that has a row, and what came before."""
        self.end = END
        """The first position that has no row."""
        self.ended_by: int | None = None
        """The source whose cap ends the schedule; None where no single one does."""
        self._caps = caps if caps is not None else [None] * num_sources
        _check_caps(self._caps)
        self._asked = list(stages)
        self._redistributes = exhausted == "redistribute"
        self._segments: list[_Segment] = []
        self._add_segments(stages, self.origin)
        if not self._redistributes:
            self._end_at_first_cap()

    def _add_segments(self, stages: Sequence[Stage], origin: StartingPoint) -> None:
        """Add the segments of `stages`, the first of which begins at `origin`."""
        start, counts = origin.position, np.array(origin.counts, dtype=np.int64)
        debts = np.array(origin.debts, dtype=np.int64)
        for stage, end in zip(stages, [*(stage.start for stage in stages[1:]), END], strict=True):
            exact = exact_weights(stage.weights)
            while start < end:
                used_up = self._used_up(counts)
                present = _without(exact, used_up)
                if not any(present):
                    self.end = start
                    return
                debts = debts_of_present(debts, present)
                mix = SettlingMix(present, debts, end - start) if debts.any() else Mix(present)
                weights = _without(stage.weights, used_up)
                self._segments.append(_Segment(start, weights, counts, debts, mix))
                num_rows = min(end - start, self._rows_to_next_cap(mix, counts))
                start += num_rows
                if start < END:
                    drawn = mix.counts(num_rows)
                    counts, debts = counts + drawn, debts_after(debts, present, num_rows, drawn)

    def _used_up(self, counts: Integers) -> list[bool]:
        """Whether each source has reached its cap; nothing where that is not asked."""
        if not self._redistributes:
            return []
        caps = zip(self._caps, counts.tolist(), strict=True)
        return [cap is not None and cap <= rows for cap, rows in caps]

    def _rows_to_next_cap(self, mix: Mix | SettlingMix, counts: Integers) -> int:
        """How many rows of a stage are drawn until one source has reached its cap."""
        if not self._redistributes:
            return END
        lasts = []  # the earliest that the last row may come, the source, that row
        for source, (weight, cap) in enumerate(zip(mix.weights, self._caps, strict=True)):
            if weight and cap is not None:
                last = cap - int(counts[source]) - 1
                lasts.append((mix.not_before(source, last), source, last))
        nearest = END
        for earliest, source, last in sorted(lasts):
            if earliest > nearest:
                break
            position = mix.position(source, last)
            nearest = nearest if position is None else min(nearest, position + 1)
        return nearest

    def _end_at_first_cap(self) -> None:
        for source, cap in enumerate(self._caps):
            position = None if cap is None else self.position(source, cap)
            if position is not None and position < self.end:
                self.end, self.ended_by = position, source

    @property
    def stages(self) -> list[Stage]:
        """The stages in force, those that a reached cap began among them."""
        return [Stage(segment.start, segment.weights) for segment in self._segments]

    def changed(self, position: int, weights: Sequence[Weight]) -> "Schedule":
        """The same up to `position`, and other weights from there on; for one without caps.

        Costs what one stage costs, however many there are.
        """
        kept = self._num_before(position)
        changed = copy(self)
        changed._segments = self._segments[:kept]
        changed._asked = [*self._asked[:kept], Stage(position, weights)]
        changed._add_segments(changed._asked[-1:], self.origin_at(position))
        changed._starts = np.append(self._starts[:kept], position)
        changed.__dict__.pop("_bases", None)
        return changed

    def origin_at(self, position: int) -> StartingPoint:
        """What a schedule that continues this one at `position` needs to know of it."""
        number = self._num_before(position) - 1
        if number < 0:
            return self.origin
        start, _, counts, debts, mix = self._segments[number]
        drawn = mix.counts(position - start)
        owed = debts_after(debts, mix.weights, position - start, drawn)
        return StartingPoint(position, (counts + drawn).tolist(), owed.tolist())

    def owed(self, num_rows: int) -> list[float]:
        """What each source is owed after `num_rows` rows: the integral of weights, less its rows.

        The integral is adjusted where a weight became 0; see the module.
        """
        return [debt / ONE_ROW for debt in self.origin_at(num_rows).debts]

    def _num_before(self, position: int) -> int:
        """How many segments begin before a position."""
        return bisect_left(self._segments, position, key=lambda segment: segment.start)

    @cached_property
    def _starts(self) -> Integers:
        return np.array([segment.start for segment in self._segments], dtype=np.int64)

    @cached_property
    def _bases(self) -> Integers:
        """The rows of each source before each segment."""
        return np.array([segment.counts for segment in self._segments])

    def at(self, positions: npt.ArrayLike) -> tuple[Integers, Integers]:
        """The source at each of `positions`, and its ordinal among that source's rows."""
        numbers = as_unsigned(positions, self.end).view(np.int64)
        if self.origin.position and numbers.size and int(numbers.min()) < self.origin.position:
            raise self._forgotten(int(numbers.min()))
        if len(self._segments) == 1 and not self.origin.position:
            return self._segments[0].mix.at(numbers)
        sources, ordinals = np.empty_like(numbers), np.empty_like(numbers)
        numbers_of_segments = np.searchsorted(self._starts, numbers, side="right") - 1
        for number, rows in _rows_of_each(numbers_of_segments):
            start, _, counts, _, mix = self._segments[number]
            drawn, inside = mix.at(numbers[rows] - start)
            sources[rows], ordinals[rows] = drawn, inside + counts[drawn]
        return sources, ordinals

    def positions(self, source: int, ordinals: npt.ArrayLike) -> Integers:
        """The positions of a source's rows: the inverse of `at`.

        Raises:
            PlanError: The schedule ends before one of the rows, or never draws it.
        """
        numbers = np.asarray(ordinals, dtype=np.int64)
        if numbers.size and self.position(source, int(numbers.max())) is None:
            raise PlanError(f"Source {source} has no row {int(numbers.max()):,} in this schedule.")
        if numbers.size and int(numbers.min()) < self.origin.counts[source]:
            raise self._forgotten(self.origin.position - 1)
        positions = np.empty_like(numbers)
        of_rows = np.searchsorted(self._bases[:, source], numbers, side="right") - 1
        for number, rows in _rows_of_each(of_rows):
            start, _, counts, _, mix = self._segments[number]
            positions[rows] = mix.positions(source, numbers[rows] - counts[source]) + start
        return positions

    def position(self, source: int, ordinal: int) -> int | None:
        """The position of one row of a source; None where the schedule has none."""
        # The last segment before which no more than `ordinal` rows were drawn: those in
        # which the source rests begin with as many as the one after them.
        number = int(np.searchsorted(self._bases[:, source], ordinal, side="right")) - 1
        if number < 0:
            raise self._forgotten(self.origin.position - 1)
        segment = self._segments[number]
        inside = segment.mix.position(source, ordinal - int(segment.counts[source]))
        position = None if inside is None else inside + segment.start
        return position if position is not None and position < self.end else None

    def counts(self, num_rows: int) -> list[int]:
        """How many of the first `num_rows` rows belong to each source, in O(sources)."""
        if not 0 <= num_rows <= self.end:
            raise PlanError(f"{num_rows:,} rows are not in a schedule of {self.end:,}.")
        if num_rows < self.origin.position:
            raise self._forgotten(num_rows)
        return self.origin_at(num_rows).counts

    def asked(self, num_rows: int) -> list[float]:
        """How many of the first `num_rows` rows each source would have by weight alone.

        By the weights that were asked, whatever caps made of them.
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
            f"Position {position:,} is before {self.origin.position:,}, where this order was "
            "resumed. Its rows depend on weights that changed earlier, and a state holds only "
            "what later rows need. Ask the run that set those weights, or give all weights as a "
            "schedule from the start."
        )


def check_starts(starts: Sequence[int], origin: int = 0) -> None:
    """Refuse stages that do not begin at the origin or do not follow each other."""
    if not starts or starts[0] != origin:
        first = f"{starts[0]:,}" if starts else "nowhere"
        raise PlanError(
            f"The first stage begins at {first}; positions before it need one at {origin:,}."
        )
    for before, start in pairwise(starts):
        if not before < start < END:
            raise PlanError(
                f"A stage that begins at {start:,} cannot follow one that begins at {before:,}; "
                "each begins later than the one before it, and below 2^62."
            )


def _check_caps(caps: Sequence[int | None]) -> None:
    for source, cap in enumerate(caps):
        if cap is not None and cap < 1:
            raise PlanError(
                f"Source {source} is capped at {cap:,} rows, so it is never drawn. Give it "
                "weight 0."
            )


def _without(weights: Sequence[AnyWeight], used_up: Sequence[bool]) -> Sequence[AnyWeight | int]:
    if not any(used_up):
        return weights
    return [0 if gone else weight for weight, gone in zip(weights, used_up, strict=True)]


def _rows_of_each(numbers: Indices) -> Iterator[tuple[int, Indices | slice]]:
    """Each segment that occurs, with its rows."""
    if not numbers.size:
        return
    if (numbers == numbers[0]).all():
        yield int(numbers[0]), slice(None)
        return
    order = np.argsort(numbers, kind="stable")
    grouped = numbers[order]
    borders = np.flatnonzero(grouped[1:] != grouped[:-1]) + 1
    for rows in np.split(order, borders):
        yield int(numbers[rows[0]]), rows
