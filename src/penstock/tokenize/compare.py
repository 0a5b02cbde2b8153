"""Compares the ids of the fast engine with those of the reference, before and during a build.

A fast tokenizer that differs from the reference in one id in a million is worse than a slow one,
because nothing looks wrong. So a build encodes its first documents with both engines, and later, in
every slice, one document in 10,000 and some text around added tokens.

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
from penstock.sources.document import Batch, binary_array, text_offsets
from penstock.tokenize.engines import text_buffers
from penstock.tokenize.tokenizer import Tokenizer

Spans = tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64]]
"""The bytes of a batch, and where each document begins and ends in them."""
ORACLE_DOCUMENTS = 1_000
ORACLE_BYTES = 1_000_000
# Of a short input, a thousandth of the text is compared first, but at least this much: the
# reference takes 0.7 s for 1 MB, in which two cores build 120 MB.
_LEAST_BYTES = 256_000
_ONE_IN = 10_000
# The most bytes of one sampled document; of a longer one, a window is compared.
_MAX_BYTES = 1 << 14
# Bytes compared on each side of an added token in a text.
_AROUND = 256
# At most one byte in this many is compared because it is near an added token, but at least one
# window per slice.
_COMPARED_SHARE = 40_000
# One byte in this many is searched for added tokens; searching all would take 3 % of the time.
_SEARCHED_SHARE = 16
# The most positions of a batch that are checked because an added token may begin there.
_MAX_CANDIDATES = 32


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
            f'ids for {tokenizer.name}. Use engine="tokenizers" of penstock.load_tokenizer or '
            "penstock.build (--engine tokenizers)."
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
    _tokens: tuple[bytes, ...] = field(init=False)
    _num_documents: int = 0
    _num_bytes: int = 0
    _token_bytes: int = 0
    _texts: list[bytes] = field(default_factory=list)
    _origins: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        definition = self.tokenizer.definition
        added = [token["content"] for token in definition.added_tokens] if definition else []
        # Added tokens that consist of blanks are left out, because every document contains them.
        # The longest tokens come first.
        contents = [content.encode() for content in added if content.strip()]
        self._tokens = tuple(sorted(contents, key=len, reverse=True))

    def add(self, batch: Batch) -> None:
        """Choose texts of the next documents of the slice."""
        if self.tokenizer.reference is None or not len(batch):
            return
        spans = data, starts, stops = _spans(batch)
        # 2,654,435,769 is 2**32 divided by the golden ratio. Its multiples modulo 2**32 spread the
        # first document chosen in each slice evenly over 0 to 9,999.
        first = ((self.index + 1) * 2_654_435_769 % (1 << 32)) * _ONE_IN >> 32
        # Every 10,000th document of the slice, counted across batches.
        for row in range((first - self._num_documents) % _ONE_IN, len(batch), _ONE_IN):
            start, stop = int(starts[row]), int(stops[row])
            # Of a long document, only a window is compared. It begins at the same fraction of every
            # long document of the slice.
            if stop - start > _MAX_BYTES:
                start += first * (stop - start - _MAX_BYTES) // _ONE_IN
            self._keep(batch, row, data[start : min(stop, start + _MAX_BYTES)])
        self._num_documents += len(batch)
        self._num_bytes += len(data)
        self._add_around_tokens(batch, spans)

    def encoded(self) -> EncodedSample:
        """The chosen texts, encoded by the fast engine."""
        names = [
            f"the document at offset {offset:,} of {self.names[file]}"
            for file, offset in self._origins
        ]
        return EncodedSample.of(self.tokenizer, self._texts, names)

    def _keep(self, batch: Batch, row: int, text: NDArray[np.uint8]) -> None:
        self._texts.append(_whole_characters(text.tobytes()))
        self._origins.append((int(batch.files[row]) - self.first_file, int(batch.offsets[row])))

    def _add_around_tokens(self, batch: Batch, spans: Spans) -> None:
        """Choose text around added tokens, as long as `_COMPARED_SHARE` allows more."""
        data, starts, stops = spans
        separator = batch.separated.separator if batch.separated else None
        # A separator is never inside a document, so it need not be searched for.
        tokens = tuple(token for token in self._tokens if token != separator)
        begins = {token[:2] for token in tokens}
        room = _AROUND * 2 + self._num_bytes // _COMPARED_SHARE - self._token_bytes
        if not tokens or room <= 0:
            return
        # Only a part of each batch is searched. It begins at another position in each batch (7,919
        # is prime), so that the search does not always leave out the same part.
        size = max(1 << 12, len(data) // (_SEARCHED_SHARE * len(begins)))
        low = self._num_documents * 7_919 % max(1, len(data) - size)
        for found in _positions(data[low : low + size], begins)[:_MAX_CANDIDATES]:
            at = low + found
            row = int(np.searchsorted(starts, at, side="right")) - 1
            # The first bytes of a token are at `at`. `rest` shows whether the whole token follows,
            # inside the same document.
            rest = data[at : min(int(stops[row]), at + len(tokens[0]))].tobytes()
            if row < 0 or room <= 0 or not rest.startswith(tokens):
                continue
            start = max(int(starts[row]), at - _AROUND)
            stop = min(int(stops[row]), at + len(rest) + _AROUND)
            self._keep(batch, row, data[start:stop])
            self._token_bytes += stop - start
            room -= stop - start


def _positions(data: NDArray[np.uint8], begins: set[bytes]) -> list[int]:
    """The positions, in ascending order, of all `begins`, which are one or two bytes long."""
    found = [np.zeros(0, np.int64)]
    for begin in begins:
        matches = data == begin[0]
        if len(begin) > 1:
            matches = matches[:-1] & (data[1:] == begin[1])
        found.append(np.flatnonzero(matches))
    positions: list[int] = np.sort(np.concatenate(found)).tolist()
    return positions


def _spans(batch: Batch) -> Spans:
    if batch.separated:
        block = batch.separated
        return np.frombuffer(block.data, np.uint8), block.starts, block.stops
    data, offsets = text_buffers(batch.texts)
    return data, offsets[:-1], offsets[1:]


def _whole_characters(text: bytes) -> bytes:
    """`text` without the incomplete UTF-8 characters at its ends."""
    return text.decode(errors="ignore").encode()


def first_difference(one: Sequence[int], two: Sequence[int]) -> int:
    """The first index at which two sequences differ, or the length of the shorter one."""
    pairs = enumerate(zip(one, two, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(two)))
