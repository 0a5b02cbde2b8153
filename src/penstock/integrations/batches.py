"""Batches of this rank by their positions, for DataLoaders of Lightning and Hugging Face.

Full steps are those of a `penstock.Loader`. A step that is not full (see
`penstock.integrations.steps`) is read by a loader with another batch size, from the position at
which the step begins.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.data import Dataset

from penstock.errors import PlanError
from penstock.integrations.hf_format import PaddedFormat, Tensors
from penstock.integrations.steps import EpochCuts, EqualSteps, RankSpan
from penstock.loader.arguments import AnyPlan
from penstock.loader.batch_format import Format
from penstock.loader.loader import Loader
from penstock.loader.packed import one_row
from penstock.rows.documents import Documents
from penstock.streaming.plan import StreamedPlan

__all__ = ["BatchSource", "State", "StepBatches", "unchanged"]

State = dict[str, Any]
"""A position as JSON."""

Batch = TypeVar("Batch")


def unchanged(batch: Batch) -> Batch:
    """The collate function of DataLoaders whose dataset makes whole batches."""
    return batch


@dataclass(frozen=True)
class BatchSource:
    """The rows that are trained on, their order, and how batches of them are made."""

    plan: AnyPlan
    global_batch: int
    """Rows of a full step on all ranks together."""
    rank: int
    world_size: int
    to_batch: Callable[[Tensors], Tensors]
    """Makes the user's batch from the loader's."""
    format: Format = "dict"
    flat: bool = False
    """Whether a batch becomes one row, for attention that finds documents in one row only."""
    workers: dict[str, Any] = field(default_factory=dict)
    """Arguments for DataLoaders."""
    drop_last: bool = False
    """Whether to leave out a last step of an epoch that is not full."""

    def __getstate__(self) -> dict[str, object]:
        # Workers start no workers, and a generator in `workers` cannot be pickled.
        return {**self.__dict__, "workers": {}}

    def loader(
        self, rows: int | None = None, *, sharded: bool = True, epochs: int | None = None
    ) -> Loader:
        """A loader over all positions.

        Args:
            rows: Rows of a step on all ranks together; `global_batch` if not given.
            sharded: Whether it reads this rank's share of a step, or the whole step.
            epochs: Epochs of one loop; without it, a loop does not end.
        """
        return Loader(
            self.plan,
            global_batch_size=rows or self.global_batch,
            rank=self.rank if sharded else 0,
            world_size=self.world_size if sharded else 1,
            epochs=epochs,
            format=self.format,
        )

    @property
    def cuts(self) -> EpochCuts:
        """Where steps begin and end, as far as the length of an epoch is known."""
        rows = self.plan.epoch_rows
        return EpochCuts(rows, self.global_batch, self.world_size, self.drop_last)

    @property
    def epoch_steps(self) -> int | None:
        """The steps of an epoch; None as long as the number of rows is not known."""
        rows = self.plan.epoch_rows
        return None if rows is None else self.cuts.num_steps(rows)

    def refuse_no_step(self, *, wait: bool = False) -> None:
        """Raise if all rows do not make one full step.

        Args:
            wait: Whether to wait for text that is still being tokenized. Otherwise, too little
                text is found only once all of it was read.
        """
        if wait and isinstance(self.plan, StreamedPlan):
            self.plan.reach(self.global_batch)
        rows = self.plan.epoch_rows
        if rows is not None and rows < self.global_batch:
            raise PlanError(
                f"The training text makes {rows:,} rows, and one step of training takes "
                f"{self.global_batch:,} ({self.global_batch // self.world_size:,} on each of "
                f"{self.world_size:,} devices). Use a smaller batch_size, or more text."
            )

    def steps(self, position: int) -> Iterator[EqualSteps]:
        """The steps from a position on, without end.

        While text is still being tokenized, this waits until the end of the next step is known.
        So all ranks compute the same steps, no matter how fast they are.
        """
        cuts = self.cuts
        while True:
            if cuts.epoch_rows is None and isinstance(self.plan, StreamedPlan):
                # One row more for each rank than this step has: whether they exist decides if
                # this step must leave rows for the next one.
                self.plan.reach(position + self.global_batch + self.world_size)
                cuts = self.cuts
            position = cuts.begin(position)
            epoch = position // cuts.epoch_rows if cuts.epoch_rows else 0
            steps = EqualSteps(epoch, position, cuts.rows(position), cuts.num_alike(position))
            yield steps
            position += steps.rows * steps.number

    def span(self, position: int, rows: int) -> RankSpan:
        """The positions of this rank in the step of `rows` rows at `position`."""
        return RankSpan(*self.cuts.share(position, rows, self.rank), (position, position + rows))

    def sized(self, global_batch: int) -> "BatchSource":
        """The same rows in steps of another size."""
        if global_batch == self.global_batch:
            return self
        return replace(self, global_batch=global_batch)

    def finish(self, batch: Tensors) -> Tensors:
        """The user's batch, from the loader's."""
        made = self.to_batch(batch)
        return one_row(made) if self.flat else made


class StepBatches(Dataset[Tensors]):
    """A dataset whose items are batches, by their positions. Worker processes have a copy."""

    def __init__(self, source: BatchSource) -> None:
        self.source = source
        self._loaders: dict[int, Loader] = {}

    def __getstate__(self) -> dict[str, object]:
        # Loaders have threads. A worker makes its own when it needs them.
        return {"source": self.source, "_loaders": {}}

    def __len__(self) -> int:
        # Trainers report it as the number of examples on this rank.
        return (self.source.plan.epoch_rows or 0) // self.source.world_size

    def __getitem__(self, span: RankSpan) -> Tensors:
        source, real = self.source, span.stop - span.first
        full = span.step[1] - span.step[0] == source.global_batch
        # A full step is read as this rank's share, so the loader pads it as on all ranks. A
        # smaller step may not divide by the ranks; its rows are read as one batch of this rank.
        if full:
            loader, first = self._loader(0), span.step[0]
        else:
            loader, first = self._loader(real), span.first
        loader.seek(first)
        batch = loader.make(loader.step).batch
        if full or source.world_size == 1:
            return source.finish(batch)
        made = self._filled(source.to_batch(batch), span)
        return one_row(made) if source.flat else made

    def __getitems__(self, spans: list[RankSpan]) -> Tensors:
        """The batch of the one step that a batch sampler asks for."""
        return self[spans[0]]

    def _loader(self, rows: int) -> Loader:
        """A loader of `rows` consecutive rows; with 0, of this rank's share of full steps."""
        # Few sizes occur: full steps, and the shares of the smaller steps at the end of an epoch.
        if rows not in self._loaders:
            source = self.source
            self._loaders[rows] = source.loader(rows, sharded=False) if rows else source.loader()
        return self._loaders[rows]

    def _filled(self, batch: Tensors, span: RankSpan) -> Tensors:
        """A smaller batch in the shape that it has on all ranks."""
        (rows,) = self.source.plan.sources.values()
        if isinstance(rows, Documents):  # as wide as the widest row of the step
            _, _, samples = self.source.plan.locate(np.arange(*span.step))
            # This rank has read its own rows only, and padded them to the widest of these.
            missing = int(rows.widths(samples).max()) - batch["input_ids"].shape[1]
            sides = (missing, 0) if rows.side == "left" else (0, missing)
            to_batch = self.source.to_batch
            pad_id = to_batch.pad_id if isinstance(to_batch, PaddedFormat) else rows.pad_id
            fill = {"input_ids": pad_id, "attention_mask": 0, "labels": -100}
            batch = {
                name: torch.nn.functional.pad(values, sides, value=fill[name])
                for name, values in batch.items()
            }
        if span.stop - span.first < span.size:  # by at most one row
            # A copy of the last row, so that the model sees real text; its loss counts nothing.
            batch = {name: torch.cat((values, values[-1:])) for name, values in batch.items()}
            batch["labels"][-1] = -100
        return batch
