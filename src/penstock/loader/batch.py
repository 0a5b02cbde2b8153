"""Arrays to tensors: the batches of a block, in the user's format.

tokens    t0 t1 t2 t3 t4        (rows, length + 1)
inputs    t0 t1 t2 t3           two views of one buffer; targets are copied only
targets      t1 t2 t3 t4        if some of them are ignored (-100)
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import count, pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view

from penstock.loader.batch_format import IGNORED, Batch, Shape, Tensors
from penstock.loader.device import DeviceCopy
from penstock.loader.read import IDS, StepBlock
from penstock.order.steps import PADDING
from penstock.rows.documents import narrowed
from penstock.rows.protocol import Array, Fields, Side
from penstock.rows.windows import cu_seqlens

ToBatch = Callable[[Tensors], Batch]

# The models of transformers do not take these arguments; position_ids say the same.
_NOT_FOR_HF = ("document_ids", "cu_seqlens")


def _cut(rows: Array, length: int, overlap: bool) -> Array:
    """Return rows of `length`, as many as fill a row; with `overlap`, each by one token.

    >>> _cut(np.arange(8)[None], 4, overlap=True).tolist()
    [[0, 1, 2, 3], [3, 4, 5, 6]]
    """
    if overlap:
        # Windows of `length` that begin `length - 1` apart, as views without a copy.
        count = rows.shape[1] // length
        rows = sliding_window_view(rows, length, axis=1)[:, :: length - 1][:, :count]
    return rows.reshape(-1, length)


def host_arrays(block: StepBlock, number: int, shape: Shape, length: int) -> Fields:
    """Return the arrays of one step of a block, as they are copied to the device.

    Ids are in the rows of the block and in the dtype of the store; all other fields are in rows
    of `length`.
    """
    rows = slice(block.edges[number], block.edges[number + 1])
    arrays: Fields = {"tokens": block.tokens[rows]}
    if block.targets is not None and not block.targets[rows].all():
        arrays["target_mask"] = block.targets[rows]
    overlap = length != shape.length and shape.overlaps(block.extras)
    for name, values in block.extras.items():
        whole = name in ("labels", "targets")  # `Shape.to_batch` cuts these with the inputs
        arrays[name] = values[rows] if whole else _cut(values[rows], length, overlap)
    if "position_ids" in arrays:
        # A row that begins inside a document counts its positions from 0, also after a cut.
        columns = np.arange(length, dtype=np.int32)
        arrays["position_ids"] = np.minimum(arrays["position_ids"], columns)
        arrays["document_ids"] = arrays["document_ids"] - arrays["document_ids"][:, :1]
        arrays["cu_seqlens"] = cu_seqlens(arrays["position_ids"])
    if shape.ids:
        # A row that is cut into four becomes four rows with the same ids.
        located = np.repeat(block.located[:, rows], (block.tokens.shape[1] - 1) // length, axis=1)
        located[:, located[3] == PADDING] = PADDING
        arrays |= dict(zip(("source", "epoch", "sample", "position"), located, strict=True))
    return arrays


class Made(NamedTuple):
    """A batch that is ready to be yielded."""

    step: int
    stop: int  # the position after it
    batch: Batch
    fingerprint: int
    finish: Callable[[], None] | None  # to be called on the reader's thread before it is used


class Maker:
    """Makes batches of one shape, for one device.

    Args:
        shape: The fields, and the length of rows.
        device: Where batches go.
        side: The side on which rows are padded to the widest row of a step; None if they are not.
        whole_documents: Whether some rows begin a document.
    """

    def __init__(
        self,
        shape: Shape,
        device: torch.device,
        *,
        side: Side | None,
        whole_documents: bool,
    ) -> None:
        self._shape = shape
        self._device = device
        self._narrow = shape.format == "narrow"
        self._side = side
        self._whole_documents = whole_documents

    def batches(self, block: StepBlock, copy: DeviceCopy | None = None) -> Iterator[Made]:
        """Yield the batches of a block, one per step; each is made when it is asked for."""
        made = self._plain(block) if self._is_plain(block) else self._any(block, copy)
        fields = zip(count(block.first_step), block.spans, block.fingerprints, made, strict=False)
        for step, (_, stop), fingerprint, (batch, finish) in fields:
            yield Made(step, stop, batch, fingerprint, finish)

    def _is_plain(self, block: StepBlock) -> bool:
        """Return whether batches are only inputs and targets of full rows, on the CPU."""
        return (
            block.targets is None
            and not block.extras
            and block.widths is None
            and not self._shape.ids
            and not self._shape.lengths
            and self._shape.format in ("dict", "tuple")
            and self._device.type == "cpu"
        )

    def _plain(self, block: StepBlock) -> Iterator[tuple[Batch, None]]:
        """Yield what `Shape.to_batch` would, by views of NumPy, which cost a tenth of torch's."""
        tokens, as_tuple = block.tokens, self._shape.format == "tuple"
        for start, stop in pairwise(block.edges):
            # A new array for each batch: a caller may keep it, and the block can be freed.
            wide = tokens[start:stop].astype(np.int64)
            inputs, targets = torch.from_numpy(wide[:, :-1]), torch.from_numpy(wide[:, 1:])
            yield (inputs, targets) if as_tuple else {"inputs": inputs, "targets": targets}, None

    def _any(
        self, block: StepBlock, copy: DeviceCopy | None
    ) -> Iterator[tuple[Batch, Callable[[], None] | None]]:
        """Yield any batch, with the function that finishes it."""
        for number, (start, _) in enumerate(block.spans):
            length = self._shape.length_at(start)
            arrays = host_arrays(block, number, self._shape, length)
            if block.widths is not None:
                arrays = narrowed(arrays, block.widths[number], length, self._side or "right")
            to_batch = self._to_batch(arrays, length)
            if copy is not None:
                yield copy.put(arrays, to_batch, narrow=self._narrow)
            else:
                yield self._on_device(arrays, to_batch), None

    def _on_device(self, arrays: Fields, to_batch: ToBatch) -> Batch:
        """Return a batch on a device that copies without a stream."""
        if not self._narrow:
            arrays |= {name: arrays[name].astype(np.int64) for name in IDS if name in arrays}
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        if self._device.type != "cpu":
            tensors = {name: each.to(self._device) for name, each in tensors.items()}
        return to_batch(tensors)

    def _to_batch(self, arrays: Fields, length: int) -> ToBatch:
        """Return the function from tensors to a batch; remove arrays that the batch lacks."""
        if self._narrow:
            return _unchanged
        to_batch: ToBatch = partial(self._shape.to_batch, length=length)
        if self._shape.format == "hf":
            for name in _NOT_FOR_HF:
                arrays.pop(name, None)
            if self._whole_documents and "labels" not in arrays:
                return partial(_without_first, to_batch)
        return to_batch


def _without_first(to_batch: ToBatch, tensors: Tensors) -> Batch:
    """Return a batch in which the first label of each row is ignored.

    Models ignore it anyway, but not after the rows of a batch are concatenated.
    """
    batch = to_batch(tensors)
    batch["labels"][:, 0] = IGNORED
    return batch


def _unchanged(tensors: Tensors) -> Batch:
    return tensors
