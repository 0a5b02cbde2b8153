"""The dict of a batch, which notebooks show as a table.

It is a dict in every other way: equal to one, made from one, and taken by `model(**batch)`,
`torch.compile`, collate functions, and the functions that move batches to a device. One exception:
with `fullgraph=True`, torch 2.6 compiles `batch["inputs"]`, but no loop over a batch or `**batch`.
"""

from collections import OrderedDict
from collections.abc import Iterable
from copy import deepcopy
from html import escape
from typing import Any

import torch
from torch.utils import _pytree

_SHOWN_VALUES = 12


class BatchDict(dict[str, Any]):
    """A batch of `Loader`: tensors by name, and `use_cache=False` if it is packed for a model."""

    def _repr_html_(self) -> str:
        """Return a table of the fields with their first values, for notebooks; all is escaped."""
        heads = "".join(f"<th>{name}</th>" for name in ("field", "shape", "dtype", "first values"))
        lines = []
        tensors = {name: each for name, each in self.items() if isinstance(each, torch.Tensor)}
        for name, tensor in tensors.items():
            shape = " x ".join(f"{size:,}" for size in tensor.shape)
            cells = name, shape, str(tensor.dtype).removeprefix("torch."), _first_values(tensor)
            lines.append("".join(f"<td>{escape(cell)}</td>" for cell in cells))
        for name in self.keys() - tensors.keys():  # "use_cache", which has no shape
            cells = name, "", type(self[name]).__name__, str(self[name])
            lines.append("".join(f"<td>{escape(cell)}</td>" for cell in cells))
        devices = ", ".join(sorted({str(tensor.device) for tensor in tensors.values()}))
        caption = f"a batch on {escape(devices)}; loader.explain(step) shows text"
        rows = "".join(f"<tr>{line}</tr>" for line in lines)
        return f"<table><caption>{caption}</caption><tr>{heads}</tr>{rows}</table>"

    def __reduce__(self) -> tuple[Any, ...]:
        # `torch.load` refuses classes that it does not know, and also `dict` by its name. An
        # OrderedDict is equal to a dict with the same items.
        return OrderedDict, (), None, None, iter(self.items())

    def __copy__(self) -> "BatchDict":
        return BatchDict(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> "BatchDict":
        return BatchDict({name: deepcopy(tensor, memo) for name, tensor in self.items()})


def shown(batch: Any) -> Any:
    """A dict as a `BatchDict`; other formats of batches as they are."""
    return BatchDict(batch) if isinstance(batch, dict) else batch


def _first_values(tensor: torch.Tensor) -> str:
    """The first values of the first row."""
    flat = tensor.reshape(-1)
    values = flat[:_SHOWN_VALUES].tolist()
    return " ".join(map(str, values)) + " …" * (flat.numel() > _SHOWN_VALUES)


def _leaves(batch: BatchDict) -> tuple[list[Any], tuple[str, ...]]:
    return list(batch.values()), tuple(batch)


def _leaves_with_keys(
    batch: BatchDict,
) -> tuple[list[tuple[_pytree.KeyEntry, Any]], tuple[str, ...]]:
    return [(_pytree.MappingKey(name), tensor) for name, tensor in batch.items()], tuple(batch)


def _from_leaves(leaves: Iterable[Any], names: tuple[str, ...]) -> BatchDict:
    return BatchDict(zip(names, leaves, strict=True))


# torch maps functions over nested dicts, lists and tuples, such as `tensor.to(device)`. It looks a
# class up by its exact name, so without this a batch would be one unknown value.
_pytree.register_pytree_node(
    BatchDict,
    _leaves,
    _from_leaves,
    serialized_type_name="penstock.loader.BatchDict",
    flatten_with_keys_fn=_leaves_with_keys,
)
