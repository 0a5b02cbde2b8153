"""What is lost of a conversation without being an error is counted and said once."""

import json
from pathlib import Path

import pytest
import tokenizers

import penstock
from penstock.chat.chat import Chat
from penstock.errors import ChatError

TEMPLATES = Path(__file__).parent / "templates"
QWEN35 = (TEMPLATES / "qwen35.jinja").read_text(encoding="utf-8").removesuffix("\n")
ASKED = {"role": "user", "content": "Weather?"}
CALL = {
    "role": "assistant",
    "content": "",
    "reasoning_content": "I must look.",
    "tool_calls": [{"type": "function", "function": {"name": "sky", "arguments": {"at": "Rome"}}}],
}
TOLD = {"role": "tool", "content": "clear"}
DONE = {"role": "assistant", "content": "It is clear.", "reasoning_content": "Easy."}
PLAIN = {"role": "assistant", "content": "It is clear."}
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = CHATML.replace(
    "{{ m.content }}",
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}",
)
NO_END = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def said(rendered):
    return [rendered.text[a:b] for a, b in rendered.trained]


def written(number):
    """The call without its thought, as Qwen3.5 writes those of earlier questions."""
    return (
        "<tool_call>\n<function=sky>\n<parameter=at>\nRome\n</parameter>\n</function>\n"
        "</tool_call><|im_end|>"
    ) * number


EARLIER = [ASKED, CALL, TOLD, DONE, ASKED, DONE]


@pytest.mark.parametrize("more", [[], [ASKED, PLAIN], [ASKED, CALL, TOLD, DONE]])
def test_an_earlier_call_whose_thought_is_dropped_is_masked(more, gpt2_chat):
    rendered = Chat(QWEN35, gpt2_chat).render([*EARLIER, *more])
    last = [number for number, each in enumerate([*EARLIER, *more]) if each == ASKED][-1]
    kept = [
        number
        for number, each in enumerate([*EARLIER, *more])
        if each["role"] == "assistant" and number > last
    ]

    assert 1 in rendered.rewritten
    assert len(said(rendered)) == len(kept)


def test_it_is_trained_on_where_that_was_asked_for(gpt2_chat):
    rendered = Chat(QWEN35, gpt2_chat, rewritten="train").render(EARLIER)

    assert said(rendered)[:2] == [written(1), "It is clear.<|im_end|>"]


def test_it_is_refused_where_that_was_asked_for(gpt2_chat):
    with pytest.raises(ChatError, match=r"in messages \[1, 3\]") as error:
        Chat(QWEN35, gpt2_chat, rewritten="refuse").render(EARLIER)

    assert error.value.reason == "rewritten"


def test_an_earlier_call_without_a_thought_is_trained_on(gpt2_chat):
    bare = {key: item for key, item in CALL.items() if key != "reasoning_content"}
    rendered = Chat(QWEN35, gpt2_chat).render([ASKED, bare, TOLD, PLAIN, ASKED, PLAIN])

    assert said(rendered)[0] == written(1)
    assert rendered.rewritten == ()


def texts(*conversations):
    return penstock.Texts([json.dumps({"messages": each}) for each in conversations])


def test_turns_whose_thought_the_template_ignores_are_counted(tmp_path, gpt2_chat, caplog):
    """Half of them have no turn left, and are rejects; they are counted too."""
    twice = [ASKED, DONE, ASKED, PLAIN]
    given = [[ASKED, DONE], twice, [ASKED, PLAIN]] * 5
    penstock.build(texts(*given), tmp_path / "a", chat=CHATML, tokenizer=gpt2_chat, max_bad=5)
    lines = [each.message for each in caplog.records if "reasoning_content" in each.message]

    assert len(lines) == 1
    assert lines[0].startswith("In 10 of 15 conversations 10 turns are not trained on")
    assert 'rewritten="train" (--rewritten train)' in lines[0]


def test_nothing_is_said_where_nothing_is_lost(tmp_path, gpt2_chat, caplog):
    penstock.build(texts([ASKED, PLAIN]), tmp_path / "a", chat="chatml", tokenizer=gpt2_chat)
    penstock.build(texts([ASKED, PLAIN]), tmp_path / "b", chat=CHATML, tokenizer=gpt2_chat)
    penstock.build(texts([ASKED, PLAIN]), tmp_path / "c", chat=NO_END, tokenizer=gpt2_chat)

    assert not [each.message for each in caplog.records if "conversations" in each.message]


