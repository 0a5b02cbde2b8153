r"""Renders conversations with a template, finds the assistant's turns and checks them.

A turn of the assistant begins after the generation prompt, the words that ask the model for an
answer, and ends with its end marker. Everything between them belongs to the turn: reasoning, text,
tool calls.

    <|im_start|>assistant\n<think>\nHm.\n</think>\n\nYes.<|im_end|>\n<|im_start|>user…
    └─ generation prompt ─┘└──────────── trained ───────────────────┘

The characters to train on are found in two ways, which must agree, or the conversation is refused:

- Runs (see `provenance`) record which characters come from which message. To learn what the
  template writes around them (`TurnFormat`), penstock renders a question and an answer, once for
  each template. A template with `{% generation %}` blocks marks its turns itself.
- For each new shape of conversation, every text in it is replaced by a word that occurs nowhere
  else, and the rendered text is searched for these words. The shape, which is everything that a
  template may test, stays the same: roles, keys, blanks at the ends of a text, and tags inside it:

      "<think>\nIt is odd.\n</think>\n\nNo."   →   "<think>\nZqx0x\n</think>\n\nZqx1x"
"""

import datetime
import json
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import itemgetter
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
from penstock.chat.provenance import Leaf, Run, Traced, trace, traced_join
from penstock.chat.special_tokens import Markers
from penstock.chat.template import Template, write_plain
from penstock.errors import ChatError, TemplateError

Rewritten = Literal["mask", "train", "refuse"]

# The forms in which templates take the content of a user and of the assistant; the most common
# pair of forms comes first.
_FORMS = (("string", "string"), ("parts", "parts"), ("parts", "string"), ("string", "parts"))

# The most shapes to remember as checked; a dataset has some hundreds.
_MAX_SHAPES = 10_000
Render = Callable[[list[Message], bool], Traced]
"""Renders messages; the second argument says whether to ask for an answer."""

_ANSWERED: Message = {"role": "assistant", "content": ANSWER}
# <|im_end|>, <think>, </think> and [INST]: what templates look for inside a text.
_TAG = re.compile(r"(<\|[^|<>\s]{1,40}\|>|</?[A-Za-z_][\w:.-]{0,40}>|\[/?[A-Z][A-Z_]{1,30}\])")
# Templates write the texts under these keys. Other strings, such as a role, may decide what else a
# template writes, so they are not replaced.
_WRITTEN = frozenset(("content", "text", "reasoning_content", "reasoning", "thinking"))


@dataclass(frozen=True, slots=True)
class TurnFormat:
    """The text that a template writes around a turn of the assistant."""

    prompt: str
    """The text that asks for an answer; "" if the template has none."""
    end: str | None
    """The marker that ends a turn; None if the template has none."""


@dataclass(frozen=True, slots=True)
class Turn:
    """The characters of one turn that the model learns to write."""

    message: int
    span: Span
    untrained: tuple[Span, ...] = ()
    """Characters inside the turn that are only read, such as the output of a tool."""


def find_format(render: Render, markers: Markers) -> TurnFormat:
    """Find the text that a template writes around an answer, by rendering one.

    Raises:
        TemplateError: the template does not render a question and an answer.
    """
    pair: list[Message] = [{"role": "user", "content": QUESTION}, _ANSWERED]
    try:
        text = render(pair, False).plain
    except ChatError as error:
        raise TemplateError(
            f"The template cannot render a question and an answer: {error}"
        ) from error
    if text.count(ANSWER) != 1 or text.count(QUESTION) != 1:
        raise TemplateError(
            f"The template writes a question and its answer {text.count(QUESTION)} and "
            f"{text.count(ANSWER)} times, not once each, so the assistant's turns cannot be found."
        )
    # The first group of markers after the answer ends a turn: <|im_end|>, or </s><s>.
    tail = text[text.index(ANSWER) + len(ANSWER) :]
    end = "".join(tail[slice(*span)] for span in markers.first_group(tail))
    return TurnFormat(_prompt(render, pair[:1]), end or None)


