r"""The headers of the `.npy` files of a store, and the layout of their arrays.

Different versions of NumPy pad headers differently. The headers of a store are always 128 bytes
of format 1.0, so a store has the same bytes whichever version wrote it. A reader needs no
parser: a file either begins with exactly the expected 128 bytes, or it is not the file that the
manifest lists.

    \x93NUMPY \x01\x00 \x76\x00 {'descr': '<u2', 'fortran_order': False, 'shape': (5,), }   \n
"""

from typing import Any

import numpy as np

__all__ = ["HEADER_BYTES", "array_layout", "header"]

HEADER_BYTES = 128
_MAGIC = b"\x93NUMPY\x01\x00"


def array_layout(
    kind: str, dtype: "np.dtype[Any]", *, num_documents: int, num_tokens: int
) -> tuple["np.dtype[Any]", tuple[int, ...]]:
    """The type and shape of one array of a part; `dtype` is that of the tokens."""
    return {
        "tokens": (dtype, (num_tokens,)),
        "bounds": (np.dtype("<u8"), (num_documents,)),
        "origin": (np.dtype("<u8"), (num_documents, 2)),
        "loss": (np.dtype("u1"), (num_tokens,)),
    }[kind]


def header(dtype: "np.dtype[np.generic]", shape: tuple[int, ...]) -> bytes:
    r"""The first 128 bytes of a C-ordered array file.

    >>> import io
    >>> file = io.BytesIO(header(np.dtype("<u2"), (2,)) + b"\x01\x00\x02\x00")
    >>> np.load(file).tolist()
    [1, 2]
    """
    text = f"{{'descr': '{dtype.str}', 'fortran_order': False, 'shape': {shape!r}, }}".encode()
    room = HEADER_BYTES - len(_MAGIC) - 2
    return _MAGIC + room.to_bytes(2, "little") + text.ljust(room - 1) + b"\n"
