"""A small training run under Lightning's Trainer, for tests that kill and resume it.

Writes a line for each step and rank: which step, and a hash of each row. `--kill-after N` ends
all processes of the run with SIGKILL after step N.
"""

import argparse
import json
import os
import signal
import warnings
import zlib
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from penstock.integrations.lightning import (
    FingerprintCallback,
    LLMDataModule,
    LocalOpenWebTextDataModule,
)
from penstock.sources.slices import cut

warnings.filterwarnings("ignore")


class TinyGPT(pl.LightningModule):
    """As little of a language model as has a loss: an embedding and a layer."""

    def __init__(self, options):
        super().__init__()
        self.options = options
        self.embedding = torch.nn.Embedding(50_257, 8)
        self.head = torch.nn.Linear(8, 50_257)

    def configure_optimizers(self):
        if self.options.touch:
            # Lightning then makes the loaders before it restores its own progress.
            assert self.trainer.estimated_stepping_batches > 0
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def training_step(self, batch, batch_idx):
        rows = batch["input_ids"]
        mask = batch.get("attention_mask", torch.ones_like(rows))
        trained = (batch["labels"] != -100).any(1)  # the others fill up the end of an epoch
        hashes = [
            zlib.crc32(row[kept.bool()].numpy().tobytes())
            for row, kept in zip(rows[trained], mask[trained], strict=True)
        ]
        line = {"step": self.trainer.global_step, "epoch": self.current_epoch, "rows": hashes}
        path = Path(self.options.out) / f"rank{self.global_rank}.jsonl"
        with path.open("a") as stream:
            stream.write(json.dumps(line) + "\n")
        logits = self.head(self.embedding(rows))
        labels = batch["labels"]
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def on_train_batch_end(self, *_):
        if self.trainer.global_step == self.options.kill_after:
            os.killpg(os.getpgid(0), signal.SIGKILL)

    def validation_step(self, batch, batch_idx):
        path = Path(self.options.out) / f"val{self.global_rank}.jsonl"
        with path.open("a") as stream:
            rows = [zlib.crc32(row.numpy().tobytes()) for row in batch["labels"]]
            stream.write(json.dumps({"batch": batch_idx, "rows": rows}) + "\n")


def datamodule(options):
    common = {"batch_size": options.batch_size, "num_workers": options.workers, "max_length": 16}
    text = Path(options.data)
    if options.kind == "padded":
        sides = {"train": text / "train.txt", "val": text / "val.txt"}
        return LLMDataModule(data=sides, **common)
    common |= {"train_file": text / "train.txt", "val_file": text / "val.txt"}
    if options.kind == "preprocessed":
        token_files = {
            "preprocessed_train": text / "owt_train_preprocessed.npy",
            "preprocessed_val": text / "owt_val_preprocessed.npy",
        }
        return LocalOpenWebTextDataModule(use_preprocessed=True, **token_files, **common)
    return LocalOpenWebTextDataModule(**common)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--kind", choices=("padded", "preprocessed", "streaming"), required=True)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--save-every", type=int, default=3)
    parser.add_argument("--kill-after", type=int, default=-1)
    parser.add_argument("--resume")
    parser.add_argument("--slice-bytes", type=int, default=64_000_000)
    parser.add_argument("--touch", action="store_true")
    parser.add_argument("--validate", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    cut.__kwdefaults__["slice_bytes"] = options.slice_bytes  # many parts of a small file
    Path(options.out).mkdir(exist_ok=True)
    saver = ModelCheckpoint(
        options.out, "{step}", every_n_train_steps=options.save_every, save_top_k=-1
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=options.devices,
        strategy="ddp" if options.devices > 1 else "auto",
        max_epochs=options.epochs,
        callbacks=[saver, FingerprintCallback(options.out)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=1.0 if options.validate else 0,
        num_sanity_val_steps=0,
        use_distributed_sampler=True,
    )
    trainer.fit(TinyGPT(options), datamodule=datamodule(options), ckpt_path=options.resume)


if __name__ == "__main__":
    main()
