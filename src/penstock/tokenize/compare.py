"""Compares the ids of the fast engine with those of the reference, before and during a build.

A fast tokenizer that differs from the reference in one id in a million is worse than a slow one,
because nothing looks wrong. So a build encodes its first documents with both engines, and later, in
every slice, its first document and one in 10,000 after it.

The reference is about 100 times as slow, so comparing one ten-thousandth of the text costs 1 % of
the time. Which texts are compared depends on the inputs alone: it is limited by counting bytes and
not by the clock. So a build that found a difference finds it again.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from penstock.errors import TokenMismatchError
from penstock.sources.batch import Batch, binary_array, text_offsets
from penstock.tokenize.engines import text_buffers
from penstock.tokenize.tokenizer import Tokenizer

ORACLE_DOCUMENTS = 1_000
ORACLE_BYTES = 1_000_000
# Of a short input, a thousandth of the text is compared first, but at least this much: the
# reference takes 0.7 s for 1 MB, in which two cores build 120 MB.
_LEAST_BYTES = 256_000
_ONE_IN = 10_000
# The most bytes of one sampled document; of a longer one, a window is compared.
_MAX_BYTES = 1 << 13


def compare(tokenizer: Tokenizer, texts: pa.LargeBinaryArray, input_bytes: int) -> int:
    """Compare both engines on the first 1,000 documents or 1 MB of `texts`, whichever is less.

    If the inputs have less than 1 GB (`input_bytes`), a thousandth of them is compared and not
    1 MB, but at least 256 kB.

    Returns the number of documents compared.

    Raises:
        TokenMismatchError: an id differs.
    """
    if tokenizer.reference is None or not len(texts):
        return 0
    offsets = text_offsets(texts)
    most = min(ORACLE_BYTES, max(_LEAST_BYTES, input_bytes // 1_000))
    fitting = int(np.searchsorted(offsets, most, side="right")) - 1
    # At least one document, however long.
    num_documents = max(1, min(len(texts), ORACLE_DOCUMENTS, fitting))
    # A longer document is cut at a character: all of it could take minutes.
    sample = [text.as_py() for text in texts[:num_documents]]
    sample[0] = _whole_characters(sample[0][:most])
    names = [f"document {number:,}" for number in range(num_documents)]
    EncodedSample.of(tokenizer, sample, names).compare(tokenizer)
    return num_documents


@dataclass(frozen=True, slots=True)
class EncodedSample:
    """Texts and the ids that the fast engine gave them, to be compared with the reference.

    Another process may compare them, so that worker processes need not load the reference for it.
    """

    texts: list[bytes]
    names: list[str]
    ids: list[NDArray[np.uint32]]

    @classmethod
    def of(cls, tokenizer: Tokenizer, texts: list[bytes], names: list[str]) -> "EncodedSample":
        """Encode `texts` with the fast engine."""
        if tokenizer.reference is None or not texts:
            return cls([], [], [])
        ids, offsets = tokenizer.engine.encode(binary_array(texts))
        # Copies, because the ids of a view would be pickled with all others.
        return cls(texts, names, [ids[a:b].copy() for a, b in pairwise(offsets.tolist())])

    def compare(self, tokenizer: Tokenizer) -> None:
        """Encode the texts with the reference of `tokenizer`.

        Raises:
            TokenMismatchError: an id differs.
        """
        if tokenizer.reference is None or not self.texts:
            return
        expected, offsets = tokenizer.reference.encode(binary_array(self.texts))
        for number, (a, b) in enumerate(pairwise(offsets.tolist())):
            if not np.array_equal(self.ids[number], expected[a:b]):
                raise self._mismatch(tokenizer, number, expected[a:b].tolist())

    def _mismatch(self, tokenizer: Tokenizer, number: int, right: list[int]) -> TokenMismatchError:
        assert tokenizer.reference is not None
        found = self.ids[number].tolist()
        at = first_difference(found, right)
        return TokenMismatchError(
            f"{tokenizer.engine.name} and {tokenizer.reference.name} disagree on "
            f"{self.names[number]} from token {at:,} on: {found[at : at + 5]} and "
            f"{right[at : at + 5]}, for {self.texts[number][:60]!r}. The fast engine gives wrong "
            f"ids for {tokenizer.name}. Use the other engine: tokenizer=penstock.load_tokenizer("
            '…, engine="tokenizers").'
        )


@dataclass(slots=True)
class SliceSample:
    """The texts of one slice to compare with the reference.

    `add` chooses the texts and `encoded` encodes them. Both depend on the slice alone.
    """

    tokenizer: Tokenizer
    index: int
    """The number of the slice."""
    names: list[str]
    """The names of the input files, for messages."""
    first_file: int = 0
    """The number of files that earlier builds of the same store read."""
    _num_documents: int = 0
    _texts: list[bytes] = field(default_factory=list)
    _places: list[str] = field(default_factory=list)

    def add(self, batch: Batch) -> None:
        """Choose texts of the next documents of the slice."""
        if self.tokenizer.reference is None or not len(batch):
            return
        block = batch.separated
        if block is None:
            data, offsets = text_buffers(batch.texts)
            starts, stops = offsets[:-1], offsets[1:]
        else:
            data, starts, stops = np.frombuffer(block.data, np.uint8), block.starts, block.stops
        # The first document of the slice, and every 10,000th after it, counted across batches.
        for row in range(-self._num_documents % _ONE_IN, len(batch), _ONE_IN):
            start, stop = int(starts[row]), int(stops[row])
            # Of a long document, only a window is compared. The multiples of 2**32 divided by the
            # golden ratio, modulo 2**32, spread the windows of all slices evenly over documents.
            if stop - start > _MAX_BYTES:
                share = (self.index + 1) * 2_654_435_769 % (1 << 32)
                start += share * (stop - start - _MAX_BYTES) >> 32
            text = data[start : min(stop, start + _MAX_BYTES)].tobytes()
            name, offset = self.names[int(batch.files[row]) - self.first_file], batch.offsets[row]
            self._texts.append(_whole_characters(text))
            self._places.append(f"the document at offset {offset:,} of {name}")
        self._num_documents += len(batch)

    def encoded(self) -> EncodedSample:
        """The chosen texts, encoded by the fast engine."""
        return EncodedSample.of(self.tokenizer, self._texts, self._places)


def _whole_characters(text: bytes) -> bytes:
    """`text` without the incomplete UTF-8 characters at its ends."""
    return text.decode(errors="ignore").encode()


def first_difference(one: Sequence[int], two: Sequence[int]) -> int:
    """The first index at which two sequences differ, or the length of the shorter one."""
    pairs = enumerate(zip(one, two, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(two)))
