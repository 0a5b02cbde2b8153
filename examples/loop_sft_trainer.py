"""Fine-tune a small GPT-2 on conversations with TRL's `SFTTrainer`. Run it again to resume.

    python examples/loop_sft_trainer.py chats.jsonl --steps 200

A line of the file is {"messages": [{"role": "user", "content": "…"}, …]}. penstock renders the
conversations, marks the words of the assistant, and packs whole conversations into rows. Only these
words are trained on, and conversations do not attend to each other.
"""

import argparse
from pathlib import Path

import datasets
import torch
import transformers
import trl
from transformers.trainer_utils import get_last_checkpoint

import penstock as ps
from penstock.integrations.huggingface import RowsTrainer, hf_tokenizer


class ChatTrainer(RowsTrainer, trl.SFTTrainer):
    """An SFTTrainer of rows."""


class PrintLoss(transformers.TrainerCallback):
    """Prints the loss of each step."""

    def on_log(self, args, state, control, logs=None, **_) -> None:  # noqa: ANN001, ANN003
        """Print one line."""
        if "loss" in logs and state.is_world_process_zero:
            print(f"step {state.global_step}: loss {float(logs['loss']):.4f}")


def main() -> None:
    """Train, and print the loss of each step."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("chats", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs/sft"))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=50)
    options = parser.parse_args()

    chat = ps.Chat("chatml", "gpt2", add_tokens="auto")  # two markers become tokens
    store = ps.build(options.chats, options.out / "store", chat=chat)
    chat.tokenizer.save(options.out / "tokenizer")
    rows = ps.Packs(store, 64)
    transformers.set_seed(0)
    config = transformers.GPT2Config(
        vocab_size=store.vocab_size, n_positions=64, n_embd=64, n_layer=2, n_head=2
    )
    trainer = ChatTrainer(
        model=transformers.GPT2LMHeadModel(config),
        args=trl.SFTConfig(
            output_dir=str(options.out),
            max_steps=options.steps,
            per_device_train_batch_size=4,
            learning_rate=1e-3,
            lr_scheduler_type="constant",
            logging_steps=1,
            save_steps=options.save_every,
            seed=17,
            bf16=torch.cuda.is_available(),
            report_to=[],
            disable_tqdm=True,
            dataset_kwargs={"skip_prepare_dataset": True},
        ),
        # TRL looks at the columns of one example before it trains, and reads no more of it.
        train_dataset=datasets.Dataset.from_list([{"input_ids": [0], "labels": [0]}]),
        processing_class=hf_tokenizer(str(options.out / "tokenizer")),
        callbacks=[PrintLoss()],
    )
    trainer.train_rows = rows  # read instead of train_dataset
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(options.out)))


if __name__ == "__main__":
    main()
