"""A callback for Lightning's Trainer that logs what each training batch has read."""

import os
from typing import Any

from penstock.errors import MissingExtraError, PlanError
from penstock.integrations.lightning.base import ResumableDataModule
from penstock.loader.fingerprints import FingerprintLog

try:
    from lightning.pytorch import Callback
except ImportError:
    try:
        from pytorch_lightning import Callback
    except ImportError:
        raise MissingExtraError(
            "FingerprintCallback needs lightning, which is not installed.\n"
            'Install it with: pip install "penstock[lightning]"'
        ) from None


class FingerprintCallback(Callback):  # type: ignore[misc]
    """Writes fingerprints.jsonl: a line for each training batch, on all devices together.

        trainer = Trainer(callbacks=[FingerprintCallback("runs/mine")])

    `penstock diff` compares the files of two runs. The process with rank 0 writes the file; the
    others do nothing. A resumed run continues it.
    """

    def __init__(self, directory: str | os.PathLike[str] | None = None) -> None:
        """Log to `fingerprints.jsonl` in a directory.

        Args:
            directory: The directory; by default, `default_root_dir` of the Trainer.
        """
        self._directory = directory
        self._log: FingerprintLog | None = None

    def __repr__(self) -> str:
        return f"FingerprintCallback({'' if self._directory is None else repr(self._directory)})"

    def on_train_start(self, trainer: Any, pl_module: object) -> None:
        """Begin a new run, or continue one."""
        self._log = None
        if not isinstance(trainer.datamodule, ResumableDataModule):
            raise PlanError(
                "FingerprintCallback needs a data module of penstock, such as LLMDataModule; got "
                f"{type(trainer.datamodule).__name__}. Pass it as Trainer.fit(model, datamodule=…)."
            )
        if trainer.overfit_batches:
            raise PlanError(
                f"overfit_batches={trainer.overfit_batches} reads the same batches again and "
                "again, which has no fingerprints. Remove FingerprintCallback."
            )

    def on_train_batch_end(self, trainer: Any, *_: object, **__: object) -> None:
        """Log the batch that was just trained."""
        if not trainer.is_global_zero:
            return
        progress = trainer.datamodule.progress
        number, span = progress.last_batch()
        if self._log is None:
            directory = self._directory or trainer.default_root_dir
            self._log = FingerprintLog(directory, progress.source.plan, span[0])
        self._log.add(number, span)

    def on_save_checkpoint(self, trainer: Any, *_: object) -> None:
        """Force the file to disk before a checkpoint is written."""
        if self._log is not None and trainer.is_global_zero:
            self._log.sync()