def _prompt(render: Render, messages: list[Message]) -> str:
    """The text that the template adds when it is asked for an answer."""
    try:
        plain, asked = render(messages, False).plain, render(messages, True).plain
    except ChatError:
        return ""
    # If the template changes earlier text when it asks for an answer, its prompt cannot be found.
    prompt = asked[len(plain) :] if asked.startswith(plain) else ""
    return prompt if prompt.strip() else ""


def hulls_of(spans: Iterable[tuple[int, int, int]]) -> dict[int, Span]:
    """For each message, the span from its first to its last character.

    Args:
        spans: Ranges of characters: the start, the stop, and the number of the message.
    """
    hulls: dict[int, Span] = {}
    for start, stop, message in spans:
        low, high = hulls.get(message, (start, stop))
        hulls[message] = min(low, start), max(high, stop)
    return hulls


def _hulls(runs: Sequence[Run]) -> dict[int, Span]:
    """For each message, the span from its first to its last character, without repeated text.

    A template may write some text again, such as the name of a tool above its result.
    """
    firsts = ((start, stop, leaf.message) for start, stop, leaf, _ in _first_runs(runs))
    return hulls_of(each for each in firsts if each[2] >= 0)


def _first_runs(runs: Sequence[Run]) -> Iterator[Run]:
    """The runs with characters of a leaf that no earlier run has."""
    # For each leaf, by identity, the number of its characters written so far.
    seen: dict[int, int] = {}
    for run in sorted(runs, key=itemgetter(0)):
        start, stop, leaf, offset = run
        known = seen.get(id(leaf), 0)
        # Changed text (-1) counts as all of the leaf: its characters cannot be compared.
        upto = len(leaf.text) if offset < 0 else offset + stop - start
        if upto > known or not known:
            seen[id(leaf)] = upto
            yield run


def _only_read(runs: Sequence[Run], number: int) -> tuple[Span, ...]:
    found = [(a, b) for a, b, leaf, _ in runs if leaf.message == number and not leaf.train]
    return tuple(merged(found))


