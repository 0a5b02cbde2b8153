"""Batches to a GPU, while it computes.

Ids travel as narrow as they are stored (2 or 4 bytes) and become int64 on the device.
Each batch is one copy from pinned memory on a stream of its own. There are two pinned
slots: while the GPU reads one, the next batch is put together in the other.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.loader.read import IDS

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
        # "cuda" means the device that is current here; on another thread it would be the first.
        index = torch.cuda.current_device() if device.index is None else device.index
        self._device = torch.device("cuda", index)
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._slots = [_Slot() for _ in range(_NUM_SLOTS)]
        self._turn = 0

    def put(
        self,
        arrays: dict[str, NDArray[Any]],
        dress: Callable[[dict[str, torch.Tensor]], Any],
        *,
        narrow: bool = False,
    ) -> tuple[Any, Callable[[], None]]:
        """Send `arrays`; returns at once, with the batch that `dress` makes of the tensors.

        The second result is to be called on the stream that will use the batch. The tensors
        are new on every call, so they may be kept.
        """
        slot = self._slots[self._turn]
        self._turn = (self._turn + 1) % _NUM_SLOTS
        # The GPU reads pinned memory in its own time. Refilling a slot whose last copy is
        # still queued would change a batch already handed out, and nothing would say so.
        slot.copied.synchronize()
        places = _lay_out(arrays)
        size = places[-1][1] if places else 0
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            if slot.pinned.numel() < size:
                slot.pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
            host = slot.pinned.numpy()
            for array, (start, stop) in zip(arrays.values(), places, strict=True):
                host[start:stop].view(array.dtype).reshape(array.shape)[...] = array
            on_device = slot.pinned[:size].to(self._device, non_blocking=True)
            slot.copied.record(self._stream)
            tensors = {
                name: on_device[start:stop].view(_torch_type(array)).view(array.shape)
                for (name, array), (start, stop) in zip(arrays.items(), places, strict=True)
            }
            if not narrow:
                tensors |= {name: _widened(tensors[name]) for name in IDS if name in tensors}
            # Here, and not by the reader: what it computes must follow the copy on this stream.
            batch = dress(tensors)
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record(self._stream)
        return batch, partial(self._hand_out, _distinct(batch), ready)

    def _hand_out(self, tensors: list[torch.Tensor], ready: torch.cuda.Event) -> None:
        """Make the current stream wait for `tensors`, and keep their memory until it is done."""
        current = torch.cuda.current_stream(self._device)
        current.wait_event(ready)
        for tensor in tensors:
            # Made on our stream, used on theirs: without this the allocator could give the
            # memory away while their kernels still read it.
            tensor.record_stream(current)


def _distinct(batch: Any) -> list[torch.Tensor]:
    """One tensor for each piece of memory that a batch holds; several may be views of one."""
    tensors = batch.values() if isinstance(batch, dict) else batch
    return list({each.untyped_storage().data_ptr(): each for each in tensors}.values())


def _lay_out(arrays: dict[str, NDArray[Any]]) -> list[tuple[int, int]]:
    """Where each array begins and ends in one buffer; every one begins at a multiple of 64."""
    places = []
    end = 0
    for array in arrays.values():
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        end = start + array.nbytes
        places.append((start, end))
    return places


def _torch_type(array: NDArray[Any]) -> torch.dtype:
    return torch.from_numpy(np.zeros(0, array.dtype)).dtype


def _widened(ids: torch.Tensor) -> torch.Tensor:
    """Ids as int64; torch knows few operations on unsigned ones, so they go by way of signed."""
    if ids.dtype == torch.uint16:
        return ids.view(torch.int16).to(torch.int64).bitwise_and_(0xFFFF)
    if ids.dtype == torch.uint32:
        return ids.view(torch.int32).to(torch.int64).bitwise_and_(0xFFFF_FFFF)
    return ids.to(torch.int64)
