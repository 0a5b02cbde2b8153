"""Print the first training batch of a data module.

python -m penstock.integrations.lightning               # four rows of WikiText-2, decoded
"""

from penstock.integrations.lightning.datamodules import LLMDataModule, LocalOpenWebTextDataModule
from penstock.loader.batch_format import LabelBatch

DataModule = LLMDataModule | LocalOpenWebTextDataModule


def debug_datamodule(datamodule: DataModule | None = None) -> None:
    """Print the first training batch of a data module.

    Args:
        datamodule: A data module whose batches are dicts of `input_ids` and `labels`; if not
            given, an `LLMDataModule` of WikiText-2 in batches of 4.
    """
    if datamodule is None:
        datamodule = LLMDataModule(batch_size=4)
    datamodule.prepare_data()
    datamodule.setup()
    batch = next(iter(datamodule.train_dataloader()))
    input_ids = batch["input_ids"]
    # The script that this function replaces printed the same lines, except for the last one.
    decoded = datamodule.tokenizer.decode(input_ids[0])
    lines = [
        f"Keys available: {batch.keys()}",
        f"Input Shape: {input_ids.shape}",
        f"\n--- Sample Text (Decoded) ---\n{decoded[:100]}...",
        f"\nLabels included? {'labels' in batch}",
        _padding(batch, datamodule),
    ]
    print("\n".join(lines))  # noqa: T201  (its purpose)


def _padding(batch: LabelBatch, datamodule: DataModule) -> str:
    """Return a line with the share of padding in a batch, and its share at a fixed width."""
    if "position_ids" in batch:  # packed: the rows know the padding, batches do not
        return f"Padding: {datamodule.train_dataset!r}"
    # Batches of windows have no mask: only the last row of an epoch has padding, at its end.
    max_length = datamodule.max_length
    rows, width = batch["input_ids"].shape
    real = int(batch["attention_mask"].sum()) if "attention_mask" in batch else rows * width
    dynamic, fixed = 1 - real / (rows * width), 1 - real / (rows * max_length)
    return (
        f"Padding: {dynamic:.1%} of the batch (dynamic, {rows} x {width}); padded to "
        f"max_length={max_length} it would be {fixed:.1%}"
    )


if __name__ == "__main__":
    debug_datamodule()
