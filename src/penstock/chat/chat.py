"""Renders conversations as tokens and loss masks, with one template and one tokenizer.

    chat = Chat("chatml", "gpt2", add_tokens="auto")
    tokens, loss = chat.render([{"role": "user", "content": "Hi"},
                                {"role": "assistant", "content": "Hello."}])

`loss` is 1 for the tokens to train on: what the assistant wrote, and the token that ends its turn.
A `Chat` compiles its template once, and encodes many conversations in one call.
"""

import datetime
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from penstock.chat.encode import Borders, ChatEncoder, EncodedChats
from penstock.chat.messages import ANCHOR, ChatText, JsonObject, Span, to_conversation
from penstock.chat.renderer import Renderer, Rewritten
from penstock.chat.special_tokens import Markers, TokenFinder, tokenizer_with_markers
from penstock.chat.template import load_template
from penstock.digest import digest_json
from penstock.errors import ChatError, TemplateError
from penstock.tokenize.tokenizer import load_tokenizer

_log = logging.getLogger("penstock")

Pair = tuple[NDArray[np.uint32], NDArray[np.uint8]]
"""The tokens of a conversation and its loss mask."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """One conversation as tokens; unpacks to `tokens, loss`, and `len` counts the tokens."""

    tokens: NDArray[np.uint32]
    loss: NDArray[np.uint8]
    """1 if the token is trained on."""
    text: str
    """The rendered text."""
    trained: tuple[Span, ...]
    """The characters of the text that are trained on."""
    rewritten: tuple[int, ...]
    """The numbers of the messages from which the template left something out."""

    def __iter__(self) -> Iterator[NDArray[np.uint32] | NDArray[np.uint8]]:
        return iter((self.tokens, self.loss))

    def __len__(self) -> int:
        return len(self.tokens)


class Chat:
    """Renders conversations with one template and one tokenizer; safe to use from threads.

    Args:
        template: A built-in name ("chatml", "nanochat"), Jinja source, the path of a template, of
            a tokenizer_config.json or of a directory with one, or a tokenizer object that has one.
        tokenizer: Anything that `load_tokenizer` accepts.
        date: The date that `strftime_now` in a template returns, such as "2026-01-31". Without a
            date `strftime_now` is undefined, and templates that test whether it is defined use the
            date of their publication.
        rewritten: What to do with turns from which the template leaves something out (Qwen3 drops
            the reasoning of all turns but the last): "mask" does not train on them, "train" trains
            on the rest of them, "refuse" raises.
        borders: "join" gives the ids of `apply_chat_template`; with "cut", no token crosses the
            border of the text that is trained on.
        special_in_content: Whether a special token in the text of a message is parsed as that
            token.
        add_tokens: Special tokens to add to the tokenizer, after its vocabulary. "auto" adds the
            markers of the template that the tokenizer does not have.
        settings: More variables for the template, such as `enable_thinking`.

    Raises:
        TemplateError: the template cannot be loaded, or its markers are not tokens.
        TokenizerError: the tokenizer cannot be loaded.
    """

    def __init__(  # noqa: PLR0913  (what a user decides about a chat, as flat keywords)
        self,
        template: object,
        tokenizer: object,
        *,
        date: str | datetime.date | None = None,
        rewritten: Rewritten = "mask",
        borders: Borders = "join",
        special_in_content: bool = False,
        add_tokens: Literal["auto"] | Sequence[str] | None = None,
        settings: JsonObject | None = None,
    ) -> None:
        if rewritten not in ("mask", "train", "refuse"):
            raise TemplateError(f'rewritten={rewritten!r} is not "mask", "train" or "refuse".')
        self.template = load_template(template)
        loaded = load_tokenizer(tokenizer, add_tokens=None if add_tokens == "auto" else add_tokens)
        day = _parse_date(date)
        self._source, self._add_tokens = tokenizer, add_tokens
        self._options = {
            "rewritten": rewritten,
            "borders": borders,
            "special_in_content": special_in_content,
            "settings": dict(settings or {}),
            "date": None if day is None else day.isoformat(),
        }
        tokens = dict(self.template.tokens)
        if (known := loaded.definition) is not None:
            edges = {"bos_token": known.bos_token, "eos_token": known.eos_token}
            tokens = {name: each for name, each in edges.items() if each is not None} | tokens
        # The renderer needs markers to find turns, and finding the markers that the tokenizer lacks
        # needs a rendered sample. So the renderer gets its markers twice, here and below.
        markers = Markers({*TokenFinder(loaded).tokens, *tokens.values()})
        self._renderer = Renderer(
            self.template, markers, tokens, day, rewritten, dict(settings or {})
        )
        self.tokenizer = tokenizer_with_markers(
            loaded, self.template, self._renderer.sample, markers, add=add_tokens == "auto"
        )
        self._encoder = ChatEncoder(
            self.tokenizer, borders=borders, special_in_content=special_in_content
        )
        self._renderer.markers = Markers({*self._encoder.special.tokens, *tokens.values()})
        self._has_warned = False

    def __repr__(self) -> str:
        return f"Chat({self.template.name!r}, {self.tokenizer.name!r})"

    def __reduce__(self) -> tuple[object, ...]:
        # Compiled templates and loaded tokenizers cannot be pickled; a worker makes its own.
        options: JsonObject = {**self._options, "add_tokens": self._add_tokens}
        return partial(Chat, self.template, self._source, **options), ()

    def describe(self) -> JsonObject:
        """The entry for a store's manifest: the settings that affect tokens or masks."""
        return {
            "template": self.template.recorded_name,
            "digest": self.template.digest,
            "tokens": dict(sorted(self._renderer.tokens.items())),
            **self._options,
        }

    @property
    def digest(self) -> str:
        """A digest of template, settings and tokenizer."""
        # The name is left out: the same template under another path must have the same digest.
        entry = {key: value for key, value in self.describe().items() if key != "template"}
        return digest_json([entry, self.tokenizer.digest or self.tokenizer.canary])

    def render(self, record: object) -> Rendered:
        """One conversation as tokens and loss mask.

        Args:
            record: A list of messages, or a record of any format that `to_conversation` knows.

        Raises:
            ChatError: the record is not a conversation, or the template cannot render it.
        """
        chat = self.render_text(record)
        encoded = self.encode([chat])
        self._warn([chat])
        return Rendered(encoded.ids, encoded.loss, chat.text, tuple(chat.trained), chat.rewritten)

    def render_many(self, records: Sequence[object]) -> list[Pair]:
        """The tokens and the loss mask of each conversation; all are encoded in one call."""
        chats = [self.render_text(record) for record in records]
        encoded = self.encode(chats)
        self._warn(chats)
        edges = encoded.offsets.tolist()
        return [
            (encoded.ids[start:stop], encoded.loss[start:stop]) for start, stop in pairwise(edges)
        ]

    def render_text(self, record: object) -> ChatText:
        """The text of one conversation before it is encoded, and which characters to train on."""
        chat = self._renderer.render_text(to_conversation(record))
        _refuse_bad_text(chat.text)
        _refuse_double_bos(chat, self._renderer.tokens.get("bos_token"))
        return chat

    def encode(self, chats: list[ChatText]) -> EncodedChats:
        """The tokens of many rendered conversations, concatenated, and their loss mask."""
        return self._encoder.encode(chats)

    def prompt(self, record: object) -> NDArray[np.uint32]:
        """The tokens of the conversation, and of the words that ask the model for an answer."""
        return self.encode([self._renderer.prompt(to_conversation(record))]).ids

    def begins_with(self, token: str) -> bool:
        """Whether the template begins a conversation with `token`."""
        return self._renderer.sample.startswith(token)

    @property
    def ends_turns(self) -> bool:
        """Whether the template writes a token after a turn of the assistant."""
        return self._renderer.ends_turns

    def report(self) -> "TurnReport":
        """A `TurnReport` for this template, with all counts at zero."""
        return TurnReport(self.template.name, self._renderer.marks_generation)

    def _warn(self, chats: list[ChatText]) -> None:
        """Log once for each `Chat` that turns, or the ends of turns, are not trained on."""
        if not self._has_warned and any(c.num_without_reasoning or c.without_end for c in chats):
            report = self.report()
            report.add(chats)
            # There is no lock: two threads may both log the warning, which does no harm.
            self._has_warned = report.log()

    def compare(self, chats: list[ChatText]) -> int:
        """Compare the ids of `chats` with those of `tokenizers`; see `ChatEncoder.compare`."""
        return self._encoder.compare(chats)


