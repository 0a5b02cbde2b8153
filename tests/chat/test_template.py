"""Templates come from names, texts, files, directories and tokenizers."""

import json

import pytest

from penstock.chat.template import load_template
from penstock.errors import TemplateError

SOURCE = "{% for m in messages %}{{ m.content }}{% endfor %}"


def test_a_built_in_name_a_text_and_a_file_are_templates(tmp_path):
    path = tmp_path / "chat_template.jinja"
    path.write_text(SOURCE)

    assert "<|im_start|>" in load_template("chatml").source
    assert load_template(SOURCE).source == SOURCE
    assert load_template(path).digest == load_template(SOURCE).digest


def test_a_tokenizer_config_gives_its_template_and_its_tokens(tmp_path):
    config = {"chat_template": SOURCE, "bos_token": "<s>", "eos_token": {"content": "</s>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    from_file = load_template(tmp_path / "tokenizer_config.json")
    from_directory = load_template(tmp_path)

    assert from_file.source == from_directory.source == SOURCE
    assert from_file.tokens == from_directory.tokens == {"bos_token": "<s>", "eos_token": "</s>"}


def test_a_template_file_beside_the_config_wins_and_keeps_the_tokens(tmp_path):
    config = {"chat_template": "{{ 'old' }}", "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "chat_template.jinja").write_text(SOURCE)

    assert load_template(tmp_path).source == SOURCE
    assert load_template(tmp_path).tokens == {"eos_token": "</s>"}


def test_of_several_templates_the_default_is_taken(tmp_path):
    several = [{"name": "tool_use", "template": "{{ 1 }}"}, {"name": "default", "template": SOURCE}]
    (tmp_path / "a.json").write_text(json.dumps({"chat_template": several}))
    (tmp_path / "b.json").write_text(json.dumps({"chat_template": several[:1]}))

    assert load_template(tmp_path / "a.json").source == SOURCE
    with pytest.raises(TemplateError, match="none called default: tool_use"):
        load_template(tmp_path / "b.json")


def test_a_tokenizer_object_gives_its_template():
    class Tokenizer:
        chat_template = SOURCE
        name_or_path = "some/model"
        special_tokens_map = {"eos_token": "</s>"}  # noqa: RUF012

    assert load_template(Tokenizer()).source == SOURCE
    assert load_template(Tokenizer()).tokens == {"eos_token": "</s>"}
    Tokenizer.chat_template = None
    with pytest.raises(TemplateError, match="some/model has no chat_template"):
        load_template(Tokenizer())
