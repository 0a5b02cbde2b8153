r"""Headers of `.npy` files, spelled by us.

NumPy pads its headers differently in different versions. Ours are always 128 bytes of
format 1.0, so that a store has the same bytes whoever wrote it, and can be checked
without parsing anything: a file either begins with exactly the expected 128 bytes or
it is not the file that the manifest speaks of.

    \x93NUMPY \x01\x00 \x76\x00 {'descr': '<u2', 'fortran_order': False, 'shape': (5,), }   \n
"""

import numpy as np

__all__ = ["HEADER_BYTES", "header"]

HEADER_BYTES = 128
_MAGIC = b"\x93NUMPY\x01\x00"


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
