"""The comparison with the reference, before and during a build.

A fast tokenizer that differs from the reference in one id in a million is worse than a
slow one: nothing looks wrong. So the first documents of every build are encoded by both,
and some of every slice: one document in 10,000, and texts in which an added token is spelled.

The reference is about 100 times as slow, so a ten-thousandth of the text costs 1 % of the time.
What is compared is bounded by counting bytes and not by the clock: it depends on the inputs
alone, and a build that found a difference finds it again.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import TokenMismatchError
from penstock.sources.arrow import binary_array
from penstock.sources.document import Batch, text_offsets
from penstock.tokenize.tokenizer import Tokenizer

__all__ = ["ORACLE_BYTES", "ORACLE_DOCUMENTS", "SliceSample", "compare"]

ORACLE_DOCUMENTS = 1_000
ORACLE_BYTES = 1_000_000
_ONE_IN = 10_000
_MOST_BYTES = 1 << 14
"""Of a sampled document; of a longer one, a window somewhere in it is compared."""
_AROUND = 256
"""Bytes compared on each side of an added token's text."""
_SHARE_SPELLED = 40_000
"""One byte in so many is compared around added tokens, and one such window of each slice."""
_SHARE_SEARCHED = 16
"""One byte in so many is searched for added tokens; to search them all takes 3 % of the time."""

_MOST_PLACES = 32
"""Looked at in each batch, where the first two bytes of an added token stand."""


def compare(tokenizer: Tokenizer, texts: Any) -> int:
    """Encode the first 1,000 documents or 1 MB of `texts` with both engines.

    Returns how many documents were compared.

    Raises:
        TokenMismatchError: an id differs.
    """
    if tokenizer.reference is None or not len(texts):
        return 0
    offsets = text_offsets(texts)
    fitting = int(np.searchsorted(offsets, ORACLE_BYTES, side="right")) - 1
    num_documents = max(1, min(len(texts), ORACLE_DOCUMENTS, fitting))
    # One document longer than 1 MB is cut at a character, so that it costs no minute.
    sample = [text.as_py() for text in texts[:num_documents]]
    sample[0] = _whole_characters(sample[0][:ORACLE_BYTES])
    _compare(tokenizer, sample, [f"document {number:,}" for number in range(num_documents)])
    return num_documents


