"""Windows of a store as torch.long tensors, one or many at a time.

    tokens     t0 t1 t2 t3 t4        length=4
    inputs     t0 t1 t2 t3
    labels        t1 t2 t3 t4        labels="shifted": what follows each input
    labels     t0 t1 t2 t3           labels="same": for models that shift by themselves

Inputs and labels are tensors of their own and contiguous, as code written for a hand-made
Dataset expects: it calls `.view(-1)` on them, and writes -100 into the labels.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from operator import index
from typing import Any, Literal, overload

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from penstock.errors import PlanError
from penstock.store.reader import TokenStore

__all__ = ["FILLER", "Batch", "Labels", "WindowTensors", "check_labels", "ready_batch"]

FILLER = 2**62
"""The number of a window that holds nothing: inputs of 0, and labels of -100."""
_IGNORED = -100

Labels = Literal["shifted", "same"]
Pair = tuple[torch.Tensor, torch.Tensor]


def check_labels(labels: str) -> None:
    """Refuse what labels cannot be."""
    if labels not in ("shifted", "same"):
        raise PlanError(f'labels={labels!r} is not "shifted" or "same".')


class WindowTensors:
    """All windows of a store; there may be none. Pickles as a path."""

    def __init__(self, store: TokenStore, length: int, *, stride: int, labels: Labels) -> None:
        check_labels(labels)
        length, stride = index(length), index(stride)
        if length < 1 or stride < 1:
            raise PlanError(f"A length of {length} and stride={stride} must be at least 1.")
        self.store = store
        self.length = length
        self.stride = stride
        self.shifted = labels == "shifted"

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_rows"}

    def __len__(self) -> int:
        return max(0, -(-(self.store.num_tokens - self.length) // self.stride))

    @property
    def tokens(self) -> NDArray[Any]:
        """All ids of the store, as narrow as stored: a view of the file."""
        return self.store.tokens(0, self.store.num_tokens)

    @cached_property
    def _rows(self) -> NDArray[Any]:
        """Every window as a row of an array that takes no room: a view of the file."""
        if not len(self):
            return np.zeros((0, self.length + 1), self.store.dtype)
        return sliding_window_view(self.tokens, self.length + 1)[:: self.stride]

    def one(self, number: int) -> Pair:
        """Inputs and labels of one window, (length,) each."""
        number = index(number)
        if not -len(self) <= number < len(self):
            raise IndexError(f"window {number:,} is not among {len(self):,}")
        return self._pair(self._rows[number])

    def many(self, numbers: Sequence[int]) -> Pair:
        """Inputs and labels of some windows, (windows, length) each."""
        # One gather. NumPy refuses numbers past the end, and counts negative ones from it.
        wanted = np.array(numbers, np.int64)
        filled = wanted == FILLER
        if not filled.any():
            return self._pair(self._rows[wanted])
        wanted[filled] = 0
        inputs, labels = self._pair(self._rows[wanted])
        inputs[torch.from_numpy(filled)] = 0
        labels[torch.from_numpy(filled)] = _IGNORED
        return inputs, labels

    def _pair(self, rows: NDArray[Any]) -> Pair:
        inputs = torch.from_numpy(rows[..., :-1].astype(np.int64))
        if self.shifted:
            return inputs, torch.from_numpy(rows[..., 1:].astype(np.int64))
        return inputs, inputs.clone()


class Batch(Sequence[Any]):
    """The items of one batch, stacked already.

    To a collate function it is a list of items, which are made as they are asked for; one
    that knows it takes `stacked`.
    """

    def __init__(self, pair: Pair, item: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
        self._pair = pair
        self._item = item

    @property
    def stacked(self) -> Any:
        """The whole batch in the shape of an item."""
        return self._item(*self._pair)

    def __len__(self) -> int:
        return len(self._pair[0])

    @overload
    def __getitem__(self, number: int) -> Any: ...
    @overload
    def __getitem__(self, number: slice) -> list[Any]: ...
    def __getitem__(self, number: int | slice) -> Any:
        inputs, labels = self._pair
        if isinstance(number, slice):
            return [self._item(*pair) for pair in zip(inputs[number], labels[number], strict=True)]
        if not -len(self) <= number < len(self):
            raise IndexError(f"item {number:,} is not among {len(self):,}")
        return self._item(inputs[number], labels[number])

    def __iter__(self) -> Iterator[Any]:
        return iter([self._item(*pair) for pair in zip(*self._pair, strict=True)])


def ready_batch(batch: Any) -> Any:
    """The collate function for datasets of windows: the batch as it was made.

    What is no `Batch` (items picked one by one) is stacked as PyTorch does it.
    """
    return batch.stacked if isinstance(batch, Batch) else torch.utils.data.default_collate(batch)