def render(messages: object, template: object, tokenizer: object, **options: Any) -> Rendered:
    """One conversation as tokens and loss mask.

    To render more than one, make a `Chat` and keep it.

    Args:
        messages: A list of messages, or a record such as Alpaca's or ShareGPT's.
        template: See `Chat`.
        tokenizer: See `Chat`.
        options: The keywords of `Chat`.

    >>> messages = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]
    >>> tokens, loss = render(messages, "chatml", "gpt2", add_tokens="auto")
    >>> tokens[loss == 1].tolist()  # "2", and <|im_end|>, which follows the vocabulary
    [17, 50258]
    """
    return Chat(template, tokenizer, **options).render(messages)


def _parse_date(date: str | datetime.date | None) -> datetime.date | None:
    if date is None or isinstance(date, datetime.date):
        return date
    try:
        return datetime.date.fromisoformat(date)
    except ValueError:
        raise TemplateError(f"date={date!r} is not a date such as 2026-01-31.") from None


def _refuse_bad_text(text: str) -> None:
    """Raise if the text has half of a surrogate pair, which UTF-8 cannot encode, or `ANCHOR`."""
    if text.isascii():  # the usual case; Python reads a flag and not the characters
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        at = error.start
        raise ChatError("lone_surrogate", f"A lone surrogate is at character {at:,}.") from None
    if ANCHOR in text:
        raise ChatError("reserved_text", f"The text has {ANCHOR!r}, which is reserved. Remove it.")


