r"""Rendered conversations to tokens and loss masks, many at a time.

    text       <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello.<|im_end|>\n
    pieces     special      text   special  text special   text             special  text
    loss       0            0  0 0 0        0    0         0        0 1  1  1        0

The template's special tokens become their ids. The text between them is encoded piece by piece, as
tokenizers do it, so the ids equal those of `apply_chat_template`. A token is trained on if at least
one of its characters is: in `[/INST] Hello`, the blank of the token `▁Hello` is the template's and
the word is the assistant's. With borders="cut", the text on both sides of a border is encoded
separately, and no token crosses a border.
"""

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from penstock.chat.messages import ChatText, Span
from penstock.chat.special_tokens import token_finder
from penstock.chat.token_spans import SpanEncoder
from penstock.errors import TokenizerError
from penstock.tokenize.oracle import first_difference
from penstock.tokenize.special_tokens import load_reference
from penstock.tokenize.tokenizer import Tokenizer

Borders = Literal["join", "cut"]
_MAX_COMPARED = 200


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
        upto = np.concatenate((np.zeros(1, np.int64), np.cumsum(self.loss, dtype=np.int64)))
        return np.diff(upto[self.offsets])


class ChatEncoder:
    """A tokenizer for rendered conversations; safe to use from many threads."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        borders: Borders = "join",
        special_in_content: bool = False,
    ) -> None:
        if borders not in ("join", "cut"):
            raise TokenizerError(f'borders={borders!r} is not "join" or "cut".')
        self.tokenizer = tokenizer
        self.special = token_finder(tokenizer)
        self._spans = SpanEncoder(tokenizer)
        self._cuts = borders == "cut"
        self._anywhere = special_in_content

    def encode(self, chats: list[ChatText]) -> EncodedChats:
        """The tokens of `chats`, and which of them are trained on."""
        pieces = _Pieces()
        for chat in chats:
            self._divide(chat, pieces)
        texts = self._spans.encode(pieces.texts, pieces.first)
        # The pieces are in order. Tokens of special pieces and of texts are written into the same
        # arrays, each to its own positions, so that no Python loop runs over tokens.
        special = np.array(pieces.special, np.int64)
        is_text = special < 0
        # A special token is one token; a text has as many as it was encoded to.
        lengths = np.ones(len(special), np.int64)
        lengths[is_text] = np.diff(texts.offsets)
        stops = np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths)))
        at = stops[1:][~is_text] - 1
        from_text = np.ones(int(stops[-1]), bool)
        from_text[at] = False
        ids, loss = np.empty(len(from_text), np.uint32), np.empty(len(from_text), np.uint8)
        ids[at], ids[from_text] = special[~is_text], texts.ids
        loss[at] = np.array(pieces.special_trained, np.uint8)
        loss[from_text] = _overlapping(texts.starts, texts.stops, pieces.trained)
        # `stops` has the number of tokens up to each piece, and `ends` the last piece of each chat.
        return EncodedChats(ids, stops[[0, *pieces.ends]], loss)

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
        # One at a time, so that the message is about one conversation.
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
    # The trained spans, in bytes of all texts, concatenated.
    trained: list[Span] = field(default_factory=list)
    # The number of pieces up to the end of each conversation.
    ends: list[int] = field(default_factory=list)
    _num_bytes: int = 0

    def add(self, text: str, trained: list[Span], first: bool) -> None:
        """Add a text of which the characters in `trained` are trained on."""
        self.special.append(-1)
        self.texts.append(text)
        self.first.append(first)
        # In ASCII, characters are bytes; encoding every prefix would be slow.
        is_ascii = text.isascii()
        begin = self._num_bytes
        for start, stop in trained:
            low = start if is_ascii else len(text[:start].encode())
            high = stop if is_ascii else low + len(text[start:stop].encode())
            self.trained.append((begin + low, begin + high))
        self._num_bytes = begin + (len(text) if is_ascii else len(text.encode()))


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
