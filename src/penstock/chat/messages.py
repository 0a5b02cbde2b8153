"""Converts records of fine-tuning datasets to conversations.

Five formats of records are recognised by their keys. Any other record is refused with a message
that lists its keys, because a guess could train on the wrong text:

    messages       {"messages": [{"role": "user", "content": "Hi"}, …], "tools": […]}
    ShareGPT       {"conversations": [{"from": "human", "value": "Hi"}, …], "system": "…"}
    Alpaca         {"instruction": "…", "input": "…", "output": "…"}
    Dolly          {"instruction": "…", "context": "…", "response": "…"}
    prompt         {"prompt": "…", "completion": "…"}

A message with `"train": false` (or OpenAI's `"weight": 0`) is read and not trained on.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial
from typing import Any, NamedTuple, NoReturn, TypeGuard

from penstock.chat.provenance import Traced, derived, trace
from penstock.errors import ChatError

JsonObject = dict[str, Any]
"""A parsed JSON object."""
Span = tuple[int, int]
"""A range of characters, `[start, stop)`."""
Message = JsonObject
"""A message: "role", "content" and more."""
Columns = tuple[str, str]
"""The names of a column of prompts and of a column of completions."""

QUESTION, ANSWER = "Zqvi alpha?", "Zqwo beta."
"""Texts that are rendered to find out what a template writes around a turn."""
ANCHOR = "\ue0a5penstock\ue0a5"
"""Text that no message may contain, so that penstock can put it where it must find it again."""


@dataclass(frozen=True, slots=True)
class ChatText:
    """A rendered conversation, before it is encoded.

    The spans of `content` and of `trained` are ascending and do not touch.
    """

    text: str
    content: list[Span]
    """The characters that come from messages; the template wrote the others."""
    trained: list[Span]
    """The characters that are trained on."""
    rewritten: tuple[int, ...] = ()
    """The numbers of the assistant's messages from which the template left something out."""
    num_without_reasoning: int = 0
    """The number of turns not trained on because the template leaves out their reasoning."""
    without_end: tuple[int, ...] = ()
    """For each trained turn without an end token, the index of the character after the turn."""


def merged(spans: Iterable[Span]) -> list[Span]:
    """The spans in ascending order; spans that touch or overlap are joined.

    >>> merged([(4, 6), (0, 2), (2, 3), (5, 9)])
    [(0, 3), (4, 9)]
    """
    found: list[Span] = []
    for start, stop in sorted(spans):
        if found and start <= found[-1][1]:
            if stop > found[-1][1]:
                found[-1] = (found[-1][0], stop)
        elif start < stop:
            found.append((start, stop))
    return found


def gaps(spans: Iterable[Span], start: int, stop: int) -> Iterator[Span]:
    """The gaps between `spans`, which are ascending, from `start` to `stop`; a gap may be empty.

    >>> list(gaps([(2, 3), (5, 9)], 0, 9))
    [(0, 2), (3, 5), (9, 9)]
    """
    for low, high in spans:
        if low < stop and high > start:
            yield start, max(start, low)
            start = high
    yield start, max(start, stop)


