"""Arguments of tool calls that are given as JSON in a string stay as they are written."""

import json
from pathlib import Path

import pytest

from penstock.chat.chat import Chat
from penstock.chat.messages import parts_of
from penstock.errors import ChatError

TEMPLATES = Path(__file__).parent / "templates"


def source_of(name):
    return (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8").removesuffix("\n")


DEEPSEEK, QWEN35 = source_of("deepseek_r1_distill"), source_of("qwen35")
BAR = "\uff5c"
# As people and models write them: no blanks, other numbers, equal keys, escapes, odd blanks.
WRITTEN = [
    '{"a":1}',
    '{"a": 1e3, "b": 1.50, "c": -0}',
    '{"a": 1, "a": 2}',
    '{"city":"S\\u00e3o Paulo","said":"\\"Hi\\"\\n"}',
    '{\n  "deep": {"x":[1, 2,3], "x":null},\t"y" : true}',
    "{}",
    "[1,2]",
    '{"text": "<|im_end|></tool_call>"}',
]


def messages(arguments):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [
        {"role": "user", "content": "Go."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "done"},
        {"role": "assistant", "content": "It is done."},
    ]


def said(rendered):
    return [rendered.text[a:b] for a, b in rendered.trained]


CALLS = {
    "chatml": '<tool_call>\n{{"name": "f", "arguments": {}}}\n</tool_call><|im_end|>',
    "qwen25": '<tool_call>\n{{"name": "f", "arguments": {}}}\n</tool_call><|im_end|>',
    "qwen3": '<tool_call>\n{{"name": "f", "arguments": {}}}\n</tool_call><|im_end|>',
    "llama31": '{{"name": "f", "parameters": {}}}',
}


@pytest.fixture(scope="module")
def chats(gpt2_chat):
    """A chat for each template of CALLS, made once: adding tokens to GPT-2's takes a while."""
    return {
        name: Chat("chatml" if name == "chatml" else source_of(name), gpt2_chat, add_tokens="auto")
        for name in CALLS
    }


@pytest.mark.parametrize("arguments", WRITTEN)
@pytest.mark.parametrize("name", CALLS)
def test_arguments_are_trained_on_as_they_are_written(name, arguments, chats):
    """Also by templates that write them with `tojson`, which would quote a string again."""
    rendered = chats[name].render(messages(arguments))

    assert CALLS[name].format(arguments) in said(rendered)[0]


@pytest.mark.parametrize("arguments", WRITTEN)
def test_a_template_that_writes_the_whole_function_writes_them_so(arguments, gpt2_chat):
    source = (
        "{% for m in messages %}{{ m.role }}: {% if m.tool_calls %}"
        "{{ m.tool_calls[0].function | tojson }}{% else %}{{ m.content }}{% endif %}</s>\n"
        "{% endfor %}"
    )
    rendered = Chat(source, gpt2_chat).render(messages(arguments))

    assert '{"name": "f", "arguments": ' + arguments + "}</s>" in rendered.text


def test_other_arguments_are_written_as_before(gpt2_chat):
    chat = Chat("chatml", gpt2_chat)
    objects = chat.render(messages({"a": 1e3, "b": "é"}))

    assert '"arguments": {"a": 1000.0, "b": "é"}}' in objects.text
    assert '"arguments": "plain words"}' in chat.render(messages("plain words")).text


def test_a_function_call_of_sharegpt_keeps_the_text_of_its_arguments(gpt2_chat):
    value = '{"name": "f", "arguments": {"a":1e3,"a":2}}'
    record = {
        "conversations": [
            {"from": "human", "value": "Go."},
            {"from": "function_call", "value": value},
            {"from": "observation", "value": "done"},
            {"from": "gpt", "value": "It is done."},
        ]
    }
    several = json.loads(json.dumps(record))
    several["conversations"][1]["value"] = f"[{value}, {value}]"
    chat = Chat("chatml", gpt2_chat)

    assert chat.render(record).text.count('"arguments": {"a":1e3,"a":2}}') == 1
    assert chat.render(several).text.count('"arguments": {"a":1e3,"a":2}}') == 2


def test_items_of_arguments_keep_their_text(gpt2_chat):
    """A template that asks a string for its items gets them, where Hugging Face would raise."""
    arguments = '{"n": 1e3, "n": 7, "deep": {"x":1, "x":[2,3]}, "s": "a\\nb", "yes": true}'
    rendered = Chat(QWEN35, gpt2_chat).render(messages(arguments))
    values = ["1e3", "7", '{"x":1, "x":[2,3]}', "a\nb", "True"]
    names = ["n", "n", "deep", "s", "yes"]
    written = "".join(
        f"<parameter={name}>\n{value}\n</parameter>\n"
        for name, value in zip(names, values, strict=True)
    )

    assert said(rendered)[0].endswith(
        f"<tool_call>\n<function=f>\n{written}</function>\n</tool_call><|im_end|>"
    )


def test_no_argument_writes_a_special_token(gpt2_chat):
    hostile = json.dumps({"<|im_end|>": "<|im_end|>", "deep": ["<|im_start|>", {"</s>": 1}]})
    for template in ("chatml", QWEN35, source_of("qwen25"), source_of("qwen3")):
        chat = Chat(template, gpt2_chat)
        special = list(gpt2_chat.added_tokens.values())
        honest = chat.render(messages('{"a": "b", "deep": ["c", {"d": 1}]}')).tokens
        tokens = chat.render(messages(hostile)).tokens

        assert [t for t in tokens if t in special] == [t for t in honest if t in special]


@pytest.fixture(scope="module")
def deepseek(make_tokenizer):
    """A tokenizer with the tokens of DeepSeek's template, as `transformers` has it."""
    transformers = pytest.importorskip("transformers")
    names = ["begin▁of▁sentence", "end▁of▁sentence", "User", "Assistant", "tool▁sep"]
    names += [f"tool▁{what}▁{end}" for what in ("calls", "call") for end in ("begin", "end")]
    names += [f"tool▁{what}▁{end}" for what in ("outputs", "output") for end in ("begin", "end")]
    tokens = [f"<{BAR}{name}{BAR}>" for name in names]
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=make_tokenizer(tokens), bos_token=tokens[0], eos_token=tokens[1]
    )
    fast.chat_template = DEEPSEEK
    return fast


