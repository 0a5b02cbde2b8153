"""Checkpoints: all of a run that cannot be computed again.

    run/checkpoints/step-00000500.pt     model, optimizers, the loader's state, and a few counts

A file is there in full or not at all (see `penstock.store.files`), so a run that is killed
while it saves goes on from the checkpoint before. There is no random state: dropout of a step
is drawn from a key that belongs to the step. Loading runs no code (`weights_only`).
"""

import io
import re
from pathlib import Path
from typing import Any

import torch

from penstock.errors import TrainError
from penstock.store.files import remove_temporary, sync_directory, write_file

__all__ = ["Checkpoints"]

_FORMAT = 1
_KEYS = {"format", "progress", "shape", "data"}
_NAME = re.compile(r"step-(\d{8,})\.pt")


class Checkpoints:
    """The newest checkpoints of a run, in one directory."""

    def __init__(self, directory: Path, *, keep_last: int) -> None:
        self.directory = directory
        self._keep_last = keep_last

    def paths(self) -> dict[int, Path]:
        """The files by the number of steps done, oldest first."""
        found = {
            int(match[1]): path
            for path in self.directory.glob("step-*.pt")
            if (match := _NAME.fullmatch(path.name))
        }
        return dict(sorted(found.items()))

    def save(self, step: int, contents: dict[str, Any]) -> Path:
        """Write the checkpoint of a step, then remove those that are too many."""
        self.directory.mkdir(parents=True, exist_ok=True)
        remove_temporary(self.directory)
        buffer = io.BytesIO()
        torch.save({"format": _FORMAT, "step": step, **contents}, buffer)
        path = self.directory / f"step-{step:08d}.pt"
        write_file(path, [buffer.getbuffer()])
        sync_directory(self.directory)
        for old in list(self.paths().values())[: -self._keep_last]:
            old.unlink(missing_ok=True)
        return path

    def load(self) -> dict[str, Any] | None:
        """The newest checkpoint, on the CPU; None where there is none.

        Raises:
            TrainError: it cannot be read.
        """
        paths = self.paths()
        if not paths:
            return None
        *before, step = paths
        path = paths[step]
        goes_on = f"to go on after step {before[-1]:,}" if before else "to begin anew"
        then = f"Remove it {goes_on}."
        try:
            loaded: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:
            first = (str(error).splitlines() or [type(error).__name__])[0]
            why = first.split(". ")[0].rstrip(".")
            raise TrainError(f"{path} cannot be read as a checkpoint: {why}. {then}") from error
        if not isinstance(loaded, dict) or not loaded.keys() >= _KEYS:
            raise TrainError(f"{path} is no checkpoint of penstock. {then}")
        if loaded["format"] != _FORMAT:
            raise TrainError(
                f"{path} is of format {loaded['format']!r}; this penstock reads {_FORMAT}."
            )
        return loaded
