r"""The filters by which templates write the arguments of a tool call.

Arguments that came as a string with JSON in it are a string to the template, as they are to
`apply_chat_template`. Two things are added to that. `tojson` writes such a string as it is,
instead of quoting it a second time:

    {"name": "f", "arguments": {"a":1e3}}        and not   "arguments": "{\"a\":1e3}"

And a template that asks for its items gets them, where Hugging Face would raise. Numbers, objects
and arrays among them remember the text that they were given as.
"""

import json
import re
from typing import Any, NamedTuple, NoReturn

from penstock.chat.provenance import Traced, derived, leaves_in, trace

__all__ = ["Part", "is_arguments", "is_json", "items_of", "parts_of", "to_json"]

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


_PATH = re.compile(r"tool_calls\[\d+\]\.function\.arguments")


class _Written:
    """A value that remembers the JSON text that it was given as."""

    written: Traced

    def __str__(self) -> str:
        return self.written


class _WrittenInt(_Written, int):
    pass


class _WrittenFloat(_Written, float):
    pass


class _WrittenObject(_Written, dict[str, Any]):
    pass


class _WrittenArray(_Written, list[Any]):
    pass


def _kept(value: Any, written: Traced) -> Any:
    value.written = written
    return value


def is_arguments(value: Any) -> bool:
    """Whether `value` is the arguments of a tool call, given as JSON in a string."""
    if type(value) is not Traced or len(value._runs) != 1:
        return False
    start, stop, leaf, offset = value._runs[0]
    whole = (start, stop, offset) == (0, len(leaf.text), 0) and len(value) == stop
    return whole and _PATH.fullmatch(leaf.path) is not None and is_json(value.plain)


def items_of(arguments: Traced) -> list[tuple[str, Any]]:
    """The members of the object that `arguments` holds; equal keys are all there.

    Raises:
        TypeError: it holds no object.
    """
    parts = parts_of(arguments.plain)
    if parts is None or any(part.key is None for part in parts):
        raise TypeError(f"The arguments {arguments.plain[:60]!r} are no JSON object.")
    return [
        (_inside(arguments, part.key or "", part.key_at), _value(arguments, part)) for part in parts
    ]


def _value(arguments: Traced, part: Part) -> Any:
    value, start = part.value, part.start
    if isinstance(value, str):
        return _inside(arguments, value, start + 1)
    if isinstance(value, bool) or value is None:
        return value
    written = _inside(arguments, arguments.plain[start : part.stop], start)
    leaf = arguments._runs[0][2]
    if isinstance(value, dict):
        return _kept(_WrittenObject(trace(value, leaf)), written)
    if isinstance(value, list):
        return _kept(_WrittenArray(trace(value, leaf)), written)
    return _kept((_WrittenInt if isinstance(value, int) else _WrittenFloat)(value), written)


def _inside(arguments: Traced, text: str, place: int) -> Traced:
    """`text`, which the arguments have from `place` on, but for escapes."""
    return Traced(text, [(0, len(text), arguments._runs[0][2], place)] if text else [])


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter `tojson` as chat templates know it: nothing is escaped for HTML."""
    if isinstance(value, _Written):
        return value.written
    if type(value) is Traced and is_arguments(value):
        return value
    options: dict[str, Any] = {
        "ensure_ascii": ensure_ascii,
        "indent": indent,
        "separators": separators,
        "sort_keys": sort_keys,
    }
    text = json.dumps(value, **options)
    if any(_PATH.fullmatch(leaf.path) for leaf in leaves_in(value)):
        text = _with_arguments(value, text, options)
    return derived(text, [value])


def _with_arguments(value: Any, text: str, options: dict[str, Any]) -> str:
    """`value` as JSON, in which the arguments of tool calls stand as they were written."""
    mark = "\ue0a5"
    while mark in text or json.dumps(mark)[1:-1] in text:
        mark += "\ue0a5"
    held: list[str] = []
    text = json.dumps(_without_arguments(value, mark, held), **options)
    for number, arguments in enumerate(held):
        name = json.dumps(f"{mark}{number}{mark}", ensure_ascii=options["ensure_ascii"])
        text = text.replace(name, arguments)
    return text


def _without_arguments(value: Any, mark: str, held: list[str]) -> Any:
    """A copy of `value` with a name in place of each such text, which goes to `held`."""
    if is_arguments(value):
        held.append(value.plain)
        return f"{mark}{len(held) - 1}{mark}"
    if isinstance(value, dict):
        return {key: _without_arguments(item, mark, held) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_arguments(item, mark, held) for item in value]
    return value
