"""The largest batch that a GPU takes, by trial.

Doubled until the device is out of memory, then halved in between: some trials of three steps
with ids that mean nothing, after which the model's weights, gradients and random numbers are
what they were. The choice must be the same on every rank, so the smallest of theirs is taken.
"""

import math
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["largest_batch", "largest_that_fits"]

_MOST = 4_096
_MARGIN = 0.9
"""Of what fits in the trial: other text, and validation, find memory in other pieces."""
_STEPS = 3
_LOGGING = ("log", "log_dict")  # which Lightning refuses outside of its loops


def largest_that_fits(fits: Callable[[int], bool], most: int = _MOST) -> int:
    """The largest of 1 … `most` for which `fits` holds, where it holds up to some size.

    >>> tried = []
    >>> largest_that_fits(lambda size: tried.append(size) or size <= 11)
    11
    >>> tried
    [1, 2, 4, 8, 16, 12, 10, 11]
    >>> largest_that_fits(lambda size: False)
    0
    """
    good, bad = 0, 1
    while bad <= most and fits(bad):
        good, bad = bad, 2 * bad
    bad = min(bad, most + 1)
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return good


def largest_batch(module: Any, trainer: Any, length: int) -> int:
    """How many rows of `length` one step of `module` takes on this device, in multiples of 8.

    A step is what its `training_step` does, and the gradients; room for an optimizer that keeps
    two numbers for each weight is left. What it logs meanwhile goes nowhere.
    """
    device = trainer.strategy.root_device
    where = next(iter(module.parameters())).device
    kept = torch.random.get_rng_state(), torch.cuda.get_rng_state(device)
    module.to(device)
    for name in _LOGGING:
        module.__dict__[name] = _say_nothing
    try:
        found = largest_that_fits(lambda size: _fits(module, trainer, size, length))
    finally:
        for name in _LOGGING:
            del module.__dict__[name]
        module.zero_grad(set_to_none=True)
        module.to(where)
        torch.cuda.empty_cache()
        torch.random.set_rng_state(kept[0])
        torch.cuda.set_rng_state(kept[1], device)
    if found == 0:
        raise torch.cuda.OutOfMemoryError(
            f"Not one row of {length:,} tokens fits {device} beside this model. Use a shorter "
            "max_length, or a smaller model."
        )
    size = math.floor(found * _MARGIN) or 1
    return _agreed(size - size % 8 if size > 8 else size, device)


def _fits(module: Any, trainer: Any, size: int, length: int) -> bool:
    """Whether some steps of `size` rows fit, one after the other.

    The first alone would say too much: later ones find memory in pieces, and in it what the
    optimizer keeps and, until they have made their own, the gradients of the step before.
    """
    device = trainer.strategy.root_device
    kept: list[torch.Tensor] = []
    try:
        for _ in range(_STEPS):
            _step(module, trainer, size, length)
            if not kept:
                weights = [each for each in module.parameters() if each.requires_grad]
                kept = [torch.zeros_like(each) for each in weights for _ in range(2)]
        torch.cuda.synchronize(device)
    except torch.cuda.OutOfMemoryError:
        return False
    finally:
        kept.clear()
        module.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
    return True


def _step(module: Any, trainer: Any, size: int, length: int) -> None:
    rows = torch.zeros((size, length), dtype=torch.long, device=trainer.strategy.root_device)
    with trainer.precision_plugin.forward_context():
        out = module.training_step({"input_ids": rows, "labels": rows.clone()}, 0)
    module.zero_grad(set_to_none=True)
    (out["loss"] if isinstance(out, dict) else out).backward()


def _say_nothing(*_: Any, **__: Any) -> None:
    pass


def _agreed(size: int, device: torch.device) -> int:
    """The smallest choice of all ranks."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return size
    smallest = torch.tensor(size, device=device)
    torch.distributed.all_reduce(smallest, op=torch.distributed.ReduceOp.MIN)
    return int(smallest.item())
