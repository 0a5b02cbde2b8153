"""DataLoaders for Lightning's Trainer, and the position of a training run.

    positions   0 ─── rank 0 ─ rank 1 ─┊─ rank 0 ─ rank 1 ─┊ …      a step each
    epoch       ├──────── len(loader) steps ──────┤├──────── …      each row once

    position = that of the checkpoint + the rows of the batches that were trained after it

The trainer's own counter says how many batches were trained. A loader that counts what it yields
is ahead of the training by what was prefetched, and Lightning keeps the state of rank 0 only.
With the trainer's counter every rank computes the same position. Without a trainer, the loader
counts the batches that it yielded.

The position is computed when the first batch is requested, not when the iterator is made:
Lightning makes iterators before it has restored its own counters.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain, islice, takewhile
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler, SequentialSampler

from penstock.errors import PlanError, ResumeError
from penstock.integrations.batches import (
    BatchSource,
    EqualSteps,
    RankSpan,
    State,
    StepBatches,
    unchanged,
)
from penstock.integrations.hf_format import Tensors
from penstock.loader.loader import Loader

__all__ = [
    "ShardedSampler",
    "SpanBatches",
    "TrainerProgress",
    "TrainingBatches",
    "rows_per_device",
]

_FIELDS = ("data", "batches", "global_batch", "batch_size", "devices")


def rows_per_device(global_batch: int, devices: int) -> int:
    """Rows of a batch on each of some devices.

    Raises:
        PlanError: the rows do not divide over the devices.
    """
    if global_batch % devices:
        raise PlanError(
            f"global_batch_size={global_batch:,} does not divide over {devices:,} devices. Use a "
            f"multiple of {devices:,}."
        )
    return global_batch // devices


class TrainerProgress:
    """The position of one training run, in rows of all ranks together."""

    def __init__(self, batch_size: int, global_batch: int | None = None) -> None:
        """Begin at position 0.

        Args:
            batch_size: Rows of a step on one rank.
            global_batch: Rows of a step on all ranks, if the user gave them.
        """
        self.trainer: Any = None
        """Lightning's Trainer, which counts batches; None without one."""
        self._batch_size = batch_size
        self._given = global_batch
        self._source: BatchSource | None = None
        self._state_loader: Loader | None = None
        self._restored: State | None = None
        self._position = 0
        self._batches = 0
        self._yielded = 0

    @property
    def source(self) -> BatchSource:
        """The rows to train on, in steps of the current size."""
        assert self._source is not None  # set before any batch is requested
        return self._source

    def train_on(self, source: BatchSource) -> None:
        """Train on the rows of `source`, on its ranks; the size of a step is decided here."""
        # A resumed run may keep the steps of its checkpoint on another number of devices.
        self._source = replace(source, global_batch=self._global_batch(source.world_size))
        self._state_loader = None
        self._source.refuse_no_step()
        if self._restored is not None:
            loader = self._loader_of_states()
            loader.load_state_dict(self._restored["data"])
            self._position = loader.position
            self._batches = self._yielded = int(self._restored["batches"])

    def belong_to(self, trainer: Any) -> None:
        """Count with `trainer`; with another one than before, from the beginning."""
        # One data module may serve several trainers, one after the other. Each begins at 0, or
        # from the checkpoint that it loads.
        if trainer is not self.trainer:
            self.trainer = trainer
            self._restored = None
            self._position = self._batches = self._yielded = 0

    def begin(self) -> int:
        """The position of the next batch."""
        if self.trainer is not None and self.trainer.overfit_batches:
            return 0  # the same batches in every epoch
        return self._position_after(self._trained(before_hooks=False))

    def count_yielded(self) -> None:
        """Count one more batch; only used without a trainer."""
        self._yielded += 1

    def state_dict(self) -> State:
        """The position as JSON: the same on every rank, no matter what was prefetched.

        Empty before the rows to train on are known.
        """
        if self._source is None:
            return {}
        batches = self._trained(before_hooks=True)
        loader = self._loader_of_states()
        loader.seek(self._position_after(batches))
        return {
            "data": loader.state_dict(),
            "batches": batches,
            "global_batch": self.source.global_batch,
            "batch_size": self._batch_size,
            "devices": self.source.world_size,
        }

    def load_state_dict(self, state: State) -> None:
        """Continue from `state`, on any number of ranks."""
        if not isinstance(state, dict) or not all(name in state for name in _FIELDS):
            raise ResumeError(f"{state!r:.80} is not the state of a data module.")
        self._restored = dict(state)
        if self._source is not None:
            self.train_on(self._source)

    def _loader_of_states(self) -> Loader:
        """A loader that only reads and writes states."""
        if self._state_loader is None:
            self._state_loader = self.source.loader()
        return self._state_loader

    def _global_batch(self, devices: int) -> int:
        """Rows of a step on all ranks together.

        A run that is resumed on another number of devices, with nothing else changed, keeps the
        steps of its checkpoint if they divide. So a step stays the same for the learning rate
        schedule and for the length of an epoch.
        """
        if self._given is not None:
            return rows_per_device(self._given, devices) * devices
        # Only if batch_size is the same: another one asks for other steps.
        then = self._restored
        if then is not None and then["batch_size"] == self._batch_size:
            kept = int(then["global_batch"])
            if kept % devices == 0:
                return kept
        return self._batch_size * devices

    def _trained(self, *, before_hooks: bool) -> int:
        """The number of batches that were trained.

        Lightning's `processed` counts a batch right after its step, before the hooks in which
        checkpoints are written; `completed` counts it after them.
        """
        if self.trainer is None:
            return self._yielded
        total = self.trainer.fit_loop.epoch_loop.batch_progress.total
        batches = total.processed if before_hooks else total.completed
        # A trainer that resumes may request data before it has restored its own counters.
        return max(int(batches), self._batches)

    def _position_after(self, batches: int) -> int:
        # `_position` belongs to `_batches`, the count when the checkpoint was written.
        return self.source.cuts.after(self._position, batches - self._batches)


