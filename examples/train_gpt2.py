"""Train a small GPT-2 on train.txt, and validate it on val.txt, with a loop of one page.

    python examples/prepare_data.py        # writes data/train.txt and data/val.txt
    python examples/train_gpt2.py --data data --steps 500

The model is from penstock, and the loop is in this file, for you to change. `penstock train` has
the same loop with checkpoints, several GPUs, mixed precision and a live display.
"""

import argparse
import itertools
import time
from pathlib import Path

import torch

from penstock.integrations.pytorch import create_text_dataloaders
from penstock.train import GPT, ModelConfig, OptimizationConfig, Optimizers


@torch.no_grad()
def validate(model: GPT, batches: torch.utils.data.DataLoader, limit: int) -> float:
    """The mean loss of the first `limit` batches."""
    model.eval()
    total, count = 0.0, 0
    for inputs, targets in itertools.islice(batches, limit):
        total += model(inputs, targets).item()  # the sum over all targets
        count += targets.numel()
    model.train()
    return total / count


def main() -> None:
    """Train, and print the losses."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--sequence-length", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    options = parser.parse_args()

    train, val = create_text_dataloaders(
        options.data / "train.txt",
        options.data / "val.txt",
        options.batch_size,
        options.sequence_length,
    )
    torch.manual_seed(0)
    model = GPT(
        ModelConfig(
            layers=options.layers,
            heads=4,
            width=options.width,
            length=options.sequence_length,
            positions="rotary",
        )
    )
    config = OptimizationConfig(learning_rate=3e-3, warmup_steps=min(50, options.steps // 4))
    optimizers = Optimizers(model, config)
    print(f"{sum(each.numel() for each in model.parameters()):,} weights")

    started, seen = time.perf_counter(), 0
    epochs = itertools.chain.from_iterable(itertools.repeat(train))  # each epoch in a new order
    for step, (inputs, targets) in enumerate(itertools.islice(epochs, options.steps)):
        loss = model(inputs, targets) / targets.numel()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        optimizers.step(config.rate(step, options.steps))
        optimizers.zero_grad()
        seen += inputs.numel()
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    speed = seen / (time.perf_counter() - started)
    print(f"validation loss {validate(model, val, 16):.4f}, {speed:,.0f} tokens per second")


if __name__ == "__main__":
    main()
