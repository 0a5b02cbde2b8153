"""The measurements of a run: its progress and its speed; `penstock.train.logs` writes them."""

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

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
        # The step after which `recent_seconds_per_step` counts, and when it ended. The first ten
        # steps compile.
        self._mark, self._marked = _WINDOW_STEPS, math.nan

    def add_step(self, num_tokens: int, waited: float) -> None:
        """Record a step that has just ended."""
        self.num_steps += 1
        self._ends.append((time.perf_counter() - self._paused, num_tokens, waited))
        if self.num_steps == self._mark:
            self._marked = self._ends[-1][0]

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

    def recent_seconds_per_step(self) -> float | None:
        """The mean duration of the steps since the last call; None if these are fewer than ten."""
        count = self.num_steps - self._mark
        if count < _WINDOW_STEPS:
            return None
        end = self._ends[-1][0]
        found = (end - self._marked) / count
        self._mark, self._marked = self.num_steps, end
        return found

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
