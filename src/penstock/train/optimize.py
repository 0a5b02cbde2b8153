"""How weights are moved, and how far at each step.

    rate  ▲      ______
          │     /      ‾‾‾──__          warm-up, then half a cosine down to a floor
          │    /               ‾‾──__
          └───┴─────────────────────────► step

AdamW moves all weights; with Muon, the matrices inside layers are moved by it, in steps whose
singular values are all alike, and AdamW keeps the rest (embeddings, norms, biases).
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from penstock.errors import PlanError, TrainError

__all__ = ["Optimization", "Optimizers"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Optimization:
    """Which steps weights take."""

    optimizer: Literal["adamw", "muon"] = "adamw"
    learning_rate: float = 6e-4
    """Of AdamW, at its highest."""
    muon_rate: float = 0.02
    """Of Muon, at its highest."""
    warmup_steps: int = 100
    floor: float = 0.1
    """The share of the rate that is left at the end."""
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0
    """The longest gradient; longer ones are shortened to it. 0 shortens none."""

    def __post_init__(self) -> None:
        rates = (self.learning_rate, self.muon_rate)
        if not all(0 < rate < math.inf for rate in rates) or not 0 <= self.floor <= 1:
            raise PlanError(
                f"learning_rate={self.learning_rate}, muon_rate={self.muon_rate} and floor="
                f"{self.floor}: rates are above 0, and the floor is a share of them."
            )
        least = (self.warmup_steps, self.weight_decay, self.clip)
        if not all(0 <= each < math.inf for each in least):
            raise PlanError(
                f"warmup_steps={self.warmup_steps}, weight_decay={self.weight_decay} and clip="
                f"{self.clip} cannot be below 0, nor without end."
            )
        if not all(0 <= beta < 1 for beta in self.betas):
            raise PlanError(f"betas={list(self.betas)} are shares of what is kept: 0 to below 1.")

    def rate(self, step: int, steps: int | None) -> float:
        """The share of the highest rate at a step of so many; of a run of unknown length, all.

        >>> [round(Optimization(warmup_steps=2).rate(step, 10), 2) for step in (0, 1, 2, 6, 9)]
        [0.5, 1.0, 1.0, 0.55, 0.13]
        """
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if steps is None or steps <= self.warmup_steps:
            return 1.0
        done = min(1.0, (step - self.warmup_steps) / (steps - self.warmup_steps))
        return self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * done))


class Optimizers:
    """One optimizer or two, moved and saved as one."""

    def __init__(self, model: nn.Module, settings: Optimization, *, fused: bool = True) -> None:
        self.settings = settings
        matrices: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, weight in model.named_parameters():
            inside = name.startswith("layers.") and weight.dim() == 2
            (matrices if inside else others).append(weight)
        if settings.optimizer == "adamw":
            others, matrices = [*matrices, *others], []
        decay = settings.weight_decay
        groups = [
            {"params": [each for each in others if each.dim() == 2], "weight_decay": decay},
            {"params": [each for each in others if each.dim() < 2], "weight_decay": 0.0},
        ]
        self.all: list[Any] = [
            torch.optim.AdamW(groups, lr=settings.learning_rate, betas=settings.betas, fused=fused)
        ]
        if matrices:
            self.all.append(_muon(matrices, settings))
        for optimizer in self.all:
            for group in optimizer.param_groups:
                group["highest"] = group["lr"]

    def step(self, rate: float) -> None:
        """Move the weights along their gradients, at a share of the highest rate."""
        for optimizer in self.all:
            for group in optimizer.param_groups:
                group["lr"] = group["highest"] * rate
            optimizer.step()

    def clear(self) -> None:
        """Forget the gradients."""
        for optimizer in self.all:
            optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> list[dict[str, Any]]:
        """What each optimizer remembers."""
        return [optimizer.state_dict() for optimizer in self.all]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        """Go on with what was remembered, under the settings of now.

        Raises:
            TrainError: it is what another optimizer remembered.
        """
        try:
            for optimizer, state in zip(self.all, states, strict=True):
                ours = [
                    {name: value for name, value in group.items() if name != "params"}
                    for group in optimizer.param_groups
                ]
                optimizer.load_state_dict(state)
                for group, settings in zip(optimizer.param_groups, ours, strict=True):
                    group.update(settings)
        except ValueError as error:
            raise TrainError(
                f"This run was begun with another optimizer than {self.settings.optimizer!r}, "
                "which remembers other things. Go on with the one it had, or name another output."
            ) from error


def _muon(matrices: list[nn.Parameter], settings: Optimization) -> Any:
    if not hasattr(torch.optim, "Muon"):
        raise PlanError(
            f'optimizer="muon" needs torch 2.9 or newer; this is torch {torch.__version__}. '
            'Use optimizer="adamw".'
        )
    return torch.optim.Muon(matrices, lr=settings.muon_rate, weight_decay=settings.weight_decay)
