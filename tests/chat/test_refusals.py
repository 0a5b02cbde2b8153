"""What chats refuse: the input, the class or reason of the error, and words of its message."""

import pytest

from penstock.chat.chat import Chat
from penstock.chat.jinja import Program
from penstock.chat.messages import to_conversation
from penstock.chat.template import load_template
from penstock.errors import ChatError, TemplateError, TokenizerError
from penstock.tokenize.tokenizer import load_tokenizer

ASKED = {"role": "user", "content": "Is 7 odd?"}
TOLD = {"role": "assistant", "content": "Yes."}
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

RECORDS = [
    ("text", "bad_shape", "not a str"),
    ({"text": "Hi"}, "bad_shape", 'has "text", which is not a known format'),
    ({"question": "a", "answer": "b"}, "bad_shape", 'field="question,answer"'),
    ({}, "bad_shape", "no keys"),
    ({"messages": "Hi"}, "bad_shape", "not a list"),
    ({"messages": []}, "no_messages", "no messages"),
    ({"messages": ["Hi"]}, "bad_shape", "messages[0] is a str"),
    ({"messages": [{"content": "Hi"}]}, "bad_shape", 'neither "role" nor "from"'),
    ({"messages": [{"role": 3, "content": "Hi"}]}, "bad_shape", "has the role 3"),
    ({"messages": [{"role": "Assistant", "content": "x"}]}, "unknown_role", 'Write "assistant"'),
    ({"messages": [{**ASKED, "train": "no"}]}, "bad_shape", "\"train\" is 'no'"),
    ({"messages": [{**ASKED, "content": 3}]}, "bad_content", "not text or parts"),
    ({"messages": [{**ASKED, "content": [{"type": "image"}]}]}, "not_text", "of type 'image'"),
    ({"conversations": [{"from": "eve", "value": "x"}]}, "unknown_role", "from 'eve'"),
    (
        {"conversations": [{"from": "function_call", "value": "f(x)"}]},
        "bad_tool_call",
        "not valid JSON",
    ),
    ({"messages": [{**TOLD, "tool_calls": ["f"]}]}, "bad_tool_call", "names no function"),
    ({"messages": [ASKED], "tools": "{"}, "bad_tools", "not valid JSON"),
    ({"messages": [ASKED], "tools": 3}, "bad_tools", "not a list"),
    ({"instruction": "x"}, "bad_shape", 'without "output"'),
    ({"instruction": "x", "output": None}, "bad_content", "null, not text"),
    ({"instruction": "x", "instances": [{}, {}]}, "bad_shape", "2 examples"),
    ({"messages": [ASKED], "chat_template_kwargs": 3}, "bad_shape", "chat_template_kwargs"),
]


@pytest.mark.parametrize(("record", "reason", "words"), RECORDS)
def test_a_record_that_is_no_conversation_is_refused(record, reason, words):
    with pytest.raises(ChatError) as error:
        to_conversation(record)

    assert error.value.reason == reason
    assert words in str(error.value)


# Templates that cannot be followed, or write no conversation; {} is the content in ChatML.
SOURCES = [
    ("{{ '%s ' % m.content }}", "untraceable", "formats the content"),
    ("{{ '{}'.format(m.content) }}", "untraceable", "formats the content"),
    ("{{ '%s ' | format(m.content) }}", "untraceable", "formats the content"),
    ("{% generation %}{{ m.content }}{% endgeneration %}", "bad_generation", "text of the user"),
    ("{{ 'a' + 1 }}", "template_failed", "TypeError"),
    ("{{ m.content + none }}", "template_failed", "TypeError"),
    ("{{ strftime_now('%Y') }}", "template_failed", "give one with date="),
    ("{{ raise_exception('never') }}", "template_refused", "refused the conversation: never"),
    ("", "bad_template", "not once each"),
]


@pytest.mark.parametrize(("content", "reason", "words"), SOURCES)
def test_a_template_that_cannot_be_followed_is_refused(content, reason, words, gpt2_chat):
    source = CHATML.replace("{{ m.content }}", content)
    with pytest.raises(ChatError) as error:
        Chat(source, gpt2_chat).render([ASKED, TOLD])

    assert error.value.reason in (reason, "bad_template")
    assert words in str(error.value)


def test_two_turns_that_are_written_into_each_other_are_refused(gpt2_chat):
    source = (
        "Q{{ messages[0].content }}A{% for c in messages[1].content %}{{ c }}"
        "{{ messages[-1].content[:1] }}{% endfor %}"
    )
    with pytest.raises(ChatError) as error:
        Chat(source, gpt2_chat).render([ASKED, TOLD, {**ASKED, "content": "Is 8?"}])

    assert error.value.reason in ("tangled", "bad_template")


CONTENTS = [
    ("chatml", [ASKED, {**TOLD, "content": "\ud800"}], "lone surrogate is at character"),
    ("chatml", [ASKED, {**TOLD, "content": "\ue0a5penstock\ue0a5"}], "is reserved"),
    ("{{ bos_token * 2 }}" + CHATML, [ASKED, TOLD], "twice"),
    (CHATML, [{**ASKED, "content": [{"type": "code", "text": "x"}]}, TOLD], "writes only text"),
    ("nanochat", [TOLD], "a user begins"),
]


@pytest.mark.parametrize(("template", "messages", "words"), CONTENTS)
def test_text_that_cannot_be_stored_is_refused(template, messages, words, gpt2_chat):
    with pytest.raises(ChatError, match=words):
        Chat(template, gpt2_chat).render(messages)


class Bare:
    """A tokenizer object that names no chat template, no tokens and no positions."""

    vocab_size = 9

    def encode(self, text):
        return [1]


def written(path, text):
    path.write_text(text)
    return path


OBJECTS = [
    (lambda path: load_template("no-such-thing"), TemplateError, "neither a built-in name"),
    (lambda path: load_template(path), TemplateError, "has no chat template"),
    (
        lambda path: load_template(written(path / "x.json", "{}")),
        TemplateError,
        'no "chat_template"',
    ),
    (
        lambda path: load_template(written(path / "x.json", "[")),
        TemplateError,
        "is not a JSON object",
    ),
    (
        lambda path: load_template(written(path / "x.json", '{"chat_template": 3}')),
        TemplateError,
        "is not a string",
    ),
    (lambda path: load_template(Bare()), TemplateError, "Bare has no chat_template"),
    (
        lambda path: Program("{% if x %}\n{% endfor %}", "test"),
        TemplateError,
        "test, line 2 is not valid Jinja",
    ),
    (lambda path: Chat("chatml", "gpt2"), TemplateError, "has no such token"),
    (lambda path: Chat("chatml", "bytes", rewritten="often"), TemplateError, "is not"),
    (
        lambda path: Chat("chatml", "bytes", add_tokens="auto", borders="open"),
        TokenizerError,
        "is not",
    ),
    (lambda path: Chat("chatml", "bytes", date="tomorrow"), TemplateError, "is not a date"),
    (lambda path: load_tokenizer("gpt2", add_tokens="<|a|>"), TokenizerError, "give a list"),
    (
        lambda path: load_tokenizer(Bare(), add_tokens=["<a>"]),
        TokenizerError,
        "cannot extend by <a>",
    ),
]


@pytest.mark.parametrize(("make", "error", "words"), OBJECTS)
def test_what_is_no_template_tokenizer_or_option_is_refused(make, error, words, tmp_path):
    with pytest.raises(error) as found:
        make(tmp_path)

    assert words in str(found.value)
