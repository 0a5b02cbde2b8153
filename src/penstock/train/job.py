"""What a run is made of, and what it tells."""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from penstock.errors import PlanError
from penstock.order.plan import Plan, Rows
from penstock.train.model import GPT, Shape
from penstock.train.optimize import Optimization

__all__ = ["Job", "Outcome", "Progress", "Report", "Tell", "Training"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """How long, how much at once, and what is kept."""

    steps: int | None = None
    """Without it, as many as `max_minutes` will do: a few are timed, and the number is kept."""
    max_minutes: float | None = None
    batch_size: int | Literal["auto"] = "auto"
    """Rows at once on a device; "auto" is the most that fit, but no more than 65,536 tokens;
    without a GPU, 8."""
    global_batch_size: int | None = None
    """Rows of a step on all devices; gradients are added up until it is reached."""
    precision: Literal["float32", "bfloat16", "fp8"] = "float32"
    compile: bool = False
    recompute: bool = False
    """Whether activations are computed again in the backward pass: less memory, more time."""
    prefetch: int = 2
    """Blocks of batches that are made ahead; 0 makes none."""
    val_every: int = 250
    val_rows: int = 1_024
    """How many rows of the validation set are read, always the same ones."""
    save_every: int = 500
    keep_last: int = 2
    on_nonfinite: Literal["stop", "skip"] = "stop"
    target_val_loss: float | None = None
    seed: int = 0
    """Of the first weights and of dropout."""
    tensorboard: bool = False

    def __post_init__(self) -> None:
        if self.steps is None and self.max_minutes is None:
            raise PlanError("A run needs an end: give steps or max_minutes.")
        for field in fields(self):
            value = getattr(self, field.name)
            least = 0 if field.name in ("seed", "prefetch") else 1e-9
            if not isinstance(value, int | float) or isinstance(value, bool):
                continue
            if value < least:
                raise PlanError(f"{field.name}={value} is too little for a run.")
            if field.name == "seed" and value >= 1 << 63:
                raise PlanError(f"seed={value} is too large; it must be below 2**63.")
            if not math.isfinite(value):
                raise PlanError(f"{field.name}={value} is no number that a run could use.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """Everything a run is made of."""

    plan: Plan
    val: Rows | None
    shape: Shape
    training: Training
    optimization: Optimization
    output: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far a run is; what a checkpoint keeps of it."""

    step: int = 0
    """Steps done."""
    steps: int | None = None
    """Steps in all, where that is settled."""
    minutes: float | None = None
    """What that was planned from, where it was."""
    tokens: int = 0
    seconds: float = 0.0
    """Of all the times it ran."""
    loss: float | None = None
    val_loss: float | None = None
    validated: int | None = None
    """The step at which that was taken, or would have been where there is nothing to validate."""
    target_step: int | None = None
    """The step at which the validation loss was first as low as hoped for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """How a run stands, for a display."""

    now: Progress
    tokens_per_second: float
    mfu: float | None
    """The share of the device's peak that the model's own arithmetic makes up."""
    waiting: float
    """The share of the time that was spent waiting for data."""
    remaining: float | None
    """Seconds."""
    memory: int
    """The most bytes of the device that were in use; of the process, without a GPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What became of a run."""

    now: Progress
    finished: bool
    """Whether it came to its end; otherwise it was asked to stop, and can go on."""
    rank: int
    """Of the process that this is; 0 writes the files."""
    model: GPT
    output: Path


Tell = Callable[[Report | str], None]
"""Called after every step with how it stands, and with what is worth a line."""
