"""Steps of a run and the positions they read.

A step reads one global batch: the next so many rows of the order, whoever reads them.
Where its size changes on the way (a ramp), the size of a step is the one in force at the
position where the step begins; so a step is never cut, and the first step of the new size
may begin up to one batch after the position asked for. The sequence of rows is the same
for every sequence of sizes.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from penstock.errors import PlanError
from penstock.order.integers import END, Integers

__all__ = ["PADDING", "Shard", "Steps", "rows_per_rank"]

PADDING = -1
"""Stands for a row past the end of a run, in a last batch that is filled up."""


@dataclass(frozen=True, slots=True)
class _Stage:
    step: int  # the first step of this size
    start: int  # where it begins
    rows: int  # the size


class Steps:
    """Step ↔ positions, for a global batch size that may change by position.

    Args:
        batch_rows: The rows of a global batch; or sizes by the position from which each
            is in force, the first at 0.
        start: The position at which step 0 begins. A run that resumes with another batch
            size counts its steps from where it is.

    >>> steps = Steps({0: 4, 10: 8})
    >>> [steps.span(step) for step in range(4)]
    [(0, 4), (4, 8), (8, 12), (12, 20)]
    >>> steps.at(11), steps.at(12)
    (2, 3)
    """

    def __init__(self, batch_rows: int | Mapping[int, int], *, start: int = 0) -> None:
        sizes = batch_rows if isinstance(batch_rows, Mapping) else {0: batch_rows}
        self._check(sizes, start)
        self.start = start
        self._stages = self._lay_stages(sorted(sizes.items()), start)
        self._steps = np.array([stage.step for stage in self._stages], dtype=np.int64)
        self._starts = np.array([stage.start for stage in self._stages], dtype=np.int64)
        self._rows = np.array([stage.rows for stage in self._stages], dtype=np.int64)

    @staticmethod
    def _check(sizes: Mapping[int, int], start: int) -> None:
        if not 0 <= start < END:
            raise PlanError(f"A run cannot start at position {start:,}; it is 0 to 2^62 - 1.")
        if 0 not in sizes:
            raise PlanError(
                "The batch size has no value for position 0; the first of "
                f"{len(sizes):,} is for {min(sizes, default=0):,}. Add the one to begin with."
            )
        for position, rows in sizes.items():
            if not 0 <= position < END or not 1 <= rows <= 2**40:
                raise PlanError(
                    f"A batch of {rows:,} rows from position {position:,} on cannot be; a batch "
                    "has at least 1 row, and positions are 0 to 2^62 - 1."
                )

    @staticmethod
    def _lay_stages(sizes: list[tuple[int, int]], start: int) -> list[_Stage]:
        stages = [_Stage(0, start, sizes[0][1])]
        for position, rows in sizes[1:]:
            last = stages[-1]
            steps = max(0, -((last.start - position) // last.rows))
            if steps == 0:  # a size that no step begins with
                stages.pop()
            stages.append(_Stage(last.step + steps, last.start + steps * last.rows, rows))
        return stages

    @property
    def sizes(self) -> tuple[int, ...]:
        """The batch sizes that occur, in order."""
        return tuple(stage.rows for stage in self._stages)

    def span(self, step: int) -> tuple[int, int]:
        """The positions of a step: the first, and the one after the last."""
        starts, rows = self.spans(step, step + 1)
        return int(starts[0]), int(starts[0] + rows[0])

    def spans(self, first: int, stop: int) -> tuple[Integers, Integers]:
        """Where each of the steps from `first` to before `stop` begins, and its rows."""
        if not 0 <= first <= stop:
            raise PlanError(f"There are no steps from {first:,} to {stop:,}; steps begin at 0.")
        steps = np.arange(first, stop, dtype=np.int64)
        stages = np.searchsorted(self._steps, steps, side="right") - 1
        rows = self._rows[stages]
        starts = self._starts[stages] + (steps - self._steps[stages]) * rows
        if len(starts) and int(starts[-1]) + int(rows[-1]) > END:
            raise PlanError(
                f"Step {stop - 1:,} is past position {END:,} (2^62), the last there is."
            )
        return starts, rows

    def at(self, position: int) -> int:
        """The step that reads a position."""
        if not self.start <= position < END:
            raise PlanError(f"No step of a run from {self.start:,} reads position {position:,}.")
        stage = self._stages[int(np.searchsorted(self._starts, position, side="right")) - 1]
        return stage.step + (position - stage.start) // stage.rows

    def count(self, end: int, *, drop_last: bool) -> int:
        """How many steps a run takes that ends before position `end`, on every rank.

        Args:
            end: The position after the last row of the run.
            drop_last: Whether a last batch that is not full is left out, or filled up.

        >>> Steps(4).count(10, drop_last=True), Steps(4).count(10, drop_last=False)
        (2, 3)
        """
        if end <= self.start:
            return 0
        last = self.at(end - 1)
        return last + (self.span(last)[1] <= end or not drop_last)


def rows_per_rank(global_batch_rows: int, world_size: int) -> int:
    """The rows of a global batch that each rank reads.

    >>> rows_per_rank(512, world_size=8)
    64
    """
    rows, left_over = divmod(global_batch_rows, world_size)
    if left_over:
        nearest = [size * world_size for size in (rows, rows + 1) if size]
        sizes = f"sizes that divide are {nearest[0]:,} and {nearest[-1]:,}"
        if len(nearest) == 1:
            sizes = f"size that divides is {nearest[0]:,}"
        raise PlanError(
            f"a global batch of {global_batch_rows:,} rows does not divide over {world_size:,} "
            f"ranks; {left_over:,} row{'s' * (left_over > 1)} would be left over at every step. "
            f"The nearest {sizes}."
        )
    return rows


class Shard:
    """The positions that one rank reads, step by step.

    Args:
        steps: The steps of the run; every batch size must divide by `world_size`.
        rank: From 0 to `world_size` - 1.

    >>> Shard(Steps(6), rank=1, world_size=2).positions(0, 2)
    array([ 3,  4,  5,  9, 10, 11])
    """

    def __init__(self, steps: Steps, *, rank: int = 0, world_size: int = 1) -> None:
        if world_size < 1 or not 0 <= rank < world_size:
            raise PlanError(
                f"Rank {rank:,} of {world_size:,} cannot be; ranks are 0 to world_size - 1."
            )
        for size in steps.sizes:
            rows_per_rank(size, world_size)
        self.steps = steps
        self.rank = rank
        self.world_size = world_size

    def rows(self, first: int, stop: int) -> Integers:
        """How many rows this rank reads in each of the steps from `first` to before `stop`."""
        return self.steps.spans(first, stop)[1] // self.world_size

    def positions(self, first: int, stop: int, *, end: int | None = None) -> Integers:
        """The positions this rank reads in those steps, one step after the other.

        Args:
            first: The first step.
            stop: The step after the last one.
            end: Where the run ends: positions from there on are `PADDING`.

        >>> Shard(Steps(4), rank=1, world_size=2).positions(1, 3, end=11)
        array([ 6,  7, 10, -1])
        """
        starts, rows = self.steps.spans(first, stop)
        shares = rows // self.world_size
        first_rows = np.cumsum(shares) - shares  # of each step, in the result
        shifts = starts + self.rank * shares - first_rows
        positions = np.arange(int(shares.sum()), dtype=np.int64)
        positions += np.repeat(shifts, shares)
        if end is not None and len(starts) and int(starts[-1] + rows[-1]) > end:
            positions[positions >= end] = PADDING
        return positions