@dataclass(slots=True)
class SliceSample:
    """Texts of one slice that are to be compared with the reference.

    `add` picks them, `compare` encodes them; both depend on the slice alone.
    """

    tokenizer: Tokenizer
    index: int
    """The number of the slice."""
    names: list[str]
    """What to call each input file."""
    first_file: int = 0
    """How many files earlier builds of the same store have."""
    _tokens: tuple[bytes, ...] = field(init=False)
    _num_documents: int = 0
    _num_bytes: int = 0
    _spelled_bytes: int = 0
    _texts: list[bytes] = field(default_factory=list)
    _origins: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._tokens = _contents(self.tokenizer)

    def add(self, batch: Batch) -> None:
        """Pick texts of the next documents of the slice."""
        if self.tokenizer.reference is None or not len(batch):
            return
        data, starts, stops = _spans(batch)
        # Multiples of the golden ratio spread the first picks of all slices evenly.
        first = ((self.index + 1) * 2_654_435_769 % (1 << 32)) * _ONE_IN >> 32
        for row in range((first - self._num_documents) % _ONE_IN, len(batch), _ONE_IN):
            start, stop = int(starts[row]), int(stops[row])
            if stop - start > _MOST_BYTES:
                start += first * (stop - start - _MOST_BYTES) // _ONE_IN
            self._keep(batch, row, data[start : min(stop, start + _MOST_BYTES)])
        self._num_documents += len(batch)
        self._num_bytes += len(data)
        self._add_spelled(batch, data, starts, stops)

    def compare(self) -> int:
        """Encode what was picked with both engines; returns how many texts there were.

        Raises:
            TokenMismatchError: an id differs.
        """
        names = [
            f"the document at offset {offset:,} of {self.names[file]}"
            for file, offset in self._origins
        ]
        _compare(self.tokenizer, self._texts, names)
        return len(self._texts)

    def _keep(self, batch: Batch, row: int, text: NDArray[np.uint8]) -> None:
        self._texts.append(_whole_characters(text.tobytes()))
        self._origins.append((int(batch.files[row]) - self.first_file, int(batch.offsets[row])))

    def _add_spelled(
        self,
        batch: Batch,
        data: NDArray[np.uint8],
        starts: NDArray[np.int64],
        stops: NDArray[np.int64],
    ) -> None:
        """Pick the text around added tokens, as far as the slice's share of bytes goes."""
        separator = batch.separated.separator if batch.separated else None
        tokens = tuple(token for token in self._tokens if token != separator)
        begins = {token[:2] for token in tokens}
        room = _AROUND * 2 + self._num_bytes // _SHARE_SPELLED - self._spelled_bytes
        if not tokens or room <= 0:
            return
        # Another part of each batch, so that no place in the blocks is left out for ever.
        size = max(1 << 12, len(data) // (_SHARE_SEARCHED * len(begins)))
        low = self._num_documents * 7_919 % max(1, len(data) - size)
        for place in _places(data[low : low + size], begins)[:_MOST_PLACES]:
            place += low
            row = int(np.searchsorted(starts, place, side="right")) - 1
            rest = data[place : min(int(stops[row]), place + len(tokens[0]))].tobytes()
            if row < 0 or room <= 0 or not rest.startswith(tokens):
                continue
            start = max(int(starts[row]), place - _AROUND)
            stop = min(int(stops[row]), place + len(rest) + _AROUND)
            self._keep(batch, row, data[start:stop])
            self._spelled_bytes += stop - start
            room -= stop - start


def _contents(tokenizer: Tokenizer) -> tuple[bytes, ...]:
    """The texts of the added tokens, longest first; blanks alone are in every document."""
    config = tokenizer.definition.config if tokenizer.definition else {}
    contents = [token["content"] for token in config.get("added_tokens") or []]
    spelled = [content.encode() for content in contents if content.strip()]
    return tuple(sorted(spelled, key=len, reverse=True))


def _places(data: NDArray[np.uint8], begins: set[bytes]) -> list[int]:
    """Where one of some first two bytes stands, in order."""
    found = [np.zeros(0, np.int64)]
    for begin in begins:
        is_there = data == begin[0]
        if len(begin) > 1:
            is_there = is_there[:-1] & (data[1:] == begin[1])
        found.append(np.flatnonzero(is_there))
    places: list[int] = np.sort(np.concatenate(found)).tolist()
    return places


def _spans(
    batch: Batch,
) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64]]:
    """The bytes of a batch, and where each document begins and ends in them."""
    if batch.separated:
        block = batch.separated
        return np.frombuffer(block.data, np.uint8), block.starts, block.stops
    offsets = text_offsets(batch.texts)
    data = np.frombuffer(batch.texts.buffers()[2] or b"", np.uint8, count=int(offsets[-1]))
    return data, offsets[:-1], offsets[1:]


def _whole_characters(text: bytes) -> bytes:
    """`text` without the parts of characters at its ends."""
    return text.decode(errors="ignore").encode()


def _compare(tokenizer: Tokenizer, texts: list[bytes], names: list[str]) -> None:
    if tokenizer.reference is None or not texts:
        return
    array = binary_array(texts)
    ids, places = tokenizer.engine.encode(array)
    expected, expected_places = tokenizer.reference.encode(array)
    if np.array_equal(ids, expected) and np.array_equal(places, expected_places):
        return
    for number, text in enumerate(texts):
        found = ids[places[number] : places[number + 1]].tolist()
        right = expected[expected_places[number] : expected_places[number + 1]].tolist()
        if found != right:
            at = next(
                (i for i, pair in enumerate(zip(found, right, strict=False)) if pair[0] != pair[1]),
                min(len(found), len(right)),
            )
            raise TokenMismatchError(
                f"{tokenizer.engine.name} and {tokenizer.reference.name} disagree on "
                f"{names[number]} from token {at:,} on: {found[at : at + 5]} and "
                f"{right[at : at + 5]}, for {text[:60]!r}. The fast ids cannot be trusted for "
                f'{tokenizer.name}. Build with engine="tokenizers" (--engine tokenizers).'
            )
    raise AssertionError("arrays differ, so one document must")
