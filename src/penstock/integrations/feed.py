"""A run's batches as DataLoaders that no trainer cuts up a second time.

    positions   0 ─── rank 0 ─ rank 1 ─┊─ rank 0 ─ rank 1 ─┊ …      a step each
    epoch       ├──────── len(loader) steps ──────┤├──────── …

Trainers look at a DataLoader's sampler, and give each rank a part of what it yields unless
it is a `DistributedSampler`. Here it is one: a step's batch is this rank's share already.

Where training begins is asked for when the first batch is, not when the iterator is made:
Lightning makes iterators before it has restored its own counters. Positions run on through
epochs, so that the rows that do not fill a batch at the end of one come first in the next.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
from torch.utils.data import DataLoader, Dataset, DistributedSampler, SequentialSampler

from penstock.errors import PlanError
from penstock.loader.assemble import Assembler, Block
from penstock.loader.batch import Format
from penstock.loader.loader import Loader
from penstock.loader.make import Maker
from penstock.order.growing import GrowingPlan
from penstock.order.plan import Plan
from penstock.order.shard import Shard
from penstock.order.steps import Steps

__all__ = ["EvaluationBatches", "Feed", "Place", "TrainingBatches", "evaluation_cuts"]

Dress = Callable[[Any], Any]


class Place(Protocol):
    """Says where training is."""

    @property
    def feed(self) -> "Feed":
        """What is trained on."""

    def begin(self) -> int:
        """The position of the next row, when the first batch of an iterator is asked for."""

    def took_one(self) -> None:
        """One more batch was handed out."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint."""


@dataclass(frozen=True)
class Feed:
    """What batches are made of, and how they look."""

    plan: Plan
    global_batch: int
    """Rows of a step on all ranks together."""
    rank: int
    world_size: int
    dress: Dress
    """Makes the user's batch of the loader's."""
    format: Format = "dict"
    narrow: bool = False
    workers: dict[str, Any] = field(default_factory=dict)
    """Arguments for DataLoaders."""

    def __getstate__(self) -> dict[str, Any]:
        # Workers start none of their own, and a generator among these cannot be sent to them.
        return {**self.__dict__, "workers": {}}

    def loader(self) -> Loader:
        """A loader over all positions, without end."""
        plan: Any = self.plan
        growing = isinstance(plan, GrowingPlan)
        return Loader(
            plan.sources["data"] if growing else plan,
            seed=plan.seed if growing else None,
            global_batch_size=self.global_batch,
            rank=self.rank,
            world_size=self.world_size,
            format=self.format,
            narrow=self.narrow,
        )

    @property
    def epoch_steps(self) -> int | None:
        """Full steps of one pass over the rows; None where it is not known how many there are."""
        rows = self.plan.epoch_rows
        return None if rows is None else rows // self.global_batch

    def refuse_no_step(self, *, wait: bool = False) -> None:
        """Raise where all rows do not make one step: a batch would hold some of them twice.

        Where text is still being read, only `wait` finds out.
        """
        plan: Any = self.plan
        if wait and isinstance(plan, GrowingPlan):
            plan.reach(self.global_batch)
        if self.epoch_steps == 0:
            raise PlanError(
                f"The training text makes {len(plan):,} rows, and one step of training takes "
                f"{self.global_batch:,} ({self.global_batch // self.world_size:,} on each of "
                f"{self.world_size:,} devices). Use a smaller batch_size, or more text."
            )

    def ends_pass(self, position: int) -> bool:
        """Whether no step of the pass is left at `position`.

        Where text is still being read, this waits until the next step is known to be there or
        not: so all ranks, however fast they are, find the same end.
        """
        step = position // self.global_batch
        plan: Any = self.plan
        if isinstance(plan, GrowingPlan):
            plan.reach((step + 1) * self.global_batch)
        per_pass = self.epoch_steps
        return per_pass is not None and step % max(1, per_pass) == 0

    def sized(self, global_batch: int) -> "Feed":
        """The same rows in other steps."""
        if global_batch == self.global_batch:
            return self
        return replace(self, global_batch=global_batch)


