"""A model and what moves it: everything of a step that is computed on the device.

Gradients are of the mean over all targets of a step, whichever process or part holds them, so
rows with few targets count for few, and the number of processes changes only rounding.
"""

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import TrainError
from penstock.train.job import Job
from penstock.train.model import GPT
from penstock.train.optimize import Optimizers
from penstock.train.world import World

__all__ = ["Learner"]

Part = list[Tensor | None]
"""Inputs, targets, position ids and document ids of a few rows."""


class Learner:
    """The model of a job on one process, its optimizers, and how it is computed."""

    def __init__(self, job: Job, here: World) -> None:
        settings = job.training
        self._world = here
        self._clip = job.optimization.clip or torch.inf
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed)
            self.model = GPT(job.shape, recompute=settings.recompute)
        self.model.to(here.device)
        if settings.precision == "fp8":
            _use_fp8(self.model)
        self.optimizers = Optimizers(self.model, job.optimization)
        self._narrow = settings.precision != "float32"
        self._compiled = settings.compile
        self._spread: Any = self.model
        self._forward: Any = self.model

    def load(self, saved: dict[str, Any]) -> None:
        """Take the weights and memories of a checkpoint."""
        self.model.load_state_dict(saved["model"])
        self.optimizers.load_state_dict(saved["optimizers"])

    def state(self) -> dict[str, Any]:
        """What `load` takes."""
        return {"model": self.model.state_dict(), "optimizers": self.optimizers.state_dict()}

    def begin(self) -> None:
        """Share the weights with the other processes, and compile."""
        self._spread = self._world.spread(self.model)
        self._forward = torch.compile(self._spread) if self._compiled else self._spread
        self._spread.train()

    def gradients(self, parts: Iterable[Part], num_targets: Tensor) -> Tensor:
        """Compute the gradients of a step; returns its mean loss and the gradient's length."""
        parts = list(parts)
        num_targets = num_targets.clamp(min=1)  # a step may hold nothing that is trained on
        total = torch.zeros((), device=self._world.device)
        for number, part in enumerate(parts, 1):
            # Sums over processes are taken once, with the last part.
            apart = number < len(parts) and self._world.size > 1
            with self._spread.no_sync() if apart else nullcontext():
                loss = self._losses(part)
                scaled: Any = loss * (self._world.size / num_targets)
                scaled.backward()
            total += loss.detach()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self._clip)
        return torch.stack([self._world.sum(total) / num_targets, norm])

    @torch.no_grad()
    def evaluate(self, parts: Iterable[Part]) -> float:
        """The mean loss of all targets in `parts`, of all processes together."""
        self._spread.eval()
        sums = torch.zeros(2, dtype=torch.float64, device=self._world.device)
        for part in parts:
            assert part[1] is not None  # a batch has targets
            sums += torch.stack([self._losses(part).double(), (part[1] != -100).sum().double()])
        loss, num_targets = self._world.sum(sums).tolist()
        self._spread.train()
        if not num_targets:
            raise TrainError(
                "The validation rows hold no target, so they have no loss: every token in them is "
                "marked as not to be trained on. Validate on others, or on more (val_rows)."
            )
        return float(loss / num_targets)

    def _losses(self, part: Part) -> Tensor:
        with torch.autocast(self._world.device.type, torch.bfloat16, enabled=self._narrow):
            summed: Tensor = self._forward(*part)
        return summed


def _use_fp8(model: nn.Module) -> None:
    """Linear layers inside the model in 8 bits; the embedding and the head stay as they are."""
    try:
        from torchao.float8 import convert_to_float8_training
    except ImportError as error:
        raise TrainError(
            'precision="fp8" needs torchao, which is not installed. Install it with: '
            "pip install torchao"
        ) from error
    convert_to_float8_training(model)
