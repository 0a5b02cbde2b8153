"""Conversations to scripts: the template run, its turns found and checked.

The mask is never taken on trust. Runs say which characters came from which message; then,
for each new shape of conversation, every text in it is replaced by words that occur
nowhere else, and the words are searched for in what the template makes of that. Both ways
must find the same characters in the same turns, or the conversation is refused.
"""

import datetime
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from penstock.chat.builtin import WRITERS
from penstock.chat.cross_check import shape_of, texts_of, twin_of
from penstock.chat.jinja import GENERATION, Program
from penstock.chat.messages import ChatText, Conversation, Span, merged
from penstock.chat.provenance import Leaf, Run, Traced, trace, traced_join
from penstock.chat.special_tokens import Markers
from penstock.chat.template import Template, is_builtin
from penstock.chat.turns import (
    ANSWER,
    QUESTION,
    Habits,
    Turn,
    find_habits,
    find_turns,
    generation_turns,
)
from penstock.errors import ChatError

__all__ = ["Renderer", "Rewritten"]

Rewritten = Literal["mask", "train", "refuse"]

# Of a user's content and the assistant's, the likely first.
_FORMS = (("string", "string"), ("parts", "parts"), ("parts", "string"), ("string", "parts"))

# Shapes that are known to be right; a set of conversations has some hundreds.
_MAX_SHAPES = 10_000


@dataclass(frozen=True, slots=True)
class _Read:
    """A rendered conversation, before it is judged."""

    text: Traced
    turns: list[Turn]

    def render_text(self, rewritten: tuple[int, ...] = ()) -> ChatText:
        runs = [run for run in self.text._runs if run[2] is not GENERATION]
        content = merged((start, stop) for start, stop, _, _ in runs)
        trained: list[Span] = []
        for turn in self.turns:
            trained += _without(turn.span, turn.untrained)
        return ChatText(self.text.plain, content, merged(trained), rewritten)

    def without_end(self, ends: Callable[[str], bool]) -> tuple[int, ...]:
        """Where turns stop whose last trained text is no end of a turn."""
        last = {turn.message: turn.span[1] for turn in self.turns}
        text = self.text.plain  # of which tokens are a few characters
        return tuple(at for at in last.values() if not ends(text[max(0, at - 200) : at].rstrip()))


