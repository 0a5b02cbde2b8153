"""A run's batches as DataLoaders that no trainer cuts up a second time.

    positions   0 ─── rank 0 ─ rank 1 ─┊─ rank 0 ─ rank 1 ─┊ …      a step each
    epoch       ├──────── len(loader) steps ──────┤├──────── …      each row once

Trainers look at a DataLoader's sampler, and give each rank a part of what it yields unless
it is a `DistributedSampler`. Here it is one: a step's batch is this rank's share already.

Where training begins is asked for when the first batch is, not when the iterator is made:
Lightning makes iterators before it has restored its own counters. No step reaches from one
epoch into the next: see `penstock.integrations.cuts`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice, pairwise, takewhile
from typing import Any, NamedTuple, Protocol

from torch.utils.data import DataLoader, DistributedSampler, SequentialSampler

from penstock.errors import PlanError
from penstock.integrations.cuts import EpochCuts
from penstock.integrations.rank_rows import RankRows, Span
from penstock.loader.arguments import AnyPlan
from penstock.loader.batch_format import Format
from penstock.loader.loader import Loader
from penstock.streaming.plan import StreamedPlan

__all__ = [
    "EvaluationBatches",
    "Feed",
    "Place",
    "TrainingBatches",
    "evaluation_cuts",
]

Dress = Callable[[Any], Any]


class Place(Protocol):
    """Says where training is."""

    @property
    def feed(self) -> "Feed":
        """What is trained on."""

    @property
    def has_trainer(self) -> bool:
        """Whether a trainer counts the steps of an epoch, and may want fewer than there are."""

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

    plan: AnyPlan
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
    drop_last: bool = False
    """Whether to leave out a last step of an epoch that is not full."""

    def __getstate__(self) -> dict[str, Any]:
        # Workers start none of their own, and a generator among these cannot be sent to them.
        return {**self.__dict__, "workers": {}}

    def loader(self, *, epochs: int | None = None) -> Loader:
        """A loader of full steps over all positions: without end, or so many epochs a loop."""
        return Loader(
            self.plan,
            global_batch_size=self.global_batch,
            rank=self.rank,
            world_size=self.world_size,
            epochs=epochs,
            format="narrow" if self.narrow else self.format,
        )

    @property
    def cuts(self) -> EpochCuts:
        """Where steps begin and end, as far as the length of an epoch is known."""
        rows = self.plan.epoch_rows
        return EpochCuts(rows, self.global_batch, self.world_size, self.drop_last)

    @property
    def epoch_steps(self) -> int | None:
        """The steps of an epoch; None where it is not known how many rows there are."""
        rows = self.plan.epoch_rows
        return None if rows is None else self.cuts.num_steps(rows)

    def refuse_no_step(self, *, wait: bool = False) -> None:
        """Raise where all rows do not make one full step.

        Where text is still being read, only `wait` finds out.
        """
        plan: Any = self.plan
        if wait and isinstance(plan, StreamedPlan):
            plan.reach(self.global_batch)
        if plan.epoch_rows is not None and plan.epoch_rows < self.global_batch:
            raise PlanError(
                f"The training text makes {len(plan):,} rows, and one step of training takes "
                f"{self.global_batch:,} ({self.global_batch // self.world_size:,} on each of "
                f"{self.world_size:,} devices). Use a smaller batch_size, or more text."
            )

    def steps(self, position: int) -> Iterator["Steps"]:
        """The steps from a position on, without end, several at once where they are alike.

        Where text is still being read, this waits until it is known where the next step ends:
        so all ranks, however fast they are, cut the same steps.
        """
        plan: Any = self.plan
        cuts = self.cuts
        while True:
            if cuts.epoch_rows is None:
                plan.reach(position + self.global_batch + self.world_size)
                cuts = self.cuts
            position = cuts.begin(position)
            epoch = position // cuts.epoch_rows if cuts.epoch_rows else 0
            steps = Steps(epoch, position, cuts.rows(position), cuts.num_alike(position))
            yield steps
            position += steps.rows * steps.number

    def span(self, position: int, rows: int) -> Span:
        """What this rank reads of a step."""
        first, stop, size = self.cuts.share(position, rows, self.rank)
        return Span(first, stop, size, (position, position + rows))

    def sized(self, global_batch: int) -> "Feed":
        """The same rows in other steps."""
        if global_batch == self.global_batch:
            return self
        return replace(self, global_batch=global_batch)


class Steps(NamedTuple):
    """Steps of training on all ranks together, one after the other."""

    epoch: int
    position: int
    """Where the first begins."""
    rows: int
    """Of each step."""
    number: int


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
            RankRows(feed),
            batch_size=None,
            sampler=_Dealt(feed, partial(_num_steps, place, sized=sized)),
            collate_fn=_same,
            **feed.workers,
        )

    def __len__(self) -> int:
        return _num_steps(self._place, sized=self._sized)

    def __iter__(self) -> Any:
        """Batches from where training is, to the end of the epoch.

        A trainer that wants fewer batches an epoch than there are (`limit_train_batches`) gets
        them from where it was, also across the end of an epoch. Nothing is asked before the
        first batch is.
        """
        feed = self._place.feed
        position = self._place.begin()
        feed.refuse_no_step(wait=True)
        steps = feed.steps(position)
        most = len(self) if self._sized and self._place.has_trainer else None
        if most is None:
            first = next(steps)
            steps = chain([first], takewhile(lambda each: each.epoch == first.epoch, steps))
        make = self._by_workers if self.num_workers else self._here
        for batch in make(feed, steps, most):
            # Counted before the batch is out: who keeps it may never ask for another.
            self._place.took_one()
            yield batch

    def _here(self, feed: Feed, steps: Iterator[Steps], most: int | None) -> Iterator[Any]:
        batches = islice(self._made(feed, steps), most)
        # As a DataLoader does it on a thread of its own, which there is none of here.
        return map(_pinned, batches) if self.pin_memory else batches

    def _made(self, feed: Feed, steps: Iterator[Steps]) -> Iterator[Any]:
        """Full steps as a loader makes them, ahead on a thread; the last of an epoch at once."""
        loader = feed.loader(epochs=1)
        batches: Iterator[Any] = iter(())
        for _, position, rows, number in steps:
            if rows < feed.global_batch:
                yield self.dataset[feed.span(position, rows)]
                continue
            batch = next(batches, None) if loader.position == position else None
            if batch is None:  # the first step of an epoch, or of this iteration
                loader.seek(position)
                batches = iter(loader)
                batch = next(batches)
            yield feed.dress(batch)
            yield from map(feed.dress, islice(batches, number - 1))

    def _by_workers(self, feed: Feed, steps: Iterator[Steps], most: int | None) -> Iterator[Any]:
        assert isinstance(self.sampler, _Dealt)  # made above
        spans = (
            feed.span(position + step * rows, rows)
            for _, position, rows, number in steps
            for step in range(number)
        )
        self.sampler.asked = islice(spans, most)
        return super().__iter__()

    def state_dict(self) -> dict[str, Any]:
        """Where training is, the same on every rank."""
        return self._place.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a state was taken."""
        self._place.load_state_dict(state)


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
            RankRows(feed), batch_size=None, sampler=sampler, collate_fn=_same, **feed.workers
        )

    def __iter__(self) -> Any:
        self._dealt.asked = (Span(*cut, cut[1] - cut[0], cut) for cut in self.cuts)
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
