r"""A conversation of the same shape whose every text can be found by search.

Each text becomes a word that occurs nowhere else. What templates look at stays as it was:
roles, keys, blanks at the ends, and tags inside the text, such as `</think>`.

    "<think>\nIt is odd.\n</think>\n\nNo."   →   "<think>\nZqx0x\n</think>\n\nZqx1x"
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from penstock.chat.messages import Conversation

__all__ = ["Twin", "shape_of", "texts_of", "twin_of"]

_TAG = re.compile(r"(<\|[^|<>\s]{1,40}\|>|</?[A-Za-z_][\w:.-]{0,40}>|\[/?[A-Z][A-Z_]{1,30}\])")
# Texts that are only ever written out; what stands elsewhere may decide what is written.
_WRITTEN = frozenset(("content", "text", "reasoning_content", "reasoning", "thinking"))


@dataclass(frozen=True, slots=True)
class Twin:
    """A disguised conversation, and its words with the message that each is in."""

    conversation: Conversation
    words: list[tuple[str, int]]


def shape_of(conversation: Conversation) -> Any:
    """What two conversations have in common that a template treats alike."""
    return (
        tuple(_shape(message) for message in conversation.messages),
        bool(conversation.tools),
        repr(conversation.settings),
    )


def _shape(value: Any, key: str = "") -> Any:
    if isinstance(value, dict):
        return tuple((name, _shape(item, name)) for name, item in value.items())
    if isinstance(value, list | tuple):
        return tuple(_shape(item, key) for item in value)
    if isinstance(value, str) and key in _WRITTEN:
        tags = tuple(_TAG.findall(value)) if "<" in value or "[" in value else ()
        return bool(value.strip()), value[:1].isspace(), value[-1:].isspace(), tags
    return value if key in ("role", "type", "train") else type(value)


def texts_of(value: Any, key: str = "") -> Iterator[str]:
    """The texts of a message that a template is to write out."""
    if isinstance(value, dict):
        for name, item in value.items():
            if name != "tool_calls":  # written as JSON, with escapes
                yield from texts_of(item, name)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from texts_of(item, key)
    elif isinstance(value, str) and key in _WRITTEN:
        yield value


def twin_of(conversation: Conversation) -> Twin:
    """`conversation` with a word of its own in place of each text."""
    words: list[tuple[str, int]] = []
    messages = [
        _disguised(message, "", words, number)
        for number, message in enumerate(conversation.messages)
    ]
    return Twin(Conversation(messages, conversation.tools, conversation.settings), words)


def _disguised(value: Any, key: str, words: list[tuple[str, int]], number: int) -> Any:
    if isinstance(value, dict):
        return {name: _disguised(item, name, words, number) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_disguised(item, key, words, number) for item in value]
    if not isinstance(value, str) or key not in _WRITTEN:
        return value
    pieces = _TAG.split(value)
    for place, piece in enumerate(pieces):
        inner = piece.strip()
        if inner and place % 2 == 0:
            word = f"Zqx{len(words)}x"
            words.append((word, number))
            begin = piece.index(inner)
            pieces[place] = piece[:begin] + word + piece[begin + len(inner) :]
    return "".join(pieces)
