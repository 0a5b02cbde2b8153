"""A callback for `transformers.Trainer` that logs what each step has read."""

import os
from typing import Any

from penstock.errors import MissingExtraError, PlanError
from penstock.integrations.huggingface import StepLoader
from penstock.loader.fingerprints import FingerprintLog

try:
    from transformers import TrainerCallback
except ImportError:
    raise MissingExtraError(
        "FingerprintTrainerCallback needs transformers, which is not installed.\n"
        'Install it with: pip install "penstock[hf]"'
    ) from None


class FingerprintTrainerCallback(TrainerCallback):  # type: ignore[misc]
    """Writes fingerprints.jsonl: a line for each optimizer step, on all processes together.

        trainer = MyTrainer(…, train_rows=rows, callbacks=[FingerprintTrainerCallback()])

    `penstock diff` compares the files of two runs. The process with rank 0 writes the file; the
    others do nothing. A resumed run continues it.
    """

    def __init__(self, directory: str | os.PathLike[str] | None = None) -> None:
        """Log to `fingerprints.jsonl` in a directory.

        Args:
            directory: The directory; by default, `output_dir` of the training arguments.
        """
        self._directory = directory
        self._log: FingerprintLog | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Begin a new run, or continue one."""
        self._log = None

    def on_step_end(
        self, args: Any, state: Any, control: Any, train_dataloader: object = None, **_: Any
    ) -> None:
        """Log the batches of the step that was just taken."""
        if not state.is_world_process_zero:
            return
        if not isinstance(train_dataloader, StepLoader):
            raise PlanError(
                "FingerprintTrainerCallback needs a trainer with RowsTrainer, which reads "
                f"train_rows=; this one reads a {type(train_dataloader).__name__}."
            )
        # By the trainer's own count, which is right after a resume too.
        spans = train_dataloader.spans(state.global_step, args.gradient_accumulation_steps)
        if self._log is None:
            directory = self._directory or args.output_dir
            self._log = FingerprintLog(directory, train_dataloader.source.plan, spans[0][0])
        self._log.add(state.global_step, *spans)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Force the file to disk when a checkpoint is written."""
        if self._log is not None:
            self._log.sync()
