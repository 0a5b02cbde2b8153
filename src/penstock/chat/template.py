"""Where chat templates come from: a name, a text, a file, a directory or a tokenizer.

What decides the rendered text is the source, the tokens it may name (`bos_token`,
`eos_token`) and the settings given with it; the digest is of all of these.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.chat.builtin import BUILTIN, builtin_source
from penstock.digest import digest_json
from penstock.errors import TemplateError

__all__ = ["Template", "is_builtin", "load_template"]

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


def is_builtin(template: Template) -> bool:
    """Whether it is one of the built-in templates, unchanged."""
    return template.name in BUILTIN and template.source == builtin_source(template.name)


def load_template(template: Any) -> Template:
    """The template that `template` means.

    Args:
        template: A built-in name ("chatml", "nanochat"), the Jinja source itself, the path of
            a .jinja file, a tokenizer_config.json or a directory that has one, or a tokenizer
            object with a `chat_template`.

    Raises:
        TemplateError: there is no such template.
    """
    if isinstance(template, Template):
        return template
    if not isinstance(template, str) and not hasattr(template, "__fspath__"):
        return _from_object(template)
    text = str(template)
    if text in BUILTIN:
        return Template(text, builtin_source(text))
    if "{{" in text or "{%" in text:
        return Template(f"jinja-{digest_json(text)[:8]}", text)
    path = Path(text)
    if path.is_dir():
        return _from_directory(path)
    if path.is_file():
        return _from_file(path)
    raise TemplateError(
        f"{text!r} is no chat template: neither a built-in name ({', '.join(BUILTIN)}), nor Jinja "
        "source, nor a file or directory here."
    )


def _from_object(tokenizer: Any) -> Template:
    source = getattr(tokenizer, "chat_template", None)
    name = str(getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__)
    if source is None:
        raise TemplateError(f"{name} has no chat_template; give the template itself.")
    named = getattr(tokenizer, "special_tokens_map", None) or {}
    return Template(name, _default(source, name), _tokens(named))


def _from_directory(path: Path) -> Template:
    config = path / "tokenizer_config.json"
    told = _read_json(config) if config.is_file() else {}
    for file in (path / "chat_template.jinja", path / "chat_template.json"):
        if file.is_file():
            return Template(str(path), _from_file(file).source, _tokens(told))
    if told.get("chat_template"):
        return Template(str(path), _default(told["chat_template"], str(path)), _tokens(told))
    found = ", ".join(sorted(entry.name for entry in path.iterdir())[:5]) or "nothing"
    raise TemplateError(
        f"{path} holds no chat template: no chat_template.jinja, and no tokenizer_config.json "
        f"that has one; it holds {found}."
    )


def _from_file(path: Path) -> Template:
    if path.suffix != ".json":
        return Template(str(path), path.read_text(encoding="utf-8"))
    told = _read_json(path)
    if not told.get("chat_template"):
        raise TemplateError(f'{path} has no "chat_template" in it.')
    return Template(str(path), _default(told["chat_template"], str(path)), _tokens(told))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        told = json.loads(path.read_bytes())
    except ValueError as error:
        raise TemplateError(f"{path} is not JSON: {error}.") from None
    if not isinstance(told, dict):
        raise TemplateError(f"{path} holds no JSON object.")
    return told


def _default(source: Any, name: str) -> str:
    """The one template, or of several the one that is called "default"."""
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
        raise TemplateError(f"The chat template of {name} is no text: {source!r:.60}")
    return source


def _tokens(told: dict[str, Any]) -> dict[str, str]:
    """The special tokens that a configuration names, as plain strings."""
    found = {}
    for key in _TOKENS:
        token = told.get(key)
        token = token.get("content") if isinstance(token, dict) else token
        if token is not None and isinstance(str(token), str):
            found[key] = str(token)
    return found
