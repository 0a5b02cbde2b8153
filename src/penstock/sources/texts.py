"""Documents that are already in memory."""

import hashlib
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.errors import SourceError
from penstock.sources.arrow import binary_array
from penstock.sources.document import Batch
from penstock.sources.settings import BLOCK_BYTES, ReadSettings
from penstock.sources.validate import validate

__all__ = ["Texts", "read_texts", "text_spans"]


class Texts:
    """A list of strings as the documents of a build.

    The class distinguishes texts from file names:

    >>> Texts(["one document", "another"])
    Texts(2 documents, 19 bytes)
    """

    def __init__(self, texts: Sequence[str], *, keep_blank: bool = False) -> None:
        """Documents from `texts`.

        Args:
            texts: One string a document.
            keep_blank: Build texts of white space as documents too, instead of skipping them.
        """
        for number, text in enumerate(texts):
            if not isinstance(text, str):
                raise SourceError(
                    f"Text {number:,} is of type {type(text).__name__}, not a string: {text!r:.60}."
                )
        self._texts = texts
        self.keep_blank = keep_blank

    def __repr__(self) -> str:
        return f"Texts({len(self):,} documents, {self.num_bytes:,} bytes)"

    def __len__(self) -> int:
        return len(self._texts)

    def encoded(self, start: int, stop: int) -> list[bytes]:
        """Texts `[start, stop)` as UTF-8; lone surrogates stay, and `validate` rejects them."""
        return [text.encode("utf-8", "surrogatepass") for text in self._texts[start:stop]]

    def sizes(self, start: int, stop: int) -> NDArray[np.int64]:
        """Bytes of the texts `[start, stop)`, as UTF-8."""
        # One by one, so that not all of them are in memory a second time.
        each = (len(self.encoded(number, number + 1)[0]) for number in range(start, stop))
        return np.fromiter(each, np.int64, stop - start)

    @property
    def num_bytes(self) -> int:
        """Bytes of all texts."""
        return int(self.sizes(0, len(self)).sum())

    @property
    def digest(self) -> str:
        """A digest of the texts and their lengths."""
        total = hashlib.sha256()
        for number in range(len(self)):
            (text,) = self.encoded(number, number + 1)
            total.update(b"%d:" % len(text))
            total.update(text)
        return total.hexdigest()


def text_spans(texts: Texts, slice_bytes: int) -> Iterator[tuple[int, int, int]]:
    """Ranges of texts of about `slice_bytes` each, and the size of each range in bytes."""
    start, held = 0, 0
    for number, size in enumerate(texts.sizes(0, len(texts)).tolist()):
        if held >= slice_bytes:
            yield start, number, held
            start, held = number, 0
        held += size
    yield start, len(texts), held


def read_texts(
    texts: Texts, number: int, start: int, stop: int, reading: ReadSettings
) -> Iterator[Batch]:
    """The documents `[start, stop)` of `texts`."""
    for first, last in _blocks(texts, start, stop):
        data = texts.encoded(first, last)
        yield validate(
            binary_array(data),
            file=number,
            places=np.arange(first, last, dtype=np.uint64),
            record_bytes=np.array([len(text) for text in data], np.int64),
            reading=reading,
            keep_blank=texts.keep_blank,
        )


def _blocks(texts: Texts, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Ranges of texts of about one block each."""
    first, held = start, 0
    for number, size in enumerate(texts.sizes(start, stop).tolist(), start):
        held += size
        if held >= BLOCK_BYTES:
            yield first, number + 1
            first, held = number + 1, 0
    if first < stop:
        yield first, stop
