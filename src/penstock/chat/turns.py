r"""Which characters of a rendered conversation the assistant said.

A turn reaches from behind the words that ask for it to the token that ends it, whatever
stands between: thoughts, text, calls of tools.

    <|im_start|>assistant\n<think>\nHm.\n</think>\n\nYes.<|im_end|>\n<|im_start|>user…
    └─ generation prompt ─┘└──────────── trained ───────────────────┘

Where the turn's own words lie is known from their runs. What the template writes around
them is told apart by what it does with a question and an answer (`Habits`), found once
for each template. A template with `{% generation %}` blocks says it by itself.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.chat.jinja import GENERATION
from penstock.chat.messages import Conversation, Span, merged
from penstock.chat.provenance import Leaf, Run, Traced
from penstock.chat.special_tokens import Markers
from penstock.errors import ChatError, TemplateError

__all__ = ["Habits", "Turn", "find_habits", "find_turns", "generation_turns"]

Renders = Callable[[list[dict[str, Any]], bool], Traced]
"""Messages, and whether to ask for an answer, to text."""

QUESTION, ANSWER = "Zqvi alpha?", "Zqwo beta."


@dataclass(frozen=True, slots=True)
class Habits:
    """What a template writes around a turn of the assistant."""

    prompt: str
    """Asks for an answer; "" where the template cannot."""
    end: str | None
    """The marker that ends a turn, where there is one."""


@dataclass(frozen=True, slots=True)
class Turn:
    """The characters of one turn that the model has to say."""

    message: int
    span: Span
    untrained: tuple[Span, ...] = ()
    """Inside it, what is only read: the output of a tool, say."""


def find_habits(renders: Renders, markers: Markers) -> Habits:
    """What a template does with a question and an answer."""
    pair = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]
    try:
        text = renders(pair, False).plain
    except ChatError as error:
        raise TemplateError(
            f"The template cannot render a question and an answer, so it is no chat template: "
            f"{error}"
        ) from error
    if text.count(ANSWER) != 1 or text.count(QUESTION) != 1:
        raise TemplateError(
            "The template writes a question and its answer "
            f"{text.count(QUESTION)} and {text.count(ANSWER)} times, not once each; what the "
            "assistant said cannot be told."
        )
    tail = text[text.index(ANSWER) + len(ANSWER) :]
    end = markers.first_group(tail)
    return Habits(
        prompt=_prompt(renders, pair[:1]),
        end=tail[slice(*end)] if end else None,
    )


def _prompt(renders: Renders, messages: list[dict[str, Any]]) -> str:
    """What asks for an answer: the text that is added when one is asked for."""
    try:
        plain, asked = renders(messages, False).plain, renders(messages, True).plain
    except ChatError:
        return ""
    prompt = asked[len(plain) :] if asked.startswith(plain) else ""
    return prompt if prompt.strip() else ""


def find_turns(
    text: Traced, conversation: Conversation, habits: Habits, markers: Markers, renders: Renders
) -> list[Turn]:
    """The turns of the assistant that are to be trained on, by runs and habits."""
    hulls = _hulls(text._runs)
    turns = []
    for number in range(len(conversation.messages)):
        if conversation.is_trained(number) and number in hulls:
            _refuse_tangled(number, hulls)
            start = _start(text, number, hulls, conversation, habits, renders)
            stop = _stop(text, number, hulls, conversation, habits, renders, markers)
            turns.append(Turn(number, (start, stop), _only_read(text._runs, number)))
    return turns


def _hulls(runs: Sequence[Run]) -> dict[int, Span]:
    """From the first to the last character of each message, where it is first written.

    A template may write some of it again: the name of a tool that was called, above its result.
    """
    hulls: dict[int, Span] = {}
    for start, stop, leaf, _ in first_runs(runs):
        if leaf.message >= 0:
            low, high = hulls.get(leaf.message, (start, stop))
            hulls[leaf.message] = min(low, start), max(high, stop)
    return hulls


def first_runs(runs: Sequence[Run]) -> Iterator[Run]:
    """The runs that hold characters of a leaf which were not written before."""
    seen: dict[int, int] = {}
    for run in sorted(runs, key=_by_start):
        start, stop, leaf, offset = run
        known = seen.get(id(leaf), 0)
        upto = len(leaf.text) if offset < 0 else offset + stop - start
        if upto > known or not known:
            seen[id(leaf)] = upto
            yield run


def _by_start(run: Run) -> int:
    return run[0]


def _only_read(runs: Sequence[Run], number: int) -> tuple[Span, ...]:
    found = [(a, b) for a, b, leaf, _ in runs if leaf.message == number and not leaf.train]
    return tuple(merged(found))


def _refuse_tangled(number: int, hulls: dict[int, Span]) -> None:
    start, stop = hulls[number]
    for other, (low, high) in hulls.items():
        if other != number and low < stop and high > start:
            raise ChatError(
                "tangled",
                f"The template writes parts of message {other} inside message {number}, so what "
                "the assistant said cannot be told apart.",
            )


def _start(
    text: Traced,
    number: int,
    hulls: dict[int, Span],
    conversation: Conversation,
    habits: Habits,
    renders: Renders,
) -> int:
    """Where the turn begins: behind the prompt for it."""
    first = hulls[number][0]
    before, written = _written_before(text.plain, first, hulls)
    asked = written.rfind(habits.prompt) if habits.prompt else -1
    if asked >= 0:
        start = before + asked + len(habits.prompt)
    else:
        if _leaf_at(text._runs, first, number).path.startswith("content"):
            return first
        header = _header(written, number, conversation, renders)
        if header is None:
            raise ChatError(
                "unclear_turn",
                f"Where the assistant's turn begins in message {number} cannot be told from "
                f"{written[-80:]!r}. Use a template with {{% generation %}} blocks.",
            )
        start = before + len(header)
    rest = text.plain[start:first]
    return start + len(rest) - len(rest.lstrip())


def _header(written: str, number: int, conversation: Conversation, renders: Renders) -> str | None:
    """The words that ask for the turn, where a thought or a call of a tool follows them.

    An answer in the same place shows where they end. A template may write the last answer with
    an empty thought (`<think>`), and those before without: so another question is tried after it.
    """
    for more in ([], [{"role": "user", "content": QUESTION}]):
        try:
            other = renders([*conversation.messages[:number], _ANSWERED, *more], False)
        except ChatError:
            continue
        hulls = _hulls(other._runs)
        if number in hulls:
            header = _written_before(other.plain, hulls[number][0], hulls)[1].rstrip()
            if written.startswith(header):
                return header
    return None


def _written_before(text: str, first: int, hulls: dict[int, Span]) -> tuple[int, str]:
    """The template's words between the message before and the character `first`."""
    before = max((high for _, high in hulls.values() if high <= first), default=0)
    return before, text[before:first]


