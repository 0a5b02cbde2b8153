"""Collating examples of several datasets into one batch.

PyTorch's default collate function needs the same keys in every example. Examples of different
datasets have different keys. So here a batch has the keys of all its examples, and None where
an example lacks a key.
"""

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch

__all__ = ["Example", "collate_same_keys", "default_collate_fn"]

Example = dict[str, Any]


def default_collate_fn(batch: Sequence[Mapping[str, Any]]) -> Example:
    """A dict with the keys of all examples: stacked tensors, and lists of everything else.

    Tensors of equal shape are stacked. Lists are in the order of the batch. Keys are in the order
    in which they first appear.

    >>> default_collate_fn([{"text": "a", "label": 1}, {"text": "b"}])
    {'text': ['a', 'b'], 'label': [1, None]}
    """
    keys = dict.fromkeys(key for example in batch for key in example)
    return {key: _stacked([example.get(key) for example in batch]) for key in keys}


def collate_same_keys(batch: Sequence[Any]) -> Example | None:
    """`default_collate_fn` of plain dicts that have the same keys; None for other examples.

    Faster, because it reads all values of an example in one call.
    """
    first = batch[0]
    # Plain dicts only: reading a missing key of a defaultdict would add the key to it. With one
    # key, `itemgetter` returns the value itself instead of a tuple.
    if set(map(type, batch)) != {dict} or len(first) < 2:
        return None
    # If every example has the keys of the first (no KeyError below), and all examples together
    # have no more keys than that, then all have the same keys.
    if sum(map(len, batch)) != len(first) * len(batch):
        return None
    try:
        values = zip(*map(itemgetter(*first), batch), strict=True)
        return {key: _stacked(list(each)) for key, each in zip(first, values, strict=True)}
    except KeyError:
        return None


def _stacked(values: list[Any]) -> Any:
    """The values of one key: one tensor if all are tensors of the same shape."""
    if not isinstance(values[0], torch.Tensor):
        return values
    shape = values[0].shape
    if all(isinstance(value, torch.Tensor) and value.shape == shape for value in values):
        return torch.stack(values)
    return values
