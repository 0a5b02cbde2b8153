"""Records of every known shape become messages, and all others are refused."""

import pytest

from penstock.chat.messages import to_conversation

ASKED = {"role": "user", "content": "Hi"}
TOLD = {"role": "assistant", "content": "Hello."}


@pytest.mark.parametrize(
    "record",
    [
        [ASKED, TOLD],
        {"messages": [ASKED, TOLD], "id": 7},
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."}]},
        {"conversation": [ASKED, TOLD]},
        {"instruction": "Hi", "input": "", "output": "Hello."},
        {"instruction": "Hi", "context": "", "response": "Hello.", "category": "open_qa"},
        {"instruction": "Hi", "instances": [{"input": "", "output": "Hello."}]},
        {"prompt": "Hi", "completion": "Hello."},
        {"prompt": [ASKED], "completion": [TOLD]},
        {"messages": [{**ASKED, "tool_calls": None}, {**TOLD, "name": None, "train": None}]},
    ],
    ids=lambda record: "-".join(record) if isinstance(record, dict) else "list",
)
def test_every_shape_gives_the_same_conversation(record):
    assert to_conversation(record).messages == [ASKED, TOLD]


def test_the_shapes_of_alpaca_and_dolly_put_the_input_behind_the_instruction():
    alpaca = to_conversation({"instruction": "Add.", "input": "1, 2", "output": "3"})
    dolly = to_conversation({"instruction": "Add.", "context": "1, 2", "response": "3"})

    assert alpaca == dolly
    assert alpaca.messages[0]["content"] == "Add.\n\n1, 2"


def test_history_and_system_come_first():
    record = {"instruction": "c", "output": "d", "history": [["a", "b"]], "system": "s"}
    found = [message["content"] for message in to_conversation(record).messages]

    assert found == ["s", "a", "b", "c", "d"]


def test_calls_of_sharegpt_become_tool_calls_and_tools_are_parsed():
    conversation = to_conversation(
        {
            "conversations": [
                {"from": "human", "value": "Weather?"},
                {
                    "from": "function_call",
                    "value": '{"name": "sky", "arguments": {"city": "Rome"}}',
                },
                {"from": "observation", "value": "clear"},
                {"from": "gpt", "value": "It is clear."},
            ],
            "tools": '[{"name": "sky", "parameters": {}}]',
        }
    )

    assert [message["role"] for message in conversation.messages] == [
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    function = {"name": "sky", "arguments": '{"city": "Rome"}'}
    assert conversation.messages[1]["tool_calls"] == [{"type": "function", "function": function}]
    assert conversation.tools == [
        {"type": "function", "function": {"name": "sky", "parameters": {}}}
    ]


def test_arguments_stay_as_they_were_given():
    def arguments(given):
        call = {"function": {"name": "f", "arguments": given}, "id": "1"}
        (message,) = to_conversation([{**TOLD, "tool_calls": [call]}]).messages
        return message["tool_calls"][0]["function"]["arguments"]

    assert arguments('{"a":1}') == '{"a":1}'
    assert arguments("plain words") == "plain words"
    assert arguments({"a": 1}) == {"a": 1}


def test_train_and_weight_say_what_is_trained_on():
    conversation = to_conversation(
        [
            ASKED,
            {**TOLD, "train": False},
            ASKED,
            {**TOLD, "weight": 0},
            ASKED,
            {**TOLD, "weight": 1},
        ]
    )

    assert [conversation.is_trained(number) for number in range(6)] == [False] * 5 + [True]


def test_a_thought_is_found_under_the_names_that_templates_use():
    (message,) = to_conversation([{**TOLD, "reasoning": "Hm."}]).messages

    assert message["reasoning_content"] == message["thinking"] == "Hm."


def test_all_shared_records_are_conversations(chat_records):
    assert len([to_conversation(record) for record in chat_records]) == 2474
