"""Checksums of blocks of 64 KiB, by which a reader notices damage in the bytes that it reads.

    part-00007.tokens.npy   │ block 0 │ block 1 │ … │ last block, shorter │
    part-00007.checks.npy     CRC-32    CRC-32        CRC-32              then those of the bounds …

A block is 64 KiB of a file, counted from its first byte. The table of parts has the digest of each
file of checksums, so a file that belongs to another part or store does not pass for this one.

`isal` computes a CRC-32, and `zlib` where `isal` is not available, with the same result. Both
release the GIL for each call. If another thread runs Python code, every call may then wait 5 ms
for the GIL. So a reader computes one checksum of many blocks that follow each other. That must
equal the checksum which follows from those of the blocks: see `joined_sum`.
"""

import os
from collections.abc import Iterable, Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

from penstock.disk import BLOCK_BYTES, crc32
from penstock.errors import StoreError
from penstock.ranges import Integers

_ONES = 0xFFFF_FFFF


def num_blocks(num_bytes: int) -> int:
    """The number of blocks of a file; the last one may be shorter.

    >>> num_blocks(65_536), num_blocks(65_537)
    (1, 2)
    """
    return -(-num_bytes // BLOCK_BYTES)


def are_marked(bits: NDArray[np.uint8], blocks: Integers) -> NDArray[np.bool_]:
    """Which of some blocks have their bit set: block b is bit b % 8 of byte b // 8."""
    return np.asarray(bits[blocks >> 3] >> (blocks & 7).astype(np.uint8) & 1, bool)


def mark(bits: NDArray[np.uint8], blocks: Integers) -> None:
    """Set the bits of some blocks.

    If two threads set bits of one byte at once, one may be lost. Then a block is checked again.
    """
    np.bitwise_or.at(bits, blocks >> 3, np.left_shift(1, blocks & 7).astype(np.uint8))


def damaged_block(data: NDArray[np.uint8], sums: Sequence[int]) -> int | None:
    """The first block of `data` that does not have its checksum; None if all have."""
    # One checksum of all whole blocks; the last block of a file may be shorter.
    whole = len(data) // BLOCK_BYTES
    ends = ((0, whole), (whole, len(sums)))
    if all(_checksum(data, *each) == joined_sum(sums[slice(*each)]) for each in ends):
        return None
    wrong = (at for at, each in enumerate(sums) if _checksum(data, at, at + 1) != each)
    return next(wrong, None)


def _checksum(data: NDArray[np.uint8], first: int, stop: int) -> int:
    return crc32(data[first * BLOCK_BYTES : stop * BLOCK_BYTES].data)


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
