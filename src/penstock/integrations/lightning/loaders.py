"""DataLoaders for Lightning's Trainer, and the position of a training run.

    positions   0 ─── rank 0 ─ rank 1 ─┊─ rank 0 ─ rank 1 ─┊ …      a step each
    epoch       ├──────── len(loader) steps ──────┤├──────── …      each row once

    position = position of the checkpoint + rows of the batches that were trained after it

The number of trained batches is the trainer's own count. A loader that counts the batches it yields
is ahead of training by the prefetched batches, and Lightning saves the state of rank 0 only. From
the trainer's count, every rank computes the same position. Without a trainer, the loader counts
the batches that it yields.

The position is computed when the first batch is requested, not when the iterator is made:
Lightning makes iterators before it has restored its own counters.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import chain, islice, pairwise, takewhile
from typing import Any, Literal, cast

from torch.utils.data import DataLoader, DistributedSampler, SequentialSampler
from torch.utils.data._utils.pin_memory import pin_memory

from penstock.errors import PlanError, ResumeError
from penstock.integrations.batches import BatchSource, EqualSteps, RankSpan, State, StepBatches
from penstock.loader.batch_format import LabelBatch, Tensors
from penstock.loader.rank_positions import RankPositions

_FIELDS = ("data", "batches", "global_batch", "batch_size", "devices")


class TrainerProgress:
    """The position of one training run, counted in rows of all ranks together from 0.

    Args:
        trainer: Lightning's Trainer, which counts batches; None without one.
        on_change: What to do with a state of another order, as for `Loader.load_state_dict`.
    """

    def __init__(
        self, trainer: Any = None, on_change: Literal["error", "restart"] = "error"
    ) -> None:
        self.trainer = trainer
        self._on_change = on_change
        self._source: BatchSource | None = None
        self._batch_size = 0
        self._given: int | None = None
        self._restored: State | None = None
        self._position = self._batches = 0
        self.yielded = 0
        """The number of batches that the loader yielded; used only without a trainer."""

    @property
    def source(self) -> BatchSource:
        """The rows to train on, in steps of the current size."""
        assert self._source is not None  # set before any batch is requested
        return self._source

    def train_on(self, source: BatchSource, global_batch: int | None = None) -> None:
        """Train on the rows of `source`; the number of rows in a step is decided here.

        Args:
            source: The rows, in steps of the user's `batch_size` on each rank.
            global_batch: Rows of a step on all ranks, if the user set this number.
        """
        self._batch_size, self._given = source.global_batch // source.world_size, global_batch
        self._begin(source)

    def _begin(self, source: BatchSource) -> None:
        self._ranks = RankPositions(source.world_size)
        # A resumed run may keep the steps of its checkpoint on another number of devices.
        self._source = replace(source, global_batch=self._global_batch(source.world_size))
        self._source.refuse_no_step()
        if self._restored is not None:
            loader = self._source.loader()  # it only checks the state
            loader.load_state_dict(self._restored["data"], on_change=self._on_change)
            self._position = loader.position
            self._batches = self.yielded = int(self._restored["batches"])
            self._ranks.moved()

    def begin(self) -> int:
        """The position of the next batch."""
        if self.trainer is not None and self.trainer.overfit_batches:
            return 0  # the same batches in every epoch
        return self._position_after(self._trained(before_hooks=False))

    def check_ranks(self, position: int) -> None:
        """Raise if ranks begin or resume at different positions."""
        self._ranks.check(position, self.source.settings)

    def last_batch(self) -> tuple[int, tuple[int, int]]:
        """Return the number of the batch that was trained last, from 1, and its positions."""
        number = self._trained(before_hooks=True)
        cuts = self.source.cuts
        begin = cuts.begin(self._position_after(number - 1))
        return number, (begin, begin + cuts.rows(begin))

    def state_dict(self) -> State:
        """Return the position as JSON: the same on every rank, not counting prefetched batches.

        The state is empty before the rows to train on are known.
        """
        if self._source is None:
            return {}
        batches = self._trained(before_hooks=True)
        loader = self.source.loader()  # it only writes the state
        loader.seek(self._position_after(batches))
        return {
            "data": loader.state_dict(),
            "batches": batches,
            "global_batch": self.source.global_batch,
            "batch_size": self._batch_size,
            "devices": self.source.world_size,
        }

    def load_state_dict(self, state: State) -> None:
        """Continue from `state`, on any number of ranks, as soon as the rows are known."""
        if not isinstance(state, dict) or not all(name in state for name in _FIELDS):
            raise ResumeError(f"{state!r:.80} is not the state of a data module.")
        self._restored = dict(state)
        if self._source is not None:
            self._begin(self._source)

    def _global_batch(self, devices: int) -> int:
        """Rows of a step on all ranks together.

        A run that is resumed on another number of devices, with nothing else changed, keeps the
        rows per step of its checkpoint if the devices divide them. So the learning rate schedule
        and the number of steps in an epoch stay the same.
        """
        if self._given is not None:
            return self._given
        # Only if batch_size is the same: a user who changes it wants steps of another size.
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
            return self.yielded
        total = self.trainer.fit_loop.epoch_loop.batch_progress.total
        batches = total.processed if before_hooks else total.completed
        # A trainer that resumes may request data before it has restored its own counters.
        return max(int(batches), self._batches)

    def _position_after(self, batches: int) -> int:
        # `_position` belongs to `_batches`, the count when the checkpoint was written.
        return self.source.cuts.after(self._position, batches - self._batches)


class _ShardedSampler(SequentialSampler, DistributedSampler[Any]):
    """The batches of this rank, which no trainer shards a second time.

    Lightning replaces the sampler of a DataLoader unless it is a `DistributedSampler`, and with
    `overfit_batches` unless it is sequential. This class is both.

    It must not refer to its loader. A DataLoader in a reference cycle is left to the garbage
    collector, in which PyTorch waits five seconds for each worker to end.
    """

    def __init__(self, source: BatchSource, length: Callable[[], int | None]) -> None:
        self.num_replicas, self.rank = source.world_size, source.rank
        self.shuffle, self.drop_last, self.epoch, self.seed = False, False, 0, 0
        self._length = length
        self.spans: Iterable[RankSpan] = ()
        """The batches of the next iteration."""

    def __len__(self) -> int:
        length = self._length()  # a function, because the length may become known later
        if length is None:
            raise TypeError("The length of the loader is not known until all text is tokenized.")
        return length

    def __iter__(self) -> Iterator[RankSpan]:  # type: ignore[override]
        return iter(self.spans)

    def set_epoch(self, epoch: int) -> None:
        """Called by trainers. The order depends on the position, which implies the epoch."""
        self.epoch = epoch


class _SpanBatches(DataLoader[LabelBatch]):
    """A DataLoader whose dataset makes whole batches, at positions that its sampler yields."""

    def __init__(self, source: BatchSource, sampler: _ShardedSampler) -> None:
        super().__init__(StepBatches(source), batch_size=None, sampler=sampler, **source.workers)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.dataset!r})"


class EvaluationBatches(_SpanBatches):
    """Reads every row once over all ranks, in order, with equally many steps on each rank.

    No row is repeated, and no batch is without labels. So a mean over the rows of all ranks is a
    mean over the dataset. If the rows do not divide evenly, some batches are smaller.
    """

    def __init__(self, source: BatchSource) -> None:
        rank, world_size = source.rank, source.world_size
        batch_size = source.global_batch // world_size
        cuts = evaluation_cuts(len(source.plan), batch_size, rank, world_size)
        sampler = _ShardedSampler(source, cuts.__len__)
        sampler.spans = [RankSpan(*cut, cut[1] - cut[0], cut) for cut in cuts]
        # Shapes may differ between ranks, so each rank makes its batches as if it were alone.
        super().__init__(replace(source, rank=0, world_size=1), sampler)


def evaluation_cuts(
    num_rows: int, batch_size: int, rank: int, world_size: int
) -> list[tuple[int, int]]:
    """Return the batches of one rank as ranges of rows: none empty, equally many on all ranks.

    >>> [evaluation_cuts(9, 4, rank, world_size=2) for rank in (0, 1)]
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
    # A step must leave at least one row for each later step.
    edges = [min(step * batch_size, share - (steps - step)) for step in range(steps)] + [share]
    return [(first + low, first + high) for low, high in pairwise(edges)]


