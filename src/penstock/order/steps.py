"""Steps of a run, the positions they read, and each rank's share of them.

A step reads one global batch: the next rows of the order, on all ranks together. If the batch
size changes during the run (a ramp), a step has the size that is valid at the position where
it begins. So the first step of the new size may begin up to one batch later than the position of
the change, and no step is cut. The sequence of rows does not depend on batch sizes.

    position   0   4   8   12      20      28        sizes {0: 4, 10: 8}
    step       | 0 | 1 | 2 |   3   |   4   |
    rank 0     |--  --  --  ----    ----             the first half of every step
    rank 1     |  --  --  --    ----    ----         the second half

A global batch is cut into equal slices, one per rank: rank r reads slice r. So resuming on 16
ranks instead of 8 changes which rank reads a position, but not the step that reads it. All ranks
take the same number of steps: a rank with one step more would wait for the others forever in
its next all-reduce.
"""

from collections.abc import Mapping

import numpy as np

from penstock.errors import PlanError
from penstock.order.integers import END, Integers
from penstock.ranges import ranges

PADDING = -1
"""The position of padding rows, which fill up an incomplete batch."""


class Steps:
    """Maps steps to positions and back, for a global batch size that may change by position.

    Args:
        batch_rows: Rows in a global batch; or a mapping from positions to the size that is
            valid from there on. It must contain position 0.
        start: The position at which step 0 begins. A run that resumes with another batch size
            counts its steps from the position at which it resumes.

    >>> steps = Steps({0: 4, 10: 8})
    >>> [steps.span(step) for step in range(4)]
    [(0, 4), (4, 8), (8, 12), (12, 20)]
    >>> steps.at(11), steps.at(12)
    (2, 3)
    """

    def __init__(self, batch_rows: int | Mapping[int, int], *, start: int = 0) -> None:
        sizes = batch_rows if isinstance(batch_rows, Mapping) else {0: batch_rows}
        if not 0 <= start < END:
            raise PlanError(f"A run must start at a position from 0 to 2^62 - 1; got {start:,}.")
        if 0 not in sizes:
            raise PlanError(
                f"global_batch_size={dict(sizes)} has no size for position 0. Add one, for "
                "example {0: 8, …}."
            )
        for position, rows in sizes.items():
            if not 1 <= rows <= 2**40:
                raise PlanError(
                    f"A batch cannot have {rows:,} rows on all ranks together. Use a batch_size or "
                    "global_batch_size from 1 to 2^40."
                )
            if not 0 <= position < END:
                raise PlanError(
                    f"global_batch_size has a size for position {position:,}; positions are 0 to "
                    "2^62 - 1."
                )
        self.start = start
        # Of each stage: its first step, where that step begins, and its batch size.
        stages = [(0, start, sizes[0])]
        for position, rows in sorted(sizes.items())[1:]:
            step, begin, last_rows = stages[-1]
            # Rounded up: the step that contains `position` still has the old size.
            num_steps = max(0, -((begin - position) // last_rows))
            if num_steps == 0:  # no step begins while the last size is valid
                stages.pop()
            stages.append((step + num_steps, begin + num_steps * last_rows, rows))
        self._steps, self._starts, self._rows = np.array(stages, dtype=np.int64).T
        self.sizes: tuple[int, ...] = tuple(self._rows.tolist())
        """The batch sizes that occur, in order."""

    def span(self, step: int) -> tuple[int, int]:
        """Return the first position of a step, and the position after its last."""
        starts, rows = self.spans(step, step + 1)
        return int(starts[0]), int(starts[0] + rows[0])

    def spans(self, first: int, stop: int) -> tuple[Integers, Integers]:
        """Return the first position and the number of rows of each step in [first, stop)."""
        if not 0 <= first <= stop:
            raise PlanError(f"There are no steps from {first:,} to {stop:,}; steps begin at 0.")
        # The stage of a step is the last one that begins at or before it.
        steps = np.arange(first, stop, dtype=np.int64)
        stages = np.searchsorted(self._steps, steps, side="right") - 1
        rows = self._rows[stages]
        starts = self._starts[stages] + (steps - self._steps[stages]) * rows
        if len(starts) and int(starts[-1]) + int(rows[-1]) > END:
            raise PlanError(
                f"Step {stop - 1:,} would read past position {END:,} (2^62), where orders end."
            )
        return starts, rows

    def at(self, position: int) -> int:
        """Return the step that reads a position."""
        if not self.start <= position < END:
            raise PlanError(
                f"No step reads position {position:,}: the steps begin at position "
                f"{self.start:,} and end at 2^62."
            )
        stage = int(np.searchsorted(self._starts, position, side="right")) - 1
        inside = (position - int(self._starts[stage])) // int(self._rows[stage])
        return int(self._steps[stage]) + inside

    def count(self, end: int, *, drop_last: bool) -> int:
        """Return the number of steps of a run, on every rank.

        Args:
            end: The position after the last row of the run.
            drop_last: Whether an incomplete last batch is left out. Otherwise it is filled up.

        >>> Steps(4).count(10, drop_last=True), Steps(4).count(10, drop_last=False)
        (2, 3)
        """
        if end <= self.start:
            return 0
        last = self.at(end - 1)
        return last + (self.span(last)[1] <= end or not drop_last)


def shorter_steps(num_rows: int, batch_rows: int, world_size: int) -> tuple[int, ...]:
    """Return the rows of the last steps that are not full, if `num_rows` rows are read once.

    Every rank needs a row in every step: a rank without one has no loss, or blocks the others. If
    fewer rows than ranks are left, the step before leaves one more for each rank. That is
    impossible with one row a step on each rank, or without a full step; then there are none.

    >>> shorter_steps(10, 4, world_size=1), shorter_steps(17, 8, world_size=4)
    ((2,), (5, 4))
    >>> shorter_steps(5, 2, world_size=2)
    ()
    """
    full, rest = divmod(num_rows, batch_rows)
    if rest >= world_size:
        return (rest,)
    if not rest or not full or batch_rows == world_size:
        return ()
    return (batch_rows + rest - world_size, world_size)


def rows_per_rank(global_batch_rows: int, world_size: int) -> int:
    """Return how many rows of a global batch each rank reads.

    >>> rows_per_rank(512, world_size=8)
    64
    """
    rows, left_over = divmod(global_batch_rows, world_size)
    if left_over:
        below = f"{rows * world_size:,} or " if rows else ""
        raise PlanError(
            f"A global batch of {global_batch_rows:,} rows cannot be divided equally over "
            f"{world_size:,} ranks: {left_over:,} row{'s' * (left_over > 1)} would be left over in "
            f"every step. Use global_batch_size={below}{(rows + 1) * world_size:,}."
        )
    return rows


class Shard:
    """The positions that one rank reads in each step.

    Every rank reads equally many rows of a step. `world_size` must divide the batch sizes of
    `Steps`.

    Args:
        steps: The steps of the run.
        rank: From 0 to `world_size` - 1.
        world_size: The number of ranks.

    >>> Shard(Steps(6), rank=1, world_size=2).positions(0, 2)
    array([ 3,  4,  5,  9, 10, 11])
    """

    def __init__(self, steps: Steps, *, rank: int = 0, world_size: int = 1) -> None:
        if world_size < 1 or not 0 <= rank < world_size:
            raise PlanError(
                f"rank must be from 0 to world_size - 1; got rank={rank:,} and "
                f"world_size={world_size:,}."
            )
        for size in steps.sizes:
            rows_per_rank(size, world_size)
        self.steps = steps
        self.rank = rank
        self.world_size = world_size

    def rows(self, first: int, stop: int) -> Integers:
        """Return how many rows this rank reads in each step in [first, stop)."""
        return self.steps.spans(first, stop)[1] // self.world_size

    def positions(self, first: int, stop: int, *, end: int | None = None) -> Integers:
        """Return the positions that this rank reads in the steps [first, stop), concatenated.

        Rows that only fill up a batch have the position `PADDING`.

        Args:
            first: The first step.
            stop: The step after the last one.
            end: The end of the run: positions from there on are replaced by `PADDING`.

        >>> Shard(Steps(4), rank=1, world_size=2).positions(1, 3, end=11)
        array([ 6,  7, 10, -1])
        """
        starts, rows = self.steps.spans(first, stop)
        shares = rows // self.world_size
        # For rank 1 of 2 and the steps (4, 8) and (8, 12): shares 2 2, positions 6 7 | 10 11.
        positions = ranges(starts + self.rank * shares, shares)
        stops = starts + rows if end is None else np.minimum(starts + rows, end)
        # Full steps, the usual case, have no row to replace.
        if (stops - starts < shares * self.world_size).any():
            positions[positions >= np.repeat(stops, shares)] = PADDING
        return positions
