"""The measurements of a run: its progress, its speed, and the file metrics.jsonl.

    {"kind": "step", "step": 40, "loss": 6.31, "learning_rate": 0.0024, "norm": 0.8, …}
    {"kind": "val", "step": 40, "val_loss": 6.52, …}
    {"kind": "target", "step": 900, "val_loss": 5.49, …}

Losses are written with all digits, so they read back as the same number. A run that resumes
removes the lines after its checkpoint and writes them again, with the same values. Commands read
the file without torch, so this module imports it where a device is asked.
"""

import json
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import MissingExtraError
from penstock.store.files import read_file, write_file
from penstock.store.folders import open_regular, refuse_link
from penstock.train.config import ModelConfig

if TYPE_CHECKING:
    import torch

    from penstock.train.distributed import World
    from penstock.train.model import GPT

# Peak FLOP/s of dense matrix products in bfloat16, from the makers' data sheets. The first entry
# that is part of the device's name is used, so "H100 PCIe" must come before "H100".
_PEAK_FLOPS = {
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "L40S": 362e12,
    "A10": 125e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
}
_WINDOW_STEPS = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class RunProgress:
    """The progress of a run, which is part of every checkpoint."""

    step: int = 0
    """Steps done."""
    steps: int | None = None
    """Steps in total, if that is known yet."""
    minutes: float | None = None
    """The `max_minutes` from which `steps` was computed; None if it was not."""
    tokens: int = 0
    """Targets trained on."""
    seconds: float = 0.0
    """Time spent, including earlier sessions of the same run."""
    loss: float | None = None
    val_loss: float | None = None
    validated: int | None = None
    """The step of the last validation. It is also set if there is no validation data."""
    target_step: int | None = None
    """The step at which the validation loss first reached `target_val_loss`."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """The outcome of a run."""

    progress: RunProgress
    finished: bool
    """False if the run was asked to stop; the same call then resumes it."""
    rank: int
    """The rank of this process; rank 0 writes the files."""
    model: "GPT"
    output: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class RunReport:
    """The state of a run after a step, for a display."""

    progress: RunProgress
    learning_rate: float
    """The learning rate of AdamW in this step."""
    tokens_per_second: float
    mfu: float | None
    """Model FLOPs utilisation: the share of the GPU's peak that the model's arithmetic uses."""
    data_wait: float
    """The share of the time spent waiting for data."""
    seconds_left: float | None
    peak_memory: int
    """The most bytes in use so far, on the GPU; without a GPU, in this process."""


Line = dict[str, Any]
"""A line of metrics.jsonl: its kind, its step, and numbers by name."""
Log = Callable[[RunReport | str], None]
"""A callback. It gets a `RunReport` after every step, and a line of text for other events."""


class Throughput:
    """The speed of the last ten steps; pauses to validate and save are not counted."""

    TIMED_STEPS = 2 * _WINDOW_STEPS
    """After this many steps the speed is reliable: compilation slows down the first ones."""

    def __init__(self, model: ModelConfig, world: "World") -> None:
        self._model, self._world = model, world
        self._peak_flops = peak_flops(world.device)
        self.num_steps = 0
        self.last_pause = 0.0  # seconds
        self._paused = 0.0
        # The end of each step, its tokens, and how long it waited for data. N + 1 ends enclose N
        # steps.
        self._ends: deque[tuple[float, int, float]] = deque(maxlen=_WINDOW_STEPS + 1)

    def add_step(self, num_tokens: int, waited: float) -> None:
        """Record a step that has just ended."""
        self.num_steps += 1
        self._ends.append((time.perf_counter() - self._paused, num_tokens, waited))

    @contextmanager
    def pause(self) -> Iterator[None]:
        """A context whose time is not counted as training, such as a validation."""
        # There is no `finally`, because after an exception the run ends and needs no speed.
        started = time.perf_counter()
        yield
        self.last_pause = time.perf_counter() - started
        self._paused += self.last_pause

    @property
    def _span(self) -> float:
        # Before the second step there is no speed: every rate is 0, not a division by zero.
        return max(1e-9, self._ends[-1][0] - self._ends[0][0]) if len(self._ends) > 1 else math.inf

    @property
    def seconds_per_step(self) -> float:
        """The mean duration of the last ten steps."""
        return self._span / max(1, len(self._ends) - 1)

    @property
    def tokens_per_second(self) -> float:
        """The mean speed of the last ten steps, on all processes together."""
        return sum(tokens for _, tokens, _ in list(self._ends)[1:]) / self._span

    def report(self, progress: RunProgress, learning_rate: float) -> RunReport:
        """A report with the speed of the last ten steps."""
        mfu = None
        if self._peak_flops is not None:
            # The peak is that of all GPUs, as the tokens are those of all processes.
            flops = self._model.flops_per_token * self.tokens_per_second
            mfu = flops / (self._peak_flops * self._world.size)
        left = None if progress.steps is None else progress.steps - progress.step
        return RunReport(
            progress=progress,
            learning_rate=learning_rate,
            tokens_per_second=self.tokens_per_second,
            mfu=mfu,
            data_wait=sum(waited for *_, waited in list(self._ends)[1:]) / self._span,
            seconds_left=None if left is None else left * self.seconds_per_step,
            peak_memory=peak_memory(self._world.device),
        )


class Metrics:
    """The file metrics.jsonl, open for writing.

    Args:
        path: The file. Lines that are newer than the checkpoint are removed from it.
        step: The step of the checkpoint.
        validated: The step of the last validation that the checkpoint includes.
        tensorboard: Whether to write the same numbers for TensorBoard.
    """

    def __init__(
        self, path: Path, *, step: int, validated: int | None = None, tensorboard: bool = False
    ) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._board = _tensorboard(path.parent, step) if tensorboard else None
        # A checkpoint can be saved before the validation of the same step. A resumed run then
        # repeats that validation, which must not be in the file twice.
        last = ("step", "val", "target") if validated == step else ("step",)
        kept = [
            each
            for each in read_metrics(path)
            if each["step"] < step or (each["step"] == step and each["kind"] in last)
        ]
        # `write_file` writes a temporary file and renames it: a kill leaves the old lines or the
        # new ones.
        write_file(path, [_line(each) for each in kept])
        file = open_regular(path, os.O_WRONLY | os.O_APPEND)
        self._stream = os.fdopen(file, "a", encoding="utf-8")

    def add(self, kind: str, step: int, **values: float | None) -> None:
        """Write one line. It survives a kill of this process, but not a power cut; see `sync`."""
        # The kernel has the line after `flush`, so it survives the end of this process.
        self._stream.write(_line({"kind": kind, "step": step, **values}).decode())
        self._stream.flush()
        if self._board is not None:
            for name, value in values.items():
                # TensorBoard stores float32, which cannot hold a 64-bit fingerprint.
                if isinstance(value, int | float) and name != "fingerprint":
                    self._board.add_scalar(f"{kind}/{name}", value, step)

    def sync(self) -> None:
        """Force all lines to disk."""
        os.fsync(self._stream.fileno())

    def close(self) -> None:
        """Close the file."""
        self._stream.close()
        if self._board is not None:
            self._board.close()


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


def _tensorboard(directory: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise MissingExtraError(
            "tensorboard=true needs tensorboard, which is not installed. Install it with: "
            'pip install "penstock[tensorboard]"'
        ) from error
    refuse_link(directory / "tensorboard")
    # TensorBoard keeps events of steps that will be computed again, unless they are purged.
    return SummaryWriter(directory / "tensorboard", purge_step=step + 1 if step else 0)


def peak_flops(device: "torch.device") -> float | None:
    """The peak bfloat16 FLOP/s of a GPU; None for a CPU or an unknown GPU."""
    if device.type != "cuda":
        return None
    import torch

    name = torch.cuda.get_device_name(device)
    return next((peak for known, peak in _PEAK_FLOPS.items() if known in name), None)


def known_peak_flops(name: str) -> float:
    """The peak bfloat16 FLOP/s of a GPU that is in the table, by its name there."""
    return _PEAK_FLOPS[name]


def peak_memory(device: "torch.device") -> int:
    """The most bytes in use so far, on the GPU or in this process; 0 if not known."""
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # Windows does not have this module
        return 0
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux kibibytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