@dataclass
class TurnFinder:
    """Finds the turns to train on, with the runs (see `provenance`) and the format of a turn."""

    text: Traced
    conversation: Conversation
    form: TurnFormat
    markers: Markers
    render: Render

    def __post_init__(self) -> None:
        self.hulls = _hulls(self.text._runs)

    def find_all(self) -> list[Turn]:
        """The turns of all messages that are trained on."""
        numbers = range(len(self.conversation.messages))
        trained = filter(self.conversation.is_trained, numbers)
        return [self.find(number) for number in trained if number in self.hulls]

    def find(self, number: int) -> Turn:
        """The turn of one message."""
        first, last = self.hulls[number]
        for other, (low, high) in self.hulls.items():
            if other != number and low < last and high > first:
                raise ChatError(
                    "tangled",
                    f"The template writes parts of message {other} inside message {number}, so "
                    "penstock cannot separate the assistant's turn from them.",
                )
        span = (self._start(number, first), self._stop(number, last))
        return Turn(number, span, _only_read(self.text._runs, number))

    def _start(self, number: int, first: int) -> int:
        """The index of the turn's first character, which follows the prompt for the turn."""
        before, written = _written_before(self.text.plain, first, self.hulls)
        asked = written.rfind(self.form.prompt) if self.form.prompt else -1
        if asked >= 0:
            start = before + asked + len(self.form.prompt)
        else:
            runs = (run for run in self.text._runs if run[0] == first)
            leaf = next(leaf for _, _, leaf, _ in runs if leaf.message == number)
            if leaf.path.startswith("content"):  # nothing of the turn can come before its text
                return first
            header = self._header(written, number)
            if header is None:
                raise ChatError(
                    "unclear_turn",
                    f"penstock cannot find where the assistant's turn begins in message {number}, "
                    f"after {written[-80:]!r}. Use a template with {{% generation %}} blocks.",
                )
            start = before + len(header)
        # Blanks between the prompt and the first word are the template's.
        rest = self.text.plain[start:first]
        return start + len(rest) - len(rest.lstrip())

    def _header(self, written: str, number: int) -> str | None:
        """The words that ask for the turn, if reasoning or a tool call follows; None if not found.

        To find the end of these words, the message is replaced by a plain answer and rendered. A
        template may write empty reasoning (`<think>`) only before the last answer. So if that
        fails, a second try adds a question after the answer.
        """
        earlier = self.conversation.messages[:number]
        for more in ([], [{"role": "user", "content": QUESTION}]):
            try:
                other = self.render([*earlier, _ANSWERED, *more], False)
            except ChatError:
                continue
            hulls = _hulls(other._runs)
            if number in hulls:
                header = _written_before(other.plain, hulls[number][0], hulls)[1].rstrip()
                if written.startswith(header):
                    return header
        return None

    def _stop(self, number: int, last: int) -> int:
        """The index after the turn: after the markers that end it, or after its last word."""
        end = self.form.end
        after = min((low for low, _ in self.hulls.values() if low >= last), default=len(self.text))
        written = self.text.plain[last:after]
        usual = written.find(end) if end else -1
        stop = usual + len(end or "")
        # The usual end follows directly: no need to render again.
        if usual >= 0 and not written[:usual].strip():
            return last + stop
        # Other text of the template follows: the brackets of a tool call, or already the next turn.
        # The conversation is rendered again up to this message. Text that also follows there
        # belongs to the turn.
        alone = self.render(self.conversation.messages[: number + 1], False)
        end_alone = _hulls(alone._runs).get(number, (0, len(alone)))[1]
        closing = _shared_start(written, alone.plain[end_alone:], self.markers)
        return last + (stop if usual >= 0 and stop <= len(closing) else len(closing.rstrip()))


def _written_before(text: str, first: int, hulls: dict[int, Span]) -> tuple[int, str]:
    """Where the previous message ends, and the template's text from there to `first`."""
    before = max((high for _, high in hulls.values() if high <= first), default=0)
    return before, text[before:first]


def _shared_start(one: str, two: str, markers: Markers) -> str:
    """The common beginning of both texts, cut before a marker that they share only in part."""
    shorter = min(len(one), len(two))
    size = next((at for at in range(shorter) if one[at] != two[at]), shorter)
    # <|im_end|> and <|im_start|> share "<|im_", which is no part of the turn.
    cut = [start for start, stop in markers.find(one) if start < size < stop]
    return one[: min(cut, default=size)]


def generation_turns(text: Traced, conversation: Conversation) -> list[Turn]:
    """The turns that `{% generation %}` blocks mark.

    Raises:
        ChatError: a block contains text that the assistant did not write.
    """
    blocks = [(start, stop) for start, stop, leaf, _ in text._runs if leaf is GENERATION]
    runs = [run for run in text._runs if run[2] is not GENERATION]
    turns = []
    owner = -1
    for start, stop in sorted(blocks):
        inside = {leaf.message for low, high, leaf, _ in runs if low < stop and high > start}
        speakers = {conversation.messages[each]["role"] for each in inside if each >= 0}
        # -1 stands for tool definitions and settings, which belong to no message.
        if speakers - {"assistant"} or -1 in inside:
            others = ", ".join(sorted(speakers - {"assistant"})) or "tools"
            raise ChatError(
                "bad_generation", f"A {{% generation %}} block contains text of the {others}."
            )
        # A block with only the template's text belongs to the turn before it.
        owner = max(inside, default=owner)
        if start < stop and owner >= 0 and conversation.is_trained(owner):
            turns.append(Turn(owner, (start, stop), _only_read(runs, owner)))
    return turns


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
