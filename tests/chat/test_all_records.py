"""Every record of the shared sets under every family of templates: minutes, so on request."""

import json

import pytest

from penstock.chat.messages import to_conversation

pytestmark = [pytest.mark.torture, pytest.mark.timeout(3_600)]


def expected(family, conversation):
    """What the assistant says, turn by turn; None for a turn that calls tools."""
    last = len(conversation.messages) - 1
    found = []
    for number, message in enumerate(conversation.messages):
        if message["role"] == "assistant":
            calls = message.get("tool_calls")
            later = any(each["role"] == "user" for each in conversation.messages[number:])
            ends = number == last and not later
            found.append(None if calls else family.said(message["content"], last=ends))
    return found


def test_supervised_tokens_are_exactly_what_was_said(family, chat_records, figure):
    chat, joined = family.chat(borders="cut"), family.chat()
    rendered = called = compared = 0
    for record in chat_records:
        conversation = to_conversation(record)
        calls = any(message.get("tool_calls") for message in conversation.messages)
        if calls and not family.tools:
            continue
        turns = expected(family, conversation)
        script = chat.render_text(conversation)
        found = [script.text[a:b] for a, b in script.trained]
        assert len(found) == len(turns)
        for span, said, message in zip(
            found,
            turns,
            [each for each in conversation.messages if each["role"] == "assistant"],
            strict=True,
        ):
            if said is not None:
                assert span == said
            else:
                called += 1
                for call in message["tool_calls"]:
                    function = call["function"]
                    assert function["name"] in span
                    assert json.dumps(function["arguments"], ensure_ascii=False) in span
                assert span.endswith(("<|im_end|>", "<|eom_id|>", "</s>"))
        encoded = chat.encode([script])
        decoded = family.tokenizer.decode(encoded.ids[encoded.loss == 1])
        if family.name != "phi3":  # whose special tokens swallow blanks
            assert decoded == "".join(found)
        rendered += 1
        if rendered % 10 == 0:
            compared += joined.compare([joined.render_text(conversation)])

    figure(
        f"{family.name}: {rendered:,} conversations, {called} turns that call tools, "
        f"ids of {compared} compared"
    )
    assert rendered > 2_000
