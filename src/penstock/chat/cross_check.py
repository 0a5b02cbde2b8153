r"""Replaces the texts of a conversation by unique words, so that a search can find them.

Each text is replaced by a word that occurs nowhere else. The shape of the conversation, which is
everything that a template may test, stays the same: roles, keys, blanks at the ends of a text, and
tags inside it, such as `</think>`.

    "<think>\nIt is odd.\n</think>\n\nNo."   →   "<think>\nZqx0x\n</think>\n\nZqx1x"

The renderer searches the rendered text for these words, and compares their positions with the runs
that `provenance` records.
"""

import re
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial
from typing import Any

from penstock.chat.messages import Conversation, Message

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
