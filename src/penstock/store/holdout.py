"""Which documents a split holds out for validation.

tail:0.1   The documents that begin in the last tenth of the input. If the input is one document
           in one text file, it is divided into two documents after 90 % of its characters.
hash:0.1   About a tenth of the documents, chosen by a digest of their text. The choice stays the
           same when data is added, and equal documents are on the same side.
"""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation

import numpy as np
from numpy.typing import NDArray

from penstock.errors import StoreError
from penstock.sources.decompress import Expanded
from penstock.sources.document import Batch
from penstock.sources.listing import InputFile
from penstock.sources.read import BOM
from penstock.sources.settings import BLOCK_BYTES, ReadSettings
from penstock.sources.tables import num_rows
from penstock.sources.whole import file_rule

__all__ = ["SIDES", "Split", "parse_split"]

SIDES = ("train", "val")


@dataclass(frozen=True, slots=True)
class Split:
    """A rule that decides for each document whether it is held out."""

    kind: str
    share: float
    border: tuple[int, int] = (0, 0)
    """For "tail": documents from this file number and offset on are held out."""
    cut_at: int | None = None
    """The byte where an input of one document is divided, or None."""

    def held_out(self, batch: Batch) -> NDArray[np.bool_]:
        """Which documents of `batch` belong to the validation side."""
        if self.kind == "tail":
            file, offset = np.uint64(self.border[0]), np.uint64(self.border[1])
            later = (batch.files > file) | ((batch.files == file) & (batch.offsets >= offset))
            return np.asarray(later, bool)
        if batch.edges is not None:
            raise StoreError(
                'split="hash" needs whole documents, and one of them is so long that it is stored '
                'in pieces. Use split="tail", or say what separates documents: '
                'documents="lines", "paragraphs" or "sep:SEPARATOR".'
            )
        # The digest is uniform in [0, 2^64), so this share of the documents is below the limit.
        limit = int(self.share * 2**64)
        return np.array([_hash(text.as_py()) < limit for text in batch.texts], bool)

    def sides(self, batch: Batch) -> list[tuple[str, Batch]]:
        """The documents of `batch` for each side."""
        held_out = self.held_out(batch)
        return [("train", batch.where(~held_out)), ("val", batch.where(held_out))]


def parse_split(
    text: str | None, files: Sequence[InputFile], reading: ReadSettings
) -> Split | None:
    """The rule that `text` ("tail:0.1" or "hash:0.1") means for these inputs."""
    if text is None:
        return None
    kind, _, number = text.partition(":")
    try:
        share = Decimal(number)
    except InvalidOperation:
        share = Decimal(-1)
    if kind not in ("tail", "hash") or not 0 < share < 1:
        raise StoreError(
            f'split={text!r} is not understood. Write "tail:0.1" to hold out the last tenth, or '
            '"hash:0.1" to hold out a tenth of the documents by a digest of their text.'
        )
    if kind == "hash":
        return Split(kind, float(share))
    if len(files) == 1 and _is_one_document(files[0], reading):
        border = _character_border(files[0], reading, share)
        return Split(kind, float(share), (0, border), border)
    return Split(kind, float(share), _tail(files, reading, float(share)))


def _hash(text: bytes) -> int:
    # Not `hash`, which differs between processes.
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def _tail(files: Sequence[InputFile], reading: ReadSettings, share: float) -> tuple[int, int]:
    """The file and offset where the last `share` begins, by bytes of text or rows of tables."""
    kinds = {file.format in ("parquet", "arrow", "texts") for file in files}
    if len(kinds) > 1:
        raise StoreError(
            'split="tail" measures text in bytes and tables in rows, and the inputs have both. '
            'Build them separately, or use split="hash".'
        )
    # The border is counted from the front, so that rounding is the same on every machine.
    lengths = [_length(file, reading) for file in files]
    border = sum(lengths) - round(sum(lengths) * share)
    for number, length in enumerate(lengths):
        if border < length:
            # A file that is one document begins before the border, so all its pieces are kept.
            began = border > 0 and _is_one_document(files[number], reading)
            return (number + 1, 0) if began else (number, border)
        border -= length
    return len(files), 0


def _is_one_document(file: InputFile, reading: ReadSettings) -> bool:
    if file.format != "text":
        return False
    rule = file_rule(file, reading) if reading.documents == "auto" else reading.documents
    return rule == "file"


def _character_border(file: InputFile, reading: ReadSettings, share: Decimal) -> int:
    """The byte where the last `share` of the characters of a file begins.

    The same place as `text[int(len(text) * (1 - share)):]`. `share` is a Decimal, because
    1 - 0.1 as a float is not exactly 0.9. The file is read twice: to count its characters, and to
    find the one at the border.
    """
    # In UTF-8 every character has one byte that is not a continuation byte, so no text is decoded.
    num_characters, mark = 0, 0
    for start, block in _blocks(file, reading):
        mark = int(block.startswith(BOM)) if start == 0 else mark
        num_characters += len(_character_starts(block))
    # A byte order mark is one character, and not part of the text.
    wanted = int((num_characters - mark) * (1 - share)) + mark
    size = 0
    for start, block in _blocks(file, reading):
        begins = _character_starts(block)
        if wanted < len(begins):
            return start + int(begins[wanted])
        wanted -= len(begins)
        size = start + len(block)
    return size


def _blocks(file: InputFile, reading: ReadSettings) -> Iterator[tuple[int, bytes]]:
    """The text of a file in blocks, each with its offset."""
    with closing(Expanded(file, reading.max_expansion)) as stream:
        while block := stream.read(BLOCK_BYTES):
            yield stream.position - len(block), block


def _character_starts(data: bytes) -> NDArray[np.int64]:
    """The offsets where characters begin: all bytes except those of the form 10xxxxxx."""
    return np.flatnonzero((np.frombuffer(data, np.uint8) & 0xC0) != 0x80)


def _length(file: InputFile, reading: ReadSettings) -> int:
    """The number of bytes of text, or of rows; a compressed file is read for it."""
    if file.texts is not None:
        return len(file.texts)
    if file.format in ("parquet", "arrow"):
        return num_rows(file)
    if file.compression is None:
        return file.size
    return sum(len(block) for _, block in _blocks(file, reading))
