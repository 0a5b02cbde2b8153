"""A DataLoader over several datasets that can save and resume its position.

    loader = create_multiplex_dataloader([("arc", arc), ("gsm8k", gsm8k)], batch_size=32)
    for batch in loader:                          # one epoch; the next one has another order
        checkpoint["data"] = loader.state_dict()  # after any batch, on any rank

The position counts the batches that the loader returned, not those that workers prepared ahead.
Without workers, the loader does not use PyTorch's loop, which takes 20 µs per batch. Reading a
batch of 32 examples from memory takes less than that.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from penstock.errors import PlanError, ResumeError
from penstock.integrations.multiplex.dataset import Examples, MultiplexDataset, default_collate_fn
from penstock.integrations.multiplex.mixing import Json, Lengths, Mixing, Weights
from penstock.integrations.multiplex.run import BatchRequest, MultiplexRun, Span, order_settings
from penstock.loader.dataloader import WorkerOptions
from penstock.loader.rank_positions import RankPositions
from penstock.loader.state import combine, of_samples, sealed, shortened, source_keys, unsealed
from penstock.ranges import whole_number

_VERSION = 2  # of a state
_FIELDS = {"epoch": int, "start": int, "position": int, "changed": dict, "order": dict}


class _Sampler(DistributedSampler[Any]):
    """The batch sampler: yields the examples of each batch of this rank until the epoch ends.

    Some tools replace every sampler that is not a DistributedSampler, in order to shard the data
    over ranks. Here the data is sharded already, so this class is a DistributedSampler.
    """

    def __init__(self, dataset: MultiplexDataset) -> None:
        self._run = run = dataset.run
        super().__init__(dataset, run.world_size, run.rank, run.shuffle)
        self._length = run.steps_per_epoch()

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[BatchRequest]:
        return (request for request, _ in self._run.steps())

    def set_epoch(self, epoch: int) -> None:
        self._run.set_epoch(epoch)


class MultiplexDataLoader(DataLoader[Any]):
    """A `torch.utils.data.DataLoader` of mixed batches; see `create_multiplex_dataloader`.

    Each `iter()` is the next epoch. Right after `load_state_dict`, it is the rest of the epoch in
    which the state was saved. `len()` is the number of steps in a whole epoch.
    """

    dataset: MultiplexDataset

    def __init__(self, dataset: MultiplexDataset, run: MultiplexRun, **options: Any) -> None:
        self._original = run.mixing
        self._run = dataset.run = run
        self._ranks = RankPositions(run.world_size)
        sampler = _Sampler(dataset)
        # Seeds the workers. Without it, PyTorch would draw from its global generator in every
        # epoch, so loading data would change the dropout of the model.
        generator = torch.Generator().manual_seed(run.mixing.seed % 2**63)
        super().__init__(dataset, batch_sampler=sampler, generator=generator, **options)
        # PyTorch leaves these unset if it gets a batch sampler, but users and tools read them.
        self.__dict__.update(batch_size=run.batch_size, drop_last=run.drop_last, sampler=sampler)

    def __repr__(self) -> str:
        run = self._run
        batches = f"batches of {run.batch_size:,}, rank {run.rank} of {run.world_size}"
        at = f"at epoch {self.epoch:,}, position {self.position:,}"
        return f"MultiplexDataLoader({self.dataset!r}; {batches}; {at})"

    def __iter__(self) -> Any:
        number = self._run.begin()
        return self._iterate(number, self._run.mixing, self._batches())

    @property
    def position(self) -> int:
        """The position of the next example in the order; it counts all ranks and epochs."""
        return self._run.position

    @property
    def epoch(self) -> int:
        """The current epoch, or the next one if the last one is finished."""
        return self._run.epoch

    @property
    def fingerprint(self) -> int | None:
        """A number that identifies the last batch; None before the first one.

        The sum over all ranks is the number that a single process would have.
        """
        if self._run.last is None:
            return None
        # This uses the mixing of the last batch. The current mixing may be another one: with
        # shuffle=False, each epoch begins a new mixing at position 0.
        mixing, span = self._run.last
        positions = np.arange(*span[:2])
        sources, epochs, samples = mixing.order.locate(positions)
        keys = source_keys(mixing.names)[sources]
        return combine(of_samples(keys, epochs, samples, positions), [0])[0]

    def set_epoch(self, epoch: int) -> None:
        """Let the next `iter()` begin `epoch`; no effect if `epoch` is the next one anyway."""
        self._run.set_epoch(epoch)

    def set_weights(self, weights: Weights) -> None:
        """Use other weights from the next batch on; call it on every rank at the same step.

        Each dataset continues with the example after its last one, and its rounding error is
        carried over. A dataset of weight 0 passes its error on to the others. The rest of a
        `schedule` is dropped. Batches that workers prepared ahead are discarded and made again;
        with `persistent_workers=True` the workers are not restarted for that. Takes about 10 µs
        per dataset, however often weights changed before.

        Raises:
            PlanError: The weights are invalid, or the loader is proportional.
        """
        self._run.mixing = self._run.mixing.changed(self.position, weights)

    def state_dict(self) -> Json:
        """The position of the run as JSON; the same on every rank, for any number of workers.

        The state takes at most 4 KiB plus 100 bytes per dataset, however often weights were set.
        It contains the current weights, a digest of all earlier weights, and the counts and
        rounding errors of the datasets at the position where the current weights were set.
        """
        run = self._run
        changed = run.mixing.stages != self._original.stages
        state = {
            "epoch": run.epoch,
            "start": run.start,
            "position": run.position,
            "changed": run.mixing.to_resume() if changed else {},
            "order": self._settings,
        }
        return sealed(state, _VERSION)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was saved, with the weights of that moment.

        Batch size, number of ranks and workers may differ. The seed, the datasets and the weights
        that were passed at creation must be the same. If weights had been set, positions before
        that change cannot be computed any more: earlier epochs and items raise a PlanError.

        Raises:
            ResumeError: The state was edited, or belongs to another order.
        """
        state = unsealed(state_dict, _VERSION, _FIELDS, of="a multiplex DataLoader")
        saved = state["order"]
        differences = [
            f"{name} {saved.get(name)!r:.200} -> {now!r:.200}"
            for name, now in self._settings.items()
            if shortened(saved.get(name)) != now
        ]
        if differences:
            raise ResumeError(
                "This checkpoint belongs to another order of the examples, so its position "
                f"{state['position']:,} would be another example. Changed since it was saved: "
                f"{', '.join(differences)}. Restore these settings to resume exactly. To continue "
                "with other weights, load the state first and then call set_weights."
            )
        left = state["start"] + self._original.total - state["position"]
        self._run.num_steps(left)  # raises if a rank would have no example
        changed = state["changed"]
        self._run.mixing = self._original.resumed(changed) if changed else self._original
        self._run.go_to(state["epoch"], state["start"], state["position"])
        self._ranks.moved()

    @cached_property
    def _settings(self) -> Json:
        # Computed once: it reads examples, and a training loop may save the state every step.
        return order_settings(self._original, self._run.shuffle, self.dataset.datasets)

    def _shared_settings(self) -> Json:
        return {**self._settings, "batch_size": self._run.batch_size}

    def _batches(self) -> Iterator[tuple[Any, Span]]:
        """The batches from the current position on, by PyTorch's loop or by our own."""
        if self.num_workers or self.pin_memory:
            # The batches are first in `zip`, so that PyTorch sees the end and stops its workers.
            return zip(super().__iter__(), self._run.spans(), strict=False)
        dataset, collate, steps = self.dataset, self.collate_fn, self._run.steps()
        if collate is default_collate_fn:
            return ((dataset.read_collated(*request), span) for request, span in steps)
        return ((collate(dataset.read(*request)), span) for request, span in steps)

    def _iterate(
        self, number: int, mixing: Mixing, batches: Iterator[tuple[Any, Span]]
    ) -> Iterator[Any]:
        """Yield the batches, which are in the order of `mixing`, and move the run forward."""
        run = self._run
        self._ranks.check(run.position, self._shared_settings)
        while True:
            # Two iterators would both move the position, and a saved state would fit neither.
            if number != run.iterator:
                raise ResumeError(
                    "This iterator is outdated: load_state_dict(), set_epoch() or another iter() "
                    "moved the DataLoader. Use the newest iterator."
                )
            if run.mixing is not mixing:  # set_weights was called after the batches were ordered
                mixing, batches = run.mixing, self._batches()
            try:
                batch, span = next(batches)
            except StopIteration:
                run.finish()
                return
            # Before the yield, so that a state that is saved with this batch continues after it.
            run.position, run.last = span[2], (mixing, span)
            yield batch


