"""One rank's share of each step.

A global batch is cut into as many equal slices as there are ranks; rank r reads the
r-th. So the ranks together read the order as one process would, and going from 8 ranks
to 16 changes who reads a position, not the step at which it is read. Every rank takes
every step: one with a step more than the others would hang the next all-reduce.
"""

import numpy as np

from penstock.errors import PlanError
from penstock.order.integers import Integers
from penstock.order.steps import Steps

__all__ = ["PADDING", "Shard", "rows_per_rank"]

PADDING = -1
"""Stands for a row past the end of a run, in a last batch that is filled up."""


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
