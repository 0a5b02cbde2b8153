"""`Texts`, the class for inputs in memory, and the sizes in which inputs are read."""

import hashlib
from collections.abc import Iterable, Sequence

from penstock.errors import SourceError
from penstock.options import Format as Format
from penstock.options import ReadSettings as ReadSettings

# About 64 MB of text become one part. A part is small enough to be made again after a kill (0.2 s
# on two cores), and large enough for its fsyncs to take less than 1 % of the time.
SLICE_BYTES = 64_000_000

# How much of a text file "auto" searches for a separator.
RULE_BYTES = 64_000_000

# Text goes to the tokenizer in blocks that fit into the L2 and L3 caches. Measured on two cores:
# 400 MB/s with 4 MiB, 275 with 16 MiB, 329 with 1 MiB.
BLOCK_BYTES = 4 << 20


class Texts:
    """Strings as the documents of a build.

    Without this class, `build` would take the strings as file names:

    >>> Texts(["one document", "another"])
    Texts(2 documents, 19 bytes)
    """

    may_be_empty = False
    """Whether a build of no documents is accepted: the file of a Dataset may have no samples."""

    def __init__(self, texts: Iterable[str], *, keep_blank: bool = False) -> None:
        """Take each string of `texts` as one document.

        Args:
            texts: One string for each document. A generator is read to its end and kept in memory.
            keep_blank: Whether texts of white space are documents too. By default they are skipped.
        """
        # A string is a sequence too, and each of its characters would become a document.
        if isinstance(texts, str | bytes):
            raise SourceError(
                f"Texts takes a list of texts, and got a single {type(texts).__name__}: "
                f"{texts!r:.60}. Put it into a list: Texts([text])."
            )
        if not isinstance(texts, Sequence):  # a generator can be read only once
            texts = list(texts)
        for number, text in enumerate(texts):
            if not isinstance(text, str):
                raise SourceError(
                    f"Text {number:,} is of type {type(text).__name__}, not a string: {text!r:.60}."
                )
        self._texts: Sequence[str] = texts
        self.keep_blank = keep_blank

    def __repr__(self) -> str:
        return f"Texts({len(self):,} documents, {self.num_bytes:,} bytes)"

    def __len__(self) -> int:
        return len(self._texts)

    def encoded(self, start: int, stop: int) -> list[bytes]:
        """Texts `[start, stop)` as UTF-8; lone surrogates stay, and `validate` rejects them."""
        return [text.encode("utf-8", "surrogatepass") for text in self._texts[start:stop]]

    def sizes(self, start: int, stop: int) -> list[int]:
        """Bytes of each of the texts `[start, stop)`, as UTF-8."""
        # Encoded one at a time: all at once would take as much memory again as the texts.
        return [len(self.encoded(number, number + 1)[0]) for number in range(start, stop)]

    @property
    def num_bytes(self) -> int:
        """Bytes of all texts."""
        return sum(self.sizes(0, len(self)))

    @property
    def digest(self) -> str:
        """A digest of the texts and their lengths."""
        total = hashlib.sha256()
        for number in range(len(self)):
            (text,) = self.encoded(number, number + 1)
            # The length goes before each text. Otherwise ["ab", "c"] and ["a", "bc"] would have the
            # same digest.
            total.update(b"%d:" % len(text))
            total.update(text)
        return total.hexdigest()
