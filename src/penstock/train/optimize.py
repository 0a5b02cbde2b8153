"""The optimizers: AdamW for all weights, or Muon for the matrices inside layers.

    rate  ▲      ______
          │     /      ‾‾‾──__          warm-up, then half a cosine down to a floor
          │    /               ‾‾──__
          └───┴─────────────────────────► step

Muon makes all singular values of an update about equal. It only suits the matrices inside layers;
AdamW still updates the embeddings, norms and biases.
"""

from typing import Any

import torch
from torch import nn

from penstock.errors import PlanError, TrainError
from penstock.train.config import OptimizationConfig


class Optimizers:
    """One or two torch optimizers that are stepped, saved and loaded together."""

    def __init__(self, model: nn.Module, config: OptimizationConfig, *, fused: bool = True) -> None:
        self.config = config
        matrices: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, weight in model.named_parameters():
            inside = name.startswith("layers.") and weight.dim() == 2
            (matrices if inside else others).append(weight)
        if config.optimizer == "adamw":
            others, matrices = [*matrices, *others], []
        # Norms and biases do not decay: pulling them to 0 does not regularise the model.
        groups: list[dict[str, Any]] = [
            {"params": [each for each in others if each.dim() == 2]},
            {"params": [each for each in others if each.dim() < 2], "weight_decay": 0.0},
        ]
        rate, decay = config.learning_rate, config.weight_decay
        self.all: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(groups, rate, config.betas, weight_decay=decay, fused=fused)
        ]
        if matrices:
            self.all.append(_muon(matrices, config))
        # The schedule scales both optimizers alike, each from its own highest rate.
        for optimizer in self.all:
            for group in optimizer.param_groups:
                group["highest_lr"] = group["lr"]

    def step(self, rate: float) -> None:
        """Update the weights; `rate` is a fraction of the highest learning rate."""
        for optimizer in self.all:
            for group in optimizer.param_groups:
                group["lr"] = group["highest_lr"] * rate
            optimizer.step()

    def zero_grad(self) -> None:
        """Delete the gradients."""
        for optimizer in self.all:
            optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> list[dict[str, Any]]:
        """The state of each optimizer."""
        return [optimizer.state_dict() for optimizer in self.all]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        """Load moments and step counts, but keep the current learning rate, decay and betas.

        Raises:
            TrainError: the state belongs to another kind of optimizer.
        """
        try:
            for optimizer, state in zip(self.all, states, strict=True):
                # load_state_dict also restores the saved settings of the groups, so the current
                # ones are put back after it.
                current = [
                    {name: value for name, value in group.items() if name != "params"}
                    for group in optimizer.param_groups
                ]
                optimizer.load_state_dict(state)
                for group, settings in zip(optimizer.param_groups, current, strict=True):
                    group.update(settings)
        except ValueError as error:
            raise TrainError(
                "The checkpoint was saved with another optimizer than "
                f"optimizer={self.config.optimizer!r}. Resume with the original one, or use "
                "another output."
            ) from error


def _muon(matrices: list[nn.Parameter], config: OptimizationConfig) -> torch.optim.Optimizer:
    try:
        from torch.optim import Muon
    except ImportError as error:
        raise PlanError(
            f'optimizer="muon" needs torch 2.9; this is {torch.__version__}. Use "adamw".'
        ) from error
    return Muon(matrices, lr=config.muon_rate, weight_decay=config.weight_decay)
