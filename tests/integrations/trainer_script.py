"""`transformers.Trainer` on a tiny GPT-2, run whole, and stopped and resumed in mid-epoch.

Prints three lines of losses: of the whole run, before the stop, and after it. Under torchrun the
processes share the eight rows of a step.
"""

import os
import sys
import warnings
from pathlib import Path

import transformers

from penstock import Windows
from penstock.integrations.huggingface import RowsTrainer
from penstock.integrations.trainer_callback import FingerprintTrainerCallback

warnings.filterwarnings("ignore")
transformers.logging.set_verbosity_error()
STOP = 11  # in the second of two epochs


class TinyTrainer(RowsTrainer, transformers.Trainer):
    """Trains on rows."""


class Stop(transformers.TrainerCallback):
    """Saves and stops after some steps."""

    def on_step_end(self, args, state, control, **_):
        if state.global_step == STOP:
            control.should_save = control.should_training_stop = True


def losses(folder, rows, *, stop=False, resume=False):
    transformers.set_seed(1)
    config = transformers.GPT2Config(
        vocab_size=257, n_positions=16, n_embd=16, n_layer=1, n_head=2, resid_pdrop=0.1
    )
    args = transformers.TrainingArguments(
        str(folder),
        num_train_epochs=2,
        per_device_train_batch_size=8 // int(os.environ.get("WORLD_SIZE", "1")),
        gradient_accumulation_steps=1,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = TinyTrainer(
        model=transformers.GPT2LMHeadModel(config),
        args=args,
        train_rows=rows,
        callbacks=[FingerprintTrainerCallback(), *([Stop()] if stop else [])],
    )
    checkpoint = str(Path(folder) / f"checkpoint-{STOP}") if resume else None
    trainer.train(resume_from_checkpoint=checkpoint)
    seen = [each["loss"] for each in trainer.state.log_history if "loss" in each]
    return seen[STOP:] if resume else seen


def main():
    rows = Windows(sys.argv[1], 16)
    folder = Path(sys.argv[2])
    whole = losses(folder / "whole", rows)
    before = losses(folder / "stopped", rows, stop=True)
    after = losses(folder / "stopped", rows, resume=True)
    if os.environ.get("RANK", "0") != "0":
        return
    for line in (whole, before, after):
        sys.stdout.write(" ".join(map(str, line)) + "\n")


if __name__ == "__main__":
    main()
