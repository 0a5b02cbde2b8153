"""Mix ARC, GSM8K and MMLU in one DataLoader: shares, custom batches, a curriculum, resuming.

    penstock fetch arc && penstock fetch gsm8k && penstock fetch mmlu
    python examples/multiplex_example.py

Without the files, or with --made-up, it uses made-up questions instead.
"""

import argparse
from collections import Counter
from pathlib import Path
from typing import Any

from penstock.catalog import ARCDataLoader, GSM8KDataLoader, MMLUDataLoader
from penstock.errors import SourceError
from penstock.integrations.multiplex import (
    MultiplexDataset,
    create_multiplex_dataloader,
    print_dataloader_stats,
)

Pairs = list[tuple[str, list[dict[str, Any]]]]


def load_sets(data: Path) -> Pairs:
    """The three sets, from the directory where `penstock fetch` stores them."""
    return [
        ("arc", ARCDataLoader("ARC-Easy", "train", data / "arc").load_data()),
        ("gsm8k", GSM8KDataLoader("train", data / "gsm8k").load_data()),
        ("mmlu", MMLUDataLoader("abstract_algebra", "test", data / "mmlu").load_data()),
    ]


def made_up_sets() -> Pairs:
    """Made-up sums with the same keys and similar proportions."""
    sizes = {"arc": 230, "gsm8k": 750, "mmlu": 10}
    return [
        (
            name,
            [
                {
                    "question": f"What is {i} and {i}?",
                    "choices": [],
                    "answer": str(2 * i),
                    "messages": [
                        {"role": "user", "content": f"What is {i} and {i}?"},
                        {"role": "assistant", "content": str(2 * i)},
                    ],
                }
                for i in range(size)
            ],
        )
        for name, size in sizes.items()
    ]


def count(batches: Any) -> str:
    """The number of examples of each set in some batches, as text."""
    drawn = Counter(name for batch in batches for name in batch["dataset_name"])
    return ", ".join(f"{number:,} of {name}" for name, number in sorted(drawn.items()))


def show_strategies(sets: Pairs) -> None:
    """Mix the sets by size, equally, and by weights."""
    for options in (
        {"sampling_strategy": "proportional"},
        {"sampling_strategy": "uniform"},
        {"sampling_weights": {"arc": 0.5, "gsm8k": 0.3, "mmlu": 0.2}},
    ):
        loader = create_multiplex_dataloader(sets, batch_size=32, **options)  # type: ignore[arg-type]
        print_dataloader_stats(loader)
        print(f"One epoch: {count(loader)}\n")


def prompts_and_answers(batch: list[dict[str, Any]]) -> tuple[list[str], list[str]]:
    """A custom collate function; it may return whatever the training loop needs."""
    return [each["question"] for each in batch], [each["answer"] for each in batch]


def show_custom_batches(sets: Pairs, num_workers: int) -> None:
    """Let workers make batches with a custom collate function."""
    loader = create_multiplex_dataloader(
        sets,
        batch_size=4,
        num_workers=num_workers,
        prefetch_factor=2 if num_workers else None,
        persistent_workers=num_workers > 0,
        collate_fn=prompts_and_answers,
    )
    questions, answers = next(iter(loader))
    print(f"A batch of {len(questions)}: {questions[0][:60]!r} -> {answers[0]!r}\n")


def show_curriculum(sets: Pairs) -> None:
    """Change weights in the middle of an epoch; no example is repeated or skipped."""
    easy_and_hard = [("easy", sets[0][1]), ("hard", sets[1][1])]
    loader = create_multiplex_dataloader(easy_and_hard, batch_size=10, sampling_weights=[0.8, 0.2])
    batches = iter(loader)
    print(f"Early: {count(next(batches) for _ in range(10))}")
    loader.set_weights([0.2, 0.8])
    print(f"Late: {count(next(batches) for _ in range(10))}\n")


def show_resuming(sets: Pairs) -> None:
    """Stop a run in the middle of an epoch, and resume it."""
    loader = create_multiplex_dataloader(sets, batch_size=16, sampling_strategy="uniform")
    batches = iter(loader)
    for _ in range(5):
        next(batches)
    state = loader.state_dict()
    expected = next(batches)
    resumed = create_multiplex_dataloader(sets, batch_size=16, sampling_strategy="uniform")
    resumed.load_state_dict(state)
    same = next(iter(resumed)) == expected
    print(f"Stopped at example {state['position']}, resumed with the same batch: {same}\n")


def main() -> None:
    """Run all demonstrations."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--made-up", action="store_true")
    options = parser.parse_args()
    try:
        sets = made_up_sets() if options.made_up else load_sets(options.data)
    except SourceError as error:
        print(f"{error}\nUsing made-up questions instead.\n")
        sets = made_up_sets()
    show_strategies(sets)
    show_custom_batches(sets, options.num_workers)
    show_curriculum(sets)
    show_resuming(sets)
    example = MultiplexDataset(sets)[0]
    print(f"One example: {list(example)} from {example['dataset_name']}")


if __name__ == "__main__":
    main()
