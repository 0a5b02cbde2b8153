"""Batches to a GPU, while it computes.

Ids travel as narrow as they are stored (2 or 4 bytes) and become int64 on the device.
Each batch is one copy from pinned memory on a stream of its own. There are two pinned
slots: while the GPU reads one, the next batch is put together in the other.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

__all__ = ["DeviceCopy"]

_NUM_SLOTS = 2
_ALIGNMENT = 64


class _Slot:
    """Pinned memory, and the event that says when the GPU has read it."""

    def __init__(self) -> None:
        self.pinned = torch.empty(0, dtype=torch.uint8)
        self.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]


class DeviceCopy:
    """Sends batches to one CUDA device; used by one thread at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._slots = [_Slot() for _ in range(_NUM_SLOTS)]
        self._turn = 0

    def put(
        self, arrays: dict[str, NDArray[Any]]
    ) -> tuple[dict[str, torch.Tensor], torch.cuda.Event]:
        """Send `arrays`; returns at once, with tensors that are ready after the event.

        The tensors are new on every call, so they may be kept.
        """
        slot = self._slots[self._turn]
        self._turn = (self._turn + 1) % _NUM_SLOTS
        # The GPU reads pinned memory in its own time. Refilling a slot whose last copy is
        # still queued would change a batch already handed out, and nothing would say so.
        slot.copied.synchronize()
        places = _lay_out(arrays)
        size = places[-1][1] if places else 0
        if slot.pinned.numel() < size:
            slot.pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        host = slot.pinned.numpy()
        for array, (start, stop) in zip(arrays.values(), places, strict=True):
            host[start:stop].view(array.dtype).reshape(array.shape)[...] = array
        with torch.cuda.stream(self._stream):
            on_device = slot.pinned[:size].to(self._device, non_blocking=True)
            slot.copied.record(self._stream)
            tensors = {
                name: _widened(on_device[start:stop], array)
                for (name, array), (start, stop) in zip(arrays.items(), places, strict=True)
            }
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record(self._stream)
        return tensors, ready

    def hand_out(self, tensors: dict[str, torch.Tensor], ready: torch.cuda.Event) -> None:
        """Make the current stream wait for `tensors`, and keep their memory until it is done."""
        current = torch.cuda.current_stream(self._device)
        current.wait_event(ready)
        for tensor in tensors.values():
            # Made on our stream, used on theirs: without this the allocator could give the
            # memory away while their kernels still read it.
            tensor.record_stream(current)


def _lay_out(arrays: dict[str, NDArray[Any]]) -> list[tuple[int, int]]:
    """Where each array begins and ends in one buffer; every one begins at a multiple of 64."""
    places = []
    end = 0
    for array in arrays.values():
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        end = start + array.nbytes
        places.append((start, end))
    return places


def _widened(data: torch.Tensor, array: NDArray[Any]) -> torch.Tensor:
    """Bytes on the device as the tensor they stand for; ids become int64."""
    kind = array.dtype
    if kind == np.uint16:
        return data.view(torch.int16).to(torch.int64).bitwise_and_(0xFFFF).view(array.shape)
    if kind == np.uint32:
        return data.view(torch.int32).to(torch.int64).bitwise_and_(0xFFFF_FFFF).view(array.shape)
    if kind == np.bool_:
        return data.view(torch.bool).view(array.shape)
    same = torch.from_numpy(np.zeros(0, kind)).dtype
    return data.view(same).view(array.shape)
