"""Chat templates, and where they are found: a name, Jinja source, a file, a directory, a tokenizer.

The rendered text depends on the source of the template, on the tokens it may use (`bos_token`,
`eos_token`) and on the settings; a manifest records all of them.

Two templates are built in. "chatml" is the format from which most open models derive theirs; tools
are described and called as in Hermes and Qwen. "nanochat" has a token for every border, and lets
the assistant call Python in the middle of a turn. The output of Python is read and not trained on:

    <|bos|><|user_start|>7 * 191?<|user_end|>
    <|assistant_start|><|python_start|>7*191<|python_end|><|output_start|>1337<|output_end|>
    It is 1337.<|assistant_end|>

(without the line breaks). `WRITERS` renders plain conversations of both in a few lines of Python,
ten times as fast as Jinja; a test compares text and spans with those of Jinja.
"""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from penstock.chat.messages import ChatText, JsonObject, Message, Span
from penstock.digest import digest_json
from penstock.errors import TemplateError
from penstock.tokenize.objects import read_attribute

_BUILTIN = ("chatml", "nanochat")
_CHATML_ROLES = frozenset(("system", "user", "assistant"))
_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token")


@dataclass(frozen=True, slots=True)
class Template:
    """A chat template as data."""

    name: str
    source: str = field(repr=False)
    tokens: dict[str, str] = field(default_factory=dict)
    """Special tokens that came with the template, by the names it may use."""

    @property
    def digest(self) -> str:
        """A digest of the source."""
        return digest_json(self.source)

    @property
    def is_builtin(self) -> bool:
        """Whether it is one of the built-in templates, unchanged."""
        return self.name in _BUILTIN and self.source == _builtin_source(self.name)


@cache
def _builtin_source(name: str) -> str:
    return (Path(__file__).parent / "templates" / f"{name}.jinja").read_text(encoding="utf-8")


def load_template(template: object) -> Template:
    """Load a chat template.

    Args:
        template: A built-in name ("chatml", "nanochat"), the Jinja source itself, the path of
            a .jinja file, a tokenizer_config.json or a directory that has one, or a tokenizer
            object with a `chat_template`.

    Raises:
        TemplateError: there is no such template.
    """
    if isinstance(template, Template):
        return template
    if not isinstance(template, str | os.PathLike):
        return _from_object(template)
    text = os.fspath(template)
    if text in _BUILTIN:
        return Template(text, _builtin_source(text))
    # Source is recognised before paths are tried: `Path.is_dir` raises for a name as long as a
    # template's source.
    if "{{" in text or "{%" in text:
        return Template(f"jinja-{digest_json(text)[:8]}", text)
    path = Path(text)
    if path.is_dir():
        return _from_directory(path)
    if path.is_file():
        return _from_file(path)
    raise TemplateError(
        f"{text!r} is not a chat template: it is neither a built-in name ({', '.join(_BUILTIN)}), "
        "nor Jinja source, nor the path of a file or directory."
    )


def _from_object(tokenizer: object) -> Template:
    source = read_attribute(tokenizer, "chat_template")
    name = str(read_attribute(tokenizer, "name_or_path") or type(tokenizer).__name__)
    if source is None:
        raise TemplateError(f"{name} has no chat_template; give the template itself.")
    return _configured(source, name, read_attribute(tokenizer, "special_tokens_map") or {})


def _from_directory(path: Path) -> Template:
    file = path / "tokenizer_config.json"
    config = _read_json(file) if file.is_file() else {}
    # `transformers` writes a separate file and prefers it to the configuration.
    for other in (path / "chat_template.jinja", path / "chat_template.json"):
        if other.is_file():
            return _configured(_from_file(other).source, str(path), config)
    if config.get("chat_template"):
        return _configured(config["chat_template"], str(path), config)
    found = ", ".join(sorted(entry.name for entry in path.iterdir())[:5]) or "nothing"
    raise TemplateError(
        f"{path} has no chat template: no chat_template.jinja, and no tokenizer_config.json "
        f"with one; it holds {found}."
    )


def _from_file(path: Path) -> Template:
    if path.suffix != ".json":
        return Template(str(path), path.read_text(encoding="utf-8"))
    config = _read_json(path)
    if not config.get("chat_template"):
        raise TemplateError(f'{path} has no "chat_template" in it.')
    return _configured(config["chat_template"], str(path), config)


def _read_json(path: Path) -> JsonObject:
    try:
        config = json.loads(path.read_bytes())
    except ValueError as error:
        raise TemplateError(f"{path} is not JSON: {error}.") from None
    if not isinstance(config, dict):
        raise TemplateError(f"{path} is not a JSON object.")
    return config


def _configured(source: object, name: str, config: JsonObject) -> Template:
    """The template in a configuration; if it has several, the one named "default"."""
    if isinstance(source, list):
        source = {str(each.get("name")): each.get("template") for each in source}
    if isinstance(source, dict):
        if "default" not in source:
            raise TemplateError(
                f"{name} has several chat templates, none called default: {', '.join(source)}. "
                "Give the source of one."
            )
        source = source["default"]
    if not isinstance(source, str):
        raise TemplateError(f"The chat template of {name} is not a string: {source!r:.60}")
    tokens = {}
    for key in _TOKENS:
        token = config.get(key)
        token = token.get("content") if isinstance(token, dict) else token
        if token is not None:
            tokens[key] = str(token)  # `transformers` has objects here, too
    return Template(name, source, tokens)


def _write_chatml(messages: list[Message]) -> ChatText | None:
    pieces: list[str] = []
    content: list[Span] = []
    trained: list[Span] = []
    at = 0
    for message in messages:
        text, role = message["content"], message["role"]
        # More keys, other roles or parts may make the template write something else.
        if type(text) is not str or len(message) != 2 or role not in _CHATML_ROLES:
            return None
        at += 13 + len(role)  # <|im_start|>, the role, a line end
        pieces += ("<|im_start|>", role, "\n", text, "<|im_end|>\n")
        stop = at + len(text)
        if text:
            content.append((at, stop))
            if role == "assistant":
                trained.append((at, stop + 10))  # with <|im_end|>
        elif role == "assistant":  # an empty turn has no run, so Jinja's path decides about it
            return None
        at = stop + 11  # <|im_end|> and a line end
    return ChatText("".join(pieces), content, trained)


def _write_nanochat(messages: list[Message]) -> ChatText | None:
    pieces = ["<|bos|>"]
    content: list[Span] = []
    trained: list[Span] = []
    at = 7
    for number, message in enumerate(messages):
        text, role = message["content"], message["role"]
        if type(text) is not str or not text or len(message) != 2:
            return None
        # nanochat's template refuses turns that do not alternate, with its own message.
        if role != ("assistant" if number % 2 else "user"):
            return None
        pieces += ("<|", role, "_start|>", text, "<|", role, "_end|>")
        at += len(role) + 10  # <|…_start|>
        stop = at + len(text)
        content.append((at, stop))
        at = stop + len(role) + 8  # <|…_end|>
        if number % 2:
            trained.append((stop - len(text), at))
    return ChatText("".join(pieces), content, trained)


WRITERS: dict[str, Callable[[list[Message]], ChatText | None]] = {
    "chatml": _write_chatml,
    "nanochat": _write_nanochat,
}
"""Renders plain conversations of a built-in template; None for those that need Jinja."""
