"""Where in the text each token stands.

The fast engine gives ids and no places. With a byte-level vocabulary none are needed: the
bytes of a token are known, tokens lie end to end, and a running sum of their lengths is
where each begins. That it is, is checked on every batch: the ids must decode to the very
bytes that went in. Texts where they do not (a normalizer changed a character), and
tokenizers that are not byte-level, go to Hugging Face's `tokenizers`, which keeps places.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.chat.special_tokens import wrapped
from penstock.sources.arrow import binary_array
from penstock.tokenize.engines import ByteEngine, Encoded, GigatokenEngine
from penstock.tokenize.special_tokens import PlainText
from penstock.tokenize.tokenizer import Tokenizer

__all__ = ["ANCHOR", "Placed", "Placer"]

# Some tokenizers put a blank before the first word of a text, and of the first piece alone. A
# piece that is not the first is given after this token, which is cut off again.
ANCHOR = "\ue0a5penstock\ue0a5"


@dataclass(frozen=True, slots=True)
class Placed:
    """Tokens of many texts, with the bytes of the text that each stands for."""

    ids: NDArray[np.uint32]
    offsets: NDArray[np.int64]
    """Tokens of text i are `ids[offsets[i]:offsets[i + 1]]`."""
    starts: NDArray[np.int64]
    """Where each token begins, in bytes of all texts laid end to end."""
    stops: NDArray[np.int64]


class Placer:
    """Encodes texts and says where their tokens stand."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._widths = _widths(tokenizer)
        self._reference: Any = None

    def place(self, texts: list[str], first: list[bool]) -> Placed:
        """The tokens of `texts`; `first` says which begin a conversation."""
        data = [text.encode() for text in texts]
        edges = np.zeros(len(data) + 1, np.int64)
        np.cumsum([len(each) for each in data], out=edges[1:])
        if self._widths is None:
            return self._slowly(texts, edges, first)
        ids, offsets = self._encode(data)
        stops = np.cumsum(self._widths[ids])
        joined = b"".join(data)
        ends = np.concatenate((np.zeros(1, np.int64), stops))[offsets - offsets[0]]
        if np.array_equal(ends, edges) and self._tokenizer.decode(ids) == joined:
            return Placed(ids, offsets - offsets[0], stops - self._widths[ids], stops)
        return self._mended(texts, edges, first, (ids, offsets))

    def _encode(self, data: list[bytes]) -> Encoded:
        engine = self._tokenizer.engine
        if isinstance(engine, GigatokenEngine) and data:
            # No text has this byte. To set out 32 texts as an Arrow array takes 3 times as long.
            ids, offsets = engine.encode_separated(b"\xff".join(data), b"\xff")
            if len(offsets) == len(data) + 1:
                return ids, offsets
        return self._tokenizer.encode_documents(binary_array(data))

    def _mended(
        self,
        texts: list[str],
        edges: NDArray[np.int64],
        first: list[bool],
        encoded: tuple[NDArray[np.uint32], NDArray[np.int64]],
    ) -> Placed:
        """As the engine has it where it gives the text back, else as `tokenizers` has it."""
        assert self._widths is not None
        ids, offsets = encoded
        pieces = []
        for number, text in enumerate(texts):
            own = ids[offsets[number] : offsets[number + 1]]
            begin = edges[number : number + 1]
            if len(own) and self._tokenizer.decode(own) == text.encode():
                stops = begin + np.cumsum(self._widths[own])
                zero = np.zeros(2, np.int64)
                zero[1] = len(own)
                pieces.append(Placed(own, zero, stops - self._widths[own], stops))
            else:
                edge = edges[number : number + 2]
                pieces.append(self._slowly([text], edge, first[number : number + 1]))
        return _joined(pieces)

    def _slowly(self, texts: list[str], edges: NDArray[np.int64], first: list[bool]) -> Placed:
        """Ids and places by `tokenizers`."""
        if self._reference is None:
            self._reference = _Reference(self._tokenizer)
        pieces = [
            self._reference.place(text, int(begin), at_start)
            for text, begin, at_start in zip(texts, edges[:-1], first, strict=True)
        ]
        return _joined(pieces)


class _Reference:
    """Hugging Face's `tokenizers`, special tokens taken as text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        from penstock.errors import TokenizerError

        if tokenizer.definition is None:
            raise TokenizerError(
                f"{tokenizer.name} gives no places of its tokens in the text, so they cannot be "
                "masked. Use a tokenizer.json, tiktoken, or bytes."
            )
        self._anchored = '"prepend_scheme": "first"' in tokenizer.definition.text
        self._plain = PlainText(tokenizer.definition, (ANCHOR,) if self._anchored else ())

    def place(self, text: str, begin: int, first: bool) -> Placed:
        anchor = ANCHOR if self._anchored and not first else ""
        tokenizer = self._plain.tokenizer([text])
        found = tokenizer.encode(anchor + text, add_special_tokens=False)
        skipped = 1 if anchor else 0
        ids = np.array(found.ids[skipped:], np.uint32)
        self._plain.check(ids)
        places = np.array(found.offsets[skipped:], np.int64).reshape(-1, 2) - len(anchor)
        # From characters to bytes.
        upto = np.zeros(len(text) + 1, np.int64)
        if text.isascii():
            upto[:] = np.arange(len(text) + 1)
        else:
            np.cumsum([len(each.encode()) for each in text], out=upto[1:])
        return Placed(
            ids,
            np.array([0, len(ids)], np.int64),
            begin + upto[places[:, 0]],
            begin + upto[places[:, 1]],
        )


def _joined(pieces: list[Placed]) -> Placed:
    if not pieces:
        none = np.zeros(0, np.int64)
        return Placed(none.astype(np.uint32), np.zeros(1, np.int64), none, none)
    counts = [np.diff(piece.offsets) for piece in pieces]
    offsets = np.concatenate((np.zeros(1, np.int64), np.cumsum(np.concatenate(counts))))
    return Placed(
        np.concatenate([piece.ids for piece in pieces]),
        offsets,
        np.concatenate([piece.starts for piece in pieces]),
        np.concatenate([piece.stops for piece in pieces]),
    )


def _widths(tokenizer: Tokenizer) -> NDArray[np.int64] | None:
    """How many bytes each id stands for; None where the vocabulary is not of bytes."""
    if isinstance(tokenizer.engine, ByteEngine):
        return np.ones(tokenizer.vocab_size, np.int64)
    widths = np.zeros(tokenizer.vocab_size, np.int64)
    if tokenizer.definition is None:
        ranks = getattr(wrapped(tokenizer), "_mergeable_ranks", None)  # tiktoken
        if ranks is None:
            return None
        for token, number in ranks.items():
            widths[number] = len(token)
        return widths
    config = tokenizer.definition.config
    vocab = config["model"].get("vocab")
    if '"ByteLevel"' not in tokenizer.definition.text or not isinstance(vocab, dict):
        return None
    for token, number in vocab.items():
        widths[number] = len(token)  # a character of a byte-level vocabulary is a byte
    for added in config.get("added_tokens") or []:
        widths[added["id"]] = len(added["content"].encode())
    return widths
