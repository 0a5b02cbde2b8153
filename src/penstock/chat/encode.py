r"""Scripts to tokens and masks, many at a time.

    text       <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello.<|im_end|>\n
    pieces     special      text   special  text special   text             special  text
    loss       0            0  0 0 0        0    0         0        0 1  1  1        0

The template's special tokens become their ids; the text between them is encoded piece by
piece, as tokenizers do it, so the ids equal those of `apply_chat_template`. A token is
trained on if at least one of its characters is: `[/INST] Hello` has a token `▁Hello`, whose
blank is the template's and whose word is the assistant's. With borders="cut", text is
encoded apart on both sides of a border, and no token straddles one.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from penstock.chat.messages import ChatText
from penstock.chat.special_tokens import special_tokens_of
from penstock.chat.token_spans import Placer
from penstock.errors import TokenizerError
from penstock.tokenize.tokenizer import Tokenizer

__all__ = ["Borders", "ChatEncoder", "EncodedChats"]

Borders = Literal["join", "cut"]


@dataclass(frozen=True, slots=True)
class EncodedChats:
    """Tokens of many conversations, end to end, and a bit for each."""

    ids: NDArray[np.uint32]
    offsets: NDArray[np.int64]
    """Those of conversation i are `[offsets[i], offsets[i + 1])`."""
    loss: NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_trained(self) -> NDArray[np.int64]:
        """How many tokens of each conversation are trained on."""
        upto = np.concatenate((np.zeros(1, np.int64), np.cumsum(self.loss, dtype=np.int64)))
        return np.diff(upto[self.offsets])


class ChatEncoder:
    """A tokenizer for scripts; safe to use from many threads."""

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
        self.special = special_tokens_of(tokenizer)
        self._placer = Placer(tokenizer)
        self._cuts = borders == "cut"
        self._anywhere = special_in_content

    def encode(self, scripts: list[ChatText]) -> EncodedChats:
        """The tokens of `scripts`, and which of them are trained on."""
        pieces = _Pieces()
        for script in scripts:
            self._divide(script, pieces)
        placed = self._placer.place(pieces.texts, pieces.first)
        trained = _overlapping(placed.starts, placed.stops, pieces.trained)
        lengths = np.ones(len(pieces.special), np.int64)
        special = np.array(pieces.special, np.int64)
        is_text = special < 0
        lengths[is_text] = np.diff(placed.offsets)
        stops = np.cumsum(lengths)
        total = int(stops[-1]) if len(stops) else 0
        ids, loss = np.empty(total, np.uint32), np.empty(total, np.uint8)
        places = stops[~is_text] - 1
        from_text = np.ones(total, bool)
        from_text[places] = False
        ids[places], ids[from_text] = special[~is_text], placed.ids
        loss[places] = np.array(pieces.special_trained, np.uint8)
        loss[from_text] = trained
        ends = np.concatenate((np.zeros(1, np.int64), stops))[pieces.ends]
        return EncodedChats(ids, np.concatenate((np.zeros(1, np.int64), ends)), loss)

    def _divide(self, script: ChatText, pieces: "_Pieces") -> None:
        """Cut one script into special tokens and texts."""
        place = 0
        for number, (start, stop), taken in self.special.find(script, anywhere=self._anywhere):
            if place < taken[0]:
                self._add_text(script, place, taken[0], pieces)
            pieces.special.append(number)
            pieces.special_trained.append(any(a < stop and start < b for a, b in script.trained))
            place = taken[1]
        if place < len(script.text):
            self._add_text(script, place, len(script.text), pieces)
        pieces.ends.append(len(pieces.special))

    def _add_text(self, script: ChatText, start: int, stop: int, pieces: "_Pieces") -> None:
        text = script.text
        inside = [
            (max(a, start), min(b, stop)) for a, b in script.trained if a < stop and start < b
        ]
        if self._cuts and inside:
            edges = sorted({start, stop, *(edge for span in inside for edge in span)})
            for low, high in pairwise(edges):
                said = [span for span in inside if span[0] <= low and high <= span[1]]
                pieces.add(text[low:high], [(0, high - low)] if said else [], low == 0)
        else:
            spans = [(low - start, high - start) for low, high in inside]
            pieces.add(text[start:stop], spans, start == 0)

    def compare(self, scripts: list[ChatText], limit: int = 200) -> int:
        """Compare ids with those of Hugging Face's `tokenizers` for the whole text.

        Scripts whose content spells a special token are left out: there the ids differ on
        purpose. Returns how many were compared.

        Raises:
            TokenizerError: an id differs.
        """
        if self.tokenizer.definition is None or self._cuts:
            return 0
        from tokenizers import Tokenizer as HubTokenizer

        reference = HubTokenizer.from_str(self.tokenizer.definition.text)
        reference.no_truncation()
        reference.no_padding()
        compared = 0
        for script in scripts[:limit]:
            if not self._anywhere and self.special.spelled_in(script):
                continue
            ours = self.encode([script]).ids.tolist()
            theirs = reference.encode(script.text, add_special_tokens=False).ids
            if ours != theirs:
                at = next(
                    (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), 0
                )
                raise TokenizerError(
                    f"The ids of a conversation differ from those of tokenizers at token {at}: "
                    f"{ours[at : at + 5]} and {theirs[at : at + 5]}. {self.tokenizer.name} treats "
                    "special tokens in a way that penstock does not know."
                )
            compared += 1
        return compared


class _Pieces:
    """What scripts were cut into: special tokens and texts, in order."""

    def __init__(self) -> None:
        self.special: list[int] = []
        """An id for each special token, -1 for each text."""
        self.special_trained: list[bool] = []
        self.texts: list[str] = []
        self.first: list[bool] = []
        self.trained: list[tuple[int, int]] = []
        """In bytes of all texts laid end to end."""
        self.ends: list[int] = []
        """The number of pieces up to the end of each script."""
        self._num_bytes = 0

    def add(self, text: str, trained: list[tuple[int, int]], first: bool) -> None:
        """Add a text of which the characters in `trained` are trained on."""
        self.special.append(-1)
        self.texts.append(text)
        self.first.append(first)
        plain = text.isascii()
        begin = self._num_bytes
        for start, stop in trained:
            low = start if plain else len(text[:start].encode())
            high = stop if plain else low + len(text[start:stop].encode())
            self.trained.append((begin + low, begin + high))
        self._num_bytes = begin + (len(text) if plain else len(text.encode()))


def _overlapping(
    starts: NDArray[np.int64], stops: NDArray[np.int64], spans: list[tuple[int, int]]
) -> NDArray[np.uint8]:
    """Which tokens hold at least one byte of the ascending, disjoint `spans`."""
    if not spans:
        return np.zeros(len(starts), np.uint8)
    lows, highs = np.array(spans, np.int64).T
    # The first span that ends behind the token's start is the only one that can matter.
    nearest = np.searchsorted(highs, starts, side="right")
    inside = nearest < len(lows)
    found = np.zeros(len(starts), np.uint8)
    found[inside] = lows[nearest[inside]] < stops[inside]
    return found