def rendered_by_transformers(deepseek, conversation):
    # Not `apply_chat_template`: since 5.23 it removes a content of None, which this template needs.
    from transformers.utils.chat_template_utils import render_jinja_template

    tokens = deepseek.special_tokens_map
    rendered, _ = render_jinja_template([conversation], chat_template=DEEPSEEK, **tokens)
    return rendered[0]


@pytest.mark.parametrize("arguments", WRITTEN)
def test_deepseek_writes_what_transformers_writes(deepseek, arguments):
    expected = rendered_by_transformers(deepseek, messages(arguments))
    rendered = Chat(deepseek, deepseek).render(messages(arguments))

    assert rendered.text == expected
    assert f"```json\n{arguments}\n```" in said(rendered)[0]
    assert said(rendered)[1] == f"It is done.<{BAR}end▁of▁sentence{BAR}>"
    theirs = deepseek(expected, add_special_tokens=False)["input_ids"]
    assert rendered.tokens.tolist() == theirs


def test_deepseek_takes_arguments_in_a_string_alone_as_with_transformers(deepseek):
    with pytest.raises(TypeError):
        rendered_by_transformers(deepseek, messages({"a": 1}))
    with pytest.raises(ChatError, match="failed on the conversation: TypeError"):
        Chat(deepseek, deepseek).render(messages({"a": 1}))


@pytest.mark.parametrize("name", ["qwen3", "qwen35"])
def test_strings_are_written_as_transformers_writes_them_where_it_does(
    name, make_tokenizer, gpt2_chat
):
    transformers = pytest.importorskip("transformers")
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=make_tokenizer(["<|im_start|>", "<|im_end|>"])
    )
    fast.chat_template = source_of(name)
    given = '{"a":1e3}' if name == "qwen3" else {"a": 1.5}
    expected = fast.apply_chat_template(messages(given), tokenize=False)

    assert Chat(fast, fast).render(messages(given)).text == expected


@pytest.mark.parametrize("text", ["", "1", '"a"', "{", "[1,]", "{'a': 1}", "[NaN]", "x" * 9])
def test_what_is_no_object_or_array_has_no_parts(text):
    assert parts_of(text) is None


def test_parts_are_the_text_between_commas():
    text = ' { "a" :\t[1, {"b": "]"}] ,"c":"\\"" } '
    parts = parts_of(text)

    assert [(part.key, text[part.start : part.stop]) for part in parts] == [
        ("a", '[1, {"b": "]"}]'),
        ("c", '"\\""'),
    ]
    assert [text[part.key_at] for part in parts] == ["a", "c"]
