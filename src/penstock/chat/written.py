r"""JSON text that stays as it was written.

The arguments of a tool call often come as a string with JSON in it. Parsed and written again it
would be another text (`{"a":1}` becomes `{"a": 1}`, `1e3` becomes `1000.0`, of two equal keys one
vanishes), and that text would be trained on. So the string stays a string for the template, as it
is for `apply_chat_template`, and the parts of it that a template asks for keep their own text.
"""

import json
import re
from typing import Any, NamedTuple, NoReturn

__all__ = ["Part", "is_json", "parts_of"]

_BLANKS = re.compile(r"[ \t\n\r]*")


class Part(NamedTuple):
    """A member of a JSON object, or an element of an array."""

    key: str | None
    key_at: int
    """Where the key begins in the text, behind its quote."""
    value: Any
    start: int
    """The text of the value is `[start, stop)`."""
    stop: int


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse)


def is_json(text: str) -> bool:
    """Whether `text` is one JSON value, blanks aside."""
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


def parts_of(text: str) -> list[Part] | None:
    """The members or elements at the top of a JSON text; None where it is no object or array.

    Equal keys are all there, in order.

    >>> text = '{"a": 1e3, "a":[2]}'
    >>> [(part.key, text[part.start : part.stop]) for part in parts_of(text)]
    [('a', '1e3'), ('a', '[2]')]
    """
    place = _after_blanks(text, 0)
    if text[place : place + 1] not in ("{", "[") or not is_json(text):
        return None
    is_object = text[place] == "{"
    found = []
    place = _after_blanks(text, place + 1)
    while text[place] not in "}]":
        key, key_at = None, place + 1
        if is_object:
            key, place = _DECODER.raw_decode(text, place)
            place = _after_blanks(text, _after_blanks(text, place) + 1)  # behind the colon
        value, stop = _DECODER.raw_decode(text, place)
        found.append(Part(key, key_at, value, place, stop))
        place = _after_blanks(text, stop)
        if text[place] == ",":
            place = _after_blanks(text, place + 1)
    return found


def _after_blanks(text: str, place: int) -> int:
    found = _BLANKS.match(text, place)
    assert found is not None  # it may match nothing
    return found.end()
