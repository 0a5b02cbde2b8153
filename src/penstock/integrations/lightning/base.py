"""The base class of our LightningDataModules: loaders, and a state that resumes exactly.

Lightning calls `prepare_data` in one process of a node, then `setup` in all processes, then asks
for loaders. A checkpoint keeps what `state_dict` returns on rank 0.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch

from penstock.errors import MissingExtraError, PlanError
from penstock.integrations.batches import BatchSource, RankSpan, State, StepBatches
from penstock.integrations.hf_format import MaskedPacks, Tensors
from penstock.integrations.lightning.loaders import (
    ShardedSampler,
    SpanBatches,
    TrainerProgress,
    TrainingBatches,
    rows_per_device,
)
from penstock.loader.dataloader import WorkerOptions
from penstock.order.shuffle import Mode
from penstock.rows.documents import Documents
from penstock.rows.windows import Windows
from penstock.streaming.snapshots import Snapshot

try:
    from lightning.pytorch import LightningDataModule
except ImportError:
    try:
        from pytorch_lightning import LightningDataModule
    except ImportError:
        raise MissingExtraError(
            "A LightningDataModule needs lightning, which is not installed.\n"
            'Install it with: pip install "penstock[lightning]"'
        ) from None

__all__ = ["EvaluationBatches", "ModuleRows", "ResumableDataModule", "evaluation_cuts"]

ModuleRows = Windows | Documents | MaskedPacks

_STAGES: dict[str | None, tuple[str, ...]] = {
    None: ("train", "val", "test"),
    "fit": ("train", "val"),
    "validate": ("val",),
    "test": ("test",),
    "predict": (),
}


class EvaluationBatches(SpanBatches):
    """Every row once, in order, on all ranks together, in as many steps on each rank.

    No row is repeated, and no batch is without labels. So a mean over the rows of all ranks is a
    mean over the dataset. If rows do not divide, some batches are smaller.
    """

    def __init__(self, source: BatchSource, batch_size: int) -> None:
        rank, world_size = source.rank, source.world_size
        self.cuts = evaluation_cuts(len(source.plan), batch_size, rank=rank, world_size=world_size)
        # The batches of a rank are its own: other ranks need not have the same shapes.
        alone = replace(source, rank=0, world_size=1)
        super().__init__(StepBatches(alone), ShardedSampler(rank, world_size, self.cuts.__len__))

    def __iter__(self) -> Iterator[Tensors]:  # type: ignore[override]
        return self.make(RankSpan(*cut, cut[1] - cut[0], cut) for cut in self.cuts)


def evaluation_cuts(
    num_rows: int, batch_size: int, *, rank: int, world_size: int
) -> list[tuple[int, int]]:
    """The batches of one rank as ranges of rows: none empty, and as many as on every rank.

    >>> [evaluation_cuts(9, 4, rank=rank, world_size=2) for rank in (0, 1)]
    [[(0, 3), (3, 4)], [(4, 8), (8, 9)]]
    >>> evaluation_cuts(9, 4, rank=0, world_size=1)
    [(0, 4), (4, 8), (8, 9)]
    """
    if num_rows < world_size:
        raise PlanError(
            f"{num_rows:,} rows cannot be evaluated on {world_size:,} devices: some would have "
            "no row, and so no loss. Use fewer devices, or more text."
        )
    first, stop = (num_rows * each // world_size for each in (rank, rank + 1))
    # As many steps as the largest share needs, but at most one for each row of the smallest.
    largest = -(-num_rows // world_size)
    steps = min(-(-largest // batch_size), num_rows // world_size)
    share = stop - first
    # A step may not take rows that later steps need to have one each.
    edges = [min(step * batch_size, share - (steps - step)) for step in range(steps)] + [share]
    return [(first + low, first + high) for low, high in pairwise(edges)]


class ResumableDataModule(LightningDataModule):  # type: ignore[misc]
    """Loaders over rows. A subclass decides which rows, and how batches look."""

    def __init__(
        self,
        *,
        batch_size: int | None,
        seed: int,
        global_batch_size: int | None,
        drop_last: bool,
        pin_memory: bool | None,
    ) -> None:
        super().__init__()
        sizes = {"batch_size": batch_size, "global_batch_size": global_batch_size}
        for name, rows in sizes.items():
            if rows is not None and rows < 1:
                raise PlanError(f"{name}={rows} must be at least 1.")
        self.batch_size = batch_size
        self.seed = seed
        self.streaming = False
        self.num_workers = 0
        self.prefetch_factor: int | None = None
        self.train_dataset: ModuleRows | None = None
        self.val_dataset: ModuleRows | None = None
        self._global_batch_size = global_batch_size
        self._drop_last = drop_last
        self._pin_memory = pin_memory
        self._progress: TrainerProgress | None = None
        self._state: State | None = None

    @property
    def progress(self) -> TrainerProgress:
        """The position of the training run."""
        if self._progress is None:
            self._progress = TrainerProgress(self.device_rows, self._global_batch_size)
        return self._progress

    @property
    def device_rows(self) -> int:
        """Rows of a batch on each device: `batch_size`, or a share of `global_batch_size`."""
        if self.batch_size is not None:
            return self.batch_size
        assert self._global_batch_size is not None  # one of both is given, or chosen in setup
        return rows_per_device(self._global_batch_size, self.topology()[1])

    def sides(self, stage: str | None) -> tuple[str, ...]:
        """The parts of the data that a stage needs: "train", "val", "test"."""
        if stage not in _STAGES:  # Lightning passes an enum, whose members equal these strings
            raise PlanError(f'stage={stage!r} is not "fit", "validate", "test" or None.')
        return _STAGES[stage]

    def source(self, rows: ModuleRows, shuffle: Mode) -> BatchSource:
        """The rows of this rank in an order, and how batches of them are made."""
        raise NotImplementedError

    def training(self, rows: ModuleRows) -> TrainingBatches:
        """The training loader, at the position of the run."""
        trainer = self.trainer
        if trainer is not None:
            self.progress.belong_to(trainer)
        # While a store grows, only the order within its parts can be known.
        self.progress.train_on(self.source(rows, "part" if self.streaming else "full"))
        # Lightning restores states before it asks for loaders, so the state had to wait.
        if self._state is not None:
            state, self._state = self._state, None
            self.progress.load_state_dict(state)
        sized = self.progress.source.epoch_steps is not None
        if trainer is not None:  # some ranks may know already what others do not
            sized = trainer.strategy.reduce_boolean_decision(sized, all=True)
        return TrainingBatches(self.progress, sized=sized)

    def evaluation(self, rows: ModuleRows) -> EvaluationBatches:
        """A loader of every row once, in order."""
        return EvaluationBatches(self.source(rows, "none"), self.device_rows)

    def topology(self) -> tuple[int, int]:
        """The rank of this process, and the number of ranks that read separate rows."""
        trainer = self.trainer
        if trainer is not None:
            # There are fewer ranks than processes if several processes share one model.
            found = trainer.distributed_sampler_kwargs or {"rank": 0, "num_replicas": 1}
            return int(found["rank"]), int(found["num_replicas"])
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return torch.distributed.get_rank(), torch.distributed.get_world_size()
        return 0, 1

    def teardown(self, stage: str | None = None) -> None:
        """Stop the build of a streamed store in this process."""
        rows = self.train_dataset
        if rows is None or stage not in (None, "fit"):
            return
        # The build holds the lock of the store, and another process may wait to continue it.
        for store in rows.stream.members:
            if isinstance(store, Snapshot):
                store.source.close()
                self.train_dataset = None

    def state_dict(self) -> State:
        """The position of the training run: the same on every rank."""
        return {} if self._progress is None else self._progress.state_dict()

    def load_state_dict(self, state_dict: State) -> None:
        """Continue from a state, also on another number of devices."""
        if not state_dict:
            return
        progress = self._progress
        # Under another trainer, the progress is still that of the old run.
        if progress is not None and progress.trainer is self.trainer and progress.state_dict():
            progress.load_state_dict(state_dict)
        else:  # the training loader of this trainer is not made yet
            self._state = state_dict

    def worker_options(self, shuffle: Mode) -> dict[str, Any]:
        """The DataLoader arguments about workers and pinned memory."""
        # A stream is read in the process that builds it, on a thread.
        num_workers = 0 if self.streaming and shuffle == "part" else self.num_workers
        prefetch_factor = self.prefetch_factor if num_workers else None
        workers = WorkerOptions(
            num_workers, prefetch_factor, num_workers > 0, 0, None, None
        ).checked()
        pinned = torch.cuda.is_available() if self._pin_memory is None else self._pin_memory
        # The generator seeds the workers, which draw no random numbers. Without it, PyTorch would
        # draw the seed from its global generator, and loading data would change dropout.
        return {**workers._asdict(), "pin_memory": pinned, "generator": torch.Generator()}
