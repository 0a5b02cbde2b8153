"""What our LightningDataModules have in common: loaders, and a state that resumes exactly.

Lightning calls `prepare_data` in one process of a node, then `setup` in all of them, then asks
for loaders; a checkpoint keeps what `state_dict` gives on rank 0. See
`penstock.integrations.progress` for why that is enough.
"""

import os
import warnings
from typing import Any

import torch

from penstock.errors import MissingExtraError, PlanError
from penstock.integrations.feed import EvaluationBatches, Feed, TrainingBatches
from penstock.integrations.progress import Progress, per_device
from penstock.loader.arguments import AnyPlan, plan_of
from penstock.rows.protocol import Rows
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

__all__ = ["ResumableDataModule"]

_STAGES: dict[str | None, tuple[str, ...]] = {
    None: ("train", "val", "test"),
    "fit": ("train", "val"),
    "validate": ("val",),
    "test": ("test",),
    "predict": (),
}


class ResumableDataModule(LightningDataModule):  # type: ignore[misc]
    """Loaders over rows; subclasses say which rows, and how batches look."""

    batch_size: int | None
    num_workers: int
    train_dataset: Any

    def __init__(self, *, batch_size: int | None, seed: int, global_batch_size: int | None) -> None:
        super().__init__()
        sizes = {"batch_size": batch_size, "global_batch_size": global_batch_size}
        for name, rows in sizes.items():
            if rows is not None and rows < 1:
                raise PlanError(f"{name}={rows} makes no batch; use at least 1.")
        self.batch_size = batch_size
        self.seed = seed
        self._global_batch_size = global_batch_size
        self._progress: Progress | None = None
        self._state: dict[str, Any] | None = None

    @property
    def progress(self) -> Progress:
        """Where training is."""
        if self._progress is None:
            self._progress = Progress(self.device_rows, self._global_batch_size)
        return self._progress

    @property
    def device_rows(self) -> int:
        """Rows of a batch on each device: `batch_size`, or where it is None, a share of all."""
        if self.batch_size is not None:
            return self.batch_size
        assert self._global_batch_size is not None  # one of them is given, or chosen in setup
        return per_device(self._global_batch_size, self.topology()[1])

    def sides(self, stage: Any) -> tuple[str, ...]:
        """What a stage needs: "train", "val", "test"."""
        name = getattr(stage, "value", stage)
        if name not in _STAGES:
            raise PlanError(f'stage={stage!r} is not "fit", "validate", "test" or None.')
        return _STAGES[name]

    def feed(self, rows: Any, *, shuffle: Any) -> Feed:
        """The rows of this rank, in our order, as batches of this module."""
        raise NotImplementedError

    def training(self, rows: Any, *, shuffle: Any = "full") -> TrainingBatches:
        """The training loader, at wherever training is."""
        trainer = self.trainer
        if trainer is not None:
            self.progress.start_over(trainer)
        self.progress.give(self.feed(rows, shuffle=shuffle))
        if self._state is not None:
            state, self._state = self._state, None
            self.progress.load_state_dict(state)
        sized = self.progress.feed.epoch_steps is not None
        if trainer is not None:  # some ranks may know already what others do not
            sized = trainer.strategy.reduce_boolean_decision(sized, all=True)
        return TrainingBatches(self.progress, sized=sized)

    def evaluation(self, rows: Any) -> EvaluationBatches:
        """A loader of every row once, in order."""
        return EvaluationBatches(self.feed(rows, shuffle="none"), self.device_rows)

    def plan(self, rows: Any, shuffle: Any) -> AnyPlan:
        """The order of `rows`."""
        return plan_of(rows, self.seed, shuffle)

    def topology(self) -> tuple[int, int]:
        """Rank and number of ranks that are to have rows of their own."""
        trainer = self.trainer
        if trainer is not None:
            # Fewer than processes where several share one model.
            told = trainer.distributed_sampler_kwargs or {"rank": 0, "num_replicas": 1}
            return int(told["rank"]), int(told["num_replicas"])
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return torch.distributed.get_rank(), torch.distributed.get_world_size()
        return 0, 1

    def teardown(self, stage: str | None = None) -> None:
        """Stop to read text ahead, where it is streamed."""
        rows: Any = getattr(self, "train_dataset", None)
        store = rows.stream.members[0] if isinstance(rows, Rows) and rows.stream else None
        if isinstance(store, Snapshot) and stage in (None, "fit"):
            store.source.close()
            self.train_dataset = None

    def state_dict(self) -> dict[str, Any]:
        """Where training is: the same on every rank."""
        if self._progress is None or not self._progress.ready:
            return {}
        return self._progress.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where a state was taken, also on another number of devices."""
        if not state_dict:
            return
        progress = self._progress
        if progress is not None and progress.ready and progress.trainer is self.trainer:
            progress.load_state_dict(state_dict)
        else:  # the training loader of this trainer is not made yet
            self._state = state_dict

    def workers(
        self, num_workers: int, pin_memory: bool | None, prefetch_factor: int | None = None
    ) -> dict[str, Any]:
        """Arguments for a DataLoader."""
        if num_workers and os.name == "nt":
            warnings.warn(
                f"num_workers={num_workers} is taken as 0 on Windows, where starting workers costs "
                "more than they give. Batches are the same.",
                stacklevel=3,
            )
            num_workers = 0
        found: dict[str, Any] = {
            "num_workers": num_workers,
            "pin_memory": torch.cuda.is_available() if pin_memory is None else pin_memory,
            "persistent_workers": num_workers > 0,
            # Seeds workers, which draw nothing; without it, PyTorch would draw from its global
            # generator, and loading data would change what dropout does.
            "generator": torch.Generator(),
        }
        if num_workers and prefetch_factor is not None:
            found["prefetch_factor"] = prefetch_factor
        return found
