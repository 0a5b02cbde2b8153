"""Conversions between Arrow arrays, bytes and NumPy arrays, by way of their buffers.

`pa.array`, `pa.scalar` and `np.asarray(arrow_array)` would do the same, but they check whether
their argument is a pandas object. If pandas is installed, they import it for that check, which
takes 0.2 s on the first thread that reads, and Ctrl-C may be lost in that time.
"""

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute
from numpy.typing import NDArray

ArrowArray = Any
"""An array of pyarrow, which ships no types."""

__all__ = ["ArrowArray", "binary_array", "bool_array", "byte_lengths", "null_rows"]


def binary_array(texts: Sequence[bytes | None]) -> ArrowArray:
    """A large_binary array of `texts`; None becomes a null.

    >>> binary_array([b"ab", None, b""]).to_pylist()
    [b'ab', None, b'']
    """
    valid, present = None, cast("Sequence[bytes]", texts)
    if None in texts:
        valid = _bits(np.array([text is not None for text in texts]))
        present = [text or b"" for text in texts]
    edges = np.zeros(len(texts) + 1, np.int64)
    np.cumsum(np.fromiter(map(len, present), np.int64, len(present)), out=edges[1:])
    buffers = [valid, pa.py_buffer(edges), pa.py_buffer(b"".join(present))]
    return pa.Array.from_buffers(pa.large_binary(), len(texts), buffers)


def bool_array(flags: NDArray[np.bool_]) -> ArrowArray:
    """An Arrow array of booleans, for Arrow's `filter`.

    >>> bool_array(np.array([True, False])).to_pylist()
    [True, False]
    """
    return pa.Array.from_buffers(pa.bool_(), len(flags), [None, _bits(flags)])


def byte_lengths(texts: ArrowArray) -> NDArray[np.int64]:
    """The length of each text in bytes; 0 for nulls.

    >>> byte_lengths(binary_array([b"ab", None, b"c"])).tolist()
    [2, 0, 1]
    """
    # Arrow gives int32 for binary and int64 for large_binary arrays, and the length of a null is
    # whatever its slot holds.
    lengths = pa.compute.binary_length(texts)
    dtype = np.dtype(f"i{lengths.type.byte_width}")
    values = np.frombuffer(
        lengths.buffers()[1], dtype, count=len(lengths), offset=lengths.offset * dtype.itemsize
    ).astype(np.int64)
    values[null_rows(texts)] = 0
    return values


def null_rows(array: ArrowArray) -> NDArray[np.intp]:
    """The indices of the nulls in an array.

    >>> null_rows(binary_array([b"ab", None, b"c"])).tolist()
    [1]
    """
    if not array.null_count:
        return np.zeros(0, np.intp)
    # A sliced array shares its buffers, so its first bit may be inside a byte.
    missing = array.is_null()
    bits = np.unpackbits(np.frombuffer(missing.buffers()[1], np.uint8), bitorder="little")
    return np.flatnonzero(bits[missing.offset :][: len(missing)])


def _bits(flags: NDArray[np.bool_]) -> ArrowArray:
    # Arrow stores eight booleans in a byte, the first one in the lowest bit.
    return pa.py_buffer(np.packbits(flags, bitorder="little"))
