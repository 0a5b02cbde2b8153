"""Ids without a header: nanoGPT's `.bin`, and the arrays that dolma and OLMo name `.npy`.

Nothing in such a file says what it is. So the caller names the format, and gives the size of the
vocabulary, which a wrong dtype contradicts.

dolma writes a table `.csv.gz` beside each array. Each row of it describes a document, and begins
with the offsets of its first token and of the token after its last one.
"""

import csv
import gzip
import zlib
from codecs import getincrementaldecoder
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np

from penstock.errors import StoreError
from penstock.formats.mapped import MappedArray, first_bytes, is_listed, size_of
from penstock.formats.member import Ids
from penstock.formats.sample import check_not_halves, check_sampled, spread_blocks
from penstock.formats.token_files import FilePart, checked_bounds

RAW_DTYPES = ("uint8", "uint16", "uint32", "int32", "int64")
_HEAD_BYTES = 4096
# Fewer bytes of ids may be valid UTF-8 by chance.
_LEAST_TEXT = 32
_OTHERS = {
    b"\x1f\x8b\x08": "compressed with gzip",
    b"\x28\xb5\x2f\xfd": "compressed with zstd",
    b"BZh": "compressed with bzip2",
    b"\xfd7zXZ\x00": "compressed with xz",
    b"PK\x03\x04": "a zip archive, as torch.save and numpy.savez write it",
}
# A row has two numbers, a path, an id and a position.
_LONGEST_ROW = 1 << 20


def open_raw(path: Path, dtype: str | None, usual: str, vocab_size: int) -> FilePart:
    """Return the ids of a file without a header, of the dtype that was given or the usual one."""
    chosen, dtype = dtype, dtype or usual
    if dtype not in RAW_DTYPES:
        raise StoreError(f"dtype={dtype!r} is not one of {', '.join(RAW_DTYPES)}.")
    kind = np.dtype(dtype).newbyteorder("<")
    if vocab_size - 1 > np.iinfo(kind).max:
        raise StoreError(
            f"A vocabulary of {vocab_size:,} ids does not fit {dtype}, so {path} was not written "
            'as that. Pass dtype="uint32", or the vocabulary size of the tokenizer.'
        )
    ids = MappedArray(path, kind)
    check_raw(ids.array(), path, vocab_size, is_chosen=chosen is not None)
    check_sampled(ids.array(), path, vocab_size, is_recorded=False)
    return FilePart(ids)


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
        StoreError: it is text, or compressed, or has ids of a wider dtype.
    """
    head = first_bytes(path, _HEAD_BYTES)
    # Nearly all numbers that 65,536 ids make are valid, so the vocabulary refuses few such files.
    for magic, kind in _OTHERS.items():
        if head.startswith(magic):
            raise StoreError(f"{path} is {kind}, and not a file of ids. Unpack it first.")
    if ids.dtype.itemsize > 1 and len(head) >= _LEAST_TEXT and _is_text(head):
        raise StoreError(
            f"{path} is text, and not a file of ids. Make a store of it with penstock build."
        )
    for block in spread_blocks(ids):
        check_not_halves(block, path, vocab_size, is_chosen=is_chosen)


def _is_text(head: bytes) -> bool:
    """Return whether bytes are UTF-8 without control characters, apart from white space."""
    try:
        # The last character may be cut off: it is then left out.
        text = getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return False
    return not any(character < " " and character not in "\t\n\f\r" for character in text)


def open_olmo(path: Path, dtype: str | None, vocab_size: int) -> FilePart:
    """Return the ids of an array of dolma, with its documents if the table is beside it."""
    # dolma's writers use the narrowest of these two that holds the vocabulary.
    part = open_raw(path, dtype, "uint16" if vocab_size <= 1 << 16 else "uint32", vocab_size)
    table = path.with_suffix(".csv.gz")
    if not is_listed(table):
        return part
    size_of(table)  # raises for a link whose file is missing
    num_tokens = len(part.ids.array())
    return part._replace(bounds=checked_bounds(_ends(table, num_tokens), num_tokens, table))


def _ends(table: Path, num_tokens: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """Return where the documents of a table end, which must follow each other without gaps."""
    ends: list[int] = []
    end = 0
    # Documents have an end token, so there are not more documents than tokens. Twice as many are
    # allowed for, and a small file that decompresses to billions of rows is refused early.
    most = 2 * num_tokens + 1024
    try:
        with gzip.open(table, "rt", encoding="utf-8", newline="") as stream:
            for number, row in enumerate(csv.reader(_short_lines(stream, table))):
                if number == 0 and row[:2] == ["start", "end"]:
                    continue
                start, stop = int(row[0]), int(row[1])
                if start != end or not end <= stop <= num_tokens or len(ends) >= most:
                    raise StoreError(
                        f"{table}: row {number:,} is for the tokens {start:,} to {stop:,}, after "
                        f"token {end:,} of {num_tokens:,}. Documents must follow each other in the "
                        "order of the array. The table is damaged, or belongs to another array."
                    )
                ends.append(stop)
                end = stop
    except (EOFError, gzip.BadGzipFile, zlib.error, ValueError, IndexError, csv.Error) as error:
        if isinstance(error, StoreError):
            raise
        raise StoreError(f"{table} is not a table of documents: {error}.") from error
    return np.array(ends, np.uint64)


def _short_lines(stream: IO[str], table: Path) -> Iterator[str]:
    """Yield the lines of a table; one line of a small file may decompress to gigabytes."""
    while line := stream.readline(_LONGEST_ROW):
        if len(line) == _LONGEST_ROW:
            raise StoreError(f"{table} has a row of {_LONGEST_ROW:,} characters or more.")
        yield line
