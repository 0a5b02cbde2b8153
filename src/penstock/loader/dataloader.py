"""A loader in the clothes of `torch.utils.data.DataLoader`.

Some tools take nothing else. The dataset behind it answers `__getitems__` with a finished
batch, and a DataLoader with workers gives the same batches in the same order. The loader
that it was made from moves on as batches are handed out, so its state is as true as ever:
what workers have made ahead is not counted.
"""

from collections.abc import Iterator
from copy import copy
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.utils.data as data

from penstock.errors import PlanError

if TYPE_CHECKING:
    from penstock.loader.loader import Loader

__all__ = ["Batches", "StepsOfRun", "as_dataloader"]


class _Asked(NamedTuple):
    """A step, and the position from which the loader counts its steps."""

    step: int
    counted_from: int


class _Sent(NamedTuple):
    """A batch on its way from a worker."""

    batch: Any
    fingerprint: int


class StepsOfRun(data.Dataset[Any]):
    """The steps of a run as a map-style dataset: item i is the batch of step i.

    A copy in a worker does not learn where the loader was moved to, so each step is asked
    for with the position that steps are counted from.
    """

    def __init__(self, loader: "Loader") -> None:
        self._loader = copy(loader)  # one of its own, to be moved without moving the user's

    def __len__(self) -> int:
        return len(self._loader)

    def __getitem__(self, step: int) -> Any:
        return self._loader[step]

    def __getitems__(self, asked: list[_Asked]) -> _Sent:
        """The batch of the one step that a batch sampler asks for."""
        step, counted_from = asked[0]
        if self._loader.counted_from != counted_from:
            self._loader.seek(counted_from)
        made = self._loader.make(step)
        return _Sent(made.batch, made.fingerprint)


class _Rest(data.Sampler[list[_Asked]]):
    """The steps from the loader's position to the end of its pass."""

    def __init__(self, loader: "Loader") -> None:
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[list[_Asked]]:
        first, counted_from = self._loader.step, self._loader.counted_from
        for step in count(first):
            if not self._loader.has_step(step):
                return
            yield [_Asked(step, counted_from)]


class Batches(data.DataLoader[Any]):
    """A loader's batches from its position to the end of its pass, each time it is iterated.

    `len()` is that of a whole pass, as the loader's own.
    """

    def __init__(self, loader: "Loader", **options: Any) -> None:
        super().__init__(
            StepsOfRun(loader), batch_sampler=_Rest(loader), collate_fn=_same, **options
        )
        self.loader = loader

    def __iter__(self) -> Any:
        self.loader.begin_pass()  # before the sampler asks where the loader is
        return self.loader.follow(super().__iter__())


def as_dataloader(loader: "Loader", *, num_workers: int, **options: Any) -> Batches:
    """A DataLoader over the rest of `loader`'s run; each batch is one of its steps."""
    if num_workers and loader.device.type != "cpu":
        raise PlanError(
            f"num_workers={num_workers} would each make batches on {loader.device}. Make the "
            "loader without device=, and move batches to it in the training loop; or use no "
            "workers."
        )
    if num_workers and loader.drops_parts:
        raise PlanError(
            f"num_workers={num_workers} would read a stream in other processes whose parts are "
            "dropped as this one moves on. Use no workers (the Loader reads ahead on a thread), or "
            "keep=True in every process that streams it."
        )
    return Batches(loader, num_workers=num_workers, **options)


def _same(sent: Any) -> Any:
    return sent
