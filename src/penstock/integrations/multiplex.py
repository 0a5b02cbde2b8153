"""Several datasets in one DataLoader, in shares that hold at every step.

    loader = create_multiplex_dataloader(
        [("arc", arc_data), ("gsm8k", gsm8k_data), ("mmlu", mmlu_data)],
        batch_size=32,
        sampling_weights=[0.5, 0.3, 0.2],
    )
    for batch in loader:
        batch["dataset_name"]      # where each example of the batch came from

A real `torch.utils.data.DataLoader`, with workers, pinned memory and all else. What is new: the
shares are exact (within two examples at every prefix of a run, not on average), the order is
the same for any number of workers and ranks and for any way to start them, every epoch has
its own, and a state of a few hundred bytes goes on in the middle of one. The order is that of
`penstock.order`, computed as it is needed. Imports torch and NumPy only.

`python -m penstock.integrations.multiplex` shows it at work.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penstock.errors import PlanError
from penstock.integrations.collate import default_collate_fn
from penstock.integrations.epochs import Share
from penstock.integrations.mixed import MultiplexDataset
from penstock.integrations.multiplexed import MultiplexDataLoader
from penstock.integrations.shares import Lengths, Weights, whole_number
from penstock.integrations.workers import Workers
from penstock.loader.arguments import topology

__all__ = [
    "MultiplexDataLoader",
    "MultiplexDataset",
    "create_multiplex_dataloader",
    "default_collate_fn",
    "get_dataset_stats",
    "print_dataloader_stats",
]

_RULE = 70


def create_multiplex_dataloader(  # noqa: PLR0913  (a drop-in: the arguments of the code it replaces)
    datasets: Sequence[tuple[str, Any]],
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
    """A DataLoader over several datasets, mixed by size, alike, or by weights.

    An epoch is as many examples as there are in all. "proportional" reads each of them once;
    "uniform" and "weighted" hold every dataset within two examples of its share at every
    prefix, go on in the next epoch where they stopped, and repeat a dataset only when all of
    it was read. Each rank gets its slice of every step, and all take the same number of steps.

    Args:
        datasets: Pairs of a name and a sized sequence of dicts, which is never copied.
        batch_size: Examples in a batch, on each rank.
        shuffle: A new order each epoch; else the order of `shuffle_seed` again and again.
        num_workers: Processes that read and collate. They pay where `collate_fn` is slow; on
            Windows none are used.
        pin_memory: Whether batches lie in pinned memory, for quick copies to a GPU.
        prefetch_factor: Batches that each worker makes ahead.
        persistent_workers: Keep workers from one epoch to the next.
        drop_last: Leave out a last step that is not full.
        sampling_strategy: "proportional", "uniform" or "weighted".
        sampling_weights: Shares in the order of `datasets` or by name; 7 and 3 are 0.7 and 0.3.
            With the default strategy they mean "weighted".
        collate_fn: Makes a batch of a list of example dicts; `default_collate_fn` if not given.
        shuffle_seed: Another seed, another order.
        rank: Of this process; of torch.distributed where that is initialised, else 0.
        world_size: How many processes share the batches; likewise, else 1.
        timeout: Seconds to wait for a worker; 0 is without end.
        worker_init_fn: Called in each worker with its number.
        multiprocessing_context: How workers are started: "fork", "spawn" or "forkserver".
        schedule: `{10_000: [0.2, 0.8]}`: other weights from example 10,000 of the run on.
        lengths: Makes weights shares of tokens: a function of an example, or the token counts
            of all examples by dataset. See `penstock.integrations.blend` for what it promises.
        sampler: Refused: the order is what this loader is for.

    Raises:
        PlanError: a ValueError that says which argument to change.
    """
    if sampler is not None:
        raise PlanError(
            "sampler= is refused: the shares, the order, ranks and resuming all rest on the order "
            "that this loader computes. Choose sampling_strategy and sampling_weights, or give a "
            "MultiplexDataset and your sampler to torch.utils.data.DataLoader."
        )
    batch_size = whole_number("batch_size", batch_size)
    if batch_size < 1:
        raise PlanError(f"batch_size={batch_size} must be 1 or more.")
    if schedule and not shuffle:
        raise PlanError(
            "schedule= needs shuffle=True: with shuffle=False every epoch is the first one again, "
            "and so is the number of examples that a schedule counts."
        )
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        raise PlanError(f"timeout={timeout!r} is not a number of seconds.")
    workers = Workers(
        whole_number("num_workers", num_workers),
        None if prefetch_factor is None else whole_number("prefetch_factor", prefetch_factor),
        persistent_workers,
        timeout,
        worker_init_fn,
        multiprocessing_context,
    ).checked()
    dataset = MultiplexDataset(
        datasets,
        sampling_strategy,
        sampling_weights,
        shuffle_seed,
        schedule=schedule,
        lengths=lengths,
    )
    return MultiplexDataLoader(
        dataset,
        Share(batch_size, *_rank_of(rank, world_size), drop_last),
        workers,
        shuffle=shuffle,
        pin_memory=pin_memory,
        collate_fn=collate_fn if collate_fn is not None else default_collate_fn,
    )


def get_dataset_stats(dataloader: Any) -> dict[str, Any]:
    """Names, sizes and shares of a multiplex DataLoader or dataset, asked and delivered.

    >>> get_dataset_stats(MultiplexDataset([("a", [{"n": 1}])]))["datasets"][0]
    {'name': 'a', 'size': 1, 'sampling_percentage': 100.0, 'asked': 0.0, 'delivered': 0}

    Raises:
        TypeError: it is neither.
    """
    dataset = getattr(dataloader, "dataset", dataloader)
    if not isinstance(dataset, MultiplexDataset):
        raise TypeError(
            f"{type(dataloader).__name__} has no such statistics: give what "
            "create_multiplex_dataloader returned, or a MultiplexDataset."
        )
    return dataset.get_dataset_stats()


def print_dataloader_stats(dataloader: Any) -> None:
    """Print names, sizes and shares as a table.

    Raises:
        TypeError: this is neither a multiplex DataLoader nor a MultiplexDataset.
    """
    stats = get_dataset_stats(dataloader)
    lines = [
        "=" * _RULE,
        "Multiplex DataLoader Statistics",
        "=" * _RULE,
        f"Number of datasets: {stats['num_datasets']}",
        f"Total examples: {stats['total_examples']:,}",
        f"Sampling strategy: {stats['sampling_strategy']}",
        "",
        "Dataset Breakdown:",
        "-" * _RULE,
        f"{'Dataset':<30} {'Examples':<15} {'Sampling %':<15}",
        "-" * _RULE,
        *(
            f"{each['name']:<30} {each['size']:<15,} {each['sampling_percentage']:.2f}%"
            for each in stats["datasets"]
        ),
        "=" * _RULE,
    ]
    print("\n".join(lines))  # noqa: T201  (what it is for)


def _rank_of(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """The rank and the number of ranks, of torch.distributed where they are not given."""
    for name, value in (("rank", rank), ("world_size", world_size)):
        if value is not None:
            whole_number(name, value)
    rank, world_size = topology(rank, world_size)
    if world_size < 1 or not 0 <= rank < world_size:
        raise PlanError(f"Rank {rank} of {world_size} cannot be; ranks are 0 to world_size - 1.")
    return rank, world_size


def _demo() -> None:
    """Two made-up datasets by each of the three strategies."""
    datasets = [
        ("dataset1", [{"text": f"example_{i}", "label": i % 2} for i in range(100)]),
        ("dataset2", [{"text": f"example_{i}", "label": i % 3} for i in range(50)]),
    ]
    for strategy, weights in (("proportional", None), ("uniform", None), ("weighted", [0.7, 0.3])):
        loader = create_multiplex_dataloader(
            datasets, batch_size=8, sampling_strategy=strategy, sampling_weights=weights
        )
        print_dataloader_stats(loader)
        names = [name for batch in loader for name in batch["dataset_name"]]
        drawn = ", ".join(f"{names.count(name)} of {name}" for name, _ in datasets)
        print(f"One epoch, {len(loader)} batches: {drawn}\n")  # noqa: T201
    batch = next(iter(loader))
    print(f"Batch size: {len(batch['dataset_name'])}")  # noqa: T201
    print(f"Datasets: {sorted(set(batch['dataset_name']))}")  # noqa: T201
    print(f"Keys: {list(batch)}")  # noqa: T201


if __name__ == "__main__":
    _demo()
