"""The two templates that need no file.

"chatml" is the format most open models derive theirs from; tools are told and called as
in Hermes and Qwen. "nanochat" has a token for every border and lets the assistant call
Python in the middle of a turn, whose output is read and not trained on:

    <|bos|><|user_start|>7 * 191?<|user_end|>
    <|assistant_start|><|python_start|>7*191<|python_end|><|output_start|>1337<|output_end|>
    It is 1337.<|assistant_end|>

(without the line breaks). A plain conversation is written by a few lines of Python below,
ten times as fast as Jinja and, as a test holds, to the same text and the same spans.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from penstock.chat.messages import ChatText

__all__ = ["BUILTIN", "WRITERS", "builtin_source"]

BUILTIN = ("chatml", "nanochat")


@cache
def builtin_source(name: str) -> str:
    """The Jinja source of a built-in template."""
    return (Path(__file__).parent / "templates" / f"{name}.jinja").read_text(encoding="utf-8")


def _write_chatml(messages: list[dict[str, Any]]) -> ChatText | None:
    pieces: list[str] = []
    content: list[tuple[int, int]] = []
    trained: list[tuple[int, int]] = []
    place = 0
    for message in messages:
        text, role = message["content"], message["role"]
        if type(text) is not str or len(message) != 2 or role not in _CHATML_ROLES:
            return None
        place += 13 + len(role)  # <|im_start|>, the role, a line end
        pieces += ("<|im_start|>", role, "\n", text, "<|im_end|>\n")
        stop = place + len(text)
        if text:
            content.append((place, stop))
            if role == "assistant":
                trained.append((place, stop + 10))
        elif role == "assistant":
            return None
        place = stop + 11
    return ChatText("".join(pieces), content, trained)


def _write_nanochat(messages: list[dict[str, Any]]) -> ChatText | None:
    pieces = ["<|bos|>"]
    content: list[tuple[int, int]] = []
    trained: list[tuple[int, int]] = []
    place = 7
    for number, message in enumerate(messages):
        text = message["content"]
        if type(text) is not str or not text or len(message) != 2:
            return None
        if message["role"] != ("assistant" if number % 2 else "user"):
            return None
        name = message["role"]
        pieces += ("<|", name, "_start|>", text, "<|", name, "_end|>")
        place += len(name) + 10
        stop = place + len(text)
        content.append((place, stop))
        place = stop + len(name) + 8
        if number % 2:
            trained.append((stop - len(text), place))
    return ChatText("".join(pieces), content, trained)


_CHATML_ROLES = frozenset(("system", "user", "assistant"))

WRITERS: dict[str, Callable[[list[dict[str, Any]]], ChatText | None]] = {
    "chatml": _write_chatml,
    "nanochat": _write_nanochat,
}
"""By name: a conversation of plain turns to its script, None where Jinja must do it."""
