"""The windows of one batch: read with a transform, and stacked for a collate function.

A transform changes each window by random choices that depend on the seed, the epoch and the number
of the window alone. So a run repeats exactly, with any workers, and resumes exactly. A DataLoader
asks for windows by number only, so a number also says the epoch:

    number = epoch * EPOCH + window
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch.utils.data import default_collate

from penstock.errors import PlanError
from penstock.loader.batch_format import BatchFormat, LabelBatch, PairBatch, Shape
from penstock.order.integers import Integers
from penstock.transforms.transform import Transformed

EPOCH = 2**40
"""The distance between the numbers of one window in two epochs; no file has as many windows."""

FILLER = 2**62
"""The number of a window that only fills up a batch: inputs of 0, and labels of -100."""

Item = TypeVar("Item", LabelBatch, PairBatch)


def read_changed(
    rows: Transformed, samples: Integers, epochs: Integers, *, shifted: bool
) -> PairBatch:
    """Inputs and labels of changed windows, (windows, length) each, as a loader would make them.

    Raises:
        PlanError: the transform adds a field, which a pair cannot hold.
    """
    fields = rows.read_epochs(samples, epochs)
    for name in ("document_ids", "position_ids"):  # of the rows; the transform has used them
        fields.pop(name, None)
    tensors = {
        # Masks stay boolean; ids become int64, which embeddings and losses need.
        name: torch.from_numpy(values if values.dtype == np.bool_ else values.astype(np.int64))
        for name, values in fields.items()
    }
    shape = Shape(BatchFormat(fields="dict" if shifted else "hf"), rows.length)
    inputs, labels, *others = shape.to_batch(tensors).values()
    if others:
        raise PlanError(
            f"{rows.transform!r} adds {', '.join(map(repr, tensors))} to the windows, and an item "
            "holds inputs and labels only. Read such windows with penstock.Loader."
        )
    # Copies, because both may be views of one array, and users write into the labels.
    copied = (torch.clone(each, memory_format=torch.contiguous_format) for each in (inputs, labels))
    return next(copied), next(copied)


class WindowBatch(Sequence[Item], Generic[Item]):
    """The items of one batch, stacked already.

    A collate function can use it as a list of items, which are made on access. `stack` takes the
    stacked tensors instead.
    """

    def __init__(
        self,
        item: Callable[[torch.Tensor, torch.Tensor], Item],
        inputs: torch.Tensor,
        labels: torch.Tensor,
    ) -> None:
        self._item: Callable[[torch.Tensor, torch.Tensor], Item] = item
        self._inputs, self._labels = inputs, labels

    @property
    def stacked(self) -> Item:
        """The batch in the same structure as one item (a pair or a dict), with stacked tensors."""
        return self._item(self._inputs, self._labels)

    def __len__(self) -> int:
        return len(self._inputs)

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return list(self)[number]
        if not -len(self) <= number < len(self):
            raise IndexError(f"item {number:,} does not exist; there are {len(self):,} items")
        return self._item(self._inputs[number], self._labels[number])

    def __iter__(self) -> Iterator[Item]:
        return map(self._item, self._inputs, self._labels)


def stack(batch: Any) -> Any:
    """The collate function for these datasets; items that were chosen one by one are stacked."""
    return batch.stacked if isinstance(batch, WindowBatch) else default_collate(batch)
