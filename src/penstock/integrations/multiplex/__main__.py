"""A demonstration of the three strategies on two small datasets."""

from penstock.integrations.multiplex.loader import create_multiplex_dataloader
from penstock.integrations.multiplex.statistics import print_dataloader_stats

DATASETS = [
    ("dataset1", [{"text": f"example_{i}", "label": i % 2} for i in range(100)]),
    ("dataset2", [{"text": f"example_{i}", "label": i % 3} for i in range(50)]),
]


def main() -> None:
    """Print the statistics and one epoch of each strategy."""
    for strategy, weights in (("proportional", None), ("uniform", None), ("weighted", [0.7, 0.3])):
        loader = create_multiplex_dataloader(
            DATASETS, batch_size=8, sampling_strategy=strategy, sampling_weights=weights
        )
        print_dataloader_stats(loader)
        names = [name for batch in loader for name in batch["dataset_name"]]
        drawn = ", ".join(f"{names.count(name)} of {name}" for name, _ in DATASETS)
        print(f"One epoch, {len(loader)} batches: {drawn}\n")  # noqa: T201
    batch = next(iter(loader))
    print(f"Batch size: {len(batch['dataset_name'])}")  # noqa: T201
    print(f"Datasets: {sorted(set(batch['dataset_name']))}")  # noqa: T201
    print(f"Keys: {list(batch)}")  # noqa: T201


if __name__ == "__main__":
    main()
