"""A template and a tokenizer, ready to render conversations.

    chat = Chat("chatml", "gpt2", add_tokens="auto")
    tokens, loss = chat.render([{"role": "user", "content": "Hi"},
                                {"role": "assistant", "content": "Hello."}])

`loss` is 1 for tokens to train on: what the assistant said, and the token that ends its
turn. Templates are compiled and their habits found once; many conversations are tokenized
in one call.
"""

import datetime
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from penstock.chat.encode import Borders, ChatEncoder, EncodedChats
from penstock.chat.messages import ChatText, Span, to_conversation
from penstock.chat.renderer import Renderer, Rewritten
from penstock.chat.report import TurnReport
from penstock.chat.required_tokens import tokenizer_with_markers
from penstock.chat.special_tokens import Markers, special_tokens_of
from penstock.chat.template import Template, load_template
from penstock.chat.token_spans import ANCHOR
from penstock.digest import digest_json
from penstock.errors import ChatError, TemplateError
from penstock.tokenize.tokenizer import Tokenizer, load_tokenizer

__all__ = ["Chat", "Rendered", "render"]


@dataclass(frozen=True, slots=True)
class Rendered:
    """One conversation as tokens; unpacks to `tokens, loss`."""

    tokens: NDArray[np.uint32]
    loss: NDArray[np.uint8]
    """1 where the token is trained on."""
    text: str
    """The rendered text."""
    trained: tuple[Span, ...]
    """The characters of the text that are trained on."""
    rewritten: tuple[int, ...]
    """Numbers of messages of which the template left something out."""

    def __iter__(self) -> Iterator[NDArray[Any]]:
        return iter((self.tokens, self.loss))

    def __len__(self) -> int:
        return len(self.tokens)


class Chat:
    """Renders conversations with one template and one tokenizer; safe to use from threads.

    Args:
        template: A built-in name ("chatml", "nanochat"), Jinja source, a path to a template,
            a tokenizer_config.json or a directory with one, or a tokenizer object that has one.
        tokenizer: What `load_tokenizer` takes.
        date: What `strftime_now` in a template gives, "2026-01-31". Without it the name is not
            defined, and templates that look use the date they were published with.
        rewritten: Turns of which the template leaves something out (Qwen3 drops the thoughts
            of all turns but the last): "mask" does not train on them, "train" trains on what
            is left, "refuse" raises.
        borders: "join" gives the ids of `apply_chat_template`, "cut" lets no token straddle
            the border of what is trained on.
        special_in_content: Whether a special token that the text of a message holds is that token.
        add_tokens: Special tokens to add to the tokenizer, after its vocabulary. "auto" adds the
            markers of the template that it does not have.
        settings: More names for the template, such as `enable_thinking`.

    Raises:
        TemplateError: the template cannot be loaded, or its markers are no tokens.
        TokenizerError: the tokenizer cannot be loaded.
    """

    def __init__(  # noqa: PLR0913  (what a user decides about a chat, as flat keywords)
        self,
        template: Any,
        tokenizer: Any,
        *,
        date: str | datetime.date | None = None,
        rewritten: Rewritten = "mask",
        borders: Borders = "join",
        special_in_content: bool = False,
        add_tokens: Literal["auto"] | Sequence[str] | None = None,
        settings: dict[str, Any] | None = None,
    ) -> None:
        if rewritten not in ("mask", "train", "refuse"):
            raise TemplateError(f'rewritten={rewritten!r} is not "mask", "train" or "refuse".')
        self.template = load_template(template)
        loaded = load_tokenizer(tokenizer, add_tokens=None if add_tokens == "auto" else add_tokens)
        self._source, self._add_tokens = tokenizer, add_tokens
        self._options = {
            "rewritten": rewritten,
            "borders": borders,
            "special_in_content": special_in_content,
            "settings": dict(settings or {}),
            "date": None if date is None else _date(date).isoformat(),
        }
        tokens = {**_tokens_of(loaded), **self.template.tokens}
        markers = Markers({*special_tokens_of(loaded).tokens, *tokens.values()})
        self._renderer = Renderer(
            self.template,
            markers,
            tokens,
            date=None if date is None else _date(date),
            rewritten=rewritten,
            settings=dict(settings or {}),
        )
        self.tokenizer = tokenizer_with_markers(
            loaded, self.template, self._renderer.sample(), markers, add=add_tokens == "auto"
        )
        self._encoder = ChatEncoder(
            self.tokenizer, borders=borders, special_in_content=special_in_content
        )
        self._renderer.markers = Markers({*self._encoder.special.tokens, *tokens.values()})
        self._has_warned = False

    def __repr__(self) -> str:
        return f"Chat({self.template.name!r}, {self.tokenizer.name!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        # Compiled templates and tokenizers stay behind; a worker process makes its own.
        options = {**self._options, "add_tokens": self._add_tokens}
        return _rebuilt, (self.template, self._source, options)

    def describe(self) -> dict[str, Any]:
        """What decides tokens and masks beside the tokenizer, as plain JSON, for a manifest."""
        return {
            "template": self.template.name,
            "digest": self.template.digest,
            "tokens": dict(sorted(self._renderer.tokens.items())),
            **self._options,
        }

    @property
    def digest(self) -> str:
        """A digest of template, settings and tokenizer."""
        told = {key: value for key, value in self.describe().items() if key != "template"}
        return digest_json([told, self.tokenizer.digest or self.tokenizer.canary])

    def render(self, record: Any) -> Rendered:
        """One conversation as tokens and loss mask.

        Args:
            record: A list of messages, or a record of any shape that `to_conversation` knows.

        Raises:
            ChatError: it is no conversation, or the template cannot render it.
        """
        script = self.render_text(record)
        encoded = self.encode([script])
        self._warn([script])
        return Rendered(
            encoded.ids, encoded.loss, script.text, tuple(script.trained), script.rewritten
        )

    def render_many(self, records: Sequence[Any]) -> list[tuple[NDArray[Any], NDArray[Any]]]:
        """Tokens and loss mask of each conversation; tokenized in one call."""
        scripts = [self.render_text(record) for record in records]
        encoded = self.encode(scripts)
        self._warn(scripts)
        edges = encoded.offsets.tolist()
        return [
            (encoded.ids[start:stop], encoded.loss[start:stop]) for start, stop in pairwise(edges)
        ]

    def render_text(self, record: Any) -> ChatText:
        """One conversation as text, before it is tokens."""
        script = self._renderer.render_text(to_conversation(record))
        _refuse_surrogates(script.text)
        _refuse_anchor(script.text)
        _refuse_double(script, self._renderer.tokens.get("bos_token"))
        return script

    def encode(self, scripts: list[ChatText]) -> EncodedChats:
        """The tokens of many scripts, end to end."""
        return self._encoder.encode(scripts)

    def prompt(self, record: Any) -> NDArray[np.uint32]:
        """The tokens that ask the model for the next message of the assistant."""
        return self.encode([self._renderer.prompt(to_conversation(record))]).ids

    def begins_with(self, token: str) -> bool:
        """Whether the template begins a conversation with `token`."""
        return self._renderer.sample().startswith(token)

    @property
    def ends_turns(self) -> bool:
        """Whether the template writes a token behind what the assistant says."""
        return self._renderer.ends_turns

    def report(self) -> TurnReport:
        """An empty count of what is lost of conversations under this template."""
        return TurnReport(self.template.name, self._renderer.marks_generation)

    def _warn(self, scripts: list[ChatText]) -> None:
        """Log once what these conversations lose, where they are the first that do."""
        if not self._has_warned and any(
            each.num_without_reasoning or each.without_end for each in scripts
        ):
            report = self.report()
            report.add(scripts)
            self._has_warned = report.log()

    def compare(self, scripts: list[ChatText]) -> int:
        """Compare ids with the reference; see `ChatEncoder.compare`."""
        return self._encoder.compare(scripts)


