"""The order of training, for a DataLoader.

PyTorch's RandomSampler writes down a permutation of all windows: with 10^8 of them, 800 MB
and seconds before the first batch of every epoch. Here the order is arithmetic, computed a
few thousand positions at a time: the same that `penstock.Loader` has for one source.
"""

from collections.abc import Iterator
from itertools import chain
from operator import index

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Sampler

from penstock.errors import PlanError
from penstock.order.permute import permute
from penstock.order.shuffle import epoch_key
from penstock.order.steps import Shard, Steps

__all__ = ["EpochShuffle"]

_CHUNK = 8_192
_NAMES = ("data",)  # what a plan calls its only source


class EpochShuffle(Sampler[int]):
    """Every number below `num_samples` once an epoch, in an order of its own each epoch.

    The order is a function of seed and epoch. Each iteration is the next epoch; `set_epoch`
    says which is next, so that a run goes on with the order it would have had.

    >>> order = EpochShuffle(5, seed=17)
    >>> list(order), list(order)
    ([4, 2, 1, 3, 0], [3, 1, 4, 0, 2])

    Of several ranks each takes its share of every global batch, as in `penstock.Loader`, and
    what is less than a global batch at the end of an epoch is left out on all of them.

    >>> [list(EpochShuffle(5, seed=17, rank=rank, world_size=2)) for rank in (0, 1)]
    [[4, 1], [2, 3]]
    """

    def __init__(
        self,
        num_samples: int,
        *,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        batch_size: int = 1,
    ) -> None:
        self.num_samples = index(num_samples)
        self.seed = index(seed)
        self._steps = Steps(index(batch_size) * index(world_size))
        self._shard = Shard(self._steps, rank=rank, world_size=world_size)
        self.epoch = 0
        """The epoch that the next iteration goes through."""

    def __len__(self) -> int:
        if self._shard.world_size == 1:
            return self.num_samples
        return self._num_steps * (self._steps.sizes[0] // self._shard.world_size)

    @property
    def _num_steps(self) -> int:
        """Global batches of an epoch."""
        return self._steps.count(self.num_samples, drop_last=True)

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` the next one."""
        if index(epoch) < 0:
            raise PlanError(f"epoch={epoch} cannot be; the first is 0.")
        self.epoch = index(epoch)

    def __iter__(self) -> Iterator[int]:
        key = epoch_key(self.seed, _NAMES, self.epoch)
        self.epoch += 1
        return chain.from_iterable(
            permute(positions, self.num_samples, key).tolist() for positions in self._positions()
        )

    def _positions(self) -> Iterator[NDArray[np.int64]]:
        """The positions of an epoch that this rank reads."""
        if self._shard.world_size == 1:
            return (np.arange(start, stop) for start, stop in _chunks(self.num_samples))
        rows = self._steps.sizes[0] // self._shard.world_size
        return (
            self._shard.positions(start, stop)
            for start, stop in _chunks(self._num_steps, max(1, _CHUNK // rows))
        )


def _chunks(total: int, most: int = _CHUNK) -> Iterator[tuple[int, int]]:
    """Stretches of `range(total)`; the first is short, so that the first batch is there soon."""
    start, size = 0, max(1, most // 32)
    while start < total:
        yield start, min(start + size, total)
        start, size = start + size, min(2 * size, most)
