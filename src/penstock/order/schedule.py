"""Weights that change on the way.

A schedule is a list of stages; each begins at a position and has weights. Inside a
stage positions are mixed as `Mix` does, from its first row on. A source's rows are
counted through all stages: where a stage ends, the next goes on with the row after.
The counts are derived from the weights, not stored in a run, so that no row is lost or
repeated at a change, wherever a run stopped or skipped to.

A source may be capped at a number of rows. Either the schedule ends at the position
that would take one more; or a new stage begins right after the last one, in which the
other sources share its weight. That position is computed by the inverse of the mix.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from operator import add
from typing import Literal, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from penstock.errors import PlanError
from penstock.order.integers import END, Indices, Integers, as_unsigned
from penstock.order.mix import Mix
from penstock.order.weights import Weight, exact_weights

__all__ = ["Exhausted", "Schedule", "Stage", "check_starts"]

AnyWeight = TypeVar("AnyWeight", int, Weight)
Exhausted = Literal["error", "redistribute"]


class Stage(NamedTuple):
    """From `start` on, rows are drawn by `weights`, one a source."""

    start: int
    weights: Sequence[Weight]


class Schedule:
    """Stages of weights: position → (source, ordinal), and back.

    Ordinals number the rows of a source from 0 in the order of positions, without
    gaps. Every prefix of every stage is within two rows of the stage's weights.
    Immutable; a call costs what `Mix` costs, and a search among the stages. Making one
    costs 3 µs a source for each stage and each cap that is reached.

    Args:
        stages: The first begins at 0, the others later and later.
        caps: The most rows of each source; None is any number.
        exhausted: Whether a reached cap ends the schedule or leaves the rest to the
            other sources.

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
    ) -> None:
        check_starts([stage.start for stage in stages])
        self.stages: list[Stage] = []
        """The stages in force, those that a reached cap began among them."""
        self.end = END
        """The first position that has no row."""
        self.ended_by: int | None = None
        """The source whose cap ends the schedule; None where no single one does."""
        self._mixes: list[Mix] = []
        self._counts: list[list[int]] = []  # rows of each source before each stage
        self._caps = caps if caps is not None else [None] * len(stages[0].weights)
        _check_caps(self._caps)
        self._asked = list(stages)
        self._redistributes = exhausted == "redistribute"
        self._build(stages)
        self._starts = np.array([stage.start for stage in self.stages], dtype=np.int64)
        self._bases = np.array(self._counts, dtype=np.int64)
        if not self._redistributes:
            self._end_at_first_cap()

    def _build(self, stages: Sequence[Stage]) -> None:
        ends = [stage.start for stage in stages[1:]] + [END]
        counts = [0] * len(stages[0].weights)
        for (start, weights), end in zip(stages, ends, strict=True):
            exact = exact_weights(weights)
            while start < end:
                used_up = [self._is_used_up(source, rows) for source, rows in enumerate(counts)]
                if not any(_without(exact, used_up)):
                    self.end = start
                    return
                mix = Mix(_without(exact, used_up))
                self.stages.append(Stage(start, _without(weights, used_up)))
                self._mixes.append(mix)
                self._counts.append(counts)
                stop = min(end, start + self._rows_to_next_cap(mix, counts))
                counts = list(map(add, counts, mix.counts(stop - start)))
                start = stop

    def _is_used_up(self, source: int, rows: int) -> bool:
        cap = self._caps[source]
        return self._redistributes and cap is not None and rows >= cap

    def _rows_to_next_cap(self, mix: Mix, counts: list[int]) -> int:
        """How many rows of a stage are drawn until one source has reached its cap."""
        if not self._redistributes:
            return END
        total = sum(mix.weights)
        lasts = []  # the earliest that the last row may come, the source, that row
        for source, (weight, cap) in enumerate(zip(mix.weights, self._caps, strict=True)):
            if weight and cap is not None:
                last = cap - counts[source] - 1
                # Row o is drawn within two rows of its share, so not before (o - 1) / share.
                lasts.append(((last - 1) * total // weight, source, last))
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

    def at(self, positions: npt.ArrayLike) -> tuple[Integers, Integers]:
        """The source at each of `positions`, and its ordinal among that source's rows."""
        numbers = as_unsigned(positions, self.end).view(np.int64)
        if len(self.stages) == 1:
            return self._mixes[0].at(numbers)
        sources, ordinals = np.empty_like(numbers), np.empty_like(numbers)
        stages = np.searchsorted(self._starts, numbers, side="right") - 1
        for stage, rows in _rows_of_each(stages):
            drawn, inside = self._mixes[stage].at(numbers[rows] - self._starts[stage])
            sources[rows], ordinals[rows] = drawn, inside + self._bases[stage][drawn]
        return sources, ordinals

    def positions(self, source: int, ordinals: npt.ArrayLike) -> Integers:
        """The positions of a source's rows: the inverse of `at`.

        Raises:
            PlanError: The schedule ends before one of the rows, or never draws it.
        """
        numbers = np.asarray(ordinals, dtype=np.int64)
        if numbers.size and self.position(source, int(numbers.max())) is None:
            raise PlanError(f"Source {source} has no row {int(numbers.max()):,} in this schedule.")
        positions = np.empty_like(numbers)
        stages = np.searchsorted(self._bases[:, source], numbers, side="right") - 1
        for stage, rows in _rows_of_each(stages):
            inside = numbers[rows] - self._bases[stage, source]
            positions[rows] = self._mixes[stage].positions(source, inside) + self._starts[stage]
        return positions

    def position(self, source: int, ordinal: int) -> int | None:
        """The position of one row of a source; None where the schedule has none."""
        # The last stage before which no more than `ordinal` rows were drawn: those in
        # which the source rests begin with as many as the one after them.
        stage = int(np.searchsorted(self._bases[:, source], ordinal, side="right")) - 1
        inside = self._mixes[stage].position(source, ordinal - int(self._bases[stage, source]))
        position = None if inside is None else inside + int(self._starts[stage])
        return position if position is not None and position < self.end else None

    def counts(self, num_rows: int) -> list[int]:
        """How many of the first `num_rows` rows belong to each source, in O(sources)."""
        if not 0 <= num_rows <= self.end:
            raise PlanError(f"{num_rows:,} rows are not in a schedule of {self.end:,}.")
        stage = int(np.searchsorted(self._starts, num_rows, side="right")) - 1
        inside = self._mixes[stage].counts(num_rows - int(self._starts[stage]))
        return list(map(add, self._counts[stage], inside))

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


def check_starts(starts: Sequence[int]) -> None:
    """Refuse stages that do not begin at 0 or do not follow each other."""
    if not starts or starts[0] != 0:
        first = f"{starts[0]:,}" if starts else "nowhere"
        raise PlanError(f"The first stage begins at {first}; positions before it need one at 0.")
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


def _without(weights: Sequence[AnyWeight], used_up: Sequence[bool]) -> list[AnyWeight | int]:
    return [0 if gone else weight for weight, gone in zip(weights, used_up, strict=True)]


def _rows_of_each(stages: Indices) -> Iterator[tuple[int, Indices | slice]]:
    """Each stage that occurs, with its rows."""
    if stages.size and (stages == stages[0]).all():
        yield int(stages[0]), slice(None)
        return
    for stage in np.unique(stages).tolist():
        yield stage, np.flatnonzero(stages == stage)