# The speakers of ShareGPT files, which differ from dataset to dataset, and their roles.
_SPEAKERS = {
    **dict.fromkeys(("human", "user", "prompter"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard", "model", "bot"), "assistant"),
    "system": "system",
    "developer": "developer",
    "function_call": "assistant",
    **dict.fromkeys(("observation", "tool", "function_response", "function", "ipython"), "tool"),
}
_ROLES = ("system", "developer", "user", "assistant", "tool")
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages in the form that templates take, with the definitions of tools and settings."""

    messages: list[Message]
    tools: list[object] | None = None
    settings: JsonObject = field(default_factory=dict)
    """More variables for the template, such as `enable_thinking`."""

    def is_trained(self, number: int) -> bool:
        """Whether message `number` is from the assistant and is trained on."""
        message = self.messages[number]
        return message["role"] == "assistant" and message.get("train", True) is not False


def to_conversation(record: object, columns: Columns | None = None) -> Conversation:
    r"""The conversation in a record of one of the known formats.

    With `columns`, the names of a column of prompts and of one of completions, only these are read.

    >>> to_conversation({"instruction": "Add.", "input": "1 + 1", "output": "2"}).messages
    [{'role': 'user', 'content': 'Add.\n\n1 + 1'}, {'role': 'assistant', 'content': '2'}]

    Raises:
        ChatError: the record has none of these formats, or a value in it has the wrong type.
    """
    if isinstance(record, Conversation):  # a build converts first, to report bad records
        return record
    if isinstance(record, list | tuple):
        record = {"messages": record}
    if not isinstance(record, dict):
        raise ChatError("bad_shape", f"A conversation is a list or a dict, not {_kind(record)}.")
    messages = _turns(record, columns)
    # ShareGPT and Alpaca have the system message beside the turns.
    if record.get("system") and messages and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": _text(record["system"], "system")})
    if not messages:
        raise ChatError("no_messages", "The conversation has no messages.")
    settings = record.get("chat_template_kwargs") or {}
    if not isinstance(settings, dict):
        raise ChatError("bad_shape", f'"chat_template_kwargs" is {_kind(settings)}, not an object.')
    return Conversation(messages, _tools(record.get("tools")), settings)


def _turns(record: JsonObject, columns: Columns | None) -> list[Message]:
    if columns is None:
        for key in ("messages", "conversations", "conversation"):
            if record.get(key) is not None:
                return _messages(record[key], key)
        if "instruction" in record:
            return _from_instruction(record)
    prompt, completion = columns or ("prompt", "completion")
    if prompt in record and completion in record:
        messages = _messages(record[prompt], prompt, "user")
        return [*messages, *_messages(record[completion], completion, "assistant")]
    # Only keys are shown: values may be long, or private.
    shown = ", ".join(f'"{key}"' for key in list(record)[:8]) or "no keys"
    if columns is not None:
        missing = next(name for name in columns if name not in record)
        raise ChatError(
            "bad_shape",
            f'The record has {shown}, and no "{missing}", which field= (--field) of penstock.build '
            "names.",
        )
    texts = [key for key, value in record.items() if isinstance(value, str)]
    pair = ",".join(texts[:2]) if len(texts) > 1 else "question,answer"
    raise ChatError(
        "bad_shape",
        f"The record has {shown}, which is not a known format. Known are "
        '"messages", "conversations" (ShareGPT), "instruction" with "output" (Alpaca) or '
        '"response" (Dolly), and "prompt" with "completion". If one column has prompts and another '
        f'one completions, name both in penstock.build, such as field="{pair}" (--field {pair}).',
    )


def _messages(turns: object, path: str, role: str | None = None) -> list[Message]:
    """Check messages and return them; with `role`, `turns` may also be the text of one message."""
    if isinstance(turns, list | tuple):
        return [_message(turn, f"{path}[{number}]") for number, turn in enumerate(turns)]
    if role is None:
        raise ChatError("bad_shape", f'"{path}" is {_kind(turns)}, not a list.')
    return [{"role": role, "content": _text(turns, path)}]


def _from_instruction(record: JsonObject) -> list[Message]:
    """The turns of Alpaca and Dolly, and of Alpaca's seed tasks with their list of instances."""
    if isinstance(examples := record.get("instances"), list):
        if len(examples) != 1:
            found = f'"instances" holds {len(examples)} examples'
            raise ChatError("bad_shape", f"{found}; it must hold one. Write each as a record.")
        record = {**record, **examples[0]}
    # Alpaca has "output" and "input", Dolly "response" and "context".
    answer, context = ("output", "input") if "output" in record else ("response", "context")
    if answer not in record:
        raise ChatError("bad_shape", '"instruction" comes without "output" or "response".')
    question = _text(record["instruction"], "instruction")
    if more := _text(record.get(context) or "", context):
        question = f"{question}\n\n{more}" if question else more
    history = [
        [_text(each, f"history[{number}]") for each in pair]
        for number, pair in enumerate(record.get("history") or [])
    ]
    pairs = [*history, [question, _text(record[answer], answer)]]
    return [
        {"role": role, "content": text}
        for pair in pairs
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]


def _message(turn: object, path: str) -> Message:
    """Check a message, given with "role" and "content" or "from" and "value", and return it."""
    if not isinstance(turn, dict):
        raise ChatError("bad_shape", f"{path} is {_kind(turn)}, not a message.")
    if "role" in turn:
        # Parquet files have every key in every message, with null for those that are missing.
        message = {key: item for key, item in turn.items() if key != "weight" and item is not None}
        message["role"] = {"function": "tool", "model": "assistant"}.get(turn["role"], turn["role"])
        message.setdefault("content", None)
    elif "from" in turn:
        message = _sharegpt(turn, path)
    else:
        raise ChatError("bad_shape", f'{path} has neither "role" nor "from": {turn!r:.60}')
    if not isinstance(message["role"], str) or not message["role"]:
        raise ChatError("bad_shape", f"{path} has the role {message['role']!r:.40}, not a name.")
    _refuse_misspelt(message["role"], path)
    if message["content"] is None and set(message) <= {"role", "content", "train"}:
        raise ChatError("bad_shape", f'{path} has no "content".')
    # OpenAI's "weight" is 0 or 1; an explicit "train" has priority.
    if turn.get("weight") is not None and "train" not in turn:
        message["train"] = bool(turn["weight"])
    if not isinstance(message.get("train", True), bool):
        found = turn["train"]
        raise ChatError("bad_shape", f'{path}: "train" is {found!r:.20}, not true or false.')
    _check_content(message, path)
    texts = [message[key] for key in _REASONING_KEYS if isinstance(message.get(key), str)]
    if texts:  # some templates read one key, and some the other
        message = {"reasoning_content": texts[0], "thinking": texts[0], **message}
    if message.get("tool_calls"):
        calls = message["tool_calls"]
        message["tool_calls"] = [_call(call, f"{path}.tool_calls") for call in calls]
    return message


def _refuse_misspelt(role: str, path: str) -> None:
    """Raise if a role is nearly "assistant" or another: its turns would not be trained on.

    Other roles are allowed, because a template may have any.
    """
    lower = role.lower()
    meant = lower if lower in _ROLES else _SPEAKERS.get(lower)
    if meant not in (lower, "assistant"):
        meant = next(iter(get_close_matches(lower, _ROLES, 1, 0.8)), None)
    if role not in _ROLES and meant is not None:
        raise ChatError("unknown_role", f'{path} has the role {role!r:.40}. Write "{meant}".')


def _sharegpt(turn: JsonObject, path: str) -> Message:
    role = _SPEAKERS.get(turn["from"]) if isinstance(turn["from"], str) else None
    if role is None:
        known = ", ".join(sorted(_SPEAKERS))
        raise ChatError("unknown_role", f"{path} is from {turn['from']!r:.40}; known are {known}.")
    kept = {key: item for key, item in turn.items() if key not in ("from", "value", "weight")}
    value = turn.get("value")
    # A "function_call" is a turn whose whole value is the JSON of the calls.
    if turn["from"] != "function_call":
        return {**kept, "role": role, "content": value}
    calls = _written_calls(_text(value, f"{path}.value"), path)
    return {**kept, "role": role, "content": None, "tool_calls": calls}


def _written_calls(text: str, path: str) -> list[JsonObject]:
    """The tool calls in a JSON text; the text of their arguments is not changed."""
    try:
        calls = json.loads(text)
    except ValueError as error:
        raise ChatError("bad_tool_call", f"{path} is not valid JSON: {error}.") from None
    # Arguments stay text: parsed and written again, 1e3 would become 1000.0.
    if isinstance(calls, list):
        texts = [text[part.start : part.stop] for part in parts_of(text) or ()]
        return [call for each in texts for call in _written_calls(each, path)]
    for part in parts_of(text) or ():
        if part.key == "arguments" and not isinstance(part.value, str):
            calls["arguments"] = text[part.start : part.stop]
    return [calls]


def _call(call: object, path: str) -> JsonObject:
    """A tool call in the form that templates take; its arguments are not changed."""
    outer = call if isinstance(call, dict) else {}
    function = outer.get("function", outer)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ChatError("bad_tool_call", f"{path} has {call!r:.60}, which names no function.")
    inner = ("function", "name", "arguments")
    return {
        "type": "function",
        **{key: item for key, item in outer.items() if key not in inner},
        "function": {**function, "arguments": function.get("arguments", {})},
    }


def _check_content(message: Message, path: str) -> None:
    content = message["content"]
    if content is None or isinstance(content, str):
        return
    if not isinstance(content, list):
        raise ChatError("bad_content", f"{path}.content is {_kind(content)}, not text or parts.")
    for number, part in enumerate(content):
        inner = part if isinstance(part, dict) else {"text": part}
        if not isinstance(inner.get("text"), str):
            kind = inner.get("type") or _kind(part)
            raise ChatError(
                "not_text",
                f"{path}.content[{number}] is of type {kind!r:.40} and has no text; penstock "
                "renders only text.",
            )


def _tools(tools: object) -> list[object] | None:
    """The definitions of tools; ShareGPT files have them as JSON in a string."""
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except ValueError as error:
            raise ChatError("bad_tools", f'"tools" is not valid JSON: {error}.') from None
    if tools is None or tools == []:  # templates test whether there are tools at all
        return None
    if not isinstance(tools, list):
        raise ChatError("bad_tools", f'"tools" is {_kind(tools)}, not a list.')
    return [
        # Some datasets have the function alone, without OpenAI's outer object.
        {"type": "function", "function": tool}
        if isinstance(tool, dict) and "function" not in tool
        else tool
        for tool in tools
    ]


def _text(value: object, path: str) -> str:
    if not isinstance(value, str):
        raise ChatError("bad_content", f'"{path}" is {_kind(value)}, not text.')
    return value


def _kind(value: object) -> str:
    return "null" if value is None else f"a {type(value).__name__}"


# Arguments of tool calls, exactly as the record has them.
#
# If a record has the arguments as a JSON string, the template gets a string, as it does from
# `apply_chat_template`. penstock differs from that function in two ways. First, the filter `tojson`
# writes such a string unchanged, instead of quoting it a second time:
#
#     {"name": "f", "arguments": {"a":1e3}}        and not   "arguments": "{\"a\":1e3}"
#
# Second, a template can read the items of the JSON object in such a string; under Hugging Face that
# is an error. Numbers, objects and arrays among the items are written with the record's own text.

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


def refuse_constant(name: str) -> NoReturn:
    """Refuse NaN and Infinity, which Python's parser accepts and which are not JSON."""
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=refuse_constant)


def is_json(text: str) -> bool:
    """Whether `text` is one JSON value; blanks around it are allowed."""
    try:
        json.loads(text, parse_constant=refuse_constant)
    except ValueError:
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


def to_json(value: object, ensure_ascii: bool = False, **options: Any) -> str:
    """The filter `tojson` of chat templates: `json.dumps`, which does not escape HTML."""
    if isinstance(value, _Written):
        return value.written
    if type(value) is Traced and is_arguments(value):
        return value
    dump: Callable[[object], str] = partial(json.dumps, ensure_ascii=ensure_ascii, **options)
    found: list[str] = []
    text = dump(_without_arguments(value, found))
    for number, arguments in enumerate(found, 1):
        text = text.replace(dump(f"{ANCHOR}{number}{ANCHOR}"), arguments)
    return derived(text, [value])


def _without_arguments(value: object, found: list[str]) -> object:
    """A copy of `value` with placeholders for arguments, which are appended to `found`."""
    if is_arguments(value):
        found.append(value.plain)
        # No message contains the anchor, because a rendered text that does is refused.
        return f"{ANCHOR}{len(found)}{ANCHOR}"
    if isinstance(value, dict):
        return {key: _without_arguments(item, found) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_arguments(item, found) for item in value]
    return value
