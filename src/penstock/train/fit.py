"""How many rows fit on a device at once, found by trying."""

import torch
from torch import distributed

from penstock.errors import PlanError
from penstock.train.job import Training
from penstock.train.model import GPT

__all__ = ["fitting_rows"]

_WITHOUT_GPU = 8
_ENOUGH_TOKENS = 65_536  # at once: twice as many made an H200 a seventh slower, not faster
_SPARE = 0.9  # of the memory; the rest is for what fragments, and for what compiling adds


def fitting_rows(model: GPT, device: torch.device, settings: Training) -> int:
    """The most rows, a power of two, of which the model can be trained at once and fast.

    Each trial computes gradients of random rows, beside as much memory as AdamW will remember.
    Without a GPU, 8. Where a step has so many rows in all, a divisor of its share of them.
    """
    share = _share(settings)
    if device.type != "cuda":
        return _divisor(_WITHOUT_GPU, share)
    remembered = [torch.empty_like(each) for each in model.parameters() for _ in range(2)]
    enough = max(1, _ENOUGH_TOKENS // model.shape.length)
    rows, found = 1, 0
    try:
        while rows <= min(enough, share or enough) and _fits(model, device, settings, rows):
            found, rows = rows, 2 * rows
    finally:
        del remembered
        model.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    if not found:
        raise PlanError(
            f"Not one row of {model.shape.length:,} tokens fits on {device}. Use recompute=true, "
            "a shorter length or a smaller model."
        )
    return _divisor(found, share)


def _share(settings: Training) -> int | None:
    """Rows of a step on this process, where that is settled."""
    if settings.global_batch_size is None:
        return None
    joined = distributed.is_available() and distributed.is_initialized()
    # Too few rows for all processes are refused where steps are laid out.
    return settings.global_batch_size // (distributed.get_world_size() if joined else 1) or 1


def _divisor(rows: int, share: int | None) -> int:
    """The largest number up to `rows` that divides `share`.

    >>> _divisor(8, 12), _divisor(8, None)
    (6, 8)
    """
    if share is None:
        return rows
    return next(each for each in range(min(rows, share), 0, -1) if share % each == 0)


def _fits(model: GPT, device: torch.device, settings: Training, rows: int) -> bool:
    shape = model.shape
    tokens = torch.randint(shape.vocab_size, (rows, shape.length), device=device)
    try:
        with torch.autocast("cuda", torch.bfloat16, enabled=settings.precision != "float32"):
            loss = model(tokens, tokens)
        loss.backward()
        torch.cuda.synchronize(device)
    except torch.cuda.OutOfMemoryError:
        model.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
        return False
    total = torch.cuda.get_device_properties(device).total_memory
    return torch.cuda.max_memory_allocated(device) < _SPARE * total
