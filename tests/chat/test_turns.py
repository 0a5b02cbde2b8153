"""Templates that rewrite, merge, repeat or hide what was said are handled or refused."""

import pytest

from penstock.chat.chat import Chat
from penstock.errors import ChatError

ASKED = {"role": "user", "content": "Is 7 odd?"}
THOUGHT = {"role": "assistant", "content": "<think>\n7 = 2 * 3 + 1\n</think>\n\nYes."}
AGAIN = {"role": "user", "content": "Is 8?"}
LAST = {"role": "assistant", "content": "<think>\n8 = 2 * 4\n</think>\n\nNo."}
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def said(rendered):
    return [rendered.text[a:b] for a, b in rendered.trained]


@pytest.fixture(scope="module")
def qwen3(gpt2_chat):
    from pathlib import Path

    return (Path(__file__).parent / "templates" / "qwen3.jinja").read_text()


def test_a_turn_whose_thoughts_the_template_drops_is_not_trained_on(qwen3, gpt2_chat):
    rendered = Chat(qwen3, gpt2_chat).render([ASKED, THOUGHT, AGAIN, LAST])

    assert "7 = 2" not in rendered.text
    assert rendered.rewritten == (1,)
    assert said(rendered) == ["<think>\n8 = 2 * 4\n</think>\n\nNo.<|im_end|>"]


def test_what_is_left_of_it_is_trained_on_where_that_was_asked_for(qwen3, gpt2_chat):
    rendered = Chat(qwen3, gpt2_chat, rewritten="train").render([ASKED, THOUGHT, AGAIN, LAST])

    assert said(rendered) == ["Yes.<|im_end|>", "<think>\n8 = 2 * 4\n</think>\n\nNo.<|im_end|>"]


def test_it_is_refused_where_that_was_asked_for(qwen3, gpt2_chat):
    with pytest.raises(ChatError, match=r"leaves out text of the assistant in messages \[1\]"):
        Chat(qwen3, gpt2_chat, rewritten="refuse").render([ASKED, THOUGHT, AGAIN, LAST])


def test_thoughts_in_a_field_of_their_own_are_trained_on(qwen3, gpt2_chat):
    message = {"role": "assistant", "content": "Yes.", "reasoning_content": "7 = 2 * 3 + 1"}
    rendered = Chat(qwen3, gpt2_chat).render([ASKED, message])

    assert said(rendered) == ["<think>\n7 = 2 * 3 + 1\n</think>\n\nYes.<|im_end|>"]


def test_an_empty_thought_in_the_prompt_is_not_trained_on(qwen3, gpt2_chat):
    answered = [ASKED, {"role": "assistant", "content": "Yes."}]
    thinking = Chat(qwen3, gpt2_chat).render(answered)
    without = Chat(qwen3, gpt2_chat, settings={"enable_thinking": False}).render(answered)
    by_record = Chat(qwen3, gpt2_chat).render(
        {"messages": answered, "chat_template_kwargs": {"enable_thinking": False}}
    )

    assert thinking.text == without.text == by_record.text
    assert said(thinking) == ["<think>\n\n</think>\n\nYes.<|im_end|>"]
    assert said(without) == said(by_record) == ["Yes.<|im_end|>"]


def test_a_field_that_the_template_does_not_write_masks_the_turn(gpt2_chat):
    message = {"role": "assistant", "content": "Yes.", "reasoning_content": "Because."}
    rendered = Chat(CHATML, gpt2_chat).render([ASKED, message])

    assert rendered.rewritten == (1,)
    assert said(rendered) == []


def test_a_system_message_merged_into_the_user_is_not_trained_on(gpt2_chat):
    source = (
        "{% if messages[0].role == 'system' %}{% set s = messages[0].content %}"
        "{% set messages = messages[1:] %}{% else %}{% set s = '' %}{% endif %}"
        "{% for m in messages %}{% if m.role == 'user' %}U: {{ s + m.content }}\n"
        "{% set s = '' %}{% else %}A: {{ m.content }}</s>\n{% endif %}{% endfor %}"
    )
    answer = {"role": "assistant", "content": "Yes."}
    rendered = Chat(source, gpt2_chat).render(
        [{"role": "system", "content": "Yes."}, ASKED, answer]
    )

    assert rendered.text == "U: Yes.Is 7 odd?\nA: Yes.</s>\n"
    assert said(rendered) == ["Yes.</s>"]
    assert rendered.trained[0][0] == rendered.text.rindex("Yes.")


def test_the_name_of_a_tool_above_its_result_is_not_trained_on(gpt2_chat):
    """As in templates that write the name of the tool called last again."""
    source = (
        "{% set ns = namespace(name='') %}{% for m in messages %}"
        "{% if m.tool_calls %}<|start|>assistant to={{ m.tool_calls[0].function.name }}"
        "<|message|>{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
        "{% set ns.name = m.tool_calls[0].function.name %}"
        "{% elif m.role == 'tool' %}<|start|>{{ ns.name }} to=assistant<|message|>"
        "{{ m.content }}<|end|>"
        "{% elif m.role == 'assistant' and loop.last %}<|start|>assistant<|message|>{{ m.content }}"
        "<|return|>{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
    )
    call = {"name": "sky", "arguments": {"city": "Rome"}}
    messages = [
        ASKED,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "clear"},
        {"role": "assistant", "content": "Clear."},
        AGAIN,
        {"role": "assistant", "content": "No."},
    ]
    rendered = Chat(source, gpt2_chat, add_tokens="auto").render(messages)

    assert said(rendered) == [
        'to=sky<|message|>{"city": "Rome"}<|call|>',
        "<|message|>Clear.",  # no marker that also ends the last turn stands here
        "<|message|>No.<|return|>",
    ]


def test_parts_are_given_to_templates_that_take_them_and_joined_for_others(gpt2_chat):
    parts = [{"type": "text", "text": "Is 7 "}, {"type": "text", "text": "odd?"}]
    answer = [{"type": "text", "text": "Yes"}, {"type": "text", "text": ".", "train": False}]
    takes = CHATML.replace(
        "{{ m.content }}",
        "{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}",
    )
    needs = CHATML.replace("{{ m.content }}", "{% for p in m.content %}{{ p.text }}{% endfor %}")
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}]
    rendered = [Chat(source, gpt2_chat).render(messages) for source in (CHATML, takes, needs)]

    assert len({each.text for each in rendered}) == 1
    for each in rendered:
        assert said(each) == ["Yes", "<|im_end|>"]
    with pytest.raises(ChatError, match="writes only text"):
        Chat(CHATML, gpt2_chat).render(
            [{"role": "user", "content": [{"type": "code", "text": "x"}]}, messages[1]]
        )


def test_an_empty_answer_is_not_trained_on(gpt2_chat):
    rendered = Chat(CHATML, gpt2_chat).render([ASKED, {"role": "assistant", "content": ""}])

    assert said(rendered) == []
    assert rendered.loss.sum() == 0
