"""Statistics of a multiplex DataLoader, and a demonstration of the three strategies."""

from typing import Any

from penstock.integrations.multiplex.dataset import MultiplexDataset
from penstock.integrations.multiplex.loader import create_multiplex_dataloader

__all__ = ["get_dataset_stats", "print_dataloader_stats"]

_WIDTH = 70
_DATASETS = [
    ("dataset1", [{"text": f"example_{i}", "label": i % 2} for i in range(100)]),
    ("dataset2", [{"text": f"example_{i}", "label": i % 3} for i in range(50)]),
]


def get_dataset_stats(dataloader: object) -> dict[str, Any]:
    """`MultiplexDataset.get_dataset_stats` of a multiplex DataLoader or dataset.

    >>> get_dataset_stats(MultiplexDataset([("a", [{"n": 1}])]))["datasets"][0]
    {'name': 'a', 'size': 1, 'sampling_percentage': 100.0, 'asked': 0.0, 'delivered': 0}

    Raises:
        TypeError: The argument is neither.
    """
    # Frameworks wrap DataLoaders in classes of their own, which keep `dataset`.
    dataset = getattr(dataloader, "dataset", dataloader)
    if not isinstance(dataset, MultiplexDataset):
        raise TypeError(
            f"A {type(dataloader).__name__} has no statistics of datasets. Pass the DataLoader "
            "that create_multiplex_dataloader returned, or a MultiplexDataset."
        )
    return dataset.get_dataset_stats()


def print_dataloader_stats(dataloader: object) -> None:
    """Print the names, sizes and shares of the datasets as a table.

    Raises:
        TypeError: The argument is neither a multiplex DataLoader nor a MultiplexDataset.
    """
    stats = get_dataset_stats(dataloader)
    lines = [
        "=" * _WIDTH,
        "Multiplex DataLoader Statistics",
        "=" * _WIDTH,
        f"Number of datasets: {stats['num_datasets']}",
        f"Total examples: {stats['total_examples']:,}",
        f"Sampling strategy: {stats['sampling_strategy']}",
        "",
        "Dataset Breakdown:",
        "-" * _WIDTH,
        f"{'Dataset':<30} {'Examples':<15} {'Sampling %':<15}",
        "-" * _WIDTH,
        *(
            f"{each['name']:<30} {each['size']:<15,} {each['sampling_percentage']:.2f}%"
            for each in stats["datasets"]
        ),
        "=" * _WIDTH,
    ]
    print("\n".join(lines))  # noqa: T201  (the purpose of this function)


def main() -> None:
    """Print the statistics and one epoch of each strategy."""
    for strategy, weights in (("proportional", None), ("uniform", None), ("weighted", [0.7, 0.3])):
        loader = create_multiplex_dataloader(
            _DATASETS, batch_size=8, sampling_strategy=strategy, sampling_weights=weights
        )
        print_dataloader_stats(loader)
        names = [name for batch in loader for name in batch["dataset_name"]]
        drawn = ", ".join(f"{names.count(name)} of {name}" for name, _ in _DATASETS)
        print(f"One epoch, {len(loader)} batches: {drawn}\n")  # noqa: T201
    batch = next(iter(loader))
    print(f"Batch size: {len(batch['dataset_name'])}")  # noqa: T201
    print(f"Datasets: {sorted(set(batch['dataset_name']))}")  # noqa: T201
    print(f"Keys: {list(batch)}")  # noqa: T201


if __name__ == "__main__":
    main()
