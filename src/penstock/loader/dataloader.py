"""A loader in the clothes of `torch.utils.data.DataLoader`.

Some tools take nothing else. The dataset behind it answers `__getitems__` with a finished
batch, so a DataLoader without workers is about as fast as the loader itself, and one with
workers gives the same batches in the same order.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch.utils.data as data

if TYPE_CHECKING:
    from penstock.loader.loader import Loader

__all__ = ["Steps", "as_dataloader"]


class Steps(data.Dataset[Any]):
    """The steps of a run as a map-style dataset: item i is the batch of step i."""

    def __init__(self, loader: "Loader") -> None:
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader)

    def __getitem__(self, step: int) -> Any:
        return self._loader[step]

    def __getitems__(self, steps: list[int]) -> Any:
        """The batch of the one step that a batch sampler asks for."""
        return self._loader[steps[0]]


class _Rest(data.Sampler[list[int]]):
    """The steps from the loader's position to its end."""

    def __init__(self, loader: "Loader") -> None:
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader) - self._loader.step

    def __iter__(self) -> Iterator[list[int]]:
        for step in range(self._loader.step, len(self._loader)):
            yield [step]


def as_dataloader(loader: "Loader", *, num_workers: int, **options: Any) -> Any:
    """A DataLoader over the rest of `loader`'s run; each batch is one of its steps."""
    return data.DataLoader(
        Steps(loader),
        batch_sampler=_Rest(loader),
        collate_fn=_same,
        num_workers=num_workers,
        **options,
    )


def _same(batch: Any) -> Any:
    return batch
