"""The order of training, for a DataLoader.

PyTorch's RandomSampler writes down a permutation of all windows: with 10^8 of them, 800 MB
and seconds before the first batch of every epoch. Here the order is arithmetic, computed a
few thousand positions at a time: the same that `penstock.Loader` has for one source.
"""

from collections.abc import Iterator
from itertools import chain
from operator import index

import numpy as np
from torch.utils.data import Sampler

from penstock.errors import PlanError
from penstock.order.permute import permute
from penstock.order.shuffle import epoch_key

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
    """

    def __init__(self, num_samples: int, *, seed: int = 0) -> None:
        self.num_samples = index(num_samples)
        self.seed = index(seed)
        self.epoch = 0
        """The epoch that the next iteration goes through."""

    def __len__(self) -> int:
        return self.num_samples

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` the next one."""
        if index(epoch) < 0:
            raise PlanError(f"epoch={epoch} cannot be; the first is 0.")
        self.epoch = index(epoch)

    def __iter__(self) -> Iterator[int]:
        key = epoch_key(self.seed, _NAMES, self.epoch)
        self.epoch += 1
        return chain.from_iterable(
            permute(np.arange(start, stop), self.num_samples, key).tolist()
            for start, stop in _chunks(self.num_samples)
        )


def _chunks(total: int) -> Iterator[tuple[int, int]]:
    """Stretches of `range(total)`; the first is short, so that the first batch is there soon."""
    start, size = 0, 256
    while start < total:
        yield start, min(start + size, total)
        start, size = start + size, min(2 * size, _CHUNK)
