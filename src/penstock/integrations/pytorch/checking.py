"""Inspect the batches of any DataLoader before a training run.

There are two conventions for labels, which have the same shape and different losses:

    shifted   labels[i] is input_ids[i + 1]; the training loop computes the loss directly
    same      labels[i] is input_ids[i]; the model shifts them (Hugging Face models do)

If a model shifts labels that are shifted already, it learns to predict two tokens ahead. No error
is raised.
"""

from collections.abc import Iterable
from typing import Any, Literal

import torch

from penstock.errors import PlanError

__all__ = ["check_dataloader", "label_convention", "test_dataloader"]

Convention = Literal["shifted", "same", "either", "neither"]

_IGNORED = -100
_NUM_BATCHES = 3
_MEANINGS = {
    "shifted": "shifted (a label is the next input; do not shift it again)",
    "same": "same (a label is its input; the model must shift it)",
    "either": "shifted or same (these rows match both)",
    "neither": "neither shifted nor the same as the inputs",
}


def label_convention(input_ids: torch.Tensor, labels: torch.Tensor) -> Convention:
    """The convention of the labels of a batch; labels of -100 match any.

    >>> rows = torch.tensor([[1, 2, 3, 4]])
    >>> label_convention(rows[:, :-1], rows[:, 1:]), label_convention(rows, rows)
    ('shifted', 'same')
    """
    # The last label of a shifted row has no input to compare with; a row of one token fits both.
    ahead, behind = labels[:, :-1], input_ids[:, 1:]
    shifted = bool(((ahead == behind) | (ahead == _IGNORED)).all())
    same = bool(((labels == input_ids) | (labels == _IGNORED)).all())
    if shifted and same:
        return "either"
    return "shifted" if shifted else "same" if same else "neither"


def test_dataloader(data_loader: Any) -> None:
    """Print the shapes of the first three batches, and the convention of their labels."""
    print(f"DataLoader has {len(data_loader)} batches")  # noqa: T201  (its purpose)
    for number, batch in enumerate(data_loader):
        if number >= _NUM_BATCHES:
            break
        input_ids, labels = _fields(batch, number)
        match = input_ids.shape == labels.shape and (input_ids[:, 1:] == labels[:, :-1]).all()
        lines = [
            f"Batch {number}:",
            f"  Input shape: {input_ids.shape}",
            f"  Label shape: {labels.shape}",
            f"  Input and label alignment check: {bool(match)}",
        ]
        if input_ids.shape == labels.shape:
            lines.append(f"  Labels: {_MEANINGS[label_convention(input_ids, labels)]}")
        print("\n".join(lines))  # noqa: T201


test_dataloader.__test__ = False  # type: ignore[attr-defined]  # pytest would run it as a test


def check_dataloader(
    data_loader: Iterable[Any],
    *,
    labels: Literal["shifted", "same"] | None = None,
    vocab_size: int | None = None,
    num_batches: int = _NUM_BATCHES,
) -> Convention:
    """Check the first batches, and return the convention of their labels.

    Args:
        data_loader: Its batches are dictionaries with `input_ids` and `labels`, or pairs.
        labels: The convention that labels must follow; either one if not given.
        vocab_size: The number of ids, if ids are to be checked against it.
        num_batches: The number of batches to check.

    Raises:
        PlanError: there is no batch, or a batch cannot be trained on; the message names it.
    """
    found: set[Convention] = set()
    seen = 0
    for number, batch in enumerate(data_loader):
        if number >= num_batches:
            break
        seen += 1
        found.add(_checked(*_fields(batch, number), number, vocab_size))
    if not seen:
        raise PlanError(
            "The DataLoader has no batch: there is too little text, or it was iterated to its end."
        )
    # No single setting of the model would be right for both.
    if {"shifted", "same"} <= found:
        raise PlanError("Some batches have shifted labels and others labels equal to the inputs.")
    # A batch that fits both conventions says nothing; any other one decides.
    convention: Convention = next((each for each in found if each != "either"), "either")
    if labels is not None and convention not in (labels, "either"):
        raise PlanError(
            f"The labels are {_MEANINGS[convention]}, but labels={labels!r} is required."
        )
    return convention


def _fields(batch: object, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and labels of a batch, in any of the formats that language models use."""
    if isinstance(batch, dict):
        for inputs, labels in (("input_ids", "labels"), ("inputs", "targets")):
            if inputs in batch and labels in batch:
                return batch[inputs], batch[labels]
        raise PlanError(f"Batch {number} has {sorted(batch)}, and no input_ids and labels.")
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[0], batch[1]
    raise PlanError(f"Batch {number} is a {type(batch).__name__}, not a dictionary or a pair.")


def _checked(
    input_ids: torch.Tensor, labels: torch.Tensor, number: int, vocab_size: int | None
) -> Convention:
    where = f"Batch {number}"
    for name, values in (("input_ids", input_ids), ("labels", labels)):
        kind = values.dtype if isinstance(values, torch.Tensor) else type(values).__name__
        if kind != torch.long:
            raise PlanError(f"{where}: {name} is {kind}; embeddings and losses need torch.long.")
        if values.ndim != 2 or not values.numel():
            raise PlanError(f"{where}: {name} has the shape {tuple(values.shape)}, not (rows, T).")
    if input_ids.shape != labels.shape:
        raise PlanError(
            f"{where}: input_ids has the shape {tuple(input_ids.shape)} and labels "
            f"{tuple(labels.shape)}."
        )
    _refuse_outside(input_ids, labels, where, vocab_size)
    if bool((labels == _IGNORED).all()):
        raise PlanError(f"{where}: every label is -100, so there is nothing to learn.")
    convention = label_convention(input_ids, labels)
    if convention == "neither":
        raise PlanError(f"{where}: the labels are {_MEANINGS['neither']}; were they shifted twice?")
    return convention


def _refuse_outside(
    input_ids: torch.Tensor, labels: torch.Tensor, where: str, vocab_size: int | None
) -> None:
    # An id outside the vocabulary would fail in the model, on a GPU without saying which.
    targets = labels[labels != _IGNORED]
    for name, values in (("input_ids", input_ids), ("labels", targets)):
        if not values.numel():
            continue
        low, high = int(values.min()), int(values.max())
        if low < 0 or (vocab_size is not None and high >= vocab_size):
            limit = "" if vocab_size is None else f" to {vocab_size - 1:,}"
            raise PlanError(f"{where}: {name} run from {low:,} to {high:,}; ids are 0{limit}.")
