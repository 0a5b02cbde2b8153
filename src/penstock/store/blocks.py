"""Checksums of blocks of 64 KiB, by which a reader notices damage in the bytes that it reads.

    part-00007.tokens.npy   │ block 0 │ block 1 │ … │ last block, shorter │
    part-00007.checks.npy     CRC-32    CRC-32        CRC-32              then those of the bounds …

A block is 64 KiB of a file, counted from its first byte. The manifest has the SHA-256 of each file
of checksums, so a file that belongs to another part or store does not pass for this one.

`isal` computes a CRC-32 if it is installed, and otherwise `zlib`, with the same result. Both
release the GIL for each call. If another thread runs Python code, every call may then wait 5 ms
for the GIL. So a reader copies many blocks into one buffer and computes one checksum of all. That
must equal the checksum which follows from those of the blocks: see `joined_sum`.
"""

import mmap
import os
from collections.abc import Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from penstock.errors import StoreError

if TYPE_CHECKING:
    from zlib import crc32 as crc32
else:
    try:
        from isal.isal_zlib import crc32
    except ImportError:
        from zlib import crc32

BLOCK_BYTES = 1 << 16
"""The bytes that one checksum covers."""
_ONES = 0xFFFF_FFFF


def num_blocks(num_bytes: int) -> int:
    """The number of blocks of a file; the last one may be shorter.

    >>> num_blocks(65_536), num_blocks(65_537)
    (1, 2)
    """
    return -(-num_bytes // BLOCK_BYTES)


def block_sums(data: Any) -> list[int]:
    """The CRC-32 of each block of `data`, which are bytes or contiguous arrays of bytes."""
    return [crc32(data[at : at + BLOCK_BYTES]) for at in range(0, len(data), BLOCK_BYTES)]


def copy_blocks(wanted: Sequence[tuple[NDArray[np.uint8], int]]) -> NDArray[np.uint8]:
    """Copy whole blocks of mapped files, in one call of NumPy, to the rows of a new array.

    Args:
        wanted: The bytes of a file, and the number of the block, for each row.
    """
    addresses = [
        int(data.__array_interface__["data"][0]) + block * BLOCK_BYTES for data, block in wanted
    ]
    lowest = min(addresses)
    data, block = wanted[addresses.index(lowest)]
    # One view spans all files, as in `penstock.rows.gather`. It has a row for every page, because
    # maps begin at pages: a row for every byte would be more than NumPy can count.
    pages = [(address - lowest) // mmap.PAGESIZE for address in addresses]
    shape, strides = (max(pages) + 1, BLOCK_BYTES), (mmap.PAGESIZE, 1)
    view = as_strided(data[block * BLOCK_BYTES :], shape, strides, writeable=False)
    copied: NDArray[np.uint8] = view[pages]
    return copied


def joined_sum(sums: Iterable[int]) -> int:
    """The CRC-32 of whole blocks that follow each other, from the checksums of the blocks.

    >>> one, two = b"a" * BLOCK_BYTES, b"b" * BLOCK_BYTES
    >>> joined_sum([crc32(one), crc32(two)]) == crc32(one + two)
    True
    """
    first, second, third, fourth = _after_a_block()
    total = 0
    for each in sums:
        shifted = first[total & 255] ^ second[total >> 8 & 255] ^ third[total >> 16 & 255]
        total = shifted ^ fourth[total >> 24] ^ each
    return total


@cache
def _after_a_block() -> list[list[int]]:
    """For each byte of a checksum, what its values become when 64 KiB follow.

    crc(A + B) is M(crc(A)) ^ crc(B), where M is linear over single bits: M(x ^ y) = M(x) ^ M(y).
    So M of a checksum is the XOR of M of its four bytes. Zeros show what M is: a checksum begins
    and ends with all bits inverted, so crc(zeros, starting with x) is M(x ^ ones) ^ ones.
    """
    zeros = bytes(BLOCK_BYTES)
    bits = [crc32(zeros, 1 << bit ^ _ONES) ^ _ONES for bit in range(32)]
    tables = []
    for first in range(0, 32, 8):
        table = [0]
        for bit in bits[first : first + 8]:
            # The values with this bit: those without it, each with what the bit adds.
            table += [value ^ bit for value in table]
        tables.append(table)
    return tables


def bounds_problem(bounds: NDArray[np.uint64], num_tokens: int) -> str | None:
    """What is wrong with the ends of the documents of a part; None if nothing is.

    Equal bounds are the ends of documents without tokens. `build` writes none, but rows can be
    made of a store that has some.
    """
    last = int(bounds[-1]) if len(bounds) else 0
    if last == num_tokens and (bounds[1:] >= bounds[:-1]).all():
        return None
    return f"its bounds do not ascend to {num_tokens:,}, the number of its tokens"


def checks_wanted() -> bool:
    """Whether `PENSTOCK_CHECKSUMS` asks for checks of blocks, which it does if it is not set."""
    value = os.environ.get("PENSTOCK_CHECKSUMS", "1")
    if value not in ("0", "1"):
        raise StoreError(
            f"The environment variable PENSTOCK_CHECKSUMS is {value!r}. Set it to 0 to read stores "
            "without comparing checksums, or to 1, which is the default."
        )
    return value == "1"
