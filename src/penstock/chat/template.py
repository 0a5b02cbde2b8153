"""Loads chat templates: built-in ones, Jinja source, files, directories, those of tokenizers.

The rendered text depends on the source of the template, on the tokens it may use (`bos_token`,
`eos_token`) and on the settings; a manifest records all of them.

Two templates are built in. "chatml" is the format from which most open models derive theirs; tools
are described and called as in Hermes and Qwen. "nanochat" has a token for the beginning and the end
of every turn, and lets the assistant call Python in the middle of a turn. The model reads the
output of Python, but is not trained on it:

    <|bos|><|user_start|>7 * 191?<|user_end|>
    <|assistant_start|><|python_start|>7*191<|python_end|><|output_start|>1337<|output_end|>
    It is 1337.<|assistant_end|>

(without the line breaks). For both templates, `write_plain` renders simple conversations without
Jinja, which is ten times as fast; a test compares its text and spans with those of Jinja.
"""

import json
import os
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from penstock.chat.messages import ChatText, JsonObject, Message, Span
from penstock.digest import digest_json
from penstock.errors import MissingTemplateError, TemplateError
from penstock.paths import expand_user
from penstock.tokenize.definition import is_path, last_part
from penstock.tokenize.engines import read_attribute

_CHATML_ROLES = ("system", "user", "assistant")
# The text that a built-in template writes before a conversation, before and after the text of a
# message, and after the end of a turn; {} is the role.
_FORMATS = {
    "chatml": ("", "<|im_start|>{}\n", "<|im_end|>", "\n"),
    "nanochat": ("<|bos|>", "<|{}_start|>", "<|{}_end|>", ""),
}
_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token")


@dataclass(frozen=True, slots=True)
class Template:
    """A chat template: its Jinja source, its name, and the special tokens that came with it."""

    name: str
    source: str = field(repr=False)
    tokens: dict[str, str] = field(default_factory=dict)
    """Special tokens that came with the template, by their names in it, such as `bos_token`."""
    has_path: bool = False
    """Whether the name is a path."""

    @property
    def recorded_name(self) -> str:
        """The name for a manifest: of a path, which means nothing elsewhere, only its last part."""
        return last_part(self.name) if self.has_path else self.name

    @property
    def digest(self) -> str:
        """A digest of the source."""
        return digest_json(self.source)

    @property
    def is_builtin(self) -> bool:
        """Whether the template is one of the built-in ones, unchanged."""
        return self.name in _FORMATS and self.source == _builtin_source(self.name)


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
    if text in _FORMATS:
        return Template(text, _builtin_source(text))
    # Source is recognised before paths are tried: `Path.is_dir` raises for a name as long as a
    # template's source.
    if "{{" in text or "{%" in text:
        return Template(f"jinja-{digest_json(text)[:8]}", text)
    if (path := expand_user(text)).exists():
        return _from_path(path)
    raise MissingTemplateError(
        f"{text!r} is not a chat template: it is neither a built-in name ({', '.join(_FORMATS)}), "
        "nor Jinja source, nor the path of a file or directory."
    )


def _from_object(tokenizer: object) -> Template:
    source = read_attribute(tokenizer, "chat_template")
    name = str(read_attribute(tokenizer, "name_or_path") or type(tokenizer).__name__)
    if source is None:
        raise TemplateError(f"{name} has no chat_template; give the template itself.")
    found = _configured(source, name, read_attribute(tokenizer, "special_tokens_map") or {})
    return replace(found, has_path=is_path(name))


def _from_path(path: Path) -> Template:
    # `transformers` writes a separate file and prefers it to the configuration.
    names = ("tokenizer_config.json", "chat_template.json", "chat_template.jinja")
    config: JsonObject = {}
    for file in [path / name for name in names] if path.is_dir() else [path]:
        if file.suffix == ".json" and file.is_file():
            try:
                config |= json.loads(file.read_bytes())
            except (TypeError, ValueError) as error:
                raise TemplateError(f"{file} is not a JSON object: {error}.") from None
        elif file.is_file():
            config["chat_template"] = file.read_text(encoding="utf-8")
    if not config.get("chat_template"):
        raise TemplateError(
            f'{path} has no chat template: no "chat_template" in a JSON file, and no '
            "chat_template.jinja. Give the template itself."
        )
    return replace(_configured(config["chat_template"], str(path), config), has_path=True)


def _configured(source: object, name: str, config: JsonObject) -> Template:
    """The template in a configuration; if there are several, the one named "default"."""
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


def write_plain(template: str, messages: list[Message]) -> ChatText | None:
    """Render a plain conversation with a built-in template, without Jinja; None for any other.

    A conversation is plain if each message has only a text, which is not empty, and a role that the
    template expects there.
    """
    opening, head, end, tail = _FORMATS[template]
    pieces = [opening]
    content: list[Span] = []
    trained: list[Span] = []
    at = len(opening)
    for number, message in enumerate(messages):
        text, role = message["content"], message["role"]
        # nanochat's template refuses turns that do not alternate, with its own message.
        turn = ("user", "assistant")[number % 2]
        roles = _CHATML_ROLES if template == "chatml" else (turn,)
        # More keys, other roles or lists of parts may make the template write something else, and
        # an empty text has no run, so Jinja renders such conversations.
        if type(text) is not str or not text or len(message) != 2 or role not in roles:
            return None
        before, after = head.format(role), end.format(role)
        start = at + len(before)
        stop = start + len(text)
        content.append((start, stop))
        if role == "assistant":
            trained.append((start, stop + len(after)))
        pieces += (before, text, after, tail)
        at = stop + len(after) + len(tail)
    return ChatText("".join(pieces), content, trained)
