"""The bytes of the text that each token stands for.

The fast engine returns ids without positions. A byte-level vocabulary does not need them: the
bytes of each token are known, and tokens follow each other without gaps, so a running sum of their
lengths is where each token begins. Every batch is checked: its ids must decode to exactly the bytes
that were encoded. Hugging Face's `tokenizers`, which returns positions, encodes the texts for which
that fails (a normalizer changed a character), and all texts of other vocabularies.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from penstock.errors import TokenizerError
from penstock.sources.document import binary_array
from penstock.tokenize.engines import ByteEngine, Encoded
from penstock.tokenize.gigatoken import GigatokenEngine
from penstock.tokenize.objects import ObjectEngine
from penstock.tokenize.special_tokens import PlainText
from penstock.tokenize.tokenizer import Tokenizer

# Some tokenizers put a blank before the first word of a text, but not before later pieces of it. A
# piece that is not the first is encoded after this token, which is then removed.
ANCHOR = "\ue0a5penstock\ue0a5"
_ZERO = np.zeros(1, np.int64)


@dataclass(frozen=True, slots=True)
class TokenSpans:
    """The tokens of many texts, with the bytes of the text that each stands for."""

    ids: NDArray[np.uint32]
    offsets: NDArray[np.int64]
    """The tokens of text i are `ids[offsets[i]:offsets[i + 1]]`."""
    starts: NDArray[np.int64]
    """Where each token begins, in bytes of all texts, concatenated."""
    stops: NDArray[np.int64]


class SpanEncoder:
    """Encodes texts and finds the bytes of each token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._widths = _widths(tokenizer)

    def encode(self, texts: list[str], first: list[bool]) -> TokenSpans:
        """The tokens of `texts`; `first` says which of them begin a conversation."""
        data = [text.encode() for text in texts]
        edges = np.concatenate((_ZERO, np.cumsum([len(each) for each in data], dtype=np.int64)))
        if self._widths is None:
            pieces = [
                self._by_reference(text, int(begin), is_first)
                for text, begin, is_first in zip(texts, edges[:-1], first, strict=True)
            ]
            return _joined(pieces)
        ids, offsets = self._encode(data)
        # The sum of widths must reach each text's end exactly, and the bytes must be the same.
        stops = np.cumsum(self._widths[ids])
        ends = np.concatenate((_ZERO, stops))[offsets - offsets[0]]
        if np.array_equal(ends, edges) and self._tokenizer.decode(ids) == b"".join(data):
            return TokenSpans(ids, offsets - offsets[0], stops - self._widths[ids], stops)
        # Some text changed. Only the texts that do not decode to themselves need the reference.
        pieces = []
        for number, text in enumerate(texts):
            own = ids[offsets[number] : offsets[number + 1]]
            begin = int(edges[number])
            if len(own) and self._tokenizer.decode(own) == data[number]:
                stops = begin + np.cumsum(self._widths[own])
                one = np.array([0, len(own)], np.int64)
                pieces.append(TokenSpans(own, one, stops - self._widths[own], stops))
            else:
                pieces.append(self._by_reference(text, begin, first[number]))
        return _joined(pieces)

    def _encode(self, data: list[bytes]) -> Encoded:
        engine = self._tokenizer.engine
        if isinstance(engine, GigatokenEngine) and data:
            # UTF-8 has no byte 0xFF, so it separates texts. Making an Arrow array of 32 texts
            # would take 3 times as long.
            ids, offsets = engine.encode_separated(b"\xff".join(data), b"\xff")
            if len(offsets) == len(data) + 1:  # else a text is empty, and gigatoken skipped it
                return ids, offsets
        return self._tokenizer.encode_documents(binary_array(data))

    @cached_property
    def _plain(self) -> tuple[PlainText, bool]:
        """The reference, which treats special tokens as text, and whether it needs the anchor."""
        definition = self._tokenizer.definition
        if definition is None:
            raise TokenizerError(
                f"{self._tokenizer.name} gives no positions of its tokens in the text, so penstock "
                "cannot mask them. Use a tokenizer.json, tiktoken, or bytes."
            )
        is_anchored = '"prepend_scheme": "first"' in definition.text
        return PlainText(definition, (ANCHOR,) if is_anchored else ()), is_anchored

    def _by_reference(self, text: str, begin: int, is_first: bool) -> TokenSpans:
        """The tokens of one text that begins at byte `begin`, encoded by `tokenizers`."""
        plain, is_anchored = self._plain
        anchor = ANCHOR if is_anchored and not is_first else ""
        found = plain.tokenizer([text]).encode(anchor + text, add_special_tokens=False)
        # The anchor is one token, and its characters come before those of the text.
        skipped = 1 if anchor else 0
        ids = np.array(found.ids[skipped:], np.uint32)
        plain.check(ids)
        positions = np.array(found.offsets[skipped:], np.int64).reshape(-1, 2) - len(anchor)
        # `tokenizers` counts characters; this is the number of bytes up to each of them.
        if text.isascii():
            upto = np.arange(len(text) + 1)
        else:
            upto = np.concatenate((_ZERO, np.cumsum([len(each.encode()) for each in text])))
        starts, stops = begin + upto[positions[:, 0]], begin + upto[positions[:, 1]]
        return TokenSpans(ids, np.array([0, len(ids)], np.int64), starts, stops)


def _joined(pieces: list[TokenSpans]) -> TokenSpans:
    """The tokens of several texts, concatenated; each piece has the tokens of one text."""
    none = TokenSpans(np.zeros(0, np.uint32), _ZERO, _ZERO[:0], _ZERO[:0])
    every = [none, *pieces]
    return TokenSpans(
        np.concatenate([piece.ids for piece in every]),
        np.concatenate((_ZERO, np.cumsum([len(piece.ids) for piece in pieces], dtype=np.int64))),
        np.concatenate([piece.starts for piece in every]),
        np.concatenate([piece.stops for piece in every]),
    )


def _widths(tokenizer: Tokenizer) -> NDArray[np.int64] | None:
    """How many bytes each id stands for; None if the vocabulary is not made of bytes."""
    definition, engine = tokenizer.definition, tokenizer.engine
    if isinstance(engine, ByteEngine):
        return np.ones(tokenizer.vocab_size, np.int64)
    # Ids without an entry have width 0; a text with one would not decode to itself.
    widths = np.zeros(tokenizer.vocab_size, np.int64)
    if definition is None:
        ranks = engine.description.ranks if isinstance(engine, ObjectEngine) else None
        if ranks is None:
            return None
        for piece, number in ranks.items():
            widths[number] = len(piece)
        return widths
    vocab = definition.config["model"].get("vocab")
    if '"ByteLevel"' not in definition.text or not isinstance(vocab, dict):
        return None
    for token, number in vocab.items():
        widths[number] = len(token)  # each character of a byte-level token is one byte
    for added in definition.added_tokens:
        widths[added["id"]] = len(added["content"].encode())
    return widths
