"""LightningDataModules over text, and a look at a first batch.

    python -m penstock.integrations.lightning               # WikiText-2, four rows, decoded
    python -m penstock.integrations.lightning train.txt     # of a file of your own

See docs/lightning.md.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from penstock.errors import PenstockError
from penstock.integrations.datamodule import LLMDataModule
from penstock.integrations.openwebtext import LocalOpenWebTextDataModule

__all__ = ["LLMDataModule", "LocalOpenWebTextDataModule", "debug_datamodule"]

_SHOWN_CHARACTERS = 100


def debug_datamodule(datamodule: Any = None) -> None:
    """Print what the first training batch of a data module looks like.

    Args:
        datamodule: One that gives dicts of `input_ids` and `labels`; an `LLMDataModule` of
            WikiText-2 in batches of 4 if not given.
    """
    if datamodule is None:
        datamodule = LLMDataModule(batch_size=4)
    datamodule.prepare_data()
    datamodule.setup()
    batch = next(iter(datamodule.train_dataloader()))
    input_ids = batch["input_ids"]
    decoded = datamodule.tokenizer.decode(input_ids[0])
    lines = [
        f"Keys available: {batch.keys()}",
        f"Input Shape: {input_ids.shape}",
        f"\n--- Sample Text (Decoded) ---\n{decoded[:_SHOWN_CHARACTERS]}...",
        f"\nLabels included? {'labels' in batch}",
        _padding(batch, datamodule),
    ]
    print("\n".join(lines))  # noqa: T201  (what it is for)


def _padding(batch: Any, datamodule: Any) -> str:
    if "position_ids" in batch:  # packed: batches do not say where padding is, and rows do
        return f"Padding: {datamodule.train_dataset!r}"
    max_length = datamodule.max_length
    rows, width = batch["input_ids"].shape
    real = int(batch["attention_mask"].sum()) if "attention_mask" in batch else rows * width
    dynamic, fixed = 1 - real / (rows * width), 1 - real / (rows * max_length)
    return (
        f"Padding: {dynamic:.1%} of the batch (dynamic, {rows} x {width}); padded to "
        f"max_length={max_length} it would be {fixed:.1%}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m penstock.integrations.lightning",
        description="Show the first training batch of an LLMDataModule.",
    )
    parser.add_argument("train", nargs="?", help="a file of text, a row a line; else WikiText-2")
    parser.add_argument("--max_length", type=int, default=128)
    options = parser.parse_args(arguments)
    data: Any = {"train": options.train} if options.train else "wikitext-2"
    try:
        debug_datamodule(LLMDataModule(batch_size=4, max_length=options.max_length, data=data))
    except (PenstockError, OSError) as error:
        told = "\n".join([str(error), *getattr(error, "__notes__", [])])
        sys.stderr.write(f"{type(error).__name__}: {told}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
