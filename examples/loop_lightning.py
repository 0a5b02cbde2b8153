"""Train a small GPT-2 on a text file with Lightning. Run it again to resume.

    python examples/loop_lightning.py input.txt --steps 200

Rows are packs of whole documents that do not attend to each other. Lightning saves the state of the
data module with its checkpoints, so the resumed run reads the rows that come next, also on another
number of devices.
"""

import argparse
from pathlib import Path

import lightning
import torch
import transformers
from lightning.pytorch.callbacks import ModelCheckpoint

from penstock.integrations.lightning import LLMDataModule


class SmallGPT(lightning.LightningModule):
    """A GPT-2 of two layers."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        config = transformers.GPT2Config(
            vocab_size=vocab_size,
            n_positions=64,
            n_embd=64,
            n_layer=2,
            n_head=2,
            bos_token_id=None,
            eos_token_id=None,
            # No dropout: Lightning does not save the state of torch's random numbers.
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            resid_pdrop=0.0,
        )
        self.model = transformers.GPT2LMHeadModel(config)

    def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
        """Return the loss of a batch: `input_ids`, `labels`, `position_ids` and `use_cache`."""
        loss = self.model(**batch).loss
        print(f"step {self.global_step + 1}: loss {loss.item():.4f}")
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    """Train, and print the loss of each step."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs/lightning"))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=50)
    parser.add_argument("--tokenizer", default="gpt2")
    options = parser.parse_args()

    data = LLMDataModule(
        model_name=options.tokenizer,
        data={"train": options.text},
        batch_size=8,
        max_length=64,
        packing=True,
        num_workers=0,
        seed=17,
    )
    lightning.seed_everything(0, verbose=False)
    model = SmallGPT(len(data.tokenizer))
    trainer = lightning.Trainer(
        default_root_dir=options.out,
        max_steps=options.steps,
        callbacks=[
            ModelCheckpoint(options.out, every_n_train_steps=options.save_every, save_last=True)
        ],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    last = options.out / "last.ckpt"
    trainer.fit(model, datamodule=data, ckpt_path=last if last.exists() else None)


if __name__ == "__main__":
    main()