@dataclass
class Renderer:
    """A template with its settings; safe to use from many threads."""

    template: Template
    markers: Markers
    tokens: dict[str, str]
    """The special tokens by the names that templates use."""
    date: datetime.date | None = None
    rewritten: Rewritten = "mask"
    settings: dict[str, Any] = field(default_factory=dict)
    _habits: dict[str, Habits] = field(default_factory=dict, init=False)
    _shapes: dict[Any, tuple[str, ...]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._program = Program(self.template.source, self.template.name)
        known = is_builtin(self.template) and not self.settings
        self._writer = WRITERS[self.template.name] if known else None
        self._forms: dict[str, str] = {"user": "either", "assistant": "either"}
        self._forms = self._probe_forms()

    def render_text(self, conversation: Conversation) -> ChatText:
        """The text of `conversation`, and which of it is trained on.

        Raises:
            ChatError: the template refuses it, or its turns cannot be told apart.
        """
        if self._writer and conversation.tools is None and not conversation.settings:
            script = self._writer(conversation.messages)
            if script is not None:
                return script
        read = self._read(conversation)
        self._cross_check(conversation, read)
        rewritten = tuple(self._left_out(conversation, read))
        if rewritten and self.rewritten == "refuse":
            raise ChatError(
                "rewritten",
                f"The template leaves out text of the assistant in messages {list(rewritten)}.",
            )
        num_without_reasoning = 0
        if self.rewritten == "mask":
            dropped = {turn.message for turn in read.turns if turn.message in rewritten}
            num_without_reasoning = sum(
                self._lacks_thought(conversation, read, each) for each in dropped
            )
            kept = [turn for turn in read.turns if turn.message not in rewritten]
            read = _Read(read.text, kept)
        script = read.render_text(rewritten)
        return replace(
            script,
            num_without_reasoning=num_without_reasoning,
            without_end=read.without_end(self.markers.ends),
        )

    @property
    def marks_generation(self) -> bool:
        """Whether the template has `{% generation %}` blocks."""
        return self._program.marks_generation

    @property
    def ends_turns(self) -> bool:
        """Whether the template ends a turn of the assistant with a marker."""
        if self.marks_generation:
            return True
        return self._habits_for(Conversation([])).end is not None

    def sample(self) -> str:
        """What the template makes of a question and an answer; "" where it does not write both."""
        return self._probe(tuple({"either": "string"}.get(f, f) for f in self._forms.values()))

    def prompt(self, conversation: Conversation) -> ChatText:
        """The text that asks for the next answer; nothing of it is trained on."""
        text = self._run(conversation, conversation.messages, ask=True)
        return _Read(text, []).render_text()

    def _read(self, conversation: Conversation) -> _Read:
        text = self._run(conversation, conversation.messages)
        if self.marks_generation:
            turns = generation_turns(text, conversation)
        else:
            habits = self._habits_for(conversation)
            turns = find_turns(
                text, conversation, habits, self.markers, _Renders(self, conversation)
            )
        _refuse_foreign(text._runs, turns)
        return _Read(text, turns)

    def _run(
        self, conversation: Conversation, messages: list[dict[str, Any]], *, ask: bool = False
    ) -> Traced:
        traced = [
            self._in_form(trace(message, Leaf(number, "", "")))
            for number, message in enumerate(messages)
        ]
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

    def _in_form(self, message: dict[str, Any]) -> dict[str, Any]:
        """Content in the form that the template takes: a string, or a list of parts."""
        content = message.get("content")
        form = self._forms.get("assistant" if message["role"] == "assistant" else "user", "string")
        if isinstance(content, str) and form == "parts":
            return {**message, "content": [{"type": "text", "text": content}]}
        if not isinstance(content, list):
            return message
        if form != "string":
            parts = [
                {"type": "text", "text": part} if isinstance(part, str) else part
                for part in content
            ]
            return {**message, "content": parts}
        for part in content:
            if isinstance(part, dict) and part.get("type", "text") != "text":
                raise ChatError(
                    "not_text",
                    f"The template {self.template.name} takes no parts of a message, and one is "
                    f"of type {part['type']!r:.40}.",
                )
        texts = [part if isinstance(part, str) else part["text"] for part in content]
        return {**message, "content": traced_join(texts)}

    def _probe_forms(self) -> dict[str, str]:
        """Which form of content the template reads: "string", "parts", or "either"."""
        for forms in _FORMS:
            if text := self._probe(forms):
                break
        else:
            return dict.fromkeys(("user", "assistant"), "string")
        found = dict(zip(("user", "assistant"), forms, strict=True))
        for role in found:
            other = {**found, role: "parts" if found[role] == "string" else "string"}
            if self._probe(tuple(other.values())) == text:
                found[role] = "either"
        return found

    def _probe(self, forms: tuple[str, ...]) -> str:
        """A question and an answer in these forms; "" where one of them is not written."""
        texts = (QUESTION, ANSWER)
        contents = [
            [{"type": "text", "text": text}] if form == "parts" else text
            for text, form in zip(texts, forms, strict=True)
        ]
        roles = ("user", "assistant")
        messages = [
            {"role": role, "content": each} for role, each in zip(roles, contents, strict=True)
        ]
        try:
            written = self._run(Conversation([]), messages).plain
        except ChatError:
            return ""
        return written if all(text in written for text in texts) else ""

    def _habits_for(self, conversation: Conversation) -> Habits:
        key = json.dumps([conversation.settings, bool(conversation.tools)], sort_keys=True)
        habits = self._habits.get(key)
        if habits is None:
            renders = _Renders(self, conversation)
            habits = self._habits[key] = find_habits(renders, self.markers)
        return habits

    def _cross_check(self, conversation: Conversation, read: _Read) -> None:
        """Compare runs with a search for unique words, once for each shape of conversation."""
        shape = shape_of(conversation)
        if self._shapes.get(shape) == _literals(read.text):
            return
        twin = twin_of(conversation)
        found = self._read(twin.conversation)
        for word, number in twin.words:
            for place in _places(found.text.plain, word):
                self._check_word(twin.conversation, found, number, (place, place + len(word)))
        if len(self._shapes) >= _MAX_SHAPES:
            self._shapes.clear()
        self._shapes[shape] = _literals(found.text)

    def _check_word(
        self, conversation: Conversation, found: _Read, number: int, span: Span
    ) -> None:
        """Raise where runs or turns do not say of a word what the search says."""
        runs = [run for run in found.text._runs if run[2].message == number]
        inside = [run for run in runs if run[0] <= span[0] and span[1] <= run[1]]
        if not inside:
            raise ChatError(
                "untraceable",
                f"The template {self.template.name} writes message {number} in a way that cannot "
                "be followed, so what is the assistant's cannot be told. Use one that writes the "
                "content as it is, or strips it.",
            )
        speakers = {turn.message for turn in found.turns if _overlap(turn.span, span)}
        told = self.marks_generation  # then a block may leave out what it wants
        said = conversation.is_trained(number)
        if speakers - {number} or (said and not told and not speakers) or (speakers and not said):
            raise ChatError(
                "disagreement",
                f"The two ways to find what the assistant said do not agree on message {number} "
                f"of the conversation under the template {self.template.name}.",
            )

    def _left_out(self, conversation: Conversation, read: _Read) -> Iterator[int]:
        """Messages of the assistant of which some text does not appear where they are written."""
        hulls: dict[int, Span] = {}
        spans = [(*turn.span, turn.message) for turn in read.turns]
        spans += [(run[0], run[1], run[2].message) for run in read.text._runs]
        for start, stop, number in spans:
            low, high = hulls.get(number, (start, stop))
            hulls[number] = min(low, start), max(high, stop)
        for number, message in enumerate(conversation.messages):
            if conversation.is_trained(number):
                written = read.text.plain[slice(*hulls.get(number, (0, 0)))]
                if not all(_is_in(text, written) for text in texts_of(message)):
                    yield number

    def _lacks_thought(self, conversation: Conversation, read: _Read, number: int) -> bool:
        """Whether the thought of a message is nowhere in the text."""
        thought = conversation.messages[number].get("reasoning_content")
        return isinstance(thought, str) and not _is_in(thought, read.text.plain)


class _Renders:
    """What `turns` asks a template with: messages of its own, in the same setting."""

    def __init__(self, renderer: Renderer, conversation: Conversation) -> None:
        self._renderer = renderer
        self._conversation = conversation

    def __call__(self, messages: list[dict[str, Any]], ask: bool) -> Traced:
        return self._renderer._run(self._conversation, messages, ask=ask)


def _refuse_foreign(runs: Iterable[Run], turns: list[Turn]) -> None:
    """Raise where a turn holds characters of another message, whatever the template meant."""
    for start, stop, leaf, _ in runs:
        for turn in turns:
            foreign = leaf.message not in (turn.message, GENERATION.message)
            if foreign and _overlap(turn.span, (start, stop)):
                raise ChatError(
                    "tangled",
                    f"The turn of message {turn.message} holds text of message {leaf.message}, so "
                    "what the assistant said cannot be told apart.",
                )


def _overlap(one: Span, two: Span) -> bool:
    return one[0] < two[1] and two[0] < one[1]


def _without(span: Span, holes: Iterable[Span]) -> Iterator[Span]:
    """What is left of `span`."""
    start, stop = span
    for low, high in holes:
        if low < stop and high > start:
            if start < low:
                yield start, low
            start = max(start, high)
    if start < stop:
        yield start, stop


def _places(text: str, word: str) -> Iterator[int]:
    place = text.find(word)
    while place >= 0:
        yield place
        place = text.find(word, place + 1)


def _literals(text: Traced) -> tuple[str, ...]:
    """The template's own words, in order."""
    found, place = [], 0
    spans = (run[:2] for run in text._runs if run[2] is not GENERATION)
    for start, stop in merged(spans):
        found.append(text.plain[place:start])
        place = stop
    return (*found, text.plain[place:])


def _is_in(text: str, written: str) -> bool:
    """Whether `written` holds `text`, blanks aside."""
    return text.strip() in written or "".join(text.split()) in "".join(written.split())