class _Dealt(SequentialSampler, DistributedSampler[Any]):
    """Numbers of steps, for this rank already.

    By its class, it tells Lightning that it is distributed, and that it is in order: so it is
    left alone by `use_distributed_sampler=True` and by `overfit_batches`.

    It must not know its loader: a DataLoader that refers to itself is left to the garbage
    collector, in which PyTorch waits five seconds for each worker to end.
    """

    def __init__(self, feed: Feed, length: Callable[[], int]) -> None:
        self.num_replicas, self.rank = feed.world_size, feed.rank
        self.shuffle, self.drop_last, self.epoch, self.seed = False, False, 0, 0
        self._length = length
        self.asked: Iterator[Any] = iter(())

    def __len__(self) -> int:
        return self._length()

    def __iter__(self) -> Iterator[Any]:
        return self.asked

    def set_epoch(self, epoch: int) -> None:
        """Trainers call it; the order is a function of the position, which knows its epoch."""
        self.epoch = epoch


class _Asked(NamedTuple):
    """A step: where it begins, and its rows on all ranks."""

    position: int
    global_batch: int


class _Steps(Dataset[Any]):
    """Item: the batch of one step. A worker has a copy, with a loader of its own."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        self._loader: Loader | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_feed": self._feed, "_loader": None}

    def __len__(self) -> int:
        return self._feed.epoch_steps or 0

    def __getitem__(self, asked: _Asked) -> Any:
        if self._loader is None or self._feed.global_batch != asked.global_batch:
            self._feed = self._feed.sized(asked.global_batch)
            self._loader = self._feed.loader()
        self._loader.seek(asked.position)
        return self._feed.dress(self._loader.make(self._loader.step).batch)


class TrainingBatches(DataLoader[Any]):
    """Training, an epoch an iteration, from wherever it is.

    A `DataLoader` for those who ask, with a state that is the same on every rank. Without
    workers, batches are made on a thread of this process, which is usually fast enough.
    """

    def __init__(self, place: Place, *, sized: bool = True) -> None:
        """Batches from where `place` says.

        Args:
            place: Where training is, and on what.
            sized: Whether there is a length, which must be the same on every rank: some may know
                already how much text there is when others do not.
        """
        self._place = place
        self._sized = sized
        feed = place.feed
        super().__init__(
            _Steps(feed),
            batch_size=None,
            sampler=_Dealt(feed, partial(_num_steps, place, sized=sized)),
            collate_fn=_same,
            **feed.workers,
        )

    def __len__(self) -> int:
        return _num_steps(self._place, sized=self._sized)

    def __iter__(self) -> Any:
        """Batches from where training is, to the end of an epoch.

        Nothing is asked before the first batch is.
        """
        position = self._place.begin()
        feed = self._place.feed
        steps = len(self) if self._sized else None
        feed.refuse_no_step(wait=True)
        batches = self._by_workers(position) if self.num_workers else self._here(position)
        for number, batch in enumerate(batches, start=1):
            # Counted before the batch is out: who keeps it may never ask for another.
            self._place.took_one()
            yield batch
            if steps is None:
                if feed.ends_pass(position + number * feed.global_batch):
                    return
            elif number == steps:
                return

    def _here(self, position: int) -> Iterator[Any]:
        feed = self._place.feed
        loader = feed.loader()
        loader.seek(position)
        batches = map(feed.dress, loader)
        # As a DataLoader does it on a thread of its own, which there is none of here.
        return map(_pinned, batches) if self.pin_memory else batches

    def _by_workers(self, position: int) -> Iterator[Any]:
        feed = self._place.feed
        assert isinstance(self.sampler, _Dealt)  # made above
        self.sampler.asked = (
            _Asked(position + number * feed.global_batch, feed.global_batch)
            for number in range(len(self))
        )
        return super().__iter__()

    def state_dict(self) -> dict[str, Any]:
        """Where training is, the same on every rank."""
        return self._place.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a state was taken."""
        self._place.load_state_dict(state)


