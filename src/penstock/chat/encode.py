r"""Encodes many rendered conversations at once, as tokens and loss masks.

    text       <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello.<|im_end|>\n
    pieces     special      text   special  text special   text             special  text
    loss       0            0  0 0 0        0    0         0        0 1  1  1        0

A piece is a special token of the template, or the text between two of them. A special token becomes
its id. Each text is encoded separately, as `tokenizers` does it, so the ids equal those of
`apply_chat_template`. A token is trained on if at least one of its characters is: in
`[/INST] Hello`, the blank of the token `▁Hello` is the template's and the word is the assistant's.
With borders="cut", the text on both sides of a border is encoded separately, and no token crosses a
border.

The fast engine returns ids without positions. A byte-level vocabulary does not need them: the bytes
of each token are known, and tokens follow each other without gaps, so a running sum of their
lengths is where each token begins. Every batch is checked: its ids must decode to exactly the bytes
that were encoded. Hugging Face's `tokenizers`, which returns positions, encodes the texts for which
that fails (a normalizer changed a character), and all texts of other vocabularies.
"""

from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from penstock.chat.messages import ANCHOR, ChatText, Span
from penstock.chat.special_tokens import TokenFinder
from penstock.errors import TokenizerError
from penstock.sources.batch import binary_array
from penstock.tokenize.compare import first_difference
from penstock.tokenize.engines import ByteEngine, Encoded, ObjectEngine, offsets_of
from penstock.tokenize.gigatoken import GigatokenEngine
from penstock.tokenize.special_tokens import PlainText, load_reference
from penstock.tokenize.tokenizer import Tokenizer

Borders = Literal["join", "cut"]
TokenSpans = tuple[NDArray[np.uint32], NDArray[np.int64], NDArray[np.int64]]
"""The ids of tokens, and where each token begins and ends.

These are byte positions in the concatenation of all texts."""

_MAX_COMPARED = 200
_NO_TOKENS: TokenSpans = (np.zeros(0, np.uint32), np.zeros(0, np.int64), np.zeros(0, np.int64))