class TrainingBatches(_SpanBatches):
    """The training batches of an epoch, from the position of the run.

    Its state is the same on every rank. Without workers, batches are made on a thread of this
    process, which is usually fast enough.
    """

    def __init__(self, progress: TrainerProgress, *, sized: bool = True) -> None:
        """Begin at the position of `progress`.

        Args:
            progress: The position, and the rows to train on.
            sized: Whether the loader has a length. It must be the same on every rank, although
                some ranks may know the amount of text before others do.
        """
        self._progress = progress
        self._sized = sized
        # The length is a function of the progress, not a method; see _ShardedSampler.
        self._sampler = _ShardedSampler(
            progress.source, lambda: progress.source.epoch_steps if sized else None
        )
        super().__init__(progress.source, self._sampler)

    def __iter__(self) -> Iterator[LabelBatch]:  # type: ignore[override]
        """Yield the batches of one epoch of the trainer, from the position of the run on.

        If the trainer reads only some batches of each epoch (`limit_train_batches`), its next
        epoch begins where the last one stopped, and may cross the end of an epoch of the data.
        Without a trainer or a length, the batches stop at that end. Nothing is read before the
        first batch is requested.
        """
        source = self._progress.source
        position = self._progress.begin()
        source.refuse_no_step(wait=True)
        self._progress.check_ranks(position)
        steps = source.steps(position)
        most = len(self) if self._sized and self._progress.trainer is not None else None
        if most is None:
            # Stop at the end of the epoch of the first step. No step reaches into the next epoch.
            first = next(steps)
            steps = chain([first], takewhile(lambda each: each.epoch == first.epoch, steps))
        if self.num_workers:
            spans = (
                source.span(position + step * rows, rows)
                for _, position, rows, number in steps
                for step in range(number)
            )
            self._sampler.spans = islice(spans, most)
            batches: Iterator[LabelBatch] = super().__iter__()
        else:
            batches = islice(self._on_thread(source, steps), most)
            if self.pin_memory:  # a DataLoader does this itself only for batches of its workers
                batches = map(_pinned, batches)
        for batch in batches:
            # Counted before the batch is yielded: the caller may never request another one.
            self._progress.yielded += 1
            yield batch

    def _on_thread(self, source: BatchSource, steps: Iterator[EqualSteps]) -> Iterator[LabelBatch]:
        """Yield the batches of `steps`; a thread prefetches full ones, this one makes others."""
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
                loader.move(position)
                batches = iter(loader)
                batch = next(batches)
            yield source.finish(batch)
            yield from map(source.finish, islice(batches, number - 1))

    def state_dict(self) -> State:
        """The position of the run, the same on every rank."""
        return self._progress.state_dict()

    def load_state_dict(self, state: State) -> None:
        """Continue from a state."""
        self._progress.load_state_dict(state)


def _pinned(batch: LabelBatch) -> LabelBatch:
    # Values that are no tensors stay as they are.
    return cast("LabelBatch", pin_memory(batch))  # type: ignore[no-untyped-call]
