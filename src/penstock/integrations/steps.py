"""Training steps over an epoch's rows, so that each row comes once, on any number of ranks.

    10 rows, 4 a step     |0 1 2 3|4 5 6 7|8 9||10 11 12 13|…      positions; || ends an epoch
    the last step         is smaller; with drop_last=True it is left out

A step never reaches into the next epoch: the first rows of that epoch may be the same rows. On
several ranks every rank needs a row in every step, because a rank without a row has no loss, or
blocks the others. So if fewer rows than ranks would be left for the last step, the step before it
leaves one row more for each rank:

    17 rows, 8 a step on 4 ranks     8 + 5 + 4, not 8 + 8 + 1

With one row a step on each rank that is impossible, and fewer rows than ranks are left out of
the epoch; they are other rows in every epoch.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from penstock.errors import PlanError

__all__ = ["EpochCuts", "EqualSteps", "RankSpan", "evaluation_cuts"]


@dataclass(frozen=True, slots=True)
class EpochCuts:
    """The arithmetic of positions and the steps of epochs.

    Args:
        epoch_rows: The rows of an epoch; None as long as that is not known.
        global_batch: The rows of a full step on all ranks, a multiple of `world_size`.
        world_size: The number of ranks.
        drop_last: Whether to leave out a last step that is not full.

    >>> cuts = EpochCuts(epoch_rows=17, global_batch=8, world_size=4)
    >>> [cuts.after(0, steps) for steps in range(6)]
    [0, 8, 13, 17, 25, 30]
    """

    epoch_rows: int | None
    global_batch: int
    world_size: int = 1
    drop_last: bool = False

    def begin(self, position: int) -> int:
        """The position of the next step: `position`, or the next epoch if no step is left."""
        if self.epoch_rows is None or self.rows(position):
            return position
        return (position // self.epoch_rows + 1) * self.epoch_rows

    def rows(self, position: int) -> int:
        """The rows of the step that begins at a position; 0 if its epoch has no step left."""
        batch, ranks = self.global_batch, self.world_size
        if self.epoch_rows is None:
            return batch
        left = self.epoch_rows - position % self.epoch_rows
        if left < batch:  # the last step
            return 0 if self.drop_last or left < ranks else left
        # A full step, unless it would leave some rows, but not one for each rank. With one row
        # a step on each rank, a smaller step is impossible.
        if self.drop_last or batch == ranks or not 0 < left - batch < ranks:
            return batch
        return left - ranks

    def num_steps(self, left: int) -> int:
        """The number of steps for the last `left` rows of an epoch.

        >>> EpochCuts(10, 4).num_steps(10), EpochCuts(10, 4, drop_last=True).num_steps(10)
        (3, 2)
        """
        steps, rest = divmod(left, self.global_batch)
        if self.drop_last or not rest:
            return steps
        # Fewer rows than ranks make no step, unless an earlier step can leave some of its rows.
        if rest < self.world_size and (not steps or self.global_batch == self.world_size):
            return steps
        return steps + 1

    def num_alike(self, position: int) -> int:
        """A number of steps from a position on that certainly have as many rows as the first."""
        if self.epoch_rows is None:
            return 1
        left = self.epoch_rows - position % self.epoch_rows
        # The last two steps of an epoch may be smaller.
        return max(1, self.num_steps(left) - 2)

    def after(self, position: int, steps: int) -> int:
        """The position after some steps; after the last step of an epoch, the epoch's end."""
        if self.epoch_rows is None:
            return position + steps * self.global_batch
        position = self.begin(position)
        here = self.num_steps(self.epoch_rows - position % self.epoch_rows)
        if steps >= here:
            position = (position // self.epoch_rows + 1) * self.epoch_rows
            # The rest of this epoch, then whole epochs, then some steps of the last one.
            epochs, steps = divmod(steps - here, self.num_steps(self.epoch_rows))
            position += epochs * self.epoch_rows
            here = self.num_steps(self.epoch_rows)
        # All steps of an epoch are full, except for the last two.
        full = min(steps, max(0, here - 2))
        position += full * self.global_batch
        for _ in range(steps - full):
            position += self.rows(position)
        return position

    def step_at(self, position: int) -> int | None:
        """The number, in its epoch, of the step that begins at a position; None if none does."""
        if self.epoch_rows is None:
            step, rest = divmod(position, self.global_batch)
            return None if rest else step
        inside = position % self.epoch_rows
        # The steps before the position are all steps but those of the rows after it. If a step
        # of this size begins here, counting that many steps leads back here.
        step = self.num_steps(self.epoch_rows) - self.num_steps(self.epoch_rows - inside)
        start = position - inside
        found = start if step == 0 else self.after(start, step)
        return step if found == position else None

    def share(self, position: int, rows: int, rank: int) -> tuple[int, int, int]:
        """The positions of one rank in a step: the first, the one after the last, and a size.

        The size is that of the largest share. A rank with a row fewer fills its batch up, so that
        batches have one shape on all ranks.
        """
        # 5 rows on 4 ranks: 0, 1, 2, 3 and 5 are the borders, so the last rank has 2 rows.
        first, stop = (rows * each // self.world_size for each in (rank, rank + 1))
        return position + first, position + stop, -(-rows // self.world_size)


class RankSpan(NamedTuple):
    """The positions of one batch on this rank."""

    first: int
    stop: int
    size: int
    """Rows of the batch. Rows after the last position have no labels: they only fill it up."""
    step: tuple[int, int]
    """The positions of the step on all ranks."""


class EqualSteps(NamedTuple):
    """Consecutive steps with the same number of rows, on all ranks together."""

    epoch: int
    position: int
    """The position of the first step."""
    rows: int
    """The rows of each step."""
    number: int


def evaluation_cuts(
    num_rows: int, batch_size: int, *, rank: int, world_size: int
) -> list[tuple[int, int]]:
    """The batches of one rank as ranges of rows: none empty, and as many as on every rank.

    >>> [evaluation_cuts(9, 4, rank=rank, world_size=2) for rank in (0, 1)]
    [[(0, 3), (3, 4)], [(4, 8), (8, 9)]]
    >>> evaluation_cuts(9, 4, rank=0, world_size=1)
    [(0, 4), (4, 8), (8, 9)]
    """
    if num_rows < world_size:
        raise PlanError(
            f"{num_rows:,} rows cannot be evaluated on {world_size:,} devices: some would have "
            "no row, and so no loss. Use fewer devices, or more text."
        )
    first, stop = (num_rows * each // world_size for each in (rank, rank + 1))
    # As many steps as the largest share needs, but at most one for each row of the smallest.
    largest = -(-num_rows // world_size)
    steps = min(-(-largest // batch_size), num_rows // world_size)
    share = stop - first
    # A step may not take rows that later steps need to have one each.
    edges = [min(step * batch_size, share - (steps - step)) for step in range(steps)] + [share]
    return [(first + low, first + high) for low, high in pairwise(edges)]
