"""Arrays to tensors: batches in the user's format, on the user's device.

The arrays come in blocks: a block has the rows of several steps, read at once (see `read`).

tokens    t0 t1 t2 t3 t4        (rows, length + 1)
inputs    t0 t1 t2 t3           two views of one buffer; targets are copied only
targets      t1 t2 t3 t4        if some of them are ignored (-100)

A GPU gets its batches while it computes. Ids are copied in the dtype of the store (2 or 4 bytes)
and become int64 on the device. Each batch is one copy from pinned memory on a separate stream.
There are two pinned slots: while the GPU reads one, the next batch is written to the other.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count, pairwise
from typing import NamedTuple

import numpy as np
import torch

from penstock.errors import PlanError
from penstock.loader.batch_format import IGNORED, Batch, Shape, Tensors
from penstock.loader.read import IDS, MOST_STEPS, Assembler, StepBlock
from penstock.order.steps import PADDING
from penstock.rows.protocol import Fields, Side, narrowed
from penstock.rows.windows import cu_seqlens

ToBatch = Callable[[Tensors], Batch]

# The models of transformers do not take these arguments. position_ids contain the same information.
_NOT_FOR_HF = ("document_ids", "cu_seqlens")
_NUM_SLOTS = 2
_ALIGNMENT = 64  # bytes; `view` needs a multiple of the item size, at most 8


class Made(NamedTuple):
    """A batch that is ready to be yielded."""

    step: int
    stop: int  # the position after this batch
    batch: Batch
    fingerprint: int
    finish: Callable[[], None] | None  # call it on the reader's thread before the batch is used


@dataclass(frozen=True, slots=True)
class Maker:
    """Makes batches of one shape, for one device."""

    shape: Shape
    """The fields, and the length of rows."""
    device: torch.device
    side: Side | None
    """The side on which rows are padded to the widest row of a step; None if they are not."""
    whole_documents: bool
    """Whether some rows begin with a document, so that their first token is not a target."""

    def batches(self, block: StepBlock, copy: "DeviceCopy | None" = None) -> Iterator[Made]:
        """Yield the batches of a block, one per step; each is made when it is needed."""
        made = self._plain(block) if self._is_plain(block) else self._any(block, copy)
        fields = zip(count(block.first_step), block.spans, block.fingerprints, made, strict=False)
        for step, (_, stop), fingerprint, (batch, finish) in fields:
            yield Made(step, stop, batch, fingerprint, finish)

    def _is_plain(self, block: StepBlock) -> bool:
        """Return whether batches are only inputs and targets of full rows, on the CPU."""
        special = block.targets is not None or block.extras or block.widths is not None
        return (
            not (special or self.shape.ids)
            and self.shape.format in ("dict", "tuple")
            and self.device.type == "cpu"
        )

    def _plain(self, block: StepBlock) -> Iterator[tuple[Batch, None]]:
        """Yield the batches of `Shape.to_batch` as views of NumPy, at a tenth of torch's cost."""
        tokens, as_tuple = block.tokens, self.shape.format == "tuple"
        for start, stop in pairwise(block.edges):
            # A new array for each batch: a caller may keep it, and the block can be freed.
            wide = tokens[start:stop].astype(np.int64)
            inputs, targets = torch.from_numpy(wide[:, :-1]), torch.from_numpy(wide[:, 1:])
            yield (inputs, targets) if as_tuple else {"inputs": inputs, "targets": targets}, None

    def _any(
        self, block: StepBlock, copy: "DeviceCopy | None"
    ) -> Iterator[tuple[Batch, Callable[[], None] | None]]:
        """Yield batches of any format, each with the function that finishes it, if it needs one."""
        shape, format = self.shape, self.shape.format
        wide = () if format == "narrow" else IDS
        for number in range(len(block.spans)):
            arrays = _host_arrays(block, number, shape)
            if block.widths is not None:
                width = block.widths[number]
                arrays = narrowed(arrays, width, shape.length, self.side or "right")
            if format == "hf":
                arrays = {name: arrays[name] for name in arrays if name not in _NOT_FOR_HF}
            if copy is not None:
                yield copy.put(arrays, self._to_batch, wide)
                continue
            for name in wide:
                if name in arrays:
                    arrays[name] = arrays[name].astype(np.int64)
            tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
            if self.device.type != "cpu":
                tensors = {name: each.to(self.device) for name, each in tensors.items()}
            yield self._to_batch(tensors), None

    def _to_batch(self, tensors: Tensors) -> Batch:
        if self.shape.format == "narrow":
            return tensors
        unshifted = self.shape.is_shifted_later(tensors)
        batch = self.shape.to_batch(tensors)
        if unshifted and self.whole_documents:
            # Models ignore the first label of a row anyway, but not after the rows of a batch are
            # concatenated.
            batch["labels"][:, 0] = IGNORED
        return batch