def render(messages: Any, template: Any, tokenizer: Any, **options: Any) -> Rendered:
    """One conversation as tokens and loss mask.

    For more than one, make a `Chat` and keep it.

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


def _rebuilt(template: Template, tokenizer: Any, options: dict[str, Any]) -> Chat:
    return Chat(template, tokenizer, **options)


def _date(date: str | datetime.date) -> datetime.date:
    if isinstance(date, datetime.date):
        return date
    try:
        whole = len(date) <= len("2026-01-31")
        return (datetime.date if whole else datetime.datetime).fromisoformat(date)
    except ValueError:
        raise TemplateError(f"date={date!r} is not a date such as 2026-01-31.") from None


def _tokens_of(tokenizer: Tokenizer) -> dict[str, str]:
    """The special tokens that a template may name."""
    definition = tokenizer.definition
    if definition is None:
        return {}
    named = {"bos_token": definition.bos_token, "eos_token": definition.eos_token}
    return {name: token for name, token in named.items() if token is not None}


def _refuse_surrogates(text: str) -> None:
    """Raise where half of a character is in a JSON escape alone, which no encoding can write."""
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ChatError(
            "lone_surrogate", f"A lone surrogate is at character {error.start:,} of the text."
        ) from None


def _refuse_anchor(text: str) -> None:
    """Raise where the text holds the token that penstock puts before some texts."""
    if ANCHOR in text:
        raise ChatError(
            "reserved_text",
            f"The text holds {ANCHOR!r} at character {text.index(ANCHOR):,}, which penstock uses "
            "inside tokenizers.",
        )


def _refuse_double(script: ChatText, token: str | None) -> None:
    """Raise where the text begins with two begin tokens that the template wrote."""
    begins = 2 * token if token else ""
    if begins and script.text.startswith(begins):
        first = script.content[0][0] if script.content else len(script.text)
        if len(begins) <= first:
            raise ChatError(
                "double_bos",
                f"The template begins the text with {token!r} twice. Mend the template.",
            )
