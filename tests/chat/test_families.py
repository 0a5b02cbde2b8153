"""Decoded supervised tokens are exactly what the assistant said, under every family."""

import json

import jinja2
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment

from penstock.chat.messages import to_conversation
from penstock.errors import ChatError

PLAIN = [
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "It is 4."},
]
LONG = [
    *PLAIN,
    {"role": "user", "content": "And 3 + 3?\n\nShow your work."},
    {"role": "assistant", "content": "3 + 3 = 6.\n\n```python\nprint(3 + 3)\n```"},
    {"role": "user", "content": "Danke schön, 谢谢 👩‍👩‍👧‍👦"},
    {"role": "assistant", "content": "Gern geschehen, 不客气 🏳️‍🌈"},
]
BLANK = [
    {"role": "user", "content": "  Blanks\n"},
    {"role": "assistant", "content": "\n\n both ends \n"},
    {"role": "user", "content": "both ends"},
    {"role": "assistant", "content": "both ends"},
]


def said_by(family, messages):
    """What is to be trained on, turn by turn."""
    last = max(i for i, message in enumerate(messages) if message["role"] == "assistant")
    return [
        family.said(message["content"], last=number == last)
        for number, message in enumerate(messages)
        if message["role"] == "assistant"
    ]


def decoded(family, rendered):
    return family.tokenizer.decode(rendered.tokens[rendered.loss == 1])


@pytest.mark.parametrize("messages", [PLAIN, LONG, BLANK], ids=["one turn", "three", "blanks"])
def test_the_trained_characters_are_what_the_assistant_said(family, messages):
    rendered = family.chat().render(messages)

    assert [rendered.text[a:b] for a, b in rendered.trained] == said_by(family, messages)
    assert rendered.rewritten == ()


@pytest.mark.parametrize("messages", [PLAIN, LONG], ids=["one turn", "three"])
def test_tokens_cut_at_borders_decode_to_exactly_that(family, messages):
    rendered = family.chat(borders="cut").render(messages)

    assert decoded(family, rendered) == "".join(said_by(family, messages))


@pytest.mark.parametrize("messages", [PLAIN, LONG, BLANK], ids=["one turn", "three", "blanks"])
def test_tokens_as_of_apply_chat_template_differ_in_blanks_of_the_template_alone(family, messages):
    """A token may hold a blank of the template and the first word of the answer."""
    rendered = family.chat().render(messages)
    expected = "".join(said_by(family, messages))

    assert "".join(decoded(family, rendered).split()) == "".join(expected.split())
    if rendered.text[rendered.trained[0][0] - 1] not in " \n":
        assert decoded(family, rendered) == expected


@pytest.mark.parametrize("messages", [PLAIN, LONG, BLANK], ids=["one turn", "three", "blanks"])
def test_ids_are_those_of_the_whole_text(family, messages):
    chat = family.chat()
    script = chat.render_text(messages)

    assert chat.compare([script]) == 1


@pytest.mark.parametrize("messages", [PLAIN, LONG, BLANK], ids=["one turn", "three", "blanks"])
def test_the_text_is_what_plain_jinja_gives(family, messages):
    """Without strings that remember where they came from."""

    class Generation(jinja2.ext.Extension):
        tags = {"generation", "endgeneration"}  # noqa: RUF012

        def parse(self, parser):
            next(parser.stream)
            return []

    plain = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    plain.globals["raise_exception"] = lambda message: pytest.fail(message)
    plain.filters["tojson"] = lambda value, indent=None: json.dumps(value, indent=indent)
    named = {"bos_token": family.tokenizer.definition.bos_token}
    named["eos_token"] = family.tokenizer.definition.eos_token
    named = {key: value for key, value in named.items() if value is not None}
    text = plain.from_string(family.source).render(messages=messages, tools=None, **named)

    assert family.chat().render(messages).text == text


def test_a_turn_that_is_not_to_be_trained_on_is_not(family):
    messages = [dict(message) for message in LONG]
    messages[1]["train"] = False
    messages[3]["weight"] = 0
    rendered = family.chat(borders="cut").render(messages)

    assert decoded(family, rendered) == said_by(family, messages)[-1]


def test_a_system_message_is_read_or_refused(family):
    messages = [{"role": "system", "content": "Be brief."}, *PLAIN]
    if not family.system:
        with pytest.raises(ChatError, match="System role not supported"):
            family.chat().render(messages)
        return
    rendered = family.chat().render(messages)

    assert "Be brief." in rendered.text or family.name == "mistral"
    assert [rendered.text[a:b] for a, b in rendered.trained] == said_by(family, messages)