class _Rows(Dataset[Any]):
    """Item: the batch of a range of rows, in order."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        shard = Shard(Steps({0: 1}), rank=0, world_size=1)
        self._assembler = Assembler(feed.plan, shard, end=None, by_tokens=False)
        self._maker: Maker | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_maker": None}

    def __len__(self) -> int:
        return len(self._feed.plan)

    def __getitem__(self, rows: tuple[int, int]) -> Any:
        first, stop = rows
        samples = np.arange(first, stop, dtype=np.int64)
        located = np.stack([np.zeros_like(samples), np.zeros_like(samples), samples, samples])
        tokens, targets, extras = self._assembler.read(located)
        (source,) = self._feed.plan.sources.values()
        widths: Any = getattr(source, "widths", None)
        block = Block(
            first_step=0,
            edges=[0, stop - first],
            spans=[(first, stop)],
            tokens=tokens,
            targets=targets,
            extras=extras,
            located=located,
            fingerprints=[0],
            widths=[int(widths(samples).max())] if widths else None,
        )
        return self._feed.dress(next(self._making().batches(block)).batch)

    def _making(self) -> Maker:
        if self._maker is None:
            self._maker = self._feed.loader()._maker
        return self._maker


class EvaluationBatches(DataLoader[Any]):
    """Every row once, in order, on all ranks together, and equally many steps on each.

    Nothing is repeated or filled up: a mean over the rows of all ranks is one over the rows,
    and no batch is without labels. So where rows do not divide, some batches are smaller.
    """

    def __init__(self, feed: Feed, batch_size: int) -> None:
        self.cuts = evaluation_cuts(
            len(feed.plan), batch_size, rank=feed.rank, world_size=feed.world_size
        )
        sampler = _Dealt(feed, self.cuts.__len__)
        self._dealt = sampler
        super().__init__(
            _Rows(feed), batch_size=None, sampler=sampler, collate_fn=_same, **feed.workers
        )

    def __iter__(self) -> Any:
        self._dealt.asked = iter(self.cuts)
        return super().__iter__()


def evaluation_cuts(
    num_rows: int, batch_size: int, *, rank: int, world_size: int
) -> list[tuple[int, int]]:
    """The batches of one rank, as ranges of rows: none empty, and equally many on all ranks.

    >>> [evaluation_cuts(9, 4, rank=rank, world_size=2) for rank in (0, 1)]
    [[(0, 3), (3, 4)], [(4, 8), (8, 9)]]
    >>> evaluation_cuts(9, 4, rank=0, world_size=1)
    [(0, 4), (4, 8), (8, 9)]
    """
    if num_rows < world_size:
        raise PlanError(
            f"{num_rows:,} rows cannot be evaluated on {world_size:,} devices: some would have "
            "none, and so no loss. Use fewer devices, or more text."
        )
    first, stop = (num_rows * each // world_size for each in (rank, rank + 1))
    # As many as the largest share needs, and no more than the smallest has rows.
    largest = -(-num_rows // world_size)
    steps = min(-(-largest // batch_size), num_rows // world_size)
    share = stop - first
    edges = [min(step * batch_size, share - (steps - step)) for step in range(steps)] + [share]
    return [(first + low, first + high) for low, high in pairwise(edges)]


def _num_steps(place: Place, *, sized: bool) -> int:
    steps = place.feed.epoch_steps if sized else None
    if steps is None:
        raise TypeError("How many rows there are is not known before all text was read.")
    return steps


def _same(batch: Any) -> Any:
    return batch


def _pinned(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: values.pin_memory() for name, values in batch.items()}
