"""Finds the largest batch that fits on a GPU, by trying sizes.

The size is doubled until the GPU runs out of memory; then the search halves the interval between
the largest size that fits and the smallest that does not. A trial runs three steps on meaningless
token ids. Afterwards the weights and the random state are the same as before, and no gradients
are left. All ranks get the same answer: the smallest size that any of them found.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, distributed

_MOST = 4_096
# The share of the largest fitting size to use. Real text and validation allocate memory in blocks
# of other sizes than the trial, and compilation needs some memory too.
_MARGIN = 0.9
_STEPS = 3
_LOGGING = ("log", "log_dict")  # Lightning refuses them outside of its own loops


def largest_that_fits(fits: Callable[[int], bool], most: int = _MOST) -> int:
    """The largest of 1 … `most` for which `fits` is true; 0 if there is none.

    `fits` must be true up to some size and false from there on.

    >>> tried = []
    >>> largest_that_fits(lambda size: tried.append(size) or size <= 11)
    11
    >>> tried
    [1, 2, 4, 8, 16, 12, 10, 11]
    >>> largest_that_fits(lambda size: False)
    0
    """
    good, size = 0, 1
    while good < most and fits(size):
        good, size = size, min(2 * size, most)
    # From here on `good` fits and `bad` does not, or is past the limit.
    bad = size if good < most else most + 1
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return good


def round_down(rows: int, divides: int | None = None) -> int:
    """Return `rows` rounded down to a divisor of `divides`.

    Without `divides`, a number above 8 is rounded down to a multiple of 8.

    >>> round_down(8, 12), round_down(21), round_down(7)
    (6, 16, 7)
    """
    if divides is not None:
        return next(each for each in range(min(rows, divides), 0, -1) if divides % each == 0)
    return rows - rows % 8 if rows > 8 else rows


def largest_batch(
    step: Callable[[int], None],
    weights: Sequence[Tensor],
    device: torch.device,
    *,
    most: int = _MOST,
    divides: int | None = None,
) -> int:
    """Return the most rows, up to `most`, with which `step(rows)` can run on a GPU repeatedly.

    Args:
        step: A function that takes a number of rows, and computes their loss and its gradients.
        weights: The weights that get gradients. The trials leave room for an optimizer that
            keeps two numbers for each of them, as AdamW does.
        device: The GPU.
        most: The largest answer.
        divides: The answer must divide this number. Without it, an answer above 8 is a
            multiple of 8.

    Returns:
        The number of rows, the same on all ranks; 0 if not even one row fits.
    """
    # Trials draw random numbers for dropout. A run must not depend on how many trials it took.
    state = torch.random.get_rng_state(), torch.cuda.get_rng_state(device)
    try:
        # Sizes above `most` are tried too, so that `most` itself fits with the margin.
        limit = math.ceil(most / _MARGIN)
        found = largest_that_fits(lambda rows: _fits(step, rows, weights, device), limit)
    finally:
        torch.random.set_rng_state(state[0])
        torch.cuda.set_rng_state(state[1], device)
        torch.cuda.reset_peak_memory_stats(device)
    rows = min(most, math.floor(found * _MARGIN) or found)
    return _smallest_of_ranks(round_down(rows, divides) if rows else 0, device)


def _fits(
    step: Callable[[int], None], rows: int, weights: Sequence[Tensor], device: torch.device
) -> bool:
    """Whether three steps of `rows` rows fit, one after the other.

    One step is not enough. In later steps the memory is fragmented, and it also contains the
    state of the optimizer and the gradients of the previous step.
    """
    optimizer_state: list[Tensor] = []
    try:
        for _ in range(_STEPS):
            step(rows)
            if not optimizer_state:
                optimizer_state = [torch.zeros_like(each) for each in weights for _ in range(2)]
        torch.cuda.synchronize(device)
    except torch.cuda.OutOfMemoryError:
        return False
    finally:
        optimizer_state.clear()
        for each in weights:
            each.grad = None
        torch.cuda.empty_cache()
    return True


def _smallest_of_ranks(rows: int, device: torch.device) -> int:
    if not (distributed.is_available() and distributed.is_initialized()):
        return rows
    # Ranks may have different free memory, and all of them must take the same batch size.
    smallest = torch.tensor(rows, device=device)
    distributed.all_reduce(smallest, op=distributed.ReduceOp.MIN)
    return int(smallest.item())


def largest_lightning_batch(module: Any, trainer: Any, length: int) -> int:
    """The most rows of `length` tokens for the `training_step` of a LightningModule.

    Calls to its `log` and `log_dict` are ignored during the trials.
    """
    device = trainer.strategy.root_device
    before = next(iter(module.parameters())).device

    def step(rows: int) -> None:
        ids = torch.zeros((rows, length), dtype=torch.long, device=device)
        with trainer.precision_plugin.forward_context():
            output = module.training_step({"input_ids": ids, "labels": ids.clone()}, 0)
        # Lightning deletes the old gradients at this moment: after the forward pass.
        module.zero_grad(set_to_none=True)
        (output["loss"] if isinstance(output, dict) else output).backward()

    # In `setup` Lightning has not moved the module to its device yet; it is moved back below.
    module.to(device)
    for name in _LOGGING:
        module.__dict__[name] = lambda *_, **__: None
    try:
        weights = [each for each in module.parameters() if each.requires_grad]
        found = largest_batch(step, weights, device)
    finally:
        for name in _LOGGING:
            del module.__dict__[name]
        module.to(before)
        torch.cuda.empty_cache()
    if found == 0:
        raise torch.cuda.OutOfMemoryError(
            f"Even one row of {length:,} tokens does not fit into the memory of {device} together "
            "with this model. Use a shorter max_length, or a smaller model."
        )
    return found