class ShardedSampler(SequentialSampler, DistributedSampler[Any]):
    """The batches of this rank, which no trainer shards a second time.

    Lightning replaces the sampler of a DataLoader unless it is a `DistributedSampler`, and with
    `overfit_batches` unless it is sequential. This class is both.

    It must not refer to its loader. A DataLoader in a reference cycle is left to the garbage
    collector, in which PyTorch waits five seconds for each worker to end.
    """

    def __init__(self, rank: int, world_size: int, length: Callable[[], int]) -> None:
        self.num_replicas, self.rank = world_size, rank
        self.shuffle, self.drop_last, self.epoch, self.seed = False, False, 0, 0
        self._length = length
        self.spans: Iterator[RankSpan] = iter(())

    def __len__(self) -> int:
        return self._length()  # a function, because the length may become known later

    def __iter__(self) -> Iterator[RankSpan]:  # type: ignore[override]
        return self.spans

    def set_epoch(self, epoch: int) -> None:
        """Called by trainers. The order depends on the position, which implies the epoch."""
        self.epoch = epoch


class SpanBatches(DataLoader[Tensors]):
    """A DataLoader whose dataset makes whole batches."""

    def __init__(self, dataset: StepBatches, sampler: ShardedSampler) -> None:
        self._spans = sampler
        workers = dataset.source.workers
        super().__init__(dataset, batch_size=None, sampler=sampler, collate_fn=unchanged, **workers)

    def make(self, spans: Iterator[RankSpan]) -> Iterator[Tensors]:
        """The batches at these positions, in this order."""
        self._spans.spans = spans
        return super().__iter__()


class TrainingBatches(SpanBatches):
    """The training batches of an epoch, from the position of the run.

    Its state is the same on every rank. Without workers, batches are made on a thread of this
    process, which is usually fast enough.
    """

    def __init__(self, progress: TrainerProgress, *, sized: bool = True) -> None:
        """Batches from the position of `progress`.

        Args:
            progress: The position, and the rows to train on.
            sized: Whether there is a length. It must be the same on every rank: some ranks may
                know already how much text there is when others do not.
        """
        self._progress = progress
        self._sized = sized
        source = progress.source
        # A function of the progress, not a method of this loader; see ShardedSampler.
        length = partial(_num_steps, progress, sized=sized)
        sampler = ShardedSampler(source.rank, source.world_size, length)
        super().__init__(StepBatches(source), sampler)

    def __len__(self) -> int:
        return _num_steps(self._progress, sized=self._sized)

    def __iter__(self) -> Iterator[Tensors]:  # type: ignore[override]
        """Batches from the position to the end of the epoch.

        If the trainer takes fewer batches an epoch than there are (`limit_train_batches`), they
        continue from its position, also across the end of an epoch. Nothing is read before the
        first batch is requested.
        """
        source = self._progress.source
        position = self._progress.begin()
        source.refuse_no_step(wait=True)
        steps = source.steps(position)
        most = len(self) if self._sized and self._progress.trainer is not None else None
        if most is None:
            # To the end of the epoch in which the first step is; it ends with a step.
            first = next(steps)
            steps = chain([first], takewhile(lambda each: each.epoch == first.epoch, steps))
        make = self._by_workers if self.num_workers else self._on_thread
        for batch in make(source, steps, most):
            # Counted before the batch is yielded: the caller may never request another one.
            self._progress.count_yielded()
            yield batch

    def _on_thread(
        self, source: BatchSource, steps: Iterator[EqualSteps], most: int | None
    ) -> Iterator[Tensors]:
        batches = islice(self._made(source, steps), most)
        # A DataLoader pins batches on a thread that it has only with workers.
        return map(_pinned, batches) if self.pin_memory else batches

    def _made(self, source: BatchSource, steps: Iterator[EqualSteps]) -> Iterator[Tensors]:
        """Full steps by a loader, which makes them ahead on a thread; other steps here."""
        # With epochs=1 a loop of the loader ends with the epoch, so it never prefetches rows that
        # the smaller steps at the end take.
        loader = source.loader(epochs=1)
        batches: Iterator[Tensors] = iter(())
        for _, position, rows, number in steps:
            if rows < source.global_batch:
                yield self.dataset[source.span(position, rows)]
                continue
            # The loader continues by itself through full steps. After a smaller step, which was
            # read elsewhere, its position is not that of the next step.
            batch = next(batches, None) if loader.position == position else None
            if batch is None:  # the first step of an epoch, or of this iteration
                loader.seek(position)
                batches = iter(loader)
                batch = next(batches)
            yield source.finish(batch)
            yield from map(source.finish, islice(batches, number - 1))

    def _by_workers(
        self, source: BatchSource, steps: Iterator[EqualSteps], most: int | None
    ) -> Iterator[Tensors]:
        spans = (
            source.span(position + step * rows, rows)
            for _, position, rows, number in steps
            for step in range(number)
        )
        return self.make(islice(spans, most))

    def state_dict(self) -> State:
        """The position of the run, the same on every rank."""
        return self._progress.state_dict()

    def load_state_dict(self, state: State) -> None:
        """Continue from a state."""
        self._progress.load_state_dict(state)


def _num_steps(progress: TrainerProgress, *, sized: bool) -> int:
    steps = progress.source.epoch_steps if sized else None
    if steps is None:
        raise TypeError("The number of rows is not known before all text was read.")
    return steps


def _pinned(batch: Tensors) -> Tensors:
    return {name: values.pin_memory() for name, values in batch.items()}