def test_generation_blocks_that_leave_out_the_end_are_counted(tmp_path, gpt2_chat, caplog):
    given = [[ASKED, PLAIN], [ASKED, PLAIN, ASKED, PLAIN]]
    penstock.build(texts(*given), tmp_path / "a", chat=MARKED, tokenizer=gpt2_chat)
    (line,) = [each.message for each in caplog.records if "to the end" in each.message]

    assert line.startswith("In 2 of 2 conversations 3 turns are not trained on to the end")
    assert "{% generation %} blocks leave out the token" in line


def test_turns_that_nothing_ends_are_counted(tmp_path, gpt2_chat, caplog):
    """The end token behind the conversation ends the last turn, and those before have none."""
    given = [[ASKED, PLAIN], [ASKED, PLAIN, ASKED, PLAIN]]
    penstock.build(texts(*given), tmp_path / "a", chat=NO_END, tokenizer=gpt2_chat)
    penstock.build(texts(*given), tmp_path / "b", chat=NO_END, tokenizer=gpt2_chat, eos=False)
    lines = [each.message for each in caplog.records if "to the end" in each.message]

    assert [line.partition(" are ")[0].partition(" is ")[0] for line in lines] == [
        "In 1 of 2 conversations 1 turn",
        "In 2 of 2 conversations 3 turns",
    ]


def test_a_chat_without_a_build_says_it_once(gpt2_chat, caplog):
    chat = Chat(MARKED, gpt2_chat)
    for _ in range(3):
        chat.render_many([[ASKED, PLAIN]] * 4)
    lines = [each.message for each in caplog.records if "to the end" in each.message]

    assert [line[:41] for line in lines] == ["In 4 of 4 conversations 4 turns are not t"]


@pytest.fixture
def begins(make_tokenizer):
    """A tokenizer with a post-processor, that names its tokens."""

    def begins(processor, **named):
        made = make_tokenizer(["<s>", "</s>"])
        made.post_processor = processor
        return type("Named", (), {"backend_tokenizer": made, **named})()

    return begins


BOS = 434
TEMPLATE = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
ROBERTA = tokenizers.processors.RobertaProcessing(("</s>", BOS + 1), ("<s>", BOS))
SEQUENCE = tokenizers.processors.Sequence([tokenizers.processors.ByteLevel(), TEMPLATE])


@pytest.mark.parametrize("processor", [TEMPLATE, ROBERTA, SEQUENCE])
def test_a_build_says_that_it_does_not_add_the_token_that_begins_texts(
    processor, begins, tmp_path, caplog
):
    named, unnamed = begins(processor, bos_token="<s>"), begins(processor, bos_token="</s>")
    store = penstock.build(penstock.Texts(["a"]), tmp_path / "a", tokenizer=named, eos=False)
    other = penstock.build(penstock.Texts(["a"]), tmp_path / "b", tokenizer=unnamed, eos=False)
    lines = [
        each.message for each in caplog.records if "at the beginning of each text" in each.message
    ]
    caplog.clear()
    asked = penstock.build(
        penstock.Texts(["a"]), tmp_path / "c", tokenizer=named, eos=False, bos=True
    )

    assert lines[0].endswith("To add it, use bos=True (--bos) of penstock.build.")
    assert lines[1].endswith('To add it, use bos="<s>" (--bos-token "<s>") of penstock.build.')
    assert named.backend_tokenizer.token_to_id("<s>") == BOS
    assert BOS not in [*store.document(0), *other.document(0)]
    assert asked.document(0)[0] == BOS
    assert not [each for each in caplog.records if "at the beginning of each text" in each.message]


def test_a_template_that_begins_with_that_token_is_not_told_of_it(begins, tmp_path, caplog):
    tokenizer = begins(TEMPLATE, bos_token="<s>", eos_token="</s>")
    bare = "{% for m in messages %}{{ m.content }}</s>{% endfor %}"
    for number, chat in enumerate(("{{ bos_token }}" + bare, bare)):
        conversation = texts([ASKED, PLAIN])
        penstock.build(conversation, tmp_path / f"{number}", tokenizer=tokenizer, chat=chat)
        lines = [
            each.message
            for each in caplog.records
            if "at the beginning of each text" in each.message
        ]
        assert len(lines) == number
