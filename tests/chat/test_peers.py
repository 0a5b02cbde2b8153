"""The same text, ids and masks as `transformers` and TRL, where those are installed.

TRL keeps two versions of public templates: as published, and rewritten with
`{% generation %}` blocks for training. The second gives its mask to `apply_chat_template`; of
the first, penstock must find the same mask by itself.
"""

import datetime
import functools
import re
from pathlib import Path

import pytest

from penstock.chat.chat import Chat

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
trl = pytest.importorskip("trl", reason="trl is not installed")

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
TRAINING = sorted(path.stem for path in TEMPLATES.glob("*_training.jinja"))
PAIRS = [
    name for name in TRAINING if (TEMPLATES / f"{name.removesuffix('_training')}.jinja").exists()
]
TURNS = [
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "It is 4."},
    {"role": "user", "content": "Danke schön, 谢谢 👋\n\nAnd 3 + 3?"},
    {"role": "assistant", "content": "3 + 3 = 6.\n\n```python\nprint(3 + 3)\n```"},
]
CALLS = [
    {"role": "user", "content": "Weather in Rome?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "type": "function",
                "function": {"name": "weather", "arguments": {"city": "Rome", "days": 2}},
            }
        ],
    },
    {"role": "tool", "name": "weather", "content": '{"sky": "clear"}'},
    {"role": "assistant", "content": "It is clear."},
]
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CASES = {
    "one turn": (TURNS[:2], None),
    "two turns": (TURNS, None),
    "system": ([{"role": "system", "content": "Be brief."}, *TURNS], None),
    "thoughts": (
        [
            *TURNS[:3],
            {"role": "assistant", "content": "Six.", "reasoning_content": "Three and three."},
        ],
        None,
    ),
    "tools": (CALLS, [TOOL]),
}


def with_cases(names):
    """Two of the five cases for each template, in turn; all others under the marker `torture`."""
    return [
        pytest.param(name, case, marks=() if (row + column) % 5 in (0, 2) else pytest.mark.torture)
        for row, name in enumerate(names)
        for column, case in enumerate(CASES)
    ]


@pytest.fixture(scope="session")
def hub(make_tokenizer):
    """A fast tokenizer of `transformers` whose special tokens are those of a template."""

    @functools.cache
    def hub(source, template=None):
        """With the tokens of one template, and this or another one to render with."""
        marks = re.findall(
            r"<\|[\w/ -]+\|>|<\uff5c[^\uff5c]+\uff5c>|<(?:start|end)_of_turn>|<\|?\w+\|?>|</s>",
            source,
        )
        special = sorted({each for each in marks if "think" not in each and "tool" not in each})
        bos, eos = "<BOS>", "<EOS>"
        fast = transformers.PreTrainedTokenizerFast(
            tokenizer_object=make_tokenizer([*special, bos, eos]), bos_token=bos, eos_token=eos
        )
        fast.chat_template = template or source
        return fast

    return hub


def theirs(fast, messages, tools, *, masked=True):
    """Text, ids and mask as `transformers` has them, or None where the template refuses."""
    if "Zq" not in fast.apply_chat_template([{"role": "user", "content": "Zq"}], tokenize=False):
        messages = [
            {**each, "content": [{"type": "text", "text": each["content"]}]} for each in messages
        ]
    try:
        text = fast.apply_chat_template(messages, tools=tools, tokenize=False)
        told = fast.apply_chat_template(
            messages,
            tools=tools,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=masked,
        )
    except Exception:  # noqa: BLE001  (whatever a template raises on a conversation not for it)
        return None
    return text, told["input_ids"], told.get("assistant_masks")


@functools.cache
def chat_of(fast, source):
    today = datetime.date.today() if "strftime_now" in source else None
    return Chat(fast, fast, rewritten="train", date=today)


def ours(fast, source, messages, tools):
    return chat_of(fast, source).render({"messages": messages, "tools": tools})


@pytest.mark.parametrize(("name", "case"), with_cases(TRAINING))
def test_masks_of_generation_blocks_are_those_of_transformers(hub, name, case):
    source = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    fast = hub(source)
    messages, tools = CASES[case]
    expected = theirs(fast, messages, tools)
    if expected is None:
        pytest.skip(f"{name} is not for {case}")
    text, ids, mask = expected
    if case == "tools" and "Rome" not in text.partition("Rome?")[2]:
        pytest.skip("the template writes no calls: an empty turn is not trained on")
    rendered = ours(fast, source, messages, tools)

    assert rendered.text == text
    assert rendered.tokens.tolist() == ids
    assert rendered.loss.tolist() == mask


@pytest.mark.parametrize(("name", "case"), with_cases(PAIRS))
def test_words_found_without_generation_blocks_are_those_of_trl(hub, name, case, figure):
    """The same words; TRL's blocks may hold more of the template's own.

    Some begin before the prompt for an answer (`<think>`, where that is part of it), end
    behind the line end, or hold an empty turn.
    """
    published = (TEMPLATES / f"{name.removesuffix('_training')}.jinja").read_text(encoding="utf-8")
    training = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    if re.search(r"{%-?\s*generation", published):
        pytest.skip("the published template has such blocks itself")
    messages, tools = CASES[case]
    expected = theirs(hub(training), messages, tools)
    plain = theirs(hub(published), messages, tools, masked=False)
    if expected is None or plain is None or plain[0] != expected[0]:
        pytest.skip("the published and the training template render it differently")
    fast = hub(training, published)
    rendered = ours(fast, published, messages, tools)
    text, ids, mask = expected
    trained = [each for each, is_trained in zip(ids, mask, strict=True) if is_trained]
    said = chat_of(fast, published).tokenizer.decode(trained)
    found = "".join(text[a:b] for a, b in rendered.trained)
    same = "".join(found.split()) == "".join(said.split())
    figure(f"{name}, {case}: {'equal' if same else 'same words'}")

    assert rendered.tokens.tolist() == ids
    assert words(found) == words(said)


def words(text):
    """What is left of a text without markers, headers and blanks."""
    return re.sub(r"<[^<>]*>|\bassistant\b|to=\w+|\s", "", text)
