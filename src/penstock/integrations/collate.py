"""Examples of several datasets to one batch.

PyTorch's own collate function wants the same keys in every example. Examples of different
datasets have different ones, so here a batch has the keys of all of them, and None where an
example has none.
"""

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["default_collate_fn", "stacked"]


def default_collate_fn(batch: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A dict of all keys: tensors of equal shape stacked, everything else lists in batch order.

    Keys come in the order in which they first appear; an example without one has None there.

    >>> default_collate_fn([{"text": "a", "label": 1}, {"text": "b"}])
    {'text': ['a', 'b'], 'label': [1, None]}
    """
    keys = dict.fromkeys(key for example in batch for key in example)
    columns = {key: [example.get(key) for example in batch] for key in keys}
    return {key: stacked(values) for key, values in columns.items()}


def stacked(values: list[Any]) -> Any:
    """The values of one key: a tensor where all are tensors of one shape."""
    if not isinstance(values[0], torch.Tensor):
        return values
    shape = values[0].shape
    if all(isinstance(value, torch.Tensor) and value.shape == shape for value in values):
        return torch.stack(values)
    return values
