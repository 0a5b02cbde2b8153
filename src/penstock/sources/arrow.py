"""Arrow arrays made from bytes and NumPy's, and read back, by their buffers.

`pa.array`, `pa.scalar` and `np.asarray` of an Arrow array do the same and ask on the way whether
something is a pandas object. Where pandas is installed they import it to find out: 0.2 s on the
thread that reads first, in which Ctrl-C may be lost.
"""

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute
from numpy.typing import NDArray

__all__ = ["binary_array", "bool_array", "byte_lengths", "null_rows"]


def binary_array(texts: Sequence[bytes | None]) -> Any:
    """A large_binary array of `texts`, of which some may be missing.

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


def bool_array(flags: NDArray[np.bool_]) -> Any:
    """An array of truth values, as Arrow's `filter` wants them.

    >>> bool_array(np.array([True, False])).to_pylist()
    [True, False]
    """
    return pa.Array.from_buffers(pa.bool_(), len(flags), [None, _bits(flags)])


def byte_lengths(texts: Any) -> NDArray[np.int64]:
    """How many bytes each text of an array has, none where it is missing.

    >>> byte_lengths(binary_array([b"ab", None, b"c"])).tolist()
    [2, 0, 1]
    """
    lengths = pa.compute.binary_length(texts)
    dtype = np.dtype(f"i{lengths.type.byte_width}")
    values = np.frombuffer(
        lengths.buffers()[1], dtype, count=len(lengths), offset=lengths.offset * dtype.itemsize
    ).astype(np.int64)
    values[null_rows(texts)] = 0
    return values


def null_rows(array: Any) -> NDArray[np.intp]:
    """The rows of an array that have no value.

    >>> null_rows(binary_array([b"ab", None, b"c"])).tolist()
    [1]
    """
    if not array.null_count:
        return np.zeros(0, np.intp)
    missing = array.is_null()
    bits = np.unpackbits(np.frombuffer(missing.buffers()[1], np.uint8), bitorder="little")
    return np.flatnonzero(bits[missing.offset :][: len(missing)])


def _bits(flags: NDArray[np.bool_]) -> Any:
    return pa.py_buffer(np.packbits(flags, bitorder="little"))
