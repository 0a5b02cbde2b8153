"""Which documents are held out.

tail:0.1   the last tenth of the input, contiguous
hash:0.1   each document by a digest of its text: about a tenth of them, and the same
           ones when data is added later; equal documents fall on the same side
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.errors import StoreError
from penstock.sources.document import Batch
from penstock.sources.expand import Expanded
from penstock.sources.listing import InputFile
from penstock.sources.reading import Reading
from penstock.sources.tables import num_rows

__all__ = ["SIDES", "Split", "parse_split"]

SIDES = ("train", "val")


@dataclass(frozen=True, slots=True)
class Split:
    """A rule that says of each document whether it is held out."""

    kind: str
    share: float
    border: tuple[int, int] = (0, 0)
    """For "tail": file number and offset from which on documents are held out."""

    def held_out(self, batch: Batch) -> NDArray[np.bool_]:
        """Which documents of `batch` belong to the validation side."""
        if self.kind == "tail":
            file, offset = np.uint64(self.border[0]), np.uint64(self.border[1])
            later = (batch.files > file) | ((batch.files == file) & (batch.offsets >= offset))
            return np.asarray(later, bool)
        limit = int(self.share * 2**64)
        return np.array([_hash(text.as_py()) < limit for text in batch.texts], bool)


def parse_split(text: str | None, files: Sequence[InputFile], reading: Reading) -> Split | None:
    """The rule that `text` ("tail:0.1", "hash:0.1") means for these inputs."""
    if text is None:
        return None
    kind, _, spelled = text.partition(":")
    try:
        share = float(spelled)
    except ValueError:
        share = -1.0
    if kind not in ("tail", "hash") or not 0 < share < 1:
        raise StoreError(
            f'split={text!r} is not understood. Write "tail:0.1" to hold out the last tenth, or '
            '"hash:0.1" to hold out a tenth of the documents by a digest of their text.'
        )
    if kind == "hash":
        return Split(kind, share)
    return Split(kind, share, _tail(files, reading, share))


def _hash(text: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def _tail(files: Sequence[InputFile], reading: Reading, share: float) -> tuple[int, int]:
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
            return number, border
        border -= length
    return len(files), 0


def _length(file: InputFile, reading: Reading) -> int:
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
