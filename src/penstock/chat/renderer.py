r"""Renders conversations with a template, and checks the assistant's turns in two ways.

The characters to train on are found in two ways, which must agree, or the conversation is refused:

- Runs (see `provenance`) record which characters come from which message, and `turns` finds the
  turns around them.
- For each new shape of conversation, every text in it is replaced by a word that occurs nowhere
  else, and the rendered text is searched for these words. The shape, which is everything that a
  template may test, stays the same: roles, keys, blanks at the ends of a text, and tags inside it:

      "<think>\nIt is odd.\n</think>\n\nNo."   →   "<think>\nZqx0x\n</think>\n\nZqx1x"
"""

import datetime
import json
import re
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from penstock.chat.jinja import GENERATION, Program
from penstock.chat.messages import (
    ANSWER,
    QUESTION,
    ChatText,
    Conversation,
    JsonObject,
    Message,
    Span,
    gaps,
    merged,
)
from penstock.chat.provenance import Leaf, Traced, trace, traced_join
from penstock.chat.special_tokens import Markers
from penstock.chat.template import Template, write_plain
from penstock.chat.turns import (
    Turn,
    TurnFinder,
    TurnFormat,
    find_format,
    generation_turns,
    hulls_of,
)
from penstock.errors import ChatError

Rewritten = Literal["mask", "train", "refuse"]

# The forms in which templates take the content of a user and of the assistant; the most common
# pair of forms comes first.
_FORMS = (("string", "string"), ("parts", "parts"), ("parts", "string"), ("string", "parts"))

# The most shapes to remember as checked; a dataset has some hundreds.
_MAX_SHAPES = 10_000
# <|im_end|>, <think>, </think> and [INST]: what templates look for inside a text.
_TAG = re.compile(r"(<\|[^|<>\s]{1,40}\|>|</?[A-Za-z_][\w:.-]{0,40}>|\[/?[A-Z][A-Z_]{1,30}\])")
# Templates write the texts under these keys. Other strings, such as a role, may decide what else a
# template writes, so they are not replaced.
_WRITTEN = frozenset(("content", "text", "reasoning_content", "reasoning", "thinking"))


def shape_of(conversation: Conversation) -> tuple[Hashable, ...]:
    """The shape of a conversation: roles, keys, and which texts are empty or contain tags.

    For two conversations of equal shape, a template usually writes the same words around the texts.
    The renderer checks this.
    """
    return (
        tuple(_shape(message) for message in conversation.messages),
        bool(conversation.tools),
        repr(conversation.settings),
    )


def _shape(value: object, key: str = "") -> Hashable:
    if isinstance(value, dict):
        return tuple((name, _shape(item, name)) for name, item in value.items())
    if isinstance(value, list | tuple):
        return tuple(_shape(item, key) for item in value)
    if isinstance(value, str) and key in _WRITTEN:
        # Templates test for empty content, strip blanks, and split at tags; nothing else of the
        # text decides what they write around it.
        tags = tuple(_TAG.findall(value)) if "<" in value or "[" in value else ()
        return bool(value.strip()), value[:1].isspace(), value[-1:].isspace(), tags
    # The values of these three keys decide what a template writes. Of all other values only the
    # type matters.
    return value if key in ("role", "type", "train") else type(value)


def _mapped(value: object, change: Callable[[str], object], key: str = "") -> Any:
    """A copy of `value` in which `change` has replaced the texts under the keys of `_WRITTEN`."""
    if isinstance(value, dict):
        return {name: _mapped(item, change, name) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_mapped(item, change, key) for item in value]
    return change(value) if isinstance(value, str) and key in _WRITTEN else value


def texts_of(message: Message) -> list[str]:
    """The texts of a message that a template should write."""
    found: list[str] = []
    # Tool calls are left out: they are written as JSON, with escapes.
    _mapped({key: item for key, item in message.items() if key != "tool_calls"}, found.append)
    return found


def with_unique_words(conversation: Conversation) -> tuple[Conversation, list[tuple[str, int]]]:
    """`conversation` with unique words for its texts; each word with the number of its message."""
    words: list[tuple[str, int]] = []

    def replaced(text: str, number: int) -> str:
        # Text between tags gets separate words, because a template may drop one part of it.
        pieces = _TAG.split(text)
        for index, piece in enumerate(pieces):
            inner = piece.strip()
            if inner and index % 2 == 0:  # odd pieces are the tags
                # The last x keeps Zqx1x from being found inside Zqx11x.
                word = f"Zqx{len(words)}x"
                words.append((word, number))
                pieces[index] = piece.replace(inner, word, 1)
        return "".join(pieces)

    messages = [
        _mapped(message, partial(replaced, number=number))
        for number, message in enumerate(conversation.messages)
    ]
    return replace(conversation, messages=messages), words


