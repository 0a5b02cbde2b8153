"""The optimizers: AdamW for all weights, or Muon for the matrices inside layers.

    rate  ▲      ______
          │     /      ‾‾‾──__          warm-up, then half a cosine down to a floor
          │    /               ‾‾──__
          └───┴─────────────────────────► step

Muon makes all singular values of an update about equal. It only suits the matrices inside layers;
AdamW still updates the embeddings, norms and biases.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import TrainError
from penstock.train.config import OptimizationConfig

_MOMENTUM = 0.95


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
            self.all.append(Muon(matrices, config.muon_rate, decay))
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
        self.refuse_other(states)
        for optimizer, state in zip(self.all, states, strict=True):
            # load_state_dict also restores the saved settings of the groups, so the current ones
            # are put back after it.
            current = [
                {name: value for name, value in group.items() if name != "params"}
                for group in optimizer.param_groups
            ]
            optimizer.load_state_dict(state)
            for group, settings in zip(optimizer.param_groups, current, strict=True):
                group.update(settings)

    def refuse_other(self, states: list[dict[str, Any]]) -> None:
        """Raise a TrainError unless these are states of the same optimizers and as many weights."""
        counts = [
            [[len(group["params"]) for group in each["param_groups"]] for each in found]
            for found in (states, self.state_dict())
        ]
        if counts[0] != counts[1]:
            raise TrainError(
                "The checkpoint was saved with another optimizer than "
                f"optimizer={self.config.optimizer!r}. Resume with the original one, or use "
                "another output."
            )


class Muon(torch.optim.Optimizer):
    """Momentum whose update of each matrix has singular values near 1.

    The same arithmetic as `torch.optim.Muon`, but matrices of one shape are updated together: one
    by one, the 48 matrices of GPT-2 124M take 19 ms on an H200, and together 6. Queries, keys and
    values share a weight, whose three matrices are updated as three.
    """

    def __init__(self, matrices: list[nn.Parameter], rate: float, weight_decay: float) -> None:
        super().__init__(matrices, {"lr": rate, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update all matrices that have a gradient; `closure` is not called."""
        for group in self.param_groups:
            params = [each for each in group["params"] if each.grad is not None]
            for each in params:
                if not self.state[each]:  # under the name that torch's Muon uses
                    self.state[each]["momentum_buffer"] = torch.zeros_like(each)
            gradients = [each.grad for each in params]
            momenta = [self.state[each]["momentum_buffer"] for each in params]
            torch._foreach_lerp_(momenta, gradients, 1 - _MOMENTUM)
            updates = torch._foreach_lerp(gradients, momenta, _MOMENTUM)  # Nesterov's momentum
            torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(params, _orthogonal(updates), alpha=-group["lr"])


def _orthogonal(updates: Sequence[Tensor]) -> list[Tensor]:
    """Each matrix with its singular values moved to about 1; high ones are scaled up."""
    # Every matrix is wide here: a high one is transposed. (number of its update, matrix) by shape.
    by_shape: dict[torch.Size, list[tuple[int, Tensor]]] = {}
    for number, update in enumerate(updates):
        height, width = update.shape
        parts = update.chunk(3) if height == 3 * width else (update,)
        for part in parts:
            wide = part.T if part.shape[0] > part.shape[1] else part
            by_shape.setdefault(wide.shape, []).append((number, wide))
    done: list[list[Tensor]] = [[] for _ in updates]
    for entries in by_shape.values():
        results = _newton_schulz(torch.stack([wide for _, wide in entries]))
        for (number, wide), result in zip(entries, results, strict=True):
            height, width = updates[number].shape
            is_high = wide.shape != (height, width) and height != 3 * width
            done[number].append(result.T * (height / width) ** 0.5 if is_high else result)
    return [torch.cat(parts) for parts in done]


def _newton_schulz(matrices: Tensor) -> Tensor:  # (number, height, width), at least as wide as high
    """The matrices with singular values between about 0.7 and 1.2, by five steps of an iteration.

    On a GPU it computes in bfloat16: the result need not be exact.
    """
    narrow = matrices.bfloat16() if matrices.is_cuda else matrices
    result = narrow / (narrow.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    # x becomes a x + (b A + c A A) x with A = x x^T. These coefficients raise small singular values
    # fastest.
    a, b, c = 3.4445, -4.7750, 2.0315
    for _ in range(5):
        square = result @ result.mT
        polynomial = torch.baddbmm(square, square, square, beta=b, alpha=c)
        result = torch.baddbmm(result, polynomial, result, beta=a)
    orthogonal: Tensor = result.to(matrices.dtype)
    return orthogonal
