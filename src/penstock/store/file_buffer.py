"""The bytes of a file while they are collected in memory, ready to be written with O_DIRECT.

    │ header │ tokens of batch 1 │ tokens of batch 2 … │ … │
    │ chunk of 4 MiB, aligned as O_DIRECT requires │ chunk │

A batch is copied here when it was just made, so it is still in the processor's cache. The chunks
are hashed and written in place. To copy all batches when the file is written, when none of them
is in the cache, took four times as long.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

ALIGNMENT = 4096
"""What O_DIRECT requires of an address in memory, on every disk."""
WRITE_BYTES = 1 << 20
"""The bytes that are written at a time; a multiple of the blocks that have checksums."""
_CHUNK_BYTES = 4 * WRITE_BYTES


def aligned(num_bytes: int) -> NDArray[np.uint8]:
    """A new array at an address that O_DIRECT accepts.

    It is not a map: malloc keeps freed memory for the next array, see `keep_freed_memory`.
    """
    room = np.empty(num_bytes + ALIGNMENT, np.uint8)
    start = -room.ctypes.data % ALIGNMENT
    return room[start : start + num_bytes]


def is_aligned(data: memoryview) -> bool:
    """Whether data is at an address that O_DIRECT accepts."""
    return bool(np.frombuffer(data, np.uint8).ctypes.data % ALIGNMENT == 0)


class FileBuffer:
    r"""Collects the bytes that follow a header, which is known last.

    >>> buffer = FileBuffer(2)
    >>> buffer.append(np.array([513], "<u2"))
    >>> [bytes(each) for each in buffer.chunks(b"ab")]
    [b'ab\x01\x02']
    """

    def __init__(self, header_bytes: int) -> None:
        self._chunks = [aligned(_CHUNK_BYTES)]
        self._filled = header_bytes  # of the last chunk

    def append(self, array: NDArray[Any]) -> None:
        """Copy the bytes of a contiguous array."""
        data = array.reshape(-1).view(np.uint8)
        while len(data):
            if self._filled == _CHUNK_BYTES:
                self._chunks.append(aligned(_CHUNK_BYTES))
                self._filled = 0
            taken = min(len(data), _CHUNK_BYTES - self._filled)
            self._chunks[-1][self._filled : self._filled + taken] = data[:taken]
            self._filled += taken
            data = data[taken:]

    def chunks(self, header: bytes) -> Sequence[NDArray[np.uint8]]:
        """All bytes, beginning with the header; not copies."""
        self._chunks[0][: len(header)] = np.frombuffer(header, np.uint8)
        return [*self._chunks[:-1], self._chunks[-1][: self._filled]]


def blocks(pieces: Iterable[Any]) -> Iterator[memoryview]:
    """All bytes of `pieces` in blocks of one size, except the last; all are aligned for O_DIRECT.

    A piece that is not aligned, or shorter than a block, is copied to one buffer. A block is still
    in the processor's cache when it is hashed and written.
    """
    room = aligned(WRITE_BYTES)  # made for this file: two writes at a time do not share it
    buffer, filled = room.data, 0
    for piece in pieces:
        view = memoryview(piece).cast("B") if len(piece) else memoryview(b"")
        if not filled and len(view) >= WRITE_BYTES and is_aligned(view):
            whole = len(view) // WRITE_BYTES * WRITE_BYTES
            yield from (view[at : at + WRITE_BYTES] for at in range(0, whole, WRITE_BYTES))
            view = view[whole:]
        while view:
            taken = min(len(view), WRITE_BYTES - filled)
            # NumPy releases the GIL for this copy.
            room[filled : filled + taken] = np.frombuffer(view, np.uint8, taken)
            filled += taken
            view = view[taken:]
            if filled == WRITE_BYTES:
                yield buffer
                filled = 0
    if filled:
        yield buffer[:filled]