@dataclass(frozen=True, slots=True)
class EncodedChats:
    """The tokens of many conversations, concatenated, and a loss mask."""

    ids: NDArray[np.uint32]
    offsets: NDArray[np.int64]
    """The tokens of conversation i are `[offsets[i], offsets[i + 1])`."""
    loss: NDArray[np.uint8]
    """1 for tokens that are trained on, else 0."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_trained(self) -> NDArray[np.int64]:
        """The number of tokens of each conversation that are trained on."""
        return np.diff(offsets_of(self.loss)[self.offsets])


class ChatEncoder:
    """A tokenizer for rendered conversations; safe to use from many threads."""

    def __init__(
        self, tokenizer: Tokenizer, *, borders: Borders = "join", special_in_content: bool = False
    ) -> None:
        if borders not in ("join", "cut"):
            raise TokenizerError(f'borders={borders!r} is not "join" or "cut".')
        self.tokenizer = tokenizer
        self.special = TokenFinder(tokenizer)
        self._spans = SpanEncoder(tokenizer)
        self._cuts = borders == "cut"
        self._anywhere = special_in_content

    def encode(self, chats: list[ChatText]) -> EncodedChats:
        """The tokens of `chats`, and which of them are trained on."""
        pieces = _Pieces()
        for chat in chats:
            self._divide(chat, pieces)
        (text_ids, starts, stops), offsets = self._spans.encode(pieces.texts, pieces.first)
        # The pieces are in order. Tokens of special pieces and of texts are written into the same
        # arrays, each to its own positions, so that no Python loop runs over tokens.
        special = np.array(pieces.special, np.int64)
        is_text = special < 0
        # A special token is one token; a text has as many as it was encoded to.
        lengths = np.ones(len(special), np.int64)
        lengths[is_text] = np.diff(offsets)
        edges = offsets_of(lengths)
        at = edges[:-1][~is_text]
        from_text = np.ones(int(edges[-1]), bool)
        from_text[at] = False
        ids, loss = np.empty(len(from_text), np.uint32), np.empty(len(from_text), np.uint8)
        ids[at], ids[from_text] = special[~is_text], text_ids
        loss[at] = np.array(pieces.special_trained, np.uint8)
        loss[from_text] = _overlapping(starts, stops, pieces.trained)
        # `edges` has the number of tokens up to each piece, and `ends` the last piece of each chat.
        return EncodedChats(ids, edges[[0, *pieces.ends]], loss)

    def _divide(self, chat: ChatText, pieces: "_Pieces") -> None:
        """Split one conversation into special tokens and texts."""
        done = 0
        for number, (start, stop), taken in self.special.find(chat, anywhere=self._anywhere):
            if done < taken[0]:
                self._add_text(chat, done, taken[0], pieces)
            # A special token is trained on if one of its own characters is; the blanks that it
            # strips do not count.
            pieces.special.append(number)
            pieces.special_trained.append(any(a < stop and start < b for a, b in chat.trained))
            done = taken[1]
        if done < len(chat.text):
            self._add_text(chat, done, len(chat.text), pieces)
        pieces.ends.append(len(pieces.special))

    def _add_text(self, chat: ChatText, start: int, stop: int, pieces: "_Pieces") -> None:
        trained = [(max(a, start), min(b, stop)) for a, b in chat.trained if a < stop and start < b]
        edges = [start, stop]
        if self._cuts:
            edges = sorted({start, stop, *(edge for span in trained for edge in span)})
        for low, high in pairwise(edges):
            inside = [(a - low, b - low) for a, b in trained if low <= a and b <= high]
            if self._cuts:  # a piece between two edges is trained on as a whole or not at all
                inside = [(0, high - low)] if any(a <= low < b for a, b in trained) else []
            pieces.add(chat.text[low:high], inside, low == 0)

    def compare(self, chats: list[ChatText]) -> int:
        """Compare ids with those of Hugging Face's `tokenizers` for the whole text.

        Conversations whose content contains a special token are skipped: their ids differ on
        purpose. Returns the number of conversations compared.

        Raises:
            TokenizerError: an id differs.
        """
        # With borders="cut" ids differ on purpose, and a tokenizer object has no reference
        # implementation.
        if self.tokenizer.definition is None or self._cuts:
            return 0
        reference = load_reference(self.tokenizer.definition.text, self.tokenizer.name)
        compared = 0
        # One conversation at a time, so that an error message is about a single conversation.
        for chat in chats[:_MAX_COMPARED]:
            if not self._anywhere and self.special.is_in_content(chat):
                continue
            ours = self.encode([chat]).ids.tolist()
            theirs = reference.encode(chat.text, add_special_tokens=False).ids
            if ours != theirs:
                at = first_difference(ours, theirs)
                raise TokenizerError(
                    f"The ids of a conversation differ from those of tokenizers at token {at}: "
                    f"{ours[at : at + 5]} and {theirs[at : at + 5]}. {self.tokenizer.name} treats "
                    "special tokens in a way that penstock does not know. Use another tokenizer."
                )
            compared += 1
        return compared


@dataclass(slots=True)
class _Pieces:
    """The pieces of some conversations: special tokens and texts, in order."""

    # The id of each special token, -1 for each text.
    special: list[int] = field(default_factory=list)
    special_trained: list[bool] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    # Whether each text begins a conversation.
    first: list[bool] = field(default_factory=list)
    # The spans that are trained on, as byte positions in the concatenation of all texts.
    trained: list[Span] = field(default_factory=list)
    # The number of pieces up to the end of each conversation.
    ends: list[int] = field(default_factory=list)
    _num_bytes: int = 0

    def add(self, text: str, trained: list[Span], first: bool) -> None:
        """Add a text of which the characters in `trained` are trained on."""
        self.special.append(-1)
        self.texts.append(text)
        self.first.append(first)
        for start, stop in trained:
            low = self._num_bytes + len(text[:start].encode())
            self.trained.append((low, low + len(text[start:stop].encode())))
        self._num_bytes += len(text.encode())


class SpanEncoder:
    """Encodes texts, and finds which bytes of the texts each token stands for."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._widths = _widths(tokenizer)

    def encode(self, texts: list[str], first: list[bool]) -> tuple[TokenSpans, NDArray[np.int64]]:
        """The tokens of `texts`, and offsets: text i has the tokens `[offsets[i], offsets[i + 1])`.

        `first` says which texts begin a conversation.
        """
        data = [text.encode() for text in texts]
        edges = offsets_of(list(map(len, data)))
        own: list[TokenSpans | None] = [None] * len(texts)
        if self._widths is not None:
            ids, offsets = self._encode(data)
            # The sum of widths must reach each text's end exactly, and the bytes must be the same.
            stops = np.cumsum(self._widths[ids])
            ends = np.concatenate(([0], stops))[offsets - offsets[0]]
            if np.array_equal(ends, edges) and self._tokenizer.decode_bytes(ids) == b"".join(data):
                return (ids, stops - self._widths[ids], stops), offsets - offsets[0]
            # The ids of some text do not decode to that text. Only such texts need the reference.
            own = [
                self._by_widths(ids[low:high], int(begin), text)
                for (low, high), begin, text in zip(pairwise(offsets), edges, data, strict=False)
            ]
        pieces = [
            found or self._by_reference(text, int(begin), is_first)
            for found, text, begin, is_first in zip(own, texts, edges, first, strict=False)
        ]
        joined = [np.concatenate(arrays) for arrays in zip(_NO_TOKENS, *pieces, strict=True)]
        return (joined[0], joined[1], joined[2]), offsets_of([len(ids) for ids, _, _ in pieces])

    def _encode(self, data: list[bytes]) -> Encoded:
        engine = self._tokenizer.engine
        if isinstance(engine, GigatokenEngine) and data:
            # UTF-8 has no byte 0xFF, so it separates texts. Making an Arrow array of 32 texts
            # would take 3 times as long.
            ids, offsets = engine.encode_separated(b"\xff".join(data), b"\xff")
            if len(offsets) == len(data) + 1:  # else a text is empty, and gigatoken skipped it
                return ids, offsets
        return self._tokenizer.encode_documents(binary_array(data))

    def _by_widths(self, ids: NDArray[np.uint32], begin: int, text: bytes) -> TokenSpans | None:
        """The tokens of `text`, which begins at byte `begin`; None if `ids` do not decode to it."""
        if self._widths is None or not len(ids) or self._tokenizer.decode_bytes(ids) != text:
            return None
        stops = begin + np.cumsum(self._widths[ids])
        return ids, stops - self._widths[ids], stops

    @cached_property
    def _plain(self) -> tuple[PlainText, bool]:
        """A `tokenizers` encoder that treats special tokens as text; whether it needs `ANCHOR`."""
        definition = self._tokenizer.definition
        if definition is None:
            raise TokenizerError(
                f"{self._tokenizer.name} gives no positions of its tokens in the text, so penstock "
                "cannot mask them. Use a tokenizer.json, tiktoken, or bytes."
            )
        # Some tokenizers put a blank before the first word of a text, but not before later pieces
        # of it. A piece that is not the first is encoded after a token, which is then removed.
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
        # `tokenizers` counts characters. A character begins at each byte that is not 10xxxxxx.
        data = np.frombuffer(text.encode(), np.uint8)
        upto = begin + np.append(np.flatnonzero(data & 0xC0 != 0x80), len(data))
        return ids, upto[positions[:, 0]], upto[positions[:, 1]]


