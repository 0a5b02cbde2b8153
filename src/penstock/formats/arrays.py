r"""Files of ids alone, arrays in memory, and whether numbers are ids.

    npy        numpy.save: one dimension, integers
    llmc       llm.c, modded-nanogpt: a header of 256 int32, and then the ids
                   int32 0     20240520 for uint16 ids, 20240801 for uint32 ids
                   int32 1     version: 1, or 7 for the uint32 ids of Llama 3
                   int32 2     number of ids
    nanogpt    ids without a header
    olmo       the same; dolma writes a table `.csv.gz` beside each array. Each row describes a
               document, and begins with the offsets of its first token and of the token after it

Nothing in a file without a header says what it is. So the caller names the format, and gives the
size of the vocabulary, which a wrong dtype contradicts in any block of the file. Two ids of uint16
that are read as one uint32 give a number beyond every vocabulary. An id of uint32 that is read as
two uint16 gives an id and then a number near zero, again and again:

    uint32     464        50256      11
    as uint16  464  0     50256  0   11  0
"""

import csv
import gzip
import os
import warnings
from codecs import getincrementaldecoder
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from penstock.errors import StoreError
from penstock.formats.mapped import (
    Array,
    FilePart,
    HeldArray,
    Ids,
    MappedArray,
    checked_bounds,
    first_bytes,
    is_listed,
    parsing,
    size_of,
    spread_blocks,
)
from penstock.formats.options import TokenOptions

RAW_DTYPES = ("uint8", "uint16", "uint32", "int32", "int64")
# The upper half of an id is at most this for vocabularies of up to a million ids.
_NEAR_ZERO = 16
# Fewer pairs may have small second ids by chance, or second ids that are all zero.
_LEAST_PAIRS = 32
_LEAST_ZEROS = 8
# Two ids of uint16 that are read as one number are above this more often than not.
_NO_ID = 1 << 31
_AT_ONCE = 1 << 24
_LLMC_HEADER = 1024
_LLMC = {20240520: ("<u2", (1,)), 20240801: ("<u4", (1, 7))}
_HEAD_BYTES = 4096
# Fewer bytes of ids may be valid UTF-8 by chance.
_LEAST_TEXT = 32
_PACKED = {
    b"\x1f\x8b\x08": "compressed with gzip",
    b"\x28\xb5\x2f\xfd": "compressed with zstd",
    b"PK\x03\x04": "a zip archive, as torch.save and numpy.savez write it",
}


def check_dtype(dtype: np.dtype[Any], path: object) -> None:
    """Raise StoreError if a dtype is not one of integers."""
    if dtype.kind not in "iu":
        raise StoreError(f"{path} holds {dtype} values; token ids are integers.")


def all_blocks(array: Ids) -> Iterator[Array]:
    """Yield consecutive blocks of an array, which may be larger than the memory."""
    for start in range(0, len(array), _AT_ONCE):
        yield array[start : start + _AT_ONCE]


