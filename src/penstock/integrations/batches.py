"""Computes which rows a rank reads in each step, for DataLoaders of Lightning and Hugging Face.

Each row is read once an epoch, on any number of ranks:

    10 rows, 4 a step     |0 1 2 3|4 5 6 7|8 9||10 11 12 13|…      positions; || ends an epoch
    the last step         is smaller; with drop_last=True it is left out

A step never reaches into the next epoch: the first rows of that epoch may be the same rows. On
several ranks every rank needs a row in every step, because a rank without a row has no loss, or
blocks the others. So if fewer rows than ranks would be left for the last step, the step before it
is made smaller, and the last step has one row for each rank:

    17 rows, 8 a step on 4 ranks     8 + 5 + 4, not 8 + 8 + 1

If a full step has only one row for each rank, it cannot be made smaller. The remaining rows, fewer
than there are ranks, are then left out of the epoch. They are different rows in every epoch.

A `penstock.Loader` reads the full steps. A step that is not full is read by a loader with another
batch size, from the position at which the step begins.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch
from torch.utils.data import Dataset

from penstock.errors import PlanError
from penstock.integrations.hf_format import PaddedFormat, Tensors
from penstock.loader.batch_format import Format, LabelBatch
from penstock.loader.loader import Loader
from penstock.loader.packed import one_row, without_cache
from penstock.loader.run import AnyPlan
from penstock.order.steps import shorter_steps
from penstock.rows.documents import Documents
from penstock.streaming.plan import StreamedPlan

State = dict[str, Any]
"""A position as JSON."""

Batch = TypeVar("Batch")


def unchanged(batch: Batch) -> Batch:
    """Return `batch`: the collate function of DataLoaders whose dataset makes whole batches."""
    return batch


@dataclass(frozen=True, slots=True)
class EpochCuts:
    """Computes where the steps of each epoch begin and end.

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

    def _sizes(self, left: int) -> tuple[int, tuple[int, ...]]:
        """Divide the last `left` rows of an epoch into steps.

        Return the number of full steps, and the sizes of the steps after them that are not full.
        """
        batch = self.global_batch
        others = () if self.drop_last else shorter_steps(left, batch, self.world_size)
        return (left - sum(others)) // batch, others

    def _ahead(self, position: int) -> tuple[int, tuple[int, ...]]:
        """Return `_sizes` from a position to its epoch's end; one full step if that is unknown."""
        if self.epoch_rows is None:
            return 1, ()
        return self._sizes(self.epoch_rows - position % self.epoch_rows)

    def begin(self, position: int) -> int:
        """The position of the next step: `position`, or the next epoch if no step is left."""
        if self.epoch_rows is None or self.rows(position):
            return position
        return (position // self.epoch_rows + 1) * self.epoch_rows

    def rows(self, position: int) -> int:
        """The rows of the step that begins at a position; 0 if its epoch has no step left."""
        full, others = self._ahead(position)
        return self.global_batch if full else sum(others[:1])

    def num_steps(self, left: int) -> int:
        """The number of steps for the last `left` rows of an epoch.

        >>> EpochCuts(10, 4).num_steps(10), EpochCuts(10, 4, drop_last=True).num_steps(10)
        (3, 2)
        """
        full, others = self._sizes(left)
        return full + len(others)

    def num_alike(self, position: int) -> int:
        """Return how many steps from a position on certainly have as many rows as the first."""
        return max(1, self._ahead(position)[0])

    def after(self, position: int, steps: int) -> int:
        """The position after some steps; after the last step of an epoch, the epoch's end."""
        if self.epoch_rows is None:
            return position + steps * self.global_batch
        position = self.begin(position)
        here = self.num_steps(self.epoch_rows - position % self.epoch_rows)
        if steps >= here:
            # The rest of this epoch, then whole epochs, then some steps of the last one.
            epochs, steps = divmod(steps - here, self.num_steps(self.epoch_rows))
            position = (position // self.epoch_rows + 1 + epochs) * self.epoch_rows
        full, others = self._ahead(position)
        return position + min(steps, full) * self.global_batch + sum(others[: max(0, steps - full)])

    def step_at(self, position: int) -> int | None:
        """The number, in its epoch, of the step that begins at a position; None if none does."""
        if self.epoch_rows is None:
            step, rest = divmod(position, self.global_batch)
            return None if rest else step
        inside = position % self.epoch_rows
        # The number of steps before the position is that of the whole epoch minus that of the rows
        # after the position. A step begins here only if so many steps from the start of the epoch
        # end exactly here.
        step = self.num_steps(self.epoch_rows) - self.num_steps(self.epoch_rows - inside)
        return step if self.after(position - inside, step) == position else None

    def share(self, position: int, rows: int, rank: int) -> tuple[int, int, int]:
        """Return the positions of one rank in a step (first, after the last) and a batch size.

        The batch size is the largest number of rows that any rank has in the step. A rank with one
        row fewer adds a row without labels, so that batches have the same shape on all ranks.
        """
        # 5 rows on 4 ranks: 0, 1, 2, 3 and 5 are the borders, so the last rank has 2 rows.
        first, stop = (rows * each // self.world_size for each in (rank, rank + 1))
        return position + first, position + stop, -(-rows // self.world_size)


class RankSpan(NamedTuple):
    """The positions of one batch on this rank."""

    first: int
    stop: int
    size: int
    """Rows of the batch. If there are fewer positions, a row without labels is added."""
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
    ) -> Loader[Any]:
        """A loader over all positions.

        Args:
            rows: Rows of a step on all ranks together; `global_batch` if not given.
            sharded: Whether it reads this rank's share of a step, or the whole step.
            epochs: Epochs of one loop; without it, a loop does not end.
        """
        loader: Loader[Any] = Loader(
            self.plan,
            global_batch_size=rows or self.global_batch,
            rank=self.rank if sharded else 0,
            world_size=self.world_size if sharded else 1,
            epochs=epochs,
            format=self.format,
        )
        loader.rank_positions.never()  # the owner of the source compares, once
        return loader

    def settings(self) -> State:
        """What determines the order and the steps: the same on all ranks."""
        return self.loader().shared_settings()

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
            wait: Whether to wait until enough text is tokenized. Without waiting, too little text
                is noticed only after all of it was tokenized.
        """
        if wait and isinstance(self.plan, StreamedPlan):
            self.plan.reach(self.global_batch)
        rows = self.plan.epoch_rows
        if rows is not None and rows < self.global_batch:
            raise PlanError(
                f"The training text makes {rows:,} rows, and one step of training takes "
                f"{self.global_batch:,} ({self.global_batch // self.world_size:,} on each of "
                f"{self.world_size:,} devices). Use a smaller batch size, or more text."
            )

    def steps(self, position: int) -> Iterator[EqualSteps]:
        """The steps from a position on, without end.

        While text is still being tokenized, this waits until the end of the next step is known.
        So all ranks compute the same steps, no matter how fast they are.
        """
        cuts = self.cuts
        while True:
            if cuts.epoch_rows is None and isinstance(self.plan, StreamedPlan):
                # Wait for this step and for one more row per rank. Whether these rows exist
                # decides if this step must leave rows for the next one.
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

    def finish(self, batch: Tensors) -> LabelBatch:
        """Convert a batch of the loader to the user's format; join its rows into one if `flat`."""
        return self.last(self.to_batch(dict(batch)))

    def last(self, batch: Tensors) -> LabelBatch:
        """Join the rows of a batch in the user's format if `flat`, and switch the cache off."""
        return cast("LabelBatch", without_cache(one_row(batch) if self.flat else batch))


class StepBatches(Dataset[LabelBatch]):
    """A dataset whose items are batches: `dataset[RankSpan]`. Worker processes have a copy."""

    def __init__(self, source: BatchSource) -> None:
        self.source = source
        self._loaders: dict[int, Loader[Any]] = {}

    def __repr__(self) -> str:
        source = self.source
        rank = f"rank {source.rank} of {source.world_size}"
        return f"{source.plan!r}; global batches of {source.global_batch:,} rows, {rank}"

    def __getstate__(self) -> dict[str, object]:
        # Loaders have threads. A worker makes its own when it needs them.
        return {"source": self.source, "_loaders": {}}

    def __len__(self) -> int:
        # Trainers report it as the number of examples on this rank.
        return (self.source.plan.epoch_rows or 0) // self.source.world_size

    def __getitem__(self, span: RankSpan) -> LabelBatch:
        if not isinstance(span, RankSpan):
            raise TypeError(
                f"[{span!r:.60}]: this dataset makes whole batches, which its loader asks for. "
                "next(iter(loader)) returns a batch."
            )
        source, real = self.source, span.stop - span.first
        full = span.step[1] - span.step[0] == source.global_batch
        # A full step is read by a loader that knows all ranks, so it pads rows to the same width on
        # each. The rows of a smaller step may not divide by the ranks, so a loader of one rank
        # reads them.
        loader = self._loader(0 if full else real)
        loader.seek(span.step[0] if full else span.first)
        batch = source.to_batch(loader.make(loader.step).batch)
        if not full and source.world_size > 1:
            batch = self._filled(batch, span)
        return source.last(batch)

    def __getitems__(self, spans: list[RankSpan]) -> LabelBatch:
        """Return the batch of a step: a batch sampler asks for a list of one step."""
        return self[spans[0]]

    def _loader(self, rows: int) -> Loader[Any]:
        """A loader of `rows` consecutive rows; with 0, of this rank's share of full steps."""
        # Few sizes occur: full steps, and the shares of the smaller steps at the end of an epoch.
        if rows not in self._loaders:
            source = self.source
            self._loaders[rows] = source.loader(rows, sharded=False) if rows else source.loader()
        return self._loaders[rows]

    def _filled(self, batch: Tensors, span: RankSpan) -> Tensors:
        """Return a smaller batch, padded to the shape that all ranks have in this step."""
        (rows,) = self.source.plan.sources.values()
        if isinstance(rows, Documents):  # as wide as the widest row of the step
            _, _, samples = self.source.plan.locate(np.arange(*span.step))
            # This rank has read only its own rows, and padded them to the widest of those.
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
            # Add a copy of the last row, so that the model gets real text; its labels are ignored.
            batch = {name: torch.cat((values, values[-1:])) for name, values in batch.items()}
            batch["labels"][-1] = -100
        return batch
