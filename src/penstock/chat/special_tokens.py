"""The special tokens of a tokenizer, and where a template wrote them.

Text is cut at special tokens before anything else, exactly as Hugging Face's tokenizers cut
it, with one difference: only the template can write one. Where a user's message spells
`<|im_end|>`, it is eleven characters of text, and cannot end the user's turn.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from penstock.chat.messages import ChatText, Span
from penstock.tokenize.objects import special_tokens_known
from penstock.tokenize.tokenizer import Tokenizer

__all__ = ["Found", "Markers", "SpecialToken", "SpecialTokens", "special_tokens_of", "wrapped"]

_USUAL = (
    r"<\|[^|<>\s]{1,40}\|>",
    "<\uff5c[^\uff5c<>]{1,40}\uff5c>",  # as DeepSeek writes them
    r"</?[A-Za-z_][\w:.-]{0,40}>",
    r"\[/?[A-Z][A-Z_]{1,30}\]",
)


class Markers:
    """Finds markers in a text."""

    def __init__(self, special: Iterable[str]) -> None:
        # The longest first: `re` takes the first alternative that fits.
        self._known = tuple(sorted(filter(None, special), key=len, reverse=True))
        self._pattern = re.compile("|".join([*map(re.escape, self._known), *_USUAL]))

    def ends(self, text: str) -> bool:
        """Whether `text` ends with a special token, or with what looks like one."""
        return text.endswith((*self._known, "|>", "\uff5c>"))

    def find(self, text: str) -> Iterator[Span]:
        """Where markers stand in `text`."""
        return (found.span() for found in self._pattern.finditer(text))

    def first_group(self, text: str) -> Span | None:
        """The first marker in `text`, with those that follow it at once."""
        group: Span | None = None
        for start, stop in self.find(text):
            if group is not None and start != group[1]:
                break
            group = (group[0] if group else start, stop)
        return group


# White space as Rust has it; Python counts four control characters more.
_BLANKS = "\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(
    map(chr, range(0x2000, 0x200B))
)


@dataclass(frozen=True, slots=True)
class SpecialToken:
    """A token that is written, never spelled."""

    text: str
    id: int
    lstrip: bool = False
    """Whether it swallows the blanks before it."""
    rstrip: bool = False
    single_word: bool = False


class Found(NamedTuple):
    """A special token in a text."""

    id: int
    span: Span
    """Its own characters."""
    taken: Span
    """The same with the blanks that it swallows."""


@dataclass(frozen=True)
class SpecialTokens:
    """All special tokens of a tokenizer."""

    tokens: dict[str, SpecialToken] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # The longest first, as tokenizers prefer them.
        names = sorted(self.tokens, key=len, reverse=True)
        pattern = re.compile("|".join(map(re.escape, names))) if names else None
        object.__setattr__(self, "_pattern", pattern)

    def find(self, script: ChatText, *, anywhere: bool) -> Iterator[Found]:
        """Each special token that stands in the template's own words.

        With `anywhere`, also those in the content.
        """
        pattern: re.Pattern[str] | None = self._pattern  # type: ignore[attr-defined]
        if pattern is None:
            return
        text = script.text
        done = 0
        for begin, end in [(0, len(text))] if anywhere else _gaps(script):
            for found in pattern.finditer(text, begin, end):
                token = self.tokens[found.group()]
                start, stop = span = found.span()
                if token.single_word and _in_a_word(text, start, stop):
                    continue
                if token.lstrip:
                    start = max(done, len(text[:start].rstrip(_BLANKS)))
                if token.rstrip:
                    stop = len(text) - len(text[stop:].lstrip(_BLANKS))
                yield Found(token.id, span, (start, stop))
                done = stop

    def spelled_in(self, script: ChatText) -> bool:
        """Whether the content of `script` spells a special token."""
        pattern: re.Pattern[str] | None = self._pattern  # type: ignore[attr-defined]
        if pattern is None:
            return False
        own = {
            span
            for begin, end in _gaps(script)
            for span in _spans(pattern, script.text, begin, end)
        }
        return set(_spans(pattern, script.text, 0, len(script.text))) != own


def _spans(pattern: re.Pattern[str], text: str, begin: int, end: int) -> Iterator[Span]:
    return (found.span() for found in pattern.finditer(text, begin, end))


def _gaps(script: ChatText) -> Iterator[Span]:
    """The template's own words."""
    place = 0
    for start, stop in script.content:
        if place < start:
            yield place, start
        place = stop
    if place < len(script.text):
        yield place, len(script.text)


def _in_a_word(text: str, start: int, stop: int) -> bool:
    before, after = text[start - 1 : start] if start else "", text[stop : stop + 1]
    return any(each.isalnum() or each == "_" for each in (before, after) if each)


def special_tokens_of(tokenizer: Tokenizer) -> SpecialTokens:
    """The special tokens that `tokenizer` has; of an object, those that it says it has."""
    definition = tokenizer.definition
    if definition is None:
        known = {**special_tokens_known(wrapped(tokenizer)), **tokenizer.added_tokens}
        return SpecialTokens({text: SpecialToken(text, each) for text, each in known.items()})
    flags = ("lstrip", "rstrip", "single_word")
    added = {each["content"]: each for each in definition.config.get("added_tokens") or []}
    found = {}
    for text in definition.special_tokens:
        number = definition.token_id(text)
        # The unknown token is special where it is flagged so, as it is to `tokenizers`.
        if number is not None and (text in added or text != definition.unk_token):
            given = [bool(added.get(text, {}).get(flag)) for flag in flags]
            found[text] = SpecialToken(text, number, *given)
    return SpecialTokens(found)


def wrapped(tokenizer: Tokenizer) -> Any:
    """The object that the tokenizer was made of, where it is one with `encode` alone."""
    return getattr(tokenizer.engine, "_tokenizer", None)
