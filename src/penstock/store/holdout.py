"""Which documents are held out.

tail:0.1   the documents that begin in the last tenth of the input. An input that is one
           document, one text file, is divided at 0.9 of its characters, and its two parts are
           two documents
hash:0.1   each document by a digest of its text: about a tenth of them, and the same
           ones when data is added later; equal documents fall on the same side
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from itertools import accumulate

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
    """A rule that says of each document whether it is held out."""

    kind: str
    share: float
    border: tuple[int, int] = (0, 0)
    """For "tail": file number and offset from which on documents are held out."""
    cut_at: int | None = None
    """Where the one document of the input is divided, if it is one."""

    def held_out(self, batch: Batch) -> NDArray[np.bool_]:
        """Which documents of `batch` belong to the validation side."""
        if self.kind == "tail":
            file, offset = np.uint64(self.border[0]), np.uint64(self.border[1])
            later = (batch.files > file) | ((batch.files == file) & (batch.offsets >= offset))
            return np.asarray(later, bool)
        if batch.edges is not None:
            raise StoreError(
                'split="hash" goes by the text of whole documents, and one of them is so long that '
                'it is stored in pieces. Use split="tail", or say what separates documents: '
                'documents="lines", "paragraphs" or "sep:SEPARATOR".'
            )
        limit = int(self.share * 2**64)
        return np.array([_hash(text.as_py()) < limit for text in batch.texts], bool)


def parse_split(
    text: str | None, files: Sequence[InputFile], reading: ReadSettings
) -> Split | None:
    """The rule that `text` ("tail:0.1", "hash:0.1") means for these inputs."""
    if text is None:
        return None
    kind, _, spelled = text.partition(":")
    try:
        share = Decimal(spelled)
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
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def _tail(files: Sequence[InputFile], reading: ReadSettings, share: float) -> tuple[int, int]:
    """Where the last `share` of the input begins: in bytes of text, or in rows of tables."""
    kinds = {file.format in ("parquet", "arrow", "texts") for file in files}
    if len(kinds) > 1:
        raise StoreError(
            'split="tail" measures text in bytes and tables in rows, and the inputs have both. '
            'Build them apart, or use split="hash".'
        )
    lengths = [_length(file, reading) for file in files]
    border = sum(lengths) - round(sum(lengths) * share)
    for number, length in enumerate(lengths):
        if border < length:
            # A file that is one document began before the border, with all of its pieces.
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
    """The byte at which the last `share` of the characters of a file begins.

    The same place as `text[int(len(text) * (1 - share)):]`, without floating point.
    """
    stream = Expanded(file, reading.max_expansion)
    try:
        mark = len(BOM) if stream.peek(len(BOM)) == BOM else 0
        counts = [_num_characters(block) for block in iter(lambda: stream.read(BLOCK_BYTES), b"")]
    finally:
        stream.close()
    mark_characters = int(mark > 0)
    num_characters = sum(counts) - mark_characters
    wanted = int(num_characters * (1 - share)) + mark_characters
    before = [0, *accumulate(counts)]
    number = next(n for n in range(len(counts) + 1) if n == len(counts) or before[n + 1] > wanted)
    stream = Expanded(file, reading.max_expansion)
    try:
        for _ in range(number):
            stream.read(BLOCK_BYTES)
        begins = _character_starts(stream.read(BLOCK_BYTES))
    finally:
        stream.close()
    within = wanted - before[number]
    return number * BLOCK_BYTES + (int(begins[within]) if within < len(begins) else 0)


def _character_starts(data: bytes) -> NDArray[np.int64]:
    """Where characters begin: at every byte but those of the form 10xxxxxx."""
    return np.flatnonzero((np.frombuffer(data, np.uint8) & 0xC0) != 0x80)


def _num_characters(data: bytes) -> int:
    return len(_character_starts(data))


def _length(file: InputFile, reading: ReadSettings) -> int:
    """Bytes of text (compressed files are read through once for it), or rows."""
    if file.texts is not None:
        return len(file.texts)
    if file.format in ("parquet", "arrow"):
        return num_rows(file)
    if file.compression is None:
        return file.size
    stream = Expanded(file, reading.max_expansion)
    try:
        while stream.read(1 << 22):
            pass
        return stream.position
    finally:
        stream.close()
