"""The model and its optimizers: everything about a step that is computed on the device.

The loss of a step is the mean over all its targets, on all processes and in all micro-batches. So
rows with few targets count less, and the number of processes changes only the rounding.
"""

import os
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import PlanError, TrainError
from penstock.integrations.batch_size import largest_batch, round_down
from penstock.train.config import ModelConfig, TrainingJob
from penstock.train.distributed import World
from penstock.train.model import GPT
from penstock.train.optimize import Optimizers

_CPU_ROWS = 8
# The most tokens of a micro-batch. Twice as many made an H200 a seventh slower, not faster.
_MAX_TOKENS = 65_536

MicroBatch = list[Tensor | None]
"""Inputs, targets, position ids and document ids of a few rows."""


class Learner:
    """The model of a job on one process, with its optimizers."""

    def __init__(self, job: TrainingJob, world: World) -> None:
        self._config = job.training
        self._world = world
        self._clip = job.optimization.clip or torch.inf
        _refuse_too_large(job.model)
        # The weights are drawn on the CPU, so they are the same on every device.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(job.training.seed)
            self.model = GPT(job.model, recompute=job.training.recompute)
        self.model.to(world.device)
        if job.training.precision == "fp8":
            _use_fp8(self.model)
        self.optimizers = Optimizers(self.model, job.optimization)
        self._parallel: nn.Module = self.model
        self._forward: Callable[..., Tensor] = self.model

    def state(self) -> dict[str, Any]:
        """The weights and the optimizers' state, for a checkpoint."""
        return {"model": self.model.state_dict(), "optimizers": self.optimizers.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        """Load what `state` returned, or a checkpoint."""
        self.optimizers.refuse_other(state["optimizers"])
        self.model.load_state_dict(state["model"])
        self.optimizers.load_state_dict(state["optimizers"])

    def start(self) -> None:
        """Wrap the model for several processes, and compile it; call this after `load`."""
        self._parallel = self._world.data_parallel(self.model)
        self._forward = torch.compile(self._parallel) if self._config.compile else self._parallel
        self._parallel.train()

    def fitting_rows(self) -> int:
        """The most rows that can be computed at once on the GPU; without a GPU, 8.

        With a `global_batch_size`, the result is a divisor of the rows of a step on this process.
        """
        total = self._config.global_batch_size
        # Fewer rows than processes are an error, but `step_rows` explains it better.
        share = None if total is None else max(1, total // self._world.size)
        device, length = self._world.device, self.model.config.length
        if device.type != "cuda":
            return round_down(_CPU_ROWS, share)

        def step(rows: int) -> None:
            vocab_size = self.model.config.vocab_size
            tokens = torch.randint(vocab_size, (rows, length), device=device)
            torch.autograd.backward(self._loss([tokens, tokens]))

        most = max(1, min(_MAX_TOKENS // length, share or _MAX_TOKENS))
        weights = list(self.model.parameters())
        rows = largest_batch(step, weights, device, most=most, divides=share)
        if rows == 0:
            raise PlanError(
                f"Even one row of {length:,} tokens does not fit into the memory of {device}. Use "
                "recompute=true, a shorter length or a smaller model."
            )
        return rows

    def compute_gradients(self, microbatches: Iterable[MicroBatch], num_targets: Tensor) -> Tensor:
        """Compute and clip the gradients of a step.

        Args:
            microbatches: The rows of this process.
            num_targets: The number of targets on all processes.

        Returns:
            The mean loss on all processes, and the norm of the gradient before clipping.
        """
        microbatches = list(microbatches)
        num_targets = num_targets.clamp(min=1)  # a step may have no target at all
        total = torch.zeros((), device=self._world.device)
        for number, microbatch in enumerate(microbatches, 1):
            # The processes exchange gradients once a step, with the last micro-batch.
            is_last = number == len(microbatches)
            with nullcontext() if is_last else self._world.no_exchange(self._parallel):
                loss = self._loss(microbatch)
                # The processes' gradients are averaged, so the number of processes cancels out.
                torch.autograd.backward(loss * (self._world.size / num_targets))
            total += loss.detach()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self._clip)
        return torch.stack([self._world.sum(total) / num_targets, norm])

    @torch.no_grad()
    def evaluate(
        self, microbatches: Iterable[MicroBatch], stop: threading.Event | None = None
    ) -> tuple[float, int] | None:
        """The mean loss over all targets on all processes, and their number.

        None if `stop` was set.
        """
        self._parallel.eval()
        # The sums are float64: float32 cannot count past 2**24 targets.
        sums = torch.zeros(2, dtype=torch.float64, device=self._world.device)
        for microbatch in microbatches:
            if stop is not None and stop.is_set():
                self._parallel.train()
                return None
            targets = microbatch[1]
            assert targets is not None  # every batch of the loader has targets
            with self._autocast():
                loss = self.model(*microbatch, compile_parts=self._config.compile)
            sums += torch.stack([loss.double(), (targets != -100).sum().double()])
        total, num_targets = self._world.sum(sums).tolist()
        self._parallel.train()
        if not num_targets:
            raise TrainError(
                "The validation rows have no targets, because every token in them is masked out "
                "of the loss. Use other validation data, or read more of it (val_rows)."
            )
        return float(total / num_targets), int(num_targets)

    def _loss(self, microbatch: MicroBatch) -> Tensor:
        """The sum of the losses of a micro-batch."""
        with self._autocast():
            return self._forward(*microbatch)

    def _autocast(self) -> torch.autocast:
        narrow = self._config.precision != "float32"
        return torch.autocast(self._world.device.type, torch.bfloat16, enabled=narrow)


def _refuse_too_large(model: ModelConfig) -> None:
    """Raise if the weights alone exceed the memory of the machine: torch's error names no setting.

    The memory of a GPU is not looked at. It is smaller in most machines, and torch's error says so.
    """
    if sys.platform == "win32":  # it has no sysconf
        return
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    needed = 4 * model.matrix_weights  # float32
    if needed > memory:
        raise PlanError(
            f"A model of {model.layers:,} layers, width {model.width:,} and {model.vocab_size:,} "
            f"ids (model.vocab_size) has {model.matrix_weights:,} weights, which take "
            f"{needed / 1e9:,.0f} GB. This machine has {memory / 1e9:,.0f} GB of memory. Use a "
            "smaller model."
        )


def _use_fp8(model: nn.Module) -> None:
    """Compute the linear layers in 8 bits, but neither the embedding nor the output layer."""
    try:
        from torchao.float8 import convert_to_float8_training
    except ImportError as error:
        raise TrainError(
            'precision="fp8" needs torchao. Install it with: pip install torchao'
        ) from error
    convert_to_float8_training(model)
