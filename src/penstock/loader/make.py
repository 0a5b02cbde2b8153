"""A block of rows, made into batches.

What takes time (finding, reading and marking rows) was done for the whole block, on the
thread that reads ahead. What is left is done when a batch is handed out: ids are widened
into memory that an earlier batch has just given back, which is still in the processor's
cache. Made a block at a time, batches of 64-bit ids took twice as long.
"""

from collections.abc import Callable, Iterator
from copy import copy
from functools import partial
from itertools import count, pairwise
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.loader.assemble import IDS, IGNORED, Block
from penstock.loader.batch import Shape, host_tensors
from penstock.loader.device import DeviceCopy
from penstock.rows.padded import narrowed
from penstock.rows.pieces import Side

__all__ = ["Made", "Maker"]

_NOT_FOR_HF = ("document_ids", "cu_seqlens")

Dress = Callable[[dict[str, torch.Tensor]], Any]


class Made(NamedTuple):
    """A batch that is ready to be handed out."""

    step: int
    stop: int  # the position after it
    batch: Any
    fingerprint: int
    finish: Callable[[], None] | None  # what is left to do, on the reader's thread


class Maker:
    """Batches of one shape, for one device."""

    def __init__(
        self,
        shape: Shape,
        device: torch.device,
        *,
        narrow: bool,
        end: int | None,
        side: Side | None,
        whole_documents: bool,
    ) -> None:
        """What batches look like.

        Args:
            shape: Keys, and the length of rows.
            device: Where they go.
            narrow: Whether ids stay as narrow as they are stored.
            end: The position at which the run ends, where it does.
            side: Where rows are padded, if to the widest of their step.
            whole_documents: Whether some rows begin a document.
        """
        self._shape = shape
        self._device = device
        self._narrow = narrow
        self._end = end
        self._side = side
        self._for_hf = shape.format == "hf"
        self._whole_documents = whole_documents

    def ending(self, end: int | None) -> Self:
        """The same for a run of which it is known by now where it ends."""
        other = copy(self)
        other._end = end
        return other

    def batches(self, block: Block, copy: DeviceCopy | None = None) -> Iterator[Made]:
        """The batches of a block, one a step, each made when it is asked for."""
        made = self._plain(block) if self._is_plain(block) else self._any(block, copy)
        stops = [stop if self._end is None else min(stop, self._end) for _, stop in block.spans]
        steps = count(block.first_step)
        fields = zip(steps, stops, block.fingerprints, made, strict=False)
        for step, stop, fingerprint, (batch, finish) in fields:
            yield Made(step, stop, batch, fingerprint, finish)

    def _is_plain(self, block: Block) -> bool:
        """Whether batches are nothing but inputs and targets of full rows, on the CPU."""
        return (
            block.targets is None
            and not block.extras
            and block.widths is None
            and not self._narrow
            and not self._shape.ids
            and not self._shape.lengths
            and self._shape.format != "hf"
            and self._device.type == "cpu"
        )

    def _plain(self, block: Block) -> Iterator[tuple[Any, None]]:
        """What `Shape.dress` gives, by NumPy's views, which cost a tenth of torch's."""
        tokens, as_tuple = block.tokens, self._shape.format == "tuple"
        for start, stop in pairwise(block.edges):
            wide = tokens[start:stop].astype(np.int64)
            inputs, targets = torch.from_numpy(wide[:, :-1]), torch.from_numpy(wide[:, 1:])
            yield (inputs, targets) if as_tuple else {"inputs": inputs, "targets": targets}, None

    def _any(
        self, block: Block, copy: DeviceCopy | None
    ) -> Iterator[tuple[Any, Callable[[], None] | None]]:
        """Any batch, with what is left to do when it is handed out."""
        for number, (start, _) in enumerate(block.spans):
            length = self._shape.length_at(start)
            arrays = host_tensors(block, number, self._shape, length)
            if block.widths is not None:
                arrays = narrowed(arrays, block.widths[number], length, self._side or "right")
            if copy is not None:
                dress = self._dress(arrays, length)
                yield copy.put(arrays, dress, narrow=self._narrow)
            else:
                yield self._on_device(arrays, length), None

    def _on_device(self, arrays: dict[str, NDArray[Any]], length: int) -> Any:
        """Any batch, where no stream of the device has to be waited for."""
        dress = self._dress(arrays, length)
        if not self._narrow:
            arrays |= {name: arrays[name].astype(np.int64) for name in IDS if name in arrays}
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        if self._device.type != "cpu":
            tensors = {name: each.to(self._device) for name, each in tensors.items()}
        return dress(tensors)

    def _dress(self, arrays: dict[str, NDArray[Any]], length: int) -> Dress:
        """What makes a batch of tensors; takes out of `arrays` what the batch does not have."""
        dress: Dress = _as_they_are if self._narrow else partial(self._shape.dress, length=length)
        if self._for_hf:
            # These models take no such arguments; position_ids say the same.
            for name in _NOT_FOR_HF:
                arrays.pop(name, None)
            if self._whole_documents and "labels" not in arrays:
                return partial(_without_first, dress)
        return dress


def _without_first(dress: Dress, tensors: dict[str, torch.Tensor]) -> Any:
    """A batch whose rows' first labels count for nothing, also after rows are laid end to end."""
    batch = dress(tensors)
    batch["labels"][:, 0] = IGNORED
    return batch


def _as_they_are(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return tensors
