"""Checkpoints: everything about a run that cannot be computed again.

    run/checkpoints/step-00000500.pt     model, optimizers, the loader's state, progress

A checkpoint is complete or absent (see `penstock.disk`), and has the SHA-256 of its
contents, which is compared before anything is loaded. A run that is killed while
it saves resumes from the previous checkpoint. There is no random state to save: the dropout of a
step is drawn from a key derived from the step. Loading runs no code (`weights_only`), and any
number of processes can load the same file.
"""

import errno
import hashlib
import io
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from penstock.disk import lock_path, locked, remove_temporary, sync_directory, write_file
from penstock.errors import PenstockError, StoreBusyError, TrainError
from penstock.train.config import ModelConfig
from penstock.train.distributed import World
from penstock.train.record import checkpoint_paths

_FORMAT = 3
_FORMATS = (2, _FORMAT)
"""Format 3 has a digest after the tensors; 2 has none, and can still be read."""
_TRAILER = re.compile(rb"\npenstock-sha256 ([0-9a-f]{64})\n")
_TRAILER_BYTES = 82
_KEYS = {"format", "progress", "model_config", "data", "model", "optimizers"}
_LISTS = {"format", "optimizers"}
# Errors of file systems that are read-only or have no locks, as on some clusters. A finished run
# can still be opened there, without a lock.
_NO_LOCKS = {errno.EACCES, errno.EROFS, errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK}

Contents = dict[str, Any]
"""Values by name. Tensors, numbers and texts, which torch loads without running code."""


class Checkpoints:
    """The newest checkpoints of a run, in one directory."""

    def __init__(self, directory: Path, *, keep_last: int) -> None:
        self.directory = directory
        self._keep_last = keep_last

    def paths(self) -> dict[int, Path]:
        """The checkpoints by their step, oldest first."""
        return checkpoint_paths(self.directory)

    def last_saved(self) -> str:
        """A sentence that names the last checkpoint, for messages."""
        steps = list(self.paths())
        return f"The last checkpoint is step {steps[-1]:,}." if steps else "Nothing is saved yet."

    def save(self, step: int, contents: Contents) -> None:
        """Write the checkpoint of a step, then remove the oldest ones beyond `keep_last`."""
        self.directory.parent.mkdir(parents=True, exist_ok=True)
        self.directory.mkdir(exist_ok=True)
        remove_temporary(self.directory)  # left by a run that was killed while it saved
        path = self.directory / f"step-{step:08d}.pt"
        _write(path, {"format": _FORMAT, "step": step, **contents})
        # An older checkpoint is removed only after the new one is on disk under its name.
        for path in list(self.paths().values())[: -self._keep_last]:
            path.unlink()

    def load(self, model: ModelConfig) -> Contents | None:
        """The newest checkpoint, on the CPU; None if there is none.

        Raises:
            TrainError: it cannot be read, or it is of another model.
        """
        paths = self.paths()
        if not paths:
            return None
        # An older checkpoint is never loaded silently: steps would be lost without a message.
        *before, step = paths
        path = paths[step]
        instead = f"resume after step {before[-1]:,}" if before else "start from the beginning"
        advice = f"Remove it to {instead}."
        try:
            loaded, has_digest = _read(path, advice)
        except TrainError:
            raise
        except Exception as error:  # torch raises many classes for damaged files
            first = (str(error).splitlines() or [type(error).__name__])[0]
            why = first.split(". ")[0].rstrip(".")
            raise TrainError(f"{path} cannot be read as a checkpoint: {why}. {advice}") from error
        with self.refuse_odd_fields():
            self._refuse_other(loaded, path, model, has_digest, advice)
        return loaded

    def _refuse_other(
        self, loaded: Contents, path: Path, model: ModelConfig, has_digest: bool, advice: str
    ) -> None:
        """Raise if `loaded` is no checkpoint, or of another model."""
        version = loaded.get("format") if isinstance(loaded, dict) else None
        if version is not None and version not in _FORMATS:
            raise TrainError(
                f"{path} has format {version!r}, but penstock reads {_FORMAT}. Use another output."
            )
        if version == _FORMAT and not has_digest:
            raise TrainError(f"{path} is damaged: it has no digest at its end. {advice}")
        if version is None or not loaded.keys() >= _KEYS:
            raise TrainError(f"{path} is not a checkpoint of penstock. {advice}")
        # Fields that a newer version of penstock has added are not in an old checkpoint.
        odd = [each for each in sorted(_KEYS - _LISTS) if not isinstance(loaded[each], Mapping)]
        if odd:
            raise TrainError(f"{path}: {odd[0]} is {loaded[odd[0]]!r:.60}, not a dict. {advice}")
        current, saved = asdict(model), loaded["model_config"]
        changed = [name for name, value in saved.items() if current.get(name) != value]
        if changed:
            listed = ", ".join(
                f"{each} {saved[each]!r} -> {current.get(each)!r}" for each in changed
            )
            raise TrainError(
                f"{self.directory.parent} contains a run of another model: {listed}. Resume with "
                "the original model, or use another output."
            )

    @contextmanager
    def refuse_odd_fields(self) -> Iterator[None]:
        """Name the newest checkpoint if code that uses its contents finds an odd value."""
        try:
            yield
        except PenstockError:
            raise
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            first = (str(error).splitlines() or [""])[0]
            raise TrainError(
                f"{list(self.paths().values())[-1]} has a missing or odd field "
                f"({type(error).__name__}: {first:.200}). Remove it to resume from the checkpoint "
                "before it."
            ) from error


def _write(path: Path, contents: Contents) -> None:
    """Write a checkpoint to one file."""
    # torch.save writes to memory first: its own file could be cut short by a full disk, and
    # the name of a checkpoint must never belong to half a file.
    buffer = io.BytesIO()
    torch.save(contents, buffer)
    data = buffer.getbuffer()
    # torch ignores bytes after the end of its archive, so any program can still load the file.
    trailer = f"\npenstock-sha256 {hashlib.sha256(data).hexdigest()}\n".encode()
    write_file(path, [data, trailer])
    sync_directory(path.parent)


def _read(path: Path, advice: str) -> tuple[Contents, bool]:
    """The contents of a checkpoint, and whether it has a digest."""
    has_digest = _check_digest(path, advice)
    with path.open("rb") as stream:
        loaded: Contents = torch.load(stream, map_location="cpu", weights_only=True)
    return loaded, has_digest


def _check_digest(path: Path, advice: str) -> bool:
    """Whether a checkpoint has a digest; raises if its contents have another one."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        left = max(0, os.fstat(stream.fileno()).st_size - _TRAILER_BYTES)
        while left and (block := stream.read(min(left, 1 << 20))):
            digest.update(block)
            left -= len(block)
        found = _TRAILER.fullmatch(stream.read(_TRAILER_BYTES))
    if found and found[1].decode() != digest.hexdigest():
        raise TrainError(
            f"{path} is damaged: the digest of its contents is {digest.hexdigest()[:8]}, but the "
            f"digest at its end is {found[1].decode()[:8]}. {advice}"
        )
    return found is not None


_KILLED_SECONDS = 3.0


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
                # A killed process holds its lock until its memory is freed, which can take seconds.
                stack.enter_context(locked(output, wait=_KILLED_SECONDS))
            except StoreBusyError as error:
                raise TrainError(
                    f"Another process is training into {output}; its process id is in "
                    f"{lock_path(output)}. Wait for it, stop it, or use another output."
                ) from error
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
        yield
