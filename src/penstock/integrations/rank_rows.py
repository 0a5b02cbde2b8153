"""One rank's batch of any step, from the positions of its rows alone.

For worker processes, which make steps in any order, and for steps that are not full: the last
of an epoch, and those of an evaluation. Other full steps are made by a `Loader`, ahead on a
thread; they hold the same rows.
"""

from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from torch.utils.data import Dataset

from penstock.loader.batch import Maker
from penstock.loader.batch_format import IGNORED
from penstock.loader.read import Assembler, StepBlock
from penstock.order.shard import PADDING, Shard
from penstock.order.steps import Steps

if TYPE_CHECKING:
    from penstock.integrations.feed import Feed

__all__ = ["RankRows", "Span"]


class Span(NamedTuple):
    """The positions of a batch on this rank."""

    first: int
    stop: int
    size: int
    """Rows of the batch: those that are left are filled up, and have no labels."""
    step: tuple[int, int]
    """The positions of all ranks."""


class RankRows(Dataset[Any]):
    """Item: the batch of a span of positions. A worker has a copy."""

    def __init__(self, feed: "Feed") -> None:
        self._feed = feed

    def __getstate__(self) -> dict[str, Any]:
        return {"_feed": self._feed}

    def __len__(self) -> int:
        return self._feed.plan.epoch_rows or 0

    def __getitem__(self, span: Span) -> Any:
        real = span.stop - span.first
        located = np.zeros((4, span.size), np.int64)
        located[3] = PADDING
        located[3, :real] = np.arange(span.first, span.stop)
        located[:3, :real] = self._feed.plan.locate(located[3, :real])
        tokens, targets, extras = self._assembler.read(located)
        block = StepBlock(
            first_step=0,
            edges=[0, span.size],
            spans=[(span.first, span.stop)],
            tokens=tokens,
            targets=targets,
            extras=extras,
            located=located,
            fingerprints=[0],
            widths=self._widths(span),
        )
        batch = self._feed.dress(next(self._maker.batches(block)).batch)
        if real < span.size:
            batch["labels"] = batch["labels"].clone()
            batch["labels"].view(span.size, -1)[real:] = IGNORED
        return batch

    def _widths(self, span: Span) -> list[int] | None:
        """The width of the widest row on all ranks, where rows are as wide as they must be."""
        (source,) = self._feed.plan.sources.values()
        if source.side is None:
            return None
        _, _, samples = self._feed.plan.locate(np.arange(*span.step))
        return [int(source.widths(samples).max())]

    @cached_property
    def _assembler(self) -> Assembler:
        shard = Shard(Steps({0: 1}), rank=0, world_size=1)
        return Assembler(self._feed.plan, shard, end=None, by_tokens=False)

    @cached_property
    def _maker(self) -> Maker:
        return self._feed.loader()._maker
