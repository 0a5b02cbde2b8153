"""A loader as a `torch.utils.data.DataLoader`, for tools that accept nothing else.

The dataset behind it returns a finished batch from `__getitems__`. With workers, a DataLoader
yields the same batches in the same order. The loader advances as batches are yielded, so its state
is exact: batches that workers have made ahead of time are not counted.

`WorkerOptions` are the settings of any DataLoader's worker processes.
"""

import os
import warnings
from collections.abc import Callable, Iterator
from itertools import count
from multiprocessing.context import BaseContext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.utils.data as data

from penstock.errors import PlanError
from penstock.loader.batch_format import Batch

if TYPE_CHECKING:
    from penstock.loader.loader import Loader

__all__ = ["LoaderBatches", "StepsOfRun", "WorkerOptions", "as_dataloader"]


class _Request(NamedTuple):
    """A step, and the position from which the loader counts its steps."""

    step: int
    counted_from: int


class _Sent(NamedTuple):
    """A batch that a worker sends to the main process."""

    batch: Batch
    fingerprint: int


class StepsOfRun(data.Dataset[Batch]):
    """The steps of a run as a map-style dataset: item i is the batch of step i.

    The copy of a loader in a worker does not know where the loader was moved to. So each request
    names the position from which steps are counted.
    """

    def __init__(self, loader: "Loader") -> None:
        self._loader = loader.copy()  # moved without moving the user's loader

    def __len__(self) -> int:
        return len(self._loader)

    def __getitem__(self, step: int) -> Batch:
        return self._loader[step]

    def __getitems__(self, requests: list[_Request]) -> _Sent:
        """Return the batch of the one step that the batch sampler asks for."""
        step, counted_from = requests[0]
        # Requests of one pass have the same origin, so this happens once per pass and worker.
        if self._loader.counted_from != counted_from:
            self._loader.seek(counted_from)
        made = self._loader.make(step)
        return _Sent(made.batch, made.fingerprint)


class _Rest(data.Sampler[list[_Request]]):
    """The steps from the loader's position to the end of its pass."""

    def __init__(self, loader: "Loader") -> None:
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[list[_Request]]:
        first, counted_from = self._loader.step, self._loader.counted_from
        for step in count(first):
            # Asked for each step, because a streamed store may not know its end yet.
            if not self._loader.has_step(step):
                return
            yield [_Request(step, counted_from)]


class LoaderBatches(data.DataLoader[Batch]):
    """A loader's batches from its position to the end of its pass, each time it is iterated.

    `len()` is that of a whole pass, like the loader's.
    """

    def __init__(self, loader: "Loader", **options: Any) -> None:
        super().__init__(
            StepsOfRun(loader), batch_sampler=_Rest(loader), collate_fn=_same, **options
        )
        self.loader = loader

    def __iter__(self) -> Any:
        self.loader.begin_pass()  # before the sampler reads the loader's step
        return self.loader.follow(super().__iter__())


def as_dataloader(loader: "Loader", *, num_workers: int, **options: Any) -> LoaderBatches:
    """Return a DataLoader over the rest of `loader`'s pass; each batch is one of its steps."""
    if num_workers and loader.device.type != "cpu":
        raise PlanError(
            f"num_workers={num_workers} would make batches on {loader.device} in several "
            "processes. Make the loader without device= and move batches to it in the training "
            "loop, or use num_workers=0."
        )
    return LoaderBatches(loader, num_workers=num_workers, **options)


def _same(sent: Batch) -> Batch:
    return sent


# The settings that PyTorch would ignore without workers, or refuse without naming the cause.
_NEED_WORKERS = {
    "prefetch_factor": "how many batches each worker makes ahead",
    "persistent_workers": "whether workers are kept between epochs",
    "timeout": "how long to wait for a worker",
    "multiprocessing_context": "how workers are started",
}


class WorkerOptions(NamedTuple):
    """The worker processes of a DataLoader, and the settings that need workers."""

    num_workers: int
    prefetch_factor: int | None
    persistent_workers: bool
    timeout: float
    worker_init_fn: Callable[[int], None] | None
    multiprocessing_context: str | BaseContext | None

    def checked(self, stacklevel: int = 3) -> "WorkerOptions":
        """The same settings if PyTorch accepts them; on Windows no workers, with a warning.

        Args:
            stacklevel: How many calls up the user's line is, which the warning names; by default
                it called the function that calls this one.

        Raises:
            PlanError: it does not accept them; the message says what to change.
        """
        if self.num_workers < 0 or self.timeout < 0:
            raise PlanError(
                f"num_workers={self.num_workers} and timeout={self.timeout} must be 0 or more."
            )
        if self.prefetch_factor is not None and self.prefetch_factor < 1:
            raise PlanError(f"prefetch_factor={self.prefetch_factor} must be 1 or more.")
        if self.num_workers and os.name == "nt":
            # Windows can only spawn workers, which import everything again.
            warnings.warn(
                f"num_workers={self.num_workers} is taken as 0 on Windows, where starting workers "
                "costs more than they save. Batches are the same.",
                stacklevel=stacklevel,
            )
            return WorkerOptions(0, None, False, 0, None, None)
        given = self._asdict()
        for name, meaning in _NEED_WORKERS.items():
            if given[name] and not self.num_workers:
                # People search for this text without a value, as PyTorch writes it.
                shown = name if name == "prefetch_factor" else f"{name}={given[name]!r}"
                raise PlanError(
                    f"{shown} is not valid with num_workers=0: it is {meaning}. Set num_workers=1 "
                    f"or more, or leave {name} out."
                )
        return self