def check_ids(
    block: Array, path: object, vocab_size: int | None, *, is_recorded: bool = True
) -> None:
    """Raise StoreError if an id is negative, or not below the vocabulary size.

    Unless the file records its dtype, a narrower one is advised if all ids would then be valid.
    """
    if not len(block):
        return
    lowest, highest = int(block.min()), int(block.max())
    limit = _NO_ID if vocab_size is None else vocab_size
    if 0 <= lowest <= highest < limit:
        return
    wrong = lowest if lowest < 0 else highest
    why = f"but the vocabulary has {limit:,} ids"
    if lowest < 0 or vocab_size is None:
        why = "and no id is negative" if lowest < 0 else "and no vocabulary is so large"
    advice = ""
    is_wide = not is_recorded and vocab_size is not None and block.dtype.itemsize >= 4
    if is_wide and lowest >= 0 and _fits_halves(block, limit):
        half = f"uint{block.dtype.itemsize * 4}"
        advice = (
            f' Read as {half}, all ids would be below it. If they are {half}, pass dtype="{half}".'
        )
    raise StoreError(
        f"{path} has the token id {wrong:,}, {why}. The file has another dtype than "
        f"{block.dtype}, another tokenizer, or is damaged.{advice}"
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
    if not is_filled or int(upper.max()) > most or int(lower.max()) <= _NEAR_ZERO:
        return
    # Of an int64 that is read as four uint16, the third is zero too.
    is_int64 = size == 4 or (size == 2 and not block[2::4].any())
    wider = "int64" if is_int64 else f"uint{size * 16}"
    whole = block[: len(block) // 4 * 4].view(np.dtype(wider).newbyteorder("<"))
    is_beyond = vocab_size is not None and int(whole.max()) >= vocab_size
    if is_beyond and is_chosen:
        return
    advice = (
        ""
        if is_chosen
        else (
            f" If the ids are {block.dtype}, a vocabulary decides: open_tokens(path, format="
            f'"nanogpt", dtype="{block.dtype}", vocab_size=…).'
        )
    )
    raise StoreError(
        f"{path} has a number of at most {_NEAR_ZERO} in every second place, as {wider} ids "
        f'have when they are read as {block.dtype}. Pass dtype="{wider}".{advice}'
    )


def check_raw(
    ids: Ids, path: Path, vocab_size: int | None = None, *, is_chosen: bool = False
) -> None:
    """Check the contents of a file that is said to hold ids without a header.

    Args:
        ids: The ids, in the dtype in which they are read.
        path: The file.
        vocab_size: The number of ids of the vocabulary, if it is known.
        is_chosen: Whether the caller named the dtype, and did not leave it out.

    Raises:
        StoreError: it is text, or compressed, or has other ids than the vocabulary.
    """
    head = first_bytes(path, _HEAD_BYTES)
    # Nearly all numbers that 65,536 ids make are valid, so the vocabulary refuses few such files.
    for magic, kind in _PACKED.items():
        if head.startswith(magic):
            raise StoreError(f"{path} is {kind}, and not a file of ids. Unpack it first.")
    if ids.dtype.itemsize > 1 and len(head) >= _LEAST_TEXT and _is_text(head):
        raise StoreError(
            f"{path} is text, and not a file of ids. Make a store of it with penstock build."
        )
    for block in spread_blocks(ids):
        check_not_halves(block, path, vocab_size, is_chosen=is_chosen)
    for block in spread_blocks(ids):
        check_ids(block, path, vocab_size, is_recorded=False)


def _is_text(head: bytes) -> bool:
    """Return whether bytes are UTF-8 without control characters, apart from white space."""
    try:
        # The last character may be cut off: it is then left out.
        text = getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return False
    return not any(character < " " and character not in "\t\n\f\r" for character in text)


def is_llmc(path: Path) -> bool:
    """Return whether a file begins with a magic number of llm.c."""
    return int.from_bytes(first_bytes(path, 4), "little") in _LLMC


def open_llmc(path: Path, given: TokenOptions) -> list[FilePart]:
    """Return the ids of a file of llm.c or modded-nanogpt."""
    head = first_bytes(path, _LLMC_HEADER)
    magic, version, count = np.frombuffer(head[:12], "<i4").tolist()
    dtype, versions = _LLMC.get(magic, ("<u2", ()))
    if version not in versions:
        raise StoreError(
            f"{path} begins with the numbers {magic} and {version}, and not with the header of "
            f"llm.c: {' or '.join(map(str, _LLMC))}, and version 1 or 7."
        )
    ids = MappedArray(path, np.dtype(dtype), _LLMC_HEADER)
    _compare_count(path, ids, count)
    return [FilePart(ids)]


def _compare_count(path: Path, ids: MappedArray, count: int) -> None:
    if count != len(ids):
        raise StoreError(
            f"{path} has {len(ids):,} ids, but its header says {count:,}. It is truncated or "
            "damaged, or was not closed by its writer."
        )


def is_npy(path: Path) -> bool:
    """Return whether a file begins with NumPy's magic string."""
    return first_bytes(path, 6) == np.lib.format.MAGIC_PREFIX


def open_npy(path: Path, given: TokenOptions) -> list[FilePart]:
    """Return the ids of a file that `numpy.save` wrote."""
    return [FilePart(map_npy(path))]


def map_npy(path: Path) -> MappedArray:
    """Return the array of a file that `numpy.save` wrote."""
    size_of(path)
    if not is_npy(path):
        raise StoreError(
            f"{path} cannot be read as an array of NumPy, because it does not have its header. "
            'dolma and OLMo write arrays without one: open_tokens(path, format="olmo", '
            "vocab_size=…)."
        )
    with parsing(path, "an array of NumPy"), warnings.catch_warnings():
        # NumPy warns of headers that Python 2 wrote, which a damaged header may look like.
        warnings.simplefilter("ignore")
        found = np.load(path, mmap_mode="r", allow_pickle=False)
        assert isinstance(found, np.memmap)
    check_dtype(found.dtype, path)
    if found.ndim != 1:
        raise StoreError(
            f"{path} holds an array of shape {found.shape}; a token file holds a one-dimensional "
            "one."
        )
    # `numpy.save` writes nothing after the array. Bytes there mean that the shape is damaged.
    ids = MappedArray(path, found.dtype, found.offset)
    _compare_count(path, ids, len(found))
    return ids


def open_raw(path: Path, given: TokenOptions, usual: str = "uint16") -> list[FilePart]:
    """Return the ids of a file without a header, of the dtype that was given or the usual one."""
    dtype, vocab_size = given.dtype or usual, given.vocab_size
    assert vocab_size is not None  # `open_tokens` refuses files without a header otherwise
    if dtype not in RAW_DTYPES:
        raise StoreError(f"dtype={dtype!r} is not one of {', '.join(RAW_DTYPES)}.")
    kind = np.dtype(dtype).newbyteorder("<")
    if vocab_size - 1 > np.iinfo(kind).max:
        raise StoreError(
            f"A vocabulary of {vocab_size:,} ids does not fit {dtype}, so {path} was not written "
            'as that. Pass dtype="uint32", or the vocabulary size of the tokenizer.'
        )
    ids = MappedArray(path, kind)
    check_raw(ids.array(), path, vocab_size, is_chosen=given.dtype is not None)
    return [FilePart(ids)]


def open_olmo(path: Path, given: TokenOptions) -> list[FilePart]:
    """Return the ids of an array of dolma, with its documents if the table is beside it."""
    # dolma's writers use the narrowest of these two that holds the vocabulary.
    is_narrow = given.vocab_size is None or given.vocab_size <= 1 << 16
    (part,) = open_raw(path, given, "uint16" if is_narrow else "uint32")
    table = path.with_suffix(".csv.gz")
    if not is_listed(table):
        return [part]
    size_of(table)  # raises for a link whose file is missing
    with (
        parsing(table, "a table of documents"),
        gzip.open(table, "rt", encoding="utf-8", newline="") as stream,
    ):
        rows = (row[:2] for row in csv.reader(stream))
        numbers = (int(each) for row in rows if row != ["start", "end"] for each in row)
        starts, ends = np.fromiter(numbers, np.int64).reshape(-1, 2).T
    if (starts[1:] != ends[:-1]).any() or (len(starts) and starts[0] != 0):
        raise StoreError(
            f"{table}: documents must follow each other in the order of the array. The table is "
            "damaged, or belongs to another array."
        )
    return [part._replace(bounds=checked_bounds(ends, len(part.ids.array()), table))]


def in_memory(given: object) -> FilePart:
    """Return the ids of an array.

    Raises:
        StoreError: it is no array of integers of one dimension.
    """
    kind = type(given).__name__
    if hasattr(given, "save_to_disk"):
        raise StoreError(
            f"{kind} is a dataset in memory. Write it with save_to_disk(path), and open this path."
        )
    # Stores have items too, so NumPy would read all documents before it refuses them.
    if hasattr(given, "part_tokens") or hasattr(given, "snapshot"):
        raise StoreError(
            f"The {kind} is open already. Pass it to Windows, Packs or Documents as it is."
        )
    if isinstance(given, Sequence) and any(isinstance(each, str | os.PathLike) for each in given):
        raise StoreError(
            "A list of paths was given, and one path or pattern is opened at once. Pass a list of "
            "opened files to the rows: Windows([open_tokens(path), …], length)."
        )
    try:
        values = np.asarray(given)
    # What NumPy and torch raise for ragged lists, and for tensors with gradients, of dtypes that
    # NumPy does not have, with sparse layouts, or on other devices.
    except (TypeError, ValueError, RuntimeError) as error:
        raise StoreError(
            f"{kind} cannot be read as an array of ids: {str(error)[:200]} Pass an array of NumPy "
            "or a tensor on the CPU, of integers in one dimension; numpy.concatenate joins "
            "documents."
        ) from error
    if not values.ndim:
        raise StoreError(f"{kind} is neither a path nor an array of ids.")
    check_dtype(values.dtype, "The array")
    if values.ndim != 1:
        raise StoreError(f"The array has the shape {values.shape}; ids have one dimension.")
    return FilePart(HeldArray(values))
