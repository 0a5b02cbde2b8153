r"""Finds the characters of a rendered conversation that the assistant wrote.

A turn of the assistant begins after the generation prompt, the words that ask the model for an
answer, and ends with its end marker. Everything between them belongs to the turn: reasoning, text,
tool calls.

    <|im_start|>assistant\n<think>\nHm.\n</think>\n\nYes.<|im_end|>\n<|im_start|>user…
    └─ generation prompt ─┘└──────────── trained ───────────────────┘

The runs (see `provenance`) show where the words of a message are. To learn what the template writes
around them (`TurnFormat`), penstock renders a question and an answer, once for each template. A
template with `{% generation %}` blocks marks its turns itself.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter

from penstock.chat.jinja import GENERATION
from penstock.chat.messages import ANSWER, QUESTION, Conversation, Message, Span, merged
from penstock.chat.provenance import Run, Traced
from penstock.chat.special_tokens import Markers
from penstock.errors import ChatError, TemplateError

Render = Callable[[list[Message], bool], Traced]
"""Renders messages; the second argument says whether to ask for an answer."""

_ANSWERED: Message = {"role": "assistant", "content": ANSWER}


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
