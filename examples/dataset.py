"""Make batches from train.txt and val.txt: the data part of a GPT-2 training script.

    python examples/prepare_data.py        # writes data/train.txt and data/val.txt
    python examples/dataset.py --data data

The first run tokenizes both files; later runs read the tokens from the cache.
"""

import argparse
import time
from pathlib import Path

from penstock.integrations.pytorch import (
    TextDataset,
    check_dataloader,
    create_text_dataloaders,
    test_dataloader,
)


def main() -> None:
    """Print the datasets, check a few batches, and measure the speed for up to two seconds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--sequence-length", type=int, default=256)
    parser.add_argument("--num-workers", type=int, default=0)
    options = parser.parse_args()
    train, val = options.data / "train.txt", options.data / "val.txt"

    dataset = TextDataset(train, options.sequence_length)
    x, y = dataset[0]
    print(f"{train}: {len(dataset.tokens):,} tokens, {len(dataset):,} windows")
    print(f"x begins {x[:5].tolist()}, y begins {y[:5].tolist()}: y is x shifted by one")
    print(f"x as text: {dataset.tokenizer.decode(x[:12].numpy())!r}")

    train_loader, val_loader = create_text_dataloaders(
        train, val, options.batch_size, options.sequence_length, options.num_workers
    )
    for loader in (train_loader, val_loader):
        check_dataloader(loader, labels="shifted", vocab_size=dataset.vocab_size)
    test_dataloader(train_loader)

    begin, num_tokens = time.perf_counter(), 0
    for inputs, _targets in train_loader:
        num_tokens += inputs.numel()  # the model, the loss and the optimizer belong here
        if time.perf_counter() - begin > 2:
            break
    seconds = time.perf_counter() - begin
    print(f"{num_tokens / seconds / 1e6:,.1f} million tokens per second")


if __name__ == "__main__":
    main()
