"""Train a small GPT-2 on a text file with `transformers.Trainer`. Run it again to resume.

    python examples/loop_trainer.py input.txt --steps 200
    torchrun --nproc-per-node 2 examples/loop_trainer.py input.txt --steps 200

Rows are packs of whole documents that do not attend to each other. The Trainer saves and counts
steps, and `RowsTrainer` continues at the row of that count, without reading those before.
"""

import argparse
from pathlib import Path

import transformers
from transformers.trainer_utils import get_last_checkpoint

import penstock as ps
from penstock.integrations.huggingface import RowsTrainer


class PackedTrainer(RowsTrainer, transformers.Trainer):
    """A Trainer of rows."""


class PrintLoss(transformers.TrainerCallback):
    """Prints the loss of each step."""

    def on_log(self, args, state, control, logs=None, **_) -> None:  # noqa: ANN001, ANN003
        """Print one line."""
        if "loss" in logs and state.is_world_process_zero:
            print(f"step {state.global_step}: loss {float(logs['loss']):.4f}")


def main() -> None:
    """Train, and print the loss of each step."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs/trainer"))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=50)
    parser.add_argument("--tokenizer", default="gpt2")
    options = parser.parse_args()

    args = transformers.TrainingArguments(
        output_dir=str(options.out),
        max_steps=options.steps,
        per_device_train_batch_size=8,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_steps=options.save_every,
        seed=17,
        report_to=[],
        disable_tqdm=True,
    )
    with args.main_process_first():  # one process tokenizes, and the others find the store
        store = ps.build(
            options.text, options.out / "store", tokenizer=options.tokenizer, documents="lines"
        )
    transformers.set_seed(0)
    config = transformers.GPT2Config(
        vocab_size=store.vocab_size,
        n_positions=64,
        n_embd=64,
        n_layer=2,
        n_head=2,
        bos_token_id=None,
        eos_token_id=None,
    )
    trainer = PackedTrainer(
        model=transformers.GPT2LMHeadModel(config),
        args=args,
        train_rows=ps.Packs(store, 64),
        callbacks=[PrintLoss()],
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(options.out)))


if __name__ == "__main__":
    main()
