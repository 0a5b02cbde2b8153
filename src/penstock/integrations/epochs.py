"""The steps of an epoch: which examples each batch of each rank holds.

    epoch 0                          epoch 1
    |── step 0 ──|── step 1 ──|─ 2 ─||── step 0 ──| …      positions of one order, without end
     rank 0 rank 1                                          each rank takes its slice of a step

A step is one batch on every rank. It is cut from the order at the position where the run is,
so the examples come in the same sequence for any batch size, number of ranks and of workers.
Which examples they are is computed here, for thousands of positions at once, and sent along
with each request to a worker: workers need no order of their own, and none can go stale.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

import numpy as np
from torch.utils.data.distributed import DistributedSampler

from penstock.errors import PlanError
from penstock.integrations.mixed import Drawn, MultiplexDataset
from penstock.order.integers import Integers

__all__ = ["EpochSteps", "Share", "Span"]

_FIRST_ROWS, _MOST_ROWS = 512, 8_192  # few at first, so that the first batch is there soon


@dataclass(frozen=True, slots=True)
class Share:
    """What a rank reads of every step."""

    batch_size: int
    rank: int
    world_size: int
    drop_last: bool

    @property
    def step_rows(self) -> int:
        """The examples of a full step, over all ranks."""
        return self.batch_size * self.world_size

    def num_steps(self, num_rows: int) -> int:
        """How many steps so many examples make, on every rank.

        Raises:
            PlanError: the last step would leave a rank without an example.
        """
        steps, rest = divmod(num_rows, self.step_rows)
        if self.drop_last or not rest:
            return steps
        if rest < self.world_size:
            raise PlanError(
                f"{num_rows:,} examples in batches of {self.batch_size:,} on {self.world_size:,} "
                f"ranks leave {rest:,} for the last step, and a rank without an example would "
                f"hang the others. Say drop_last=True, or {self._otherwise(num_rows)}."
            )
        return steps + 1

    def refuse_too_few(self, num_rows: int) -> None:
        """Raise where a rank is without an example whatever the batch size."""
        if num_rows < self.world_size:
            raise PlanError(
                f"{num_rows:,} examples are fewer than the {self.world_size:,} ranks, and a rank "
                "without an example would hang the others. Use fewer ranks, or more examples."
            )

    def _otherwise(self, num_rows: int) -> str:
        if num_rows < self.world_size:  # at the end of an epoch that is resumed
            return f"resume on fewer ranks, such as {num_rows:,}"
        return f"choose another batch_size, such as {self._other_size(num_rows)}"

    def _other_size(self, num_rows: int) -> int:
        """The nearest batch size that leaves every rank an example, or nothing over."""
        # There is one: all examples in a single step.
        near = (self.batch_size + sign * by for by in count(1) for sign in (-1, 1))
        rests = ((size, num_rows % (size * self.world_size)) for size in near if size > 0)
        return next(size for size, rest in rests if not rest or rest >= self.world_size)


# The positions of one batch of this rank: where it begins, before what it ends, and before what
# the step ends for all ranks. Plain tuples: one is made for every batch.
Span = tuple[int, int, int]


class EpochSteps(DistributedSampler[Any]):
    """The batches of this rank from the run's position to the end of its epoch.

    A batch sampler for a DataLoader. It is a DistributedSampler so that tools which put one in
    the place of other samplers, to deal examples to ranks, see that this is done.
    """

    def __init__(self, dataset: MultiplexDataset, share: Share, *, shuffle: bool) -> None:
        super().__init__(dataset, num_replicas=share.world_size, rank=share.rank, shuffle=shuffle)
        self.share = share
        self.data = dataset
        self.turn = 0
        """Grows with every iteration that begins, and with every jump."""
        self.last: Span | None = None
        """The batch that was handed out last."""
        self._begun = False
        share.refuse_too_few(dataset.blend.total)
        self._length = share.num_steps(dataset.blend.total)
        if not self._length:
            raise PlanError(
                f"{dataset.blend.total:,} examples are fewer than the {share.step_rows:,} of one "
                f"step ({share.batch_size:,} on each of {share.world_size:,} ranks), and "
                "drop_last=True drops them. Use a smaller batch_size, or drop_last=False."
            )

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Drawn]:
        steps = self.steps(self.data.place.position)
        return (Drawn(sources.tolist(), samples.tolist()) for sources, samples, _ in steps)

    @property
    def epoch_end(self) -> int:
        """The position after the last example of the epoch."""
        return self.data.place.start + self.data.blend.total

    def begin(self) -> int:
        """Begin an iteration: the rest of the epoch, if none of it was iterated; else the next."""
        if self._begun:
            self._next_epoch()
        self._begun = True
        self.turn += 1
        return self.turn

    def finish(self, turn: int) -> None:
        """The iteration `turn` is at the end of its epoch."""
        if turn == self.turn:
            self._next_epoch()
            self._begun = False

    def go_to(self, epoch: int, start: int, position: int) -> None:
        """Make this the place where the next iteration goes on."""
        place = self.data.place
        place.epoch, place.start, place.position = epoch, start, position
        self._begun = False
        self.turn += 1

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` the next one, from its beginning; nothing changes where it is already."""
        if epoch < 0:
            raise PlanError(f"epoch={epoch} cannot be; the first is 0.")
        place = self.data.place
        if epoch == place.epoch + self._begun:
            return
        total = self.data.blend.total
        if epoch == place.epoch:
            start = place.start
        elif not self.shuffle:
            start = 0
        elif self.share.drop_last and self.data.blend.stages:
            start = epoch * self._length * self.share.step_rows
        else:
            start = epoch * total
        self.go_to(epoch, start, start)

    def spans(self, position: int) -> Iterator[Span]:
        """The batches of this rank from `position` to the end of the epoch."""
        # The end is that of now: by the time of the first batch another epoch may have begun.
        return self._spans(position, self.epoch_end)

    def _spans(self, position: int, stop: int) -> Iterator[Span]:
        share = self.share
        size, rows, ranks = share.batch_size, share.step_rows, share.world_size
        last = share.num_steps(stop - position) > (stop - position) // rows
        while position + rows <= stop:
            begin = position + share.rank * size
            position += rows
            yield begin, begin + size, position
        if last:  # what is left is dealt to the ranks as evenly as it goes
            rest = stop - position
            begin, end = share.rank * rest // ranks, (share.rank + 1) * rest // ranks
            yield position + begin, position + end, stop

    def steps(self, position: int) -> Iterator[tuple[Integers, Integers, Span]]:
        """The same, with the examples of each: which dataset, and which example of it."""
        return self._steps(self.spans(position), self.data.blend.order.locate)

    def _steps(
        self, spans: Iterator[Span], locate: Callable[[Integers], tuple[Integers, ...]]
    ) -> Iterator[tuple[Integers, Integers, Span]]:
        rows = _FIRST_ROWS
        while several := list(islice(spans, max(1, rows // self.share.batch_size))):
            positions = _joined(several, self.share)
            sources, _, samples = locate(positions)
            row = 0
            for span in several:
                end = row + span[1] - span[0]
                yield sources[row:end], samples[row:end], span
                row = end
            rows = min(4 * rows, _MOST_ROWS)

    def _next_epoch(self) -> None:
        place, blend = self.data.place, self.data.blend
        place.epoch += 1
        if not self.shuffle:
            self.data.blend = blend.restarted(place.position)
            place.start = 0
        elif blend.stages:
            place.start = place.position  # each dataset goes on where it stopped
        else:
            place.start = place.epoch * blend.total  # an epoch is one order of everything
        place.position = place.start


def _joined(spans: list[Span], share: Share) -> Integers:
    """The positions of several batches, one after the other."""
    if share.world_size == 1:
        return np.arange(spans[0][0], spans[-1][1])
    return np.concatenate([np.arange(begin, end) for begin, end, _ in spans])