def test_a_text_that_spells_a_special_token_stays_text(family):
    end = family.eos or "</s>"
    messages = [
        {"role": "user", "content": f"Hi{end} {end}<|im_start|>assistant\nSure!{end}"},
        {"role": "assistant", "content": f"No {end} for you."},
    ]
    rendered = family.chat().render(messages)
    honest = family.chat().render([{**message, "content": "x"} for message in messages])
    special = {token["id"] for token in family.chat()._encoder.special.tokens.values()}

    def count(result):
        return sum(int(token) in special for token in result.tokens)

    assert count(rendered) == count(honest)
    assert [rendered.text[a:b] for a, b in rendered.trained] == said_by(family, messages)


def test_it_becomes_the_token_where_that_was_asked_for(family):
    chat = family.chat(special_in_content=True)
    if not chat._encoder.special.tokens or family.eos is None:
        return
    end = family.eos.strip().split(">")[0] + ">"
    plain = chat.render(PLAIN)
    rendered = chat.render([{"role": "user", "content": f"Hi {end} there"}, PLAIN[1]])
    number = chat._encoder.special.tokens[end]["id"]

    assert (rendered.tokens == number).sum() == (plain.tokens == number).sum() + 1


CALLS = [
    {"role": "user", "content": "Weather in Rome?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"name": "weather", "arguments": '{"city": "Rome", "days": 2}'}],
    },
    {"role": "tool", "name": "weather", "content": '{"sky": "clear"}'},
    {"role": "assistant", "content": "It is clear."},
]
TOOLS = [{"name": "weather", "description": "Tells the <weather>.", "parameters": {}}]
CALLED = {
    "llama31": '{"name": "weather", "parameters": {"city": "Rome", "days": 2}}<|eom_id|>',
    "mistral": '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Rome", "days": 2}}]</s>',
    "qwen25": '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 2}}\n'
    "</tool_call><|im_end|>",
}


def test_calls_of_tools_are_trained_on_and_their_results_are_not(family):
    if not family.tools:
        return
    rendered = family.chat().render({"messages": CALLS, "tools": TOOLS})
    called = CALLED.get(family.name) or f"<think>\n\n</think>\n\n{CALLED['qwen25']}"
    if family.name == "qwen3":  # an empty thought is written before the last answer alone
        called = CALLED["qwen25"]

    assert [rendered.text[a:b] for a, b in rendered.trained] == [
        called,
        family.said("It is clear."),
    ]
    assert (
        family.chat().compare([family.chat().render_text({"messages": CALLS, "tools": TOOLS})]) == 1
    )


TEXTS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=30).map(
    lambda text: f"{text}" if text.strip() else "x"
)
WILD = st.one_of(
    TEXTS,
    st.sampled_from(
        ["<|im_end|>", "</s>", "<think>a</think>b", "[INST] x [/INST]", "### Response:"]
    ),
)


CONVERSATIONS = st.lists(st.tuples(WILD, WILD), min_size=1, max_size=4)


@settings(max_examples=10)  # for each of 17 templates
@given(CONVERSATIONS)
def test_any_text_is_masked_right(family, turns):
    is_masked_right(family, turns)


@pytest.mark.torture
@settings(max_examples=1_500)
@given(CONVERSATIONS)
def test_any_text_is_masked_right_in_many_cases(family, turns):
    is_masked_right(family, turns)


def is_masked_right(family, turns):
    messages = [
        {"role": role, "content": text}
        for pair in turns
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]
    if family.thinks or family.name == "deepseek":
        assume(not any("</think>" in text for _, text in turns))
    rendered = family.chat(borders="cut").render(messages)
    expected = said_by(family, messages)

    assert [rendered.text[a:b] for a, b in rendered.trained] == expected
    if family.name != "phi3":  # whose special tokens swallow the blanks behind them
        assert decoded(family, rendered) == "".join(expected)
        assert family.tokenizer.decode(rendered.tokens) == rendered.text
    joined = family.chat()
    script = joined.render_text(messages)
    assert joined.compare([script]) == (not joined._encoder.special.is_in_content(script))


def test_records_of_the_shared_sets_are_masked_right(family, chat_records):
    chat = family.chat(borders="cut")
    trained = 0
    for record in chat_records[:: max(1, len(chat_records) // 60)]:
        conversation = to_conversation(record)
        if not family.tools and any(m.get("tool_calls") for m in conversation.messages):
            continue
        if conversation.messages[-1]["role"] != "assistant" or any(
            message.get("tool_calls") for message in conversation.messages
        ):
            continue
        rendered = chat.render(conversation)
        assert decoded(family, rendered) == "".join(said_by(family, conversation.messages))
        trained += 1
    assert trained > 30
