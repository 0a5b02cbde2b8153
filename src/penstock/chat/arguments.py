r"""Writes the arguments of tool calls exactly as the record has them.

If a record has the arguments of a tool call as a JSON string, the template gets a string, as it
does from `apply_chat_template`. penstock differs from that function in two ways. First, the filter
`tojson` writes such a string unchanged, instead of quoting it a second time:

    {"name": "f", "arguments": {"a":1e3}}        and not   "arguments": "{\"a\":1e3}"

Second, a template can read the items of the JSON object in such a string; under Hugging Face that
is an error. Numbers, objects and arrays among the items are written with the record's own text.
"""

import json
import re
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, NoReturn, TypeGuard

from penstock.chat.provenance import Traced, derived, leaves_in, trace

JsonObject = dict[str, Any]
"""A parsed JSON object."""

_BLANKS = re.compile(r"[ \t\n\r]*")


class Part(NamedTuple):
    """A member of a JSON object, or an element of a JSON array, and its position in the text."""

    key: str | None
    key_at: int
    """The index in the text of the key's first character, after the opening quote."""
    value: Any
    start: int
    """The text of the value has the characters `[start, stop)`."""
    stop: int


# Python's parser accepts NaN and Infinity, which are not JSON.
def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def is_json(text: str) -> bool:
    """Whether `text` is one JSON value; blanks around it are allowed."""
    try:
        json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return False
    return True


def parts_of(text: str) -> list[Part] | None:
    """The members of a JSON object or the elements of an array; None for any other text.

    If a key occurs several times, all its members are returned, in order.

    >>> text = '{"a": 1e3, "a":[2]}'
    >>> [(part.key, text[part.start : part.stop]) for part in parts_of(text)]
    [('a', '1e3'), ('a', '[2]')]
    """
    at = _after_blanks(text, 0)
    if text[at : at + 1] not in ("{", "[") or not is_json(text):
        return None
    is_object = text[at] == "{"
    found = []
    at = _after_blanks(text, at + 1)
    while text[at] not in "}]":
        key, key_at = None, at + 1
        if is_object:
            key, at = _DECODER.raw_decode(text, at)
            at = _after_blanks(text, _after_blanks(text, at) + 1)  # after the colon
        value, stop = _DECODER.raw_decode(text, at)
        found.append(Part(key, key_at, value, at, stop))
        at = _after_blanks(text, stop)
        if text[at] == ",":
            at = _after_blanks(text, at + 1)
    return found


def _after_blanks(text: str, at: int) -> int:
    found = _BLANKS.match(text, at)
    assert found is not None  # the pattern matches an empty text
    return found.end()


_PATH = re.compile(r"tool_calls\[\d+\]\.function\.arguments")


class _Written:
    """Base class of values that are written with their JSON text from the record, such as 1e3."""

    written: Traced

    def __str__(self) -> str:
        return self.written


# A template can use these types like int, float, dict and list, but writes the record's JSON text.
_WRITTEN_TYPES: dict[type, type] = {
    kind: type(f"_Written{kind.__name__}", (_Written, kind), {})
    for kind in (int, float, dict, list)
}


def is_arguments(value: object) -> TypeGuard[Traced]:
    """Whether `value` is the arguments of a tool call, given as a JSON string in the record."""
    if type(value) is not Traced or len(value._runs) != 1:
        return False
    start, stop, leaf, offset = value._runs[0]
    # `value` must be the whole, unchanged string from the record (one leaf; see `provenance`),
    # because a part of a JSON text is usually not valid JSON.
    whole = (start, stop, offset) == (0, len(leaf.text), 0) and len(value) == stop
    return whole and _PATH.fullmatch(leaf.path) is not None and is_json(value.plain)


def items_of(arguments: Traced) -> list[tuple[str, object]]:
    """The (key, value) pairs of the JSON object in `arguments`; repeated keys give several pairs.

    Raises:
        TypeError: the arguments are not an object.
    """
    parts = parts_of(arguments.plain)
    if parts is None or any(part.key is None for part in parts):
        raise TypeError(f"The arguments {arguments.plain[:60]!r} are not a JSON object.")
    return [
        (_inside(arguments, part.key or "", part.key_at), _value(arguments, part)) for part in parts
    ]


def _value(arguments: Traced, part: Part) -> object:
    value, start = part.value, part.start
    if isinstance(value, str):
        return _inside(arguments, value, start + 1)
    if isinstance(value, bool) or value is None:  # Jinja writes True and None as Python does
        return value
    made = _WRITTEN_TYPES[type(value)](trace(value, arguments._runs[0][2]))
    made.written = _inside(arguments, arguments.plain[start : part.stop], start)
    return made


def _inside(arguments: Traced, text: str, at: int) -> Traced:
    """Return `text` as a traced string whose origin is `arguments`, from character `at` on.

    Escapes are ignored: each character of `text` counts as one character of `arguments`.
    """
    return Traced(text, [(0, len(text), arguments._runs[0][2], at)] if text else [])


def to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter `tojson` of chat templates, which does not escape HTML."""
    if isinstance(value, _Written):
        return value.written
    if type(value) is Traced and is_arguments(value):
        return value
    dump = partial(
        json.dumps,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
    text = dump(value)
    if any(_PATH.fullmatch(leaf.path) for leaf in leaves_in(value)):
        text = _with_arguments(value, text, dump)
    return derived(text, [value])


def _with_arguments(value: object, text: str, dump: Callable[[object], str]) -> str:
    """`value` as JSON; the arguments of tool calls are written exactly as in the record."""
    # Placeholders are made of a private-use character that the text does not contain, so the text
    # cannot contain a placeholder.
    mark = "\ue0a5"
    while mark in text or json.dumps(mark)[1:-1] in text:
        mark += "\ue0a5"
    found: list[str] = []
    text = dump(_without_arguments(value, mark, found))
    for number, arguments in enumerate(found):
        text = text.replace(dump(f"{mark}{number}{mark}"), arguments)
    return text


def _without_arguments(value: object, mark: str, held: list[str]) -> object:
    """A copy of `value` with a placeholder for each arguments text, which is appended to `held`."""
    if is_arguments(value):
        held.append(value.plain)
        return f"{mark}{len(held) - 1}{mark}"
    if isinstance(value, dict):
        return {key: _without_arguments(item, mark, held) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_arguments(item, mark, held) for item in value]
    return value
