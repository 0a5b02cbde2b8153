"""Copies batches to a GPU while it computes.

Ids are copied in the dtype of the store (2 or 4 bytes) and become int64 on the device. Each batch
is one copy from pinned memory on a separate stream. There are two pinned slots: while the GPU
reads one, the next batch is written to the other.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from penstock.loader.batch_format import Batch, Tensors
from penstock.loader.read import IDS
from penstock.rows.protocol import Array, Fields

_NUM_SLOTS = 2
_ALIGNMENT = 64  # bytes; `view` needs a multiple of the item size, at most 8


class _Slot:
    """Pinned memory, and an event that is recorded after the GPU has read it."""

    def __init__(self) -> None:
        self.pinned = torch.empty(0, dtype=torch.uint8)
        self.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]


class DeviceCopy:
    """Copies batches to one CUDA device; used by one thread at a time."""

    def __init__(self, device: torch.device) -> None:
        # "cuda" is the current device of this thread; on another thread it would be the first one.
        index = torch.cuda.current_device() if device.index is None else device.index
        self._device = torch.device("cuda", index)
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._slots = [_Slot() for _ in range(_NUM_SLOTS)]
        self._turn = 0

    def put(
        self,
        arrays: Fields,
        to_batch: Callable[[Tensors], Batch],
        *,
        narrow: bool = False,
    ) -> tuple[Batch, Callable[[], None]]:
        """Copy `arrays`, and return `to_batch` of the tensors before the copy has finished.

        The second result must be called on the stream that will use the batch. The tensors are
        new on every call, so the caller may keep them.
        """
        slot = self._slots[self._turn]
        self._turn = (self._turn + 1) % _NUM_SLOTS
        # The GPU reads pinned memory some time later. Writing to a slot whose last copy is still
        # queued would change a batch that was yielded already, without an error.
        slot.copied.synchronize()
        # All arrays in one buffer: one copy of a batch costs less than one copy per field.
        ranges = _lay_out(arrays)
        size = ranges[-1][1] if ranges else 0
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            if slot.pinned.numel() < size:
                slot.pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
            host = slot.pinned.numpy()
            for array, (start, stop) in zip(arrays.values(), ranges, strict=True):
                host[start:stop].view(array.dtype).reshape(array.shape)[...] = array
            on_device = slot.pinned[:size].to(self._device, non_blocking=True)
            slot.copied.record(self._stream)
            tensors = {
                name: on_device[start:stop].view(_torch_type(array)).view(array.shape)
                for (name, array), (start, stop) in zip(arrays.items(), ranges, strict=True)
            }
            if not narrow:
                tensors |= {name: _widened(tensors[name]) for name in IDS if name in tensors}
            # On this stream, so that it runs after the copy.
            batch = to_batch(tensors)
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record(self._stream)
        return batch, partial(self._finish, _distinct(batch), ready)

    def _finish(self, tensors: list[torch.Tensor], ready: torch.cuda.Event) -> None:
        """Make the current stream wait for `tensors`, and keep their memory until it has ended."""
        current = torch.cuda.current_stream(self._device)
        current.wait_event(ready)
        for tensor in tensors:
            # The tensor was allocated on our stream and is used on another one. Without this, the
            # allocator could reuse its memory while kernels still read it.
            tensor.record_stream(current)


def _distinct(batch: Batch) -> list[torch.Tensor]:
    """Return one tensor for each buffer of a batch; several may be views of one buffer."""
    tensors = batch.values() if isinstance(batch, dict) else batch
    return list({each.untyped_storage().data_ptr(): each for each in tensors}.values())


def _lay_out(arrays: Fields) -> list[tuple[int, int]]:
    """Return where each array begins and ends in one buffer; each begins at a multiple of 64."""
    ranges = []
    end = 0
    for array in arrays.values():
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        end = start + array.nbytes
        ranges.append((start, end))
    return ranges


def _torch_type(array: Array) -> torch.dtype:
    return torch.from_numpy(np.zeros(0, array.dtype)).dtype


def _widened(ids: torch.Tensor) -> torch.Tensor:
    """Return ids as int64; torch has few operations on unsigned types, so signed ones are used."""
    if ids.dtype == torch.uint16:
        return ids.view(torch.int16).to(torch.int64).bitwise_and_(0xFFFF)
    if ids.dtype == torch.uint32:
        return ids.view(torch.int32).to(torch.int64).bitwise_and_(0xFFFF_FFFF)
    return ids.to(torch.int64)