def made_blocks(
    assembler: Assembler, maker: Maker, first: int, copy: "DeviceCopy | None"
) -> Iterator[Iterable[Made]]:
    """Yield finished batches from step `first` to the end of the pass, a block at a time."""
    step = first
    most = 1  # the first batch is needed at once; then blocks grow
    while step < (last := assembler.run.steps_before(step)):
        block = assembler.block(step, last, most)
        most = min(4 * most, MOST_STEPS)
        batches = maker.batches(block, copy)
        if copy is not None:
            # One by one, because `prefetch` counts copies to the device.
            yield from ([made] for made in batches)
        else:
            yield batches
        step += len(block.spans)


def _host_arrays(block: StepBlock, number: int, shape: Shape) -> Fields:
    """Return the arrays of one step of a block, as they are copied to the device.

    Ids are in the dtype of the store.
    """
    rows = slice(block.edges[number], block.edges[number + 1])
    arrays: Fields = {"tokens": block.tokens[rows]}
    if block.targets is not None and not block.targets[rows].all():
        arrays["target_mask"] = block.targets[rows]
    arrays |= {name: values[rows] for name, values in block.extras.items()}
    if "position_ids" in arrays:
        # A row that begins inside a document counts its positions from 0.
        columns = np.arange(shape.length, dtype=np.int32)
        arrays["position_ids"] = np.minimum(arrays["position_ids"], columns)
        arrays["document_ids"] = arrays["document_ids"] - arrays["document_ids"][:, :1]
        arrays["cu_seqlens"] = cu_seqlens(arrays["position_ids"])
    if shape.ids:
        located = block.located[:, rows].copy()
        located[:, located[3] == PADDING] = PADDING
        arrays |= dict(zip(("source", "epoch", "sample", "position"), located, strict=True))
    return arrays


def checked_device(device: str | torch.device) -> torch.device:
    """The device, which must exist if it is a GPU. This does not initialise CUDA.

    Raises:
        PlanError: torch does not find this GPU.
    """
    found = torch.device(device)
    if found.type == "cuda" and (found.index or 0) >= (num_gpus := torch.cuda.device_count()):
        # Numbers count from 0: with two GPUs, the last one is cuda:1.
        advice = f"cuda:0 to cuda:{num_gpus - 1}" if num_gpus > 1 else "cuda" if num_gpus else "cpu"
        raise PlanError(
            f"device={str(device)!r} does not exist: torch finds {num_gpus} GPUs. Use {advice}."
        )
    return found


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
        self, arrays: Fields, to_batch: ToBatch, wide: tuple[str, ...]
    ) -> tuple[Batch, Callable[[], None]]:
        """Start to copy `arrays`; return the batch that `to_batch` makes, and a function to call.

        The function must be called on the stream that will use the batch, because the copy may not
        be finished. The tensors are new on every call, so the caller may keep them. The tensors
        named in `wide` become int64.
        """
        slot = self._slots[self._turn]
        self._turn = (self._turn + 1) % _NUM_SLOTS
        # The GPU reads pinned memory some time later. Writing to a slot whose last copy is still
        # queued would change a batch that was yielded already, without an error.
        slot.copied.synchronize()
        # All arrays in one buffer: one copy of a batch costs less than one copy per field.
        ranges: dict[str, tuple[int, int]] = {}
        size = 0
        for name, array in arrays.items():
            start = -(-size // _ALIGNMENT) * _ALIGNMENT
            size = start + array.nbytes
            ranges[name] = start, size
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            if slot.pinned.numel() < size:
                slot.pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
            host = slot.pinned.numpy()
            for name, (start, stop) in ranges.items():
                array = arrays[name]
                host[start:stop].view(array.dtype).reshape(array.shape)[...] = array
            on_device = slot.pinned[:size].to(self._device, non_blocking=True)
            slot.copied.record(self._stream)
            tensors = {}
            for name, (start, stop) in ranges.items():
                kind = torch.from_numpy(np.zeros(0, arrays[name].dtype)).dtype
                values = on_device[start:stop].view(kind).view(arrays[name].shape)
                tensors[name] = _widened(values) if name in wide else values
            # On this stream, so that it runs after the copy.
            batch = to_batch(tensors)
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record(self._stream)
        fields = batch.values() if isinstance(batch, dict) else batch
        on_gpu = (each for each in fields if isinstance(each, torch.Tensor))
        # Several tensors may be views of one buffer, and `_finish` needs only one of them.
        distinct = {each.untyped_storage().data_ptr(): each for each in on_gpu}
        return batch, partial(self._finish, list(distinct.values()), ready)

    def _finish(self, tensors: list[torch.Tensor], ready: torch.cuda.Event) -> None:
        """Make the current stream wait for `tensors`; keep their memory until it has used them."""
        current = torch.cuda.current_stream(self._device)
        current.wait_event(ready)
        for tensor in tensors:
            # The tensor was allocated on our stream and is used on another one. Without this, the
            # allocator could reuse its memory while kernels still read it.
            tensor.record_stream(current)


def _widened(ids: torch.Tensor) -> torch.Tensor:
    """Return ids as int64, through signed views: torch has few operations on unsigned types."""
    if ids.dtype == torch.uint16:
        return ids.view(torch.int16).to(torch.int64).bitwise_and_(0xFFFF)
    if ids.dtype == torch.uint32:
        return ids.view(torch.int32).to(torch.int64).bitwise_and_(0xFFFF_FFFF)
    return ids.to(torch.int64)
