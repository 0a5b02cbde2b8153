"""Files of ids with an index of documents: Megatron-LM's.

    train.bin    train.idx

The layout is described where it is read, in `penstock.formats.megatron`. The index is written last.
"""

import struct
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import numpy as np

from penstock.convert.source import TokenSource
from penstock.errors import StoreError
from penstock.formats.member import Array, Integers
from penstock.store.files import write_file

_LONGEST = 2**31 - 1
# Megatron's codes of dtypes. It has no uint32.
_CODES = {"uint16": 8, "int32": 4}


def write_megatron(directory: Path, side: str, source: TokenSource) -> None:
    """Write a pair of files, in which each document is one sequence."""
    dtype = "uint16" if source.is_narrow else "int32"
    for lengths in _lengths(source):  # before anything is written
        if len(lengths) and int(lengths.max()) > _LONGEST:
            raise StoreError(
                f"{source.member.path} has a document of {int(lengths.max()):,} tokens, and "
                f"Megatron's index holds lengths of up to {_LONGEST:,}. Choose another format."
            )
    write_file(directory / f"{side}.bin", source.all_ids(dtype))
    count = source.num_documents()
    head = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, _CODES[dtype], count, count + 1)
    size = np.dtype(dtype).itemsize
    index = chain(
        [head],
        (lengths.astype("<i4") for lengths in _lengths(source)),
        (starts.astype("<i8") * size for starts in _starts(source)),
        _numbers(count + 1),
    )
    write_file(directory / f"{side}.idx", index)


def _lengths(source: TokenSource) -> Iterator[Integers]:
    last = 0
    for ends in source.ends():
        yield np.diff(ends, prepend=last)
        last = int(ends[-1]) if len(ends) else last


def _starts(source: TokenSource) -> Iterator[Integers]:
    last = 0
    for ends in source.ends():
        yield np.append(last, ends)[:-1]
        last = int(ends[-1]) if len(ends) else last


def _numbers(count: int, at_once: int = 1 << 20) -> Iterator[Array]:
    """Yield the numbers from 0 on, in blocks: document k begins with sequence k."""
    for start in range(0, count, at_once):
        yield np.arange(start, min(start + at_once, count), dtype="<i8")