def create_multiplex_dataloader(  # noqa: PLR0913  (the arguments of the code that it replaces)
    datasets: Sequence[tuple[str, Examples]],
    batch_size: int = 32,
    shuffle: bool = True,
    num_workers: int = 0,
    pin_memory: bool = False,
    prefetch_factor: int | None = None,
    persistent_workers: bool = False,
    drop_last: bool = False,
    sampling_strategy: str = "proportional",
    sampling_weights: Weights | None = None,
    collate_fn: Callable[[list[dict[str, Any]]], Any] | None = None,
    shuffle_seed: int = 42,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    timeout: float = 0,
    worker_init_fn: Callable[[int], None] | None = None,
    multiprocessing_context: Any = None,
    schedule: Mapping[int, Weights] | None = None,
    lengths: Lengths | None = None,
    sampler: None = None,
) -> MultiplexDataLoader:
    """A DataLoader over several datasets, mixed by size, equally, or by weights.

    An epoch has as many examples as all datasets together. "proportional" reads each example
    once, in a random order: its shares are exact in an epoch, but not at each point inside it.
    "uniform" and "weighted" keep every dataset within two examples of its share at every point of
    the run. Inside an epoch, a dataset repeats an example only after all of it was read; with
    `shuffle` it continues in the next epoch where it stopped. Each rank gets its share of every
    step, and all ranks take the same number of steps.

    Args:
        datasets: Pairs of a name and a sized sequence of dicts, which is never copied.
        batch_size: The number of examples in a batch, on each rank.
        shuffle: Whether each epoch has a new order. If not, every epoch has the order of
            `shuffle_seed`, which is a shuffled one too.
        num_workers: Processes that read and collate. They help if `collate_fn` is slow. On
            Windows the loader uses none.
        pin_memory: Copy batches to pinned memory, for fast transfers to a GPU.
        prefetch_factor: How many batches each worker prepares ahead.
        persistent_workers: Keep the workers from one epoch to the next.
        drop_last: Leave out the last step of an epoch if it is not full.
        sampling_strategy: "proportional", "uniform" or "weighted".
        sampling_weights: Shares in the order of `datasets` or by name; 7 and 3 mean 0.7 and 0.3.
            With the default strategy they mean "weighted".
        collate_fn: Makes a batch of a list of dicts; by default `default_collate_fn`.
        shuffle_seed: A different seed gives a different order.
        rank: The rank of this process; by default that of torch.distributed, or 0.
        world_size: The number of ranks; by default that of torch.distributed, or 1.
        timeout: Seconds to wait for a worker; 0 waits forever.
        worker_init_fn: Called in each worker with its number.
        multiprocessing_context: How workers are started: "fork", "spawn" or "forkserver".
        schedule: `{10_000: [0.2, 0.8]}`: other weights from example 10,000 of the run on.
        lengths: If given, weights are shares of tokens. A function that returns the number of
            tokens of an example, or the token counts of all examples by dataset.
            `penstock.integrations.multiplex.mixing` describes the guarantee.
        sampler: Not supported. The argument exists only so that the error can give advice.

    Raises:
        PlanError: A ValueError that names the argument to change.
    """
    if sampler is not None:
        raise PlanError(
            "sampler= is not supported: shares, ranks and resuming need the order that this loader "
            "computes. Use sampling_strategy and sampling_weights, or pass a MultiplexDataset and "
            "your sampler to torch.utils.data.DataLoader."
        )
    if (batch_size := whole_number("batch_size", batch_size)) < 1:
        raise PlanError(f"batch_size={batch_size} must be 1 or more.")
    if schedule and not shuffle:
        raise PlanError(
            "schedule= needs shuffle=True. With shuffle=False every epoch repeats the first one, "
            "and so does the number of examples that a schedule counts."
        )
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        raise PlanError(f"timeout={timeout!r} is not a number of seconds.")
    workers = WorkerOptions(
        whole_number("num_workers", num_workers),
        None if prefetch_factor is None else whole_number("prefetch_factor", prefetch_factor),
        persistent_workers,
        timeout,
        worker_init_fn,
        multiprocessing_context,
    ).checked()
    order = (sampling_strategy, sampling_weights, shuffle_seed)
    dataset = MultiplexDataset(datasets, *order, schedule=schedule, lengths=lengths)
    # Imported here: it imports the code that streams stores, which imports pyarrow.
    from penstock.loader.arguments import topology

    rank, world_size = topology(rank, world_size)
    return MultiplexDataLoader(
        dataset,
        MultiplexRun(dataset.run.mixing, batch_size, rank, world_size, drop_last, shuffle),
        collate_fn=collate_fn if collate_fn is not None else default_collate_fn,
        pin_memory=pin_memory,
        **workers._asdict(),
    )
