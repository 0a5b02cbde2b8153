"""Checks of token ids, on blocks that are spread over a file.

    file      [block]......[block]......[block]......[block]

A wrong dtype shows in any block. Two ids of uint16 that are read as one uint32 give a number
beyond every vocabulary. An id of uint32 that is read as two uint16 gives an id and then a number
near zero, again and again:

    uint32     464        50256      11
    as uint16  464  0     50256  0   11  0
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from penstock.errors import StoreError
from penstock.formats.member import Array, Ids

_BLOCK_BYTES = 1 << 16
_NUM_SPREAD = 16
# The upper half of an id is at most this for vocabularies of up to a million ids.
_NEAR_ZERO = 16
# Fewer pairs may have small second ids by chance, or second ids that are all zero.
_LEAST_PAIRS = 32
_LEAST_ZEROS = 8
# Two ids of uint16 that are read as one number are above this more often than not.
_NO_ID = 1 << 31
_AT_ONCE = 1 << 24


def spread_blocks(array: Ids) -> Iterator[Array]:
    """Yield 17 blocks of 64 KiB of an array, evenly spread; all of an array that has no more."""
    per_block = _BLOCK_BYTES // array.dtype.itemsize
    if len(array) <= per_block * (_NUM_SPREAD + 1):
        yield array[:]
        return
    for k in range(_NUM_SPREAD):
        # A multiple of 8 ids, so that halves of wider ids stay at odd offsets.
        start = len(array) * k // _NUM_SPREAD // 8 * 8
        yield array[start : start + per_block]
    yield array[(len(array) - per_block) // 8 * 8 :]


def all_blocks(array: Ids) -> Iterator[Array]:
    """Yield consecutive blocks of an array, which may be larger than the memory."""
    for start in range(0, len(array), _AT_ONCE):
        yield array[start : start + _AT_ONCE]


def check_sampled(
    ids: Ids, path: object, vocab_size: int | None = None, *, is_recorded: bool = True
) -> None:
    """Check the ids of the blocks of `spread_blocks`, as `check_ids` does."""
    for block in spread_blocks(ids):
        check_ids(block, path, vocab_size, is_recorded=is_recorded)


def check_ids(
    block: Array, path: object, vocab_size: int | None, *, is_recorded: bool = True
) -> None:
    """Raise StoreError if an id is negative, or not below the vocabulary size.

    The error advises another dtype only if the file does not record its dtype (`is_recorded`):
    otherwise `open_tokens` refuses any other one.
    """
    if not len(block):
        return
    lowest, highest = int(block.min()), int(block.max())
    if lowest < 0:
        raise StoreError(
            f"{path} has the token id {lowest:,}, and no id is negative. It was written with "
            f"another dtype than {block.dtype}, or is damaged."
        )
    if vocab_size is None and highest >= _NO_ID:
        raise StoreError(
            f"{path} has the token id {highest:,}, and no vocabulary is so large. It was written "
            f"with another dtype than {block.dtype}, or is damaged."
        )
    if vocab_size is not None and highest >= vocab_size:
        advice = ""
        if not is_recorded and block.dtype.itemsize >= 4 and _fits_halves(block, vocab_size):
            half = f"uint{block.dtype.itemsize * 4}"
            advice = (
                f" Read as {half}, all ids would be below it. If they are {half}, pass "
                f'dtype="{half}".'
            )
        raise StoreError(
            f"{path} has the token id {highest:,}, but the vocabulary has {vocab_size:,} ids. The "
            f"file has another dtype than {block.dtype}, another tokenizer, or is damaged.{advice}"
        )


def _fits_halves(block: Array, vocab_size: int) -> bool:
    half = np.dtype(f"<u{block.dtype.itemsize // 2}")
    # All halves are in a larger vocabulary, so they show nothing, and the dtype would be refused.
    if vocab_size - 1 > np.iinfo(half).max:
        return False
    return bool(np.ascontiguousarray(block).view(half).max() < vocab_size)


def check_not_halves(
    block: Array, path: object, vocab_size: int | None = None, *, is_chosen: bool = False
) -> None:
    """Raise StoreError if the ids look like the two halves of wider ids.

    A text may have a small id in every second place. Then the wider ids are beyond the vocabulary,
    and the ids are accepted if the caller named their dtype (`is_chosen`).
    """
    num_pairs, size = len(block) // 2, block.dtype.itemsize
    if num_pairs < _LEAST_ZEROS or size > 4:
        return
    lower, upper = block[: 2 * num_pairs : 2], block[1 : 2 * num_pairs : 2]
    most = _NEAR_ZERO if num_pairs >= _LEAST_PAIRS else 0
    # A real text has frequent words at odd offsets too, and their ids are spread. In a file of
    # nearly nothing but zeros, the first halves are zero too.
    is_filled = 4 * np.count_nonzero(lower) >= num_pairs
    if is_filled and int(upper.max()) <= most and int(lower.max()) > _NEAR_ZERO:
        # Of an int64 that is read as four uint16, the third is zero too.
        is_int64 = size == 4 or (size == 2 and not block[2::4].any())
        wider = "int64" if is_int64 else f"uint{size * 16}"
        whole = block[: len(block) // 4 * 4].view(np.dtype(wider).newbyteorder("<"))
        advice = f'Pass dtype="{wider}".'
        if vocab_size is None:
            advice += (
                f" If the ids are {block.dtype}, a vocabulary decides: open_tokens(path, format="
                f'"nanogpt", dtype="{block.dtype}", vocab_size=…), or the table data.tokens of a '
                "recipe."
            )
        elif int(whole.max()) >= vocab_size:
            if is_chosen:
                return
            advice = (
                f"But an id would then be {int(whole.max()):,}, and the vocabulary has "
                f'{vocab_size:,} ids. If the ids are {block.dtype}, pass dtype="{block.dtype}". If '
                f'they are {wider}, pass dtype="{wider}" and a larger vocabulary.'
            )
        raise StoreError(
            f"{path} has a number of at most {_NEAR_ZERO} in every second place, as {wider} ids "
            f"have when they are read as {block.dtype}. {advice}"
        )


def check_dtype(dtype: np.dtype[Any], path: object) -> None:
    """Raise StoreError if a dtype is not one of integers."""
    if dtype.kind not in "iu":
        raise StoreError(
            f"{path} holds {dtype} values; token ids are integers. Nothing was read, because "
            "objects would have to be unpickled and other numbers are not ids."
        )