def _overlapping(
    starts: NDArray[np.int64], stops: NDArray[np.int64], spans: list[Span]
) -> NDArray[np.uint8]:
    """Whether each token contains a byte of `spans`, which are ascending and disjoint."""
    if not spans:
        return np.zeros(len(starts), np.uint8)
    lows, highs = np.array(spans, np.int64).T
    # Only the first span that ends after the token's start can overlap the token: if that span
    # begins after the token's end, so do all later ones.
    nearest = np.searchsorted(highs, starts, side="right")
    inside = nearest < len(lows)
    found = np.zeros(len(starts), np.uint8)
    found[inside] = lows[nearest[inside]] < stops[inside]
    return found


def _widths(tokenizer: Tokenizer) -> NDArray[np.int64] | None:
    """The number of bytes that each id stands for; None if the vocabulary is not byte-level."""
    definition, engine = tokenizer.definition, tokenizer.engine
    if isinstance(engine, ByteEngine):
        return np.ones(tokenizer.vocab_size, np.int64)
    if definition is not None:
        vocab = definition.config["model"].get("vocab")
        if '"ByteLevel"' not in definition.text or not isinstance(vocab, dict):
            return None
        # Each character of a byte-level token is one byte.
        sizes = {number: len(token) for token, number in vocab.items()}
        sizes |= {each["id"]: len(each["content"].encode()) for each in definition.added_tokens}
    elif isinstance(engine, ObjectEngine) and engine.description.ranks is not None:
        sizes = {number: len(piece) for piece, number in engine.description.ranks.items()}
    else:
        return None
    # Ids without an entry have width 0; a text with one would not decode to itself.
    widths = np.zeros(tokenizer.vocab_size, np.int64)
    widths[list(sizes)] = list(sizes.values())
    return widths
