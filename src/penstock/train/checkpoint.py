"""Checkpoints: everything about a run that cannot be computed again.

    run/checkpoints/step-00000500.pt     model, optimizers, the loader's state, progress

A checkpoint file is complete or absent (see `penstock.store.files`). A run that is killed while
it saves resumes from the previous checkpoint. There is no random state to save: the dropout of a
step is drawn from a key derived from the step. Loading runs no code (`weights_only`).
"""

import errno
import io
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from penstock.errors import StoreBusyError, TrainError
from penstock.store.files import remove_temporary, sync_directory, write_file
from penstock.store.lock import lock_path, locked
from penstock.train.config import ModelConfig
from penstock.train.distributed import World

__all__ = ["Checkpoints", "locked_output"]

_FORMAT = 2
_KEYS = {"format", "progress", "model_config", "data", "model", "optimizers"}
_NAME = re.compile(r"step-(\d{8,})\.pt")
# Errors of file systems that are read-only or have no locks, as on some clusters. A finished run
# can still be looked at there.
_NO_LOCKS = {errno.EACCES, errno.EROFS, errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK}


class Checkpoints:
    """The newest checkpoints of a run, in one directory."""

    def __init__(self, directory: Path, *, keep_last: int) -> None:
        self.directory = directory
        self._keep_last = keep_last

    def paths(self) -> dict[int, Path]:
        """The files by their step, oldest first."""
        found = {
            int(match[1]): path
            for path in self.directory.glob("step-*.pt")
            if (match := _NAME.fullmatch(path.name))
        }
        return dict(sorted(found.items()))

    def save(self, step: int, contents: dict[str, Any]) -> None:
        """Write the checkpoint of a step, then remove the oldest ones beyond `keep_last`."""
        self.directory.mkdir(parents=True, exist_ok=True)
        remove_temporary(self.directory)  # left by a run that was killed while it saved
        # torch.save writes to memory first: its own file could be cut short by a full disk, and
        # the name of a checkpoint must never belong to half a file.
        buffer = io.BytesIO()
        torch.save({"format": _FORMAT, "step": step, **contents}, buffer)
        # An older checkpoint is removed only after the new one is on disk under its name.
        write_file(self.directory / f"step-{step:08d}.pt", [buffer.getbuffer()])
        sync_directory(self.directory)
        for old in list(self.paths().values())[: -self._keep_last]:
            old.unlink(missing_ok=True)

    def load(self, model: ModelConfig) -> dict[str, Any] | None:
        """The newest checkpoint, on the CPU; None if there is none.

        Raises:
            TrainError: it cannot be read, or it is of another model.
        """
        paths = self.paths()
        if not paths:
            return None
        *before, step = paths
        path = paths[step]
        instead = f"resume after step {before[-1]:,}" if before else "start from the beginning"
        advice = f"Remove it to {instead}."
        try:
            loaded: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # torch raises many classes for damaged files
            first = (str(error).splitlines() or [type(error).__name__])[0]
            why = first.split(". ")[0].rstrip(".")
            raise TrainError(f"{path} cannot be read as a checkpoint: {why}. {advice}") from error
        version = loaded.get("format") if isinstance(loaded, dict) else None
        if version is not None and version != _FORMAT:
            raise TrainError(
                f"{path} has checkpoint format {version!r}, but this version of penstock reads "
                f"format {_FORMAT}. Use another output."
            )
        if version is None or not loaded.keys() >= _KEYS:
            raise TrainError(f"{path} is not a checkpoint of penstock. {advice}")
        _check_model(self.directory.parent, loaded["model_config"], asdict(model))
        return loaded


def _check_model(output: Path, saved: dict[str, Any], current: dict[str, Any]) -> None:
    changed = [
        f"{name} {value!r} -> {current.get(name)!r}"
        for name, value in saved.items()
        if current.get(name) != value
    ]
    if changed:
        raise TrainError(
            f"{output} contains a run of another model: {', '.join(changed)}. Resume with the "
            "original model, or use another output."
        )


@contextmanager
def locked_output(output: Path, world: World) -> Iterator[None]:
    """Lock the output directory, on the main process, for as long as the run takes.

    Raises:
        TrainError: another run holds the lock; the two would overwrite each other's files.
    """
    # Only the main process writes, and only it can hold the lock: the others would find it taken.
    with ExitStack() as stack:
        if world.is_main:
            try:
                output.mkdir(parents=True, exist_ok=True)
                stack.enter_context(locked(output))
            except StoreBusyError as error:
                raise TrainError(
                    f"Another process is training into {output}; its process id is in "
                    f"{lock_path(output)}. Wait for it, stop it, or use another output."
                ) from error
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
        yield