def _refuse_double_bos(chat: ChatText, token: str | None) -> None:
    """Raise if the template wrote its begin token twice."""
    # The second token must be the template's: a user's message may contain the same text.
    begins = 2 * token if token else ""
    first = chat.content[0][0] if chat.content else len(chat.text)
    if begins and chat.text.startswith(begins) and len(begins) <= first:
        raise ChatError("double_bos", f"The template begins with {token!r} twice. Remove one.")


@dataclass
class TurnReport:
    """Counts turns that are not trained on, or whose end is not trained on; safe for threads."""

    template: str
    marks_generation: bool
    """Whether the template has `{% generation %}` blocks."""
    # One array for each call of `add` or `merge`: appending to a list needs no lock. Its columns
    # are turns without their reasoning, and turns without an end that is trained on. Its rows count
    # all conversations, these turns, and the conversations that have some.
    _counted: list[NDArray[np.int64]] = field(default_factory=list)

    @property
    def num_conversations(self) -> int:
        """The number of conversations that were counted."""
        return int(self._total()[0, 0])

    def merge(self, other: "TurnReport") -> None:
        """Add the counts of another report."""
        self._counted.append(other._total())

    def add(self, chats: Iterable[ChatText], *, ended: bool = False) -> None:
        """Count some conversations.

        Args:
            chats: The conversations.
            ended: Whether a build adds an end token after each conversation. That token is
                trained on if it ends a turn.
        """
        turns = [
            # The added end token ends the last turn, if only blanks come between them.
            (each.num_without_reasoning, len(each.without_end) - (ended and _ends_open(each)))
            for each in chats
        ]
        found = np.array(turns, np.int64).reshape(-1, 2)
        self._counted.append(np.stack(([len(found)] * 2, found.sum(0), (found > 0).sum(0))))

    def _total(self) -> NDArray[np.int64]:
        return sum(self._counted, np.zeros((3, 2), np.int64))

    def log(self) -> bool:
        """Log a warning for each kind of turn that was counted; returns whether there were any."""
        advice = "Use a template that ends each turn with the same token as the last turn."
        if self.marks_generation:
            advice = (
                "Its {% generation %} blocks leave out the token that ends a turn: write the token "
                "inside the block."
            )
        reasons = (
            f": the template {self.template} leaves out their reasoning_content, so the model "
            'never wrote the rest in this form. rewritten="train" (--rewritten train) trains on '
            "the rest.",
            f" to the end under the template {self.template}, so a model does not learn to stop "
            f"there. {advice}",
        )
        total = self._total()
        for (number, turns, affected), reason in zip(total.T.tolist(), reasons, strict=True):
            if turns:
                found = f"{turns:,} turn is" if turns == 1 else f"{turns:,} turns are"
                among = f"In {affected:,} of {number:,} conversations"
                _log.warning("%s %s not trained on%s", among, found, reason)
        return bool(total[1].any())


def _ends_open(chat: ChatText) -> bool:
    """Whether the last turn ends the text, and has no end token."""
    return bool(chat.without_end) and not chat.text[chat.without_end[-1] :].strip()
