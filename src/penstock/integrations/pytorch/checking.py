"""A look at the batches of any DataLoader before a training run.

Labels come in two conventions that look alike in a shape and differ in a loss:

    shifted   labels[i] is input_ids[i + 1]; the loss is taken as it is
    same      labels[i] is input_ids[i]; the model shifts (Hugging Face's do)

Shifted labels in a model that shifts train it to predict two tokens ahead, and nothing says so.
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
    "shifted": "shifted (a label is the next input; take the loss as it is)",
    "same": "same (a label is its input; the model has to shift)",
    "either": "shifted or same (these rows fit both)",
    "neither": "neither shifted nor the same as the inputs",
}


def label_convention(input_ids: torch.Tensor, labels: torch.Tensor) -> Convention:
    """Which convention the labels of a batch follow, where they are not -100.

    >>> rows = torch.tensor([[1, 2, 3, 4]])
    >>> label_convention(rows[:, :-1], rows[:, 1:]), label_convention(rows, rows)
    ('shifted', 'same')
    """
    ahead, behind = labels[:, :-1], input_ids[:, 1:]
    shifted = bool(((ahead == behind) | (ahead == _IGNORED)).all())
    same = bool(((labels == input_ids) | (labels == _IGNORED)).all())
    if shifted and same:
        return "either"
    return "shifted" if shifted else "same" if same else "neither"


def test_dataloader(data_loader: Any) -> None:
    """Print the shapes of the first three batches, and how labels lie against inputs."""
    print(f"DataLoader has {len(data_loader)} batches")  # noqa: T201  (what it is for)
    for number, batch in enumerate(data_loader):
        if number >= _NUM_BATCHES:
            break
        input_ids, labels = _fields(batch, number)
        match = input_ids.shape == labels.shape and (input_ids[:, 1:] == labels[:, :-1]).all()
        told = [
            f"Batch {number}:",
            f"  Input shape: {input_ids.shape}",
            f"  Label shape: {labels.shape}",
            f"  Input and label alignment check: {bool(match)}",
        ]
        if input_ids.shape == labels.shape:
            told.append(f"  Labels: {_MEANINGS[label_convention(input_ids, labels)]}")
        print("\n".join(told))  # noqa: T201


test_dataloader.__test__ = False  # type: ignore[attr-defined]  # pytest takes it for a test


def check_dataloader(
    data_loader: Iterable[Any],
    *,
    labels: Literal["shifted", "same"] | None = None,
    vocab_size: int | None = None,
    num_batches: int = _NUM_BATCHES,
) -> Convention:
    """The convention of the first batches' labels, if nothing is wrong with them.

    Args:
        data_loader: Gives dictionaries with `input_ids` and `labels`, or pairs.
        labels: The convention that they must follow; either where not given.
        vocab_size: Ids must be below it, where given.
        num_batches: How many batches to look at.

    Raises:
        PlanError: there is no batch, or one cannot be trained on; the message says which.
    """
    found: set[Convention] = set()
    seen = 0
    for number, batch in enumerate(data_loader):
        if number >= num_batches:
            break
        seen += 1
        found.add(_checked(*_fields(batch, number), number, vocab_size))
    if not seen:
        raise PlanError("The DataLoader gives no batch: too little text, or a loader used up.")
    if {"shifted", "same"} <= found:
        raise PlanError("Some batches have shifted labels and others labels equal to the inputs.")
    convention: Convention = next((each for each in found if each != "either"), "either")
    if labels is not None and convention not in (labels, "either"):
        raise PlanError(f"The labels are {_MEANINGS[convention]}, and {labels!r} was asked for.")
    return convention


def _fields(batch: Any, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and labels of a batch in any of the shapes that are used for language models."""
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
    place = f"Batch {number}"
    for name, values in (("input_ids", input_ids), ("labels", labels)):
        if not isinstance(values, torch.Tensor) or values.dtype != torch.long:
            kind = getattr(values, "dtype", type(values).__name__)
            raise PlanError(f"{place}: {name} is {kind}; embeddings and losses take torch.long.")
        if values.ndim != 2 or not values.numel():
            raise PlanError(f"{place}: {name} has the shape {tuple(values.shape)}, not (rows, T).")
    if input_ids.shape != labels.shape:
        raise PlanError(
            f"{place}: input_ids has the shape {tuple(input_ids.shape)} and labels "
            f"{tuple(labels.shape)}."
        )
    _refuse_outside(input_ids, labels, place, vocab_size)
    if bool((labels == _IGNORED).all()):
        raise PlanError(f"{place}: every label is -100, so there is nothing to learn.")
    convention = label_convention(input_ids, labels)
    if convention == "neither":
        raise PlanError(f"{place}: the labels are {_MEANINGS['neither']}; is something cut twice?")
    return convention


def _refuse_outside(
    input_ids: torch.Tensor, labels: torch.Tensor, place: str, vocab_size: int | None
) -> None:
    targets = labels[labels != _IGNORED]
    for name, values in (("input_ids", input_ids), ("labels", targets)):
        if not values.numel():
            continue
        low, high = int(values.min()), int(values.max())
        if low < 0 or (vocab_size is not None and high >= vocab_size):
            limit = "" if vocab_size is None else f" to {vocab_size - 1:,}"
            raise PlanError(f"{place}: {name} run from {low:,} to {high:,}; ids are 0{limit}.")