_ANSWERED = {"role": "assistant", "content": ANSWER}


def _leaf_at(runs: Sequence[Run], place: int, number: int) -> Leaf:
    return next(leaf for start, _, leaf, _ in runs if start == place and leaf.message == number)


def _stop(
    text: Traced,
    number: int,
    hulls: dict[int, Span],
    conversation: Conversation,
    habits: Habits,
    renders: Renders,
    markers: Markers,
) -> int:
    """Where the turn ends: behind the markers that end it, or with its last word."""
    last = hulls[number][1]
    after = min((low for low, _ in hulls.values() if low >= last), default=len(text))
    written = text.plain[last:after]
    usual = written.find(habits.end) if habits.end else -1
    stop = usual + len(habits.end or "")
    if usual >= 0 and not written[:usual].strip():
        return last + stop
    # Words of the template follow: the brackets of a tool call, or the next turn already. What
    # also follows where this turn is the last one belongs to it.
    alone = renders(conversation.messages[: number + 1], False)
    end = _hulls(alone._runs).get(number, (0, len(alone)))[1]
    closing = _shared_start(written, alone.plain[end:], markers)
    return last + (stop if usual >= 0 and stop <= len(closing) else len(closing.rstrip()))


def _shared_start(one: str, two: str, markers: Markers) -> str:
    """What both texts begin with, cut before a marker that they share in part."""
    size = 0
    while size < min(len(one), len(two)) and one[size] == two[size]:
        size += 1
    cut = [start for start, stop in markers.find(one) if start < size < stop]
    return one[: min(cut, default=size)]


def generation_turns(text: Traced, conversation: Conversation) -> list[Turn]:
    """The turns that `{% generation %}` blocks mark.

    Raises:
        ChatError: a block holds what somebody else said.
    """
    blocks = [(start, stop) for start, stop, leaf, _ in text._runs if leaf is GENERATION]
    runs = [run for run in text._runs if run[2] is not GENERATION]
    turns = []
    owner = -1
    for start, stop in sorted(blocks):
        inside = {leaf.message for low, high, leaf, _ in runs if low < stop and high > start}
        speakers = {conversation.messages[each]["role"] for each in inside if each >= 0}
        if speakers - {"assistant"} or -1 in inside:
            raise ChatError(
                "bad_generation",
                f"A {{% generation %}} block of the template holds what the "
                f"{', '.join(sorted(speakers - {'assistant'})) or 'tools'} said.",
            )
        # A block of the template's own words belongs to the turn it comes after.
        owner = max(inside, default=owner)
        if start < stop and owner >= 0 and conversation.is_trained(owner):
            turns.append(Turn(owner, (start, stop), _only_read(runs, owner)))
    return turns
