"""The numbers of a run: metrics.jsonl and, if asked for, TensorBoard and Weights & Biases.

    {"kind": "step", "step": 40, "loss": 6.31, "learning_rate": 0.0024, "norm": 0.8, …}
    {"kind": "val", "step": 40, "val_loss": 6.52, …}
    {"kind": "target", "step": 900, "val_loss": 5.49, …}

Losses are written with all digits, so they read back as the same number. A run that resumes
removes the lines after its checkpoint and writes them again, with the same values. In the other
logs each step is shown once, too: TensorBoard hides the steps that are logged again, and W&B gets
only those that it did not get before.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from penstock.disk import read_file, sync_file, write_file
from penstock.errors import MissingExtraError, TrainError
from penstock.train.config import TrainingConfig
from penstock.train.metrics import RunProgress

Line = dict[str, Any]
"""A line of metrics.jsonl: its kind, its step, and numbers by name."""
Known = set[tuple[str, int]]
"""Kinds and steps of lines that earlier sessions of a run have logged."""
_WANDB_ID = "wandb-id.txt"


class MetricsLog(Protocol):
    """A log of the numbers of a run. It is called on the main process only."""

    def log(self, kind: str, step: int, values: Mapping[str, float | None]) -> None:
        """Log the numbers of a step; `kind` is "step", "val" or "target"."""

    def sync(self) -> None:
        """Bring everything to the disk; called before a checkpoint is saved."""

    def close(self) -> None:
        """End the log."""


class Metrics:
    """All logs of a run, open for writing.

    Args:
        path: metrics.jsonl. Lines that are newer than the checkpoint are removed from it.
        progress: That of the checkpoint.
        config: Whether to log to TensorBoard and W&B too.
        recipe: The tables of the recipe, which W&B shows beside its curves.
    """

    def __init__(
        self, path: Path, progress: RunProgress, config: TrainingConfig, recipe: Line | None = None
    ) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        step = progress.step
        lines = list(read_metrics(path))
        known = {(each["kind"], each["step"]) for each in lines}
        self._logs: list[MetricsLog] = []
        if config.tensorboard:
            self._logs.append(TensorBoard(path.parent / "tensorboard", step, known))
        if config.wandb:
            self._logs.append(WeightsAndBiases(path.parent, known, recipe))
        # A checkpoint can be saved before the validation of the same step. A resumed run then
        # repeats that validation, which must not be in the file twice.
        last = ("step", "val", "target") if progress.validated == step else ("step",)
        kept = [
            each
            for each in lines
            if each["step"] < step or (each["step"] == step and each["kind"] in last)
        ]
        # First, so that a kill leaves no step in another log that is not in metrics.jsonl.
        self._logs.insert(0, JsonLines(path, kept))

    def add(self, kind: str, step: int, **values: float | None) -> None:
        """Write one line to each log."""
        for log in self._logs:
            log.log(kind, step, values)

    def sync(self) -> None:
        """Force all lines to disk."""
        for log in self._logs:
            log.sync()

    def close(self) -> None:
        """Close all logs."""
        for log in self._logs:
            log.close()


class JsonLines:
    """The file metrics.jsonl, open for writing; it begins with the lines `kept`."""

    def __init__(self, path: Path, kept: list[Line]) -> None:
        # `write_file` writes a temporary file and renames it: a kill leaves the old lines or the
        # new ones.
        write_file(path, [_line(each) for each in kept])
        self._path = path
        self._stream = path.open("a", encoding="utf-8")

    def log(self, kind: str, step: int, values: Mapping[str, float | None]) -> None:
        """Write one line. It survives a kill of this process, but not a power cut; see `sync`."""
        # The kernel has the line after `flush`, so it survives the end of this process.
        self._stream.write(_line({"kind": kind, "step": step, **values}).decode())
        self._stream.flush()

    def sync(self) -> None:
        """Force all lines to disk."""
        sync_file(self._path, kept=True)

    def close(self) -> None:
        """Close the file."""
        self._stream.close()


class TensorBoard:
    """Event files for TensorBoard in a directory; `step` is that of the checkpoint."""

    def __init__(self, directory: Path, step: int, known: Known) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise MissingExtraError(
                "tensorboard=true needs tensorboard, which is not installed. Install it with: "
                'pip install "penstock[tensorboard]"'
            ) from error
        # TensorBoard shows events of steps that will be computed again, unless they are purged.
        # Those of the step of the checkpoint stay, and must not be logged again.
        self._board: Any = SummaryWriter(directory, purge_step=step + 1 if step else 0)
        self._known = {each for each in known if each[1] == step} if step else set()

    def log(self, kind: str, step: int, values: Mapping[str, float | None]) -> None:
        """Log the numbers of a step. Validations are on disk at once, steps after two minutes."""
        if (kind, step) in self._known:
            return
        for name, value in _shown(kind, values).items():
            self._board.add_scalar(name, value, step)
        if kind != "step":
            self._board.flush()

    def sync(self) -> None:
        """Write all events to their file."""
        self._board.flush()

    def close(self) -> None:
        """Close the file."""
        self._board.close()


class WeightsAndBiases:
    """A run of W&B, which a resumed training continues: its id is kept in wandb-id.txt.

    W&B reads its own settings from the environment, such as WANDB_MODE=offline and WANDB_PROJECT.
    A background process of W&B writes and sends the numbers. If this process is killed, the last
    ones may be missing there; metrics.jsonl has all.
    """

    def __init__(self, output: Path, known: Known, recipe: Line | None) -> None:
        try:
            import wandb
        except ImportError as error:
            raise MissingExtraError(
                "wandb=true needs wandb, which is not installed. Install it with: "
                'pip install "penstock[wandb]"'
            ) from error
        path = output / _WANDB_ID
        self._known = known if path.exists() else set()
        if not path.exists():
            write_file(path, [os.urandom(8).hex().encode()])
        try:
            self._run: Any = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "penstock"),
                name=output.name,
                id=read_file(path).decode().strip(),
                resume="allow",
                dir=str(output),
                config=recipe,
            )
        except wandb.Error as error:
            raise TrainError(
                f"W&B could not start: {error}. Log in with wandb login, set WANDB_MODE=offline, "
                "or set wandb=false."
            ) from error

    def log(self, kind: str, step: int, values: Mapping[str, float | None]) -> None:
        """Log the numbers of a step, unless an earlier session has."""
        # W&B refuses steps that go back in one session, but not those of files of two sessions.
        if (kind, step) not in self._known:
            self._run.log(_shown(kind, values), step=step)

    def sync(self) -> None:
        """Nothing to do: the background process writes."""

    def close(self) -> None:
        """Wait until the background process has written everything."""
        self._run.finish()


def read_metrics(path: Path) -> Iterator[Line]:
    """The lines of metrics.jsonl; none if there is no such file.

    A last line that a kill has cut short is skipped, and so are lines of other programs.
    """
    if not path.exists():
        return
    # The file is read as bytes: a line that was cut inside a character is not UTF-8.
    for line in read_file(path).split(b"\n"):
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict) and "step" in found and "kind" in found:
            yield found


def json_values(values: Line) -> Line:
    """`values` with None for NaN and infinity, which JSON does not have."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in values.items()
    }


def _line(values: Line) -> bytes:
    return json.dumps(json_values(values)).encode() + b"\n"


def _shown(kind: str, values: Mapping[str, float | None]) -> dict[str, float]:
    """The numbers for a chart, such as "val/val_loss"."""
    # Charts have floats, which cannot hold a 64-bit fingerprint.
    return {
        f"{kind}/{name}": value
        for name, value in values.items()
        if value is not None and name != "fingerprint"
    }
