"""The base class of our LightningDataModules: loaders, and a state that resumes exactly.

Lightning calls `prepare_data` in one process of a node, then `setup` in all processes, then asks
for loaders. A checkpoint keeps what `state_dict` returns on rank 0.
"""

import os
import warnings
from typing import Any

import torch

from penstock.errors import MissingExtraError, PlanError
from penstock.integrations.batches import BatchSource, State
from penstock.integrations.hf_format import MaskedPacks
from penstock.integrations.lightning.loaders import (
    EvaluationBatches,
    TrainerProgress,
    TrainingBatches,
    rows_per_device,
)
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

__all__ = ["ModuleRows", "ResumableDataModule"]

ModuleRows = Windows | Documents | MaskedPacks

_STAGES: dict[str | None, tuple[str, ...]] = {
    None: ("train", "val", "test"),
    "fit": ("train", "val"),
    "validate": ("val",),
    "test": ("test",),
    "predict": (),
}


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
        if num_workers and os.name == "nt":
            warnings.warn(
                f"num_workers={num_workers} is taken as 0 on Windows, where starting workers costs "
                "more than they save. Batches are the same.",
                stacklevel=3,
            )
            num_workers = 0
        pinned = torch.cuda.is_available() if self._pin_memory is None else self._pin_memory
        found: dict[str, Any] = {
            "num_workers": num_workers,
            "pin_memory": pinned,
            "persistent_workers": num_workers > 0,
            # It seeds the workers, which draw no random numbers. Without it, PyTorch would draw
            # the seed from its global generator, and loading data would change dropout.
            "generator": torch.Generator(),
        }
        if num_workers and self.prefetch_factor is not None:
            found["prefetch_factor"] = self.prefetch_factor
        return found
