"""Token files of llm.c and modded-nanogpt: a header of 256 int32, and then the ids.

    int32 0     20240520 for uint16 ids, 20240801 for uint32 ids
    int32 1     version: 1, or 7 for the uint32 ids of Llama 3
    int32 2     number of ids
    byte 1024   the ids

The header records no ends of documents.
"""

from pathlib import Path

import numpy as np

from penstock.errors import StoreError
from penstock.formats.mapped import MappedArray, first_bytes
from penstock.formats.token_files import FilePart

_HEADER_BYTES = 1024
_KINDS = {20240520: ("<u2", (1,)), 20240801: ("<u4", (1, 7))}


def is_llmc(path: Path) -> bool:
    """Return whether a file begins with a magic number of llm.c."""
    return _magic(first_bytes(path, 4)) in _KINDS


def _magic(head: bytes) -> int:
    return int.from_bytes(head[:4], "little")


def open_llmc(path: Path) -> FilePart:
    """Return the ids of a file."""
    head = first_bytes(path, _HEADER_BYTES)
    if _magic(head) not in _KINDS or len(head) < _HEADER_BYTES:
        raise StoreError(
            f"{path} does not begin with the header of llm.c: 256 int32, of which the first is "
            f"{' or '.join(map(str, _KINDS))}. It begins with {_magic(head)} and has {len(head):,} "
            f"of the {_HEADER_BYTES:,} bytes."
        )
    magic, version, count = np.frombuffer(head, "<i4")[:3].tolist()
    dtype, versions = _KINDS[magic]
    if version not in versions:
        raise StoreError(
            f"{path} has version {version} of the header {magic}; versions that can be read: "
            f"{', '.join(map(str, versions))}."
        )
    ids = MappedArray(path, np.dtype(dtype), _HEADER_BYTES)
    if count != len(ids.array()):
        raise StoreError(
            f"{path} has {len(ids.array()):,} ids, but its header says {count:,}. It is truncated, "
            "or was not closed by its writer."
        )
    return FilePart(ids)