@dataclass
class Renderer:
    """Renders conversations with one template and its settings; safe to use from many threads."""

    template: Template
    markers: Markers
    tokens: dict[str, str]
    """The special tokens, by the names that templates use."""
    date: datetime.date | None = None
    rewritten: Rewritten = "mask"
    settings: JsonObject = field(default_factory=dict)
    _turn_formats: dict[str, TurnFormat] = field(default_factory=dict, init=False)
    _checked: dict[Hashable, tuple[str, ...]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._program = Program(self.template.source, self.template.name)
        # Whether the template has {% generation %} blocks for the text to train on. Other templates
        # have the word "generation" too, in `add_generation_prompt`.
        self.marks_generation = "endgeneration" in self.template.source
        self._writes_plain = self.template.is_builtin and not self.settings
        # "either" changes nothing in a message, so that `_find_forms` can try each form.
        self._forms: dict[str, str] = {"user": "either", "assistant": "either"}
        self.sample, self._forms = self._find_forms()

    def render_text(self, conversation: Conversation) -> ChatText:
        """The text of `conversation`, and which of its characters are trained on.

        Raises:
            ChatError: the template refuses the conversation, or its turns cannot be found.
        """
        # Plain conversations of a built-in template need neither Jinja nor the search for turns.
        if self._writes_plain and conversation.tools is None and not conversation.settings:
            written = write_plain(self.template.name, conversation.messages)
            if written is not None:
                return written
        traced, turns = self._render(conversation)
        self._cross_check(conversation, traced)
        text = traced.plain
        rewritten = tuple(_left_out(conversation, traced, turns))
        if rewritten and self.rewritten == "refuse":
            raise ChatError(
                "rewritten",
                f"The template leaves out text of the assistant in messages {list(rewritten)}, and "
                'rewritten="refuse" rejects such conversations.',
            )
        num_without_reasoning = 0
        if self.rewritten == "mask":
            # The model never wrote a rewritten turn in this form, so it must not learn it.
            masked = {turn.message for turn in turns} & set(rewritten)
            reasoning = [conversation.messages[each].get("reasoning_content") for each in masked]
            num_without_reasoning = sum(
                isinstance(each, str) and not _is_in(each, text) for each in reasoning
            )
            turns = [turn for turn in turns if turn.message not in masked]
        # A message may have several turns, one for each block; the last one ends it.
        # A marker has a few characters, so the last 200 of a turn are enough.
        is_end = self.markers.is_end
        ends = {turn.message: turn.span[1] for turn in turns}.values()
        without_end = (at for at in ends if not is_end(text[max(0, at - 200) : at].rstrip()))
        return ChatText(
            text,
            _content(traced),
            merged(span for turn in turns for span in gaps(turn.untrained, *turn.span)),
            rewritten,
            num_without_reasoning,
            tuple(without_end),
        )

    @property
    def ends_turns(self) -> bool:
        """Whether the template ends a turn of the assistant with a marker."""
        return self.marks_generation or self._turn_format(Conversation([])).end is not None

    def prompt(self, conversation: Conversation) -> ChatText:
        """The conversation with the words that ask for an answer; nothing of it is trained on."""
        text = self._run(conversation, conversation.messages, True)
        return ChatText(text.plain, _content(text), [])

    def _render(self, conversation: Conversation) -> tuple[Traced, list[Turn]]:
        """A rendered conversation and the turns found in it."""
        text = self._run(conversation, conversation.messages)
        if self.marks_generation:
            turns = generation_turns(text, conversation)
        else:
            form = self._turn_format(conversation)
            run = partial(self._run, conversation)
            turns = TurnFinder(text, conversation, form, self.markers, run).find_all()
        _refuse_other_messages(text, turns)
        return text, turns

    def _run(
        self, conversation: Conversation, messages: list[Message], ask: bool = False
    ) -> Traced:
        """Run the template on `messages`, with the tools and settings of `conversation`."""
        traced = [
            self._in_form(trace(message, Leaf(number, "", "")))
            for number, message in enumerate(messages)
        ]
        # The order matters: a record's settings override those of the chat, and neither overrides
        # the messages. Settings are traced, so that they cannot write special tokens.
        variables = {
            **self.tokens,
            **self.settings,
            **trace(conversation.settings, Leaf(-1, "settings", "")),
            "messages": traced,
            "tools": trace(conversation.tools, Leaf(-1, "tools", "")),
            "documents": None,
            "add_generation_prompt": ask,
        }
        return self._program.run(variables, self.date)

    def _in_form(self, message: Message) -> Message:
        """`message` with its content as the template takes it: a string, or a list of parts."""
        content = message.get("content")
        form = self._forms.get("assistant" if message["role"] == "assistant" else "user", "string")
        # Multimodal templates loop over parts; over a string they would loop over characters.
        if isinstance(content, str) and form == "parts":
            return {**message, "content": [{"type": "text", "text": content}]}
        if not isinstance(content, list):
            return message
        parts = [
            {"type": "text", "text": part} if isinstance(part, str) else part for part in content
        ]
        if form != "string":
            return {**message, "content": parts}
        for part in parts:
            if part.get("type", "text") != "text":
                raise ChatError(
                    "not_text",
                    f"The template writes only text, and a part is of type {part['type']!r:.40}.",
                )
        return {**message, "content": traced_join(part["text"] for part in parts)}

    def _find_forms(self) -> tuple[str, dict[str, str]]:
        """A rendered question and answer, and the form of content that the template reads by role.

        A form is "string", "parts" or "either". The rendered text is "" if the template omits the
        question or the answer.
        """
        for forms in _FORMS:
            if text := self._try_forms(forms):
                break
        else:
            return "", dict.fromkeys(("user", "assistant"), "string")
        found = dict(zip(("user", "assistant"), forms, strict=True))
        for role in found:
            other = {**found, role: "parts" if found[role] == "string" else "string"}
            if self._try_forms(tuple(other.values())) == text:
                found[role] = "either"
        return text, found

    def _try_forms(self, forms: tuple[str, ...]) -> str:
        """A question and an answer in these forms, rendered; "" if the template omits either."""
        messages = [
            {"role": role, "content": [{"type": "text", "text": text}] if form == "parts" else text}
            for role, text, form in zip(
                ("user", "assistant"), (QUESTION, ANSWER), forms, strict=True
            )
        ]
        try:
            written = self._run(Conversation([]), messages).plain
        except ChatError:
            return ""
        return written if QUESTION in written and ANSWER in written else ""

    def _turn_format(self, conversation: Conversation) -> TurnFormat:
        # A template may write another prompt with other settings or with tools.
        key = json.dumps([conversation.settings, bool(conversation.tools)], sort_keys=True)
        found = self._turn_formats.get(key)
        if found is None:
            found = find_format(partial(self._run, conversation), self.markers)
            self._turn_formats[key] = found
        return found

    def _cross_check(self, conversation: Conversation, text: Traced) -> None:
        """Compare runs with a search for unique words, once for each shape of conversation."""
        shape = shape_of(conversation)
        # The template's own text must be the same as in the checked conversation: a template may
        # test a text in a way that its shape does not show.
        if self._checked.get(shape) == _template_texts(text):
            return
        other, words = with_unique_words(conversation)
        found, turns = self._render(other)
        for word, number in words:
            for match in re.finditer(word, found.plain):
                self._check_word(other, found, turns, number, match.span())
        # Two threads may do this at the same time. They write the same entry, or check a shape
        # twice, which does no harm.
        if len(self._checked) >= _MAX_SHAPES:
            self._checked.clear()
        self._checked[shape] = _template_texts(found)

    def _check_word(
        self, conversation: Conversation, text: Traced, turns: list[Turn], number: int, span: Span
    ) -> None:
        """Raise if runs or turns do not agree with the search about a word of message `number`."""
        runs = [run for run in text._runs if run[2].message == number]
        if not any(run[0] <= span[0] and span[1] <= run[1] for run in runs):
            raise ChatError(
                "untraceable",
                f"The template {self.template.name} writes message {number} in a way that penstock "
                "cannot trace, so it cannot know which characters are the assistant's. Use a "
                "template that writes the content as it is, or strips it.",
            )
        turns_at = {turn.message for turn in turns if _overlap(turn.span, span)}
        is_trained = conversation.is_trained(number)
        # A `{% generation %}` block may leave out any text of its turn.
        is_missing = is_trained and not self.marks_generation and not turns_at
        if turns_at - {number} or is_missing or (turns_at and not is_trained):
            raise ChatError(
                "disagreement",
                f"The text of message {number} was searched in two ways in the output of the "
                f"template {self.template.name}, and the results differ. So the loss mask could "
                "be wrong. Use another template.",
            )


def _content(text: Traced) -> list[Span]:
    """The characters that come from messages."""
    return merged(run[:2] for run in text._runs if run[2] is not GENERATION)


def _template_texts(text: Traced) -> tuple[str, ...]:
    """The texts that the template wrote, in order."""
    return tuple(text.plain[slice(*span)] for span in gaps(_content(text), 0, len(text)))


def _left_out(conversation: Conversation, text: Traced, turns: list[Turn]) -> Iterator[int]:
    """The numbers of the assistant's messages from which the template leaves out some text."""
    # Each message from its first to its last character, with the template's text between them.
    spans = [(*turn.span, turn.message) for turn in turns]
    hulls = hulls_of([*spans, *((run[0], run[1], run[2].message) for run in text._runs)])
    for number, message in enumerate(conversation.messages):
        if conversation.is_trained(number):
            written = text.plain[slice(*hulls.get(number, (0, 0)))]
            if not all(_is_in(each, written) for each in texts_of(message)):
                yield number


def _refuse_other_messages(text: Traced, turns: list[Turn]) -> None:
    """Raise if a turn contains characters of another message."""
    for start, stop, leaf, _ in text._runs:
        for turn in turns:
            is_other = leaf.message not in (turn.message, GENERATION.message)
            if is_other and _overlap(turn.span, (start, stop)):
                raise ChatError(
                    "tangled",
                    f"The turn of message {turn.message} contains text of message {leaf.message}, "
                    "so penstock cannot know which characters are the assistant's.",
                )


def _overlap(one: Span, two: Span) -> bool:
    return one[0] < two[1] and two[0] < one[1]


def _is_in(text: str, written: str) -> bool:
    """Whether `written` contains `text`, ignoring blanks."""
    # Templates strip lines and join paragraphs, which loses no words.
    return text.strip() in written or "".join(text.split()) in "".join(written.split())
