"""How the rows of an epoch are cut into training steps, so that each comes once.

    10 rows, 4 a step     |0 1 2 3|4 5 6 7|8 9||10 11 12 13|…      positions; || ends an epoch
    the last step         smaller, or with drop_last=True left out

A step never reaches into the next epoch: rows that come early there could be the same ones. On
several ranks every rank needs a row in every step, because one without a row has no loss, or
hangs the others. So where fewer rows than ranks would be left for the last step, the step before
it leaves one row more for each rank:

    17 rows, 8 a step on 4 ranks     8 + 5 + 4, not 8 + 8 + 1

With one row a step on each rank that is impossible, and fewer rows than ranks are left out of
the epoch; they are other rows in every epoch.
"""

from dataclasses import dataclass

__all__ = ["EpochCuts"]


@dataclass(frozen=True, slots=True)
class EpochCuts:
    """Positions ↔ steps of epochs.

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
        """The position of the next step: this one, or where no step is left, the next epoch's."""
        if self.epoch_rows is None or self.rows(position):
            return position
        return (position // self.epoch_rows + 1) * self.epoch_rows

    def rows(self, position: int) -> int:
        """The rows of the step that begins at a position; 0 where its epoch has no step left."""
        batch, ranks = self.global_batch, self.world_size
        if self.epoch_rows is None:
            return batch
        left = self.epoch_rows - position % self.epoch_rows
        if left < batch:
            return 0 if self.drop_last or left < ranks else left
        # After a full step there are rows for all ranks or for none; or nothing helps.
        if self.drop_last or batch == ranks or not 0 < left - batch < ranks:
            return batch
        return left - ranks

    def num_steps(self, left: int) -> int:
        """The steps in which the last `left` rows of an epoch are read.

        >>> EpochCuts(10, 4).num_steps(10), EpochCuts(10, 4, drop_last=True).num_steps(10)
        (3, 2)
        """
        steps, rest = divmod(left, self.global_batch)
        if self.drop_last or not rest:
            return steps
        if rest < self.world_size and (not steps or self.global_batch == self.world_size):
            return steps
        return steps + 1

    def num_alike(self, position: int) -> int:
        """How many steps from a position on, at least, have as many rows as the first."""
        if self.epoch_rows is None:
            return 1
        # All steps of an epoch are full, but for the last two.
        return max(1, self.num_steps(self.epoch_rows - position % self.epoch_rows) - 2)

    def after(self, position: int, steps: int) -> int:
        """The position after some steps from a position on; after the last of an epoch, its end."""
        if self.epoch_rows is None:
            return position + steps * self.global_batch
        position = self.begin(position)
        here = self.num_steps(self.epoch_rows - position % self.epoch_rows)
        if steps >= here:
            position = (position // self.epoch_rows + 1) * self.epoch_rows
            epochs, steps = divmod(steps - here, self.num_steps(self.epoch_rows))
            position += epochs * self.epoch_rows
            here = self.num_steps(self.epoch_rows)
        # All steps of an epoch are full, but for the last two.
        full = min(steps, max(0, here - 2))
        position += full * self.global_batch
        for _ in range(steps - full):
            position += self.rows(position)
        return position

    def step_at(self, position: int) -> int | None:
        """Which step of its epoch begins at a position; None where none does."""
        if self.epoch_rows is None:
            step, rest = divmod(position, self.global_batch)
            return None if rest else step
        inside = position % self.epoch_rows
        step = self.num_steps(self.epoch_rows) - self.num_steps(self.epoch_rows - inside)
        start = position - inside
        found = start if step == 0 else self.after(start, step)
        return step if found == position else None

    def share(self, position: int, rows: int, rank: int) -> tuple[int, int, int]:
        """The positions of one rank in a step: the first, the one after the last, and a size.

        The size is that of the largest share: a rank with a row fewer fills its batch up, so
        that batches have one shape on all ranks.
        """
        first, stop = (rows * each // self.world_size for each in (rank, rank + 1))
        return position + first, position + stop, -(-rows // self.world_size)
