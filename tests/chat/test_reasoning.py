"""Conversations with long reasoning render as under `transformers`, with every template here."""

import datetime
import math
import random

import pytest

from penstock.chat.chat import Chat
from penstock.chat.messages import to_conversation

# What reasoning in public datasets is made of: sentences, formulas, code, lists, JSON, tags that
# are no markers, and text in other scripts.
PIECES = (
    "Okay, let me see. The question asks for the sum of the first n odd numbers.",
    "Wait, that is not right. If x = 3, then x ** 2 - 1 = 8, so the claim fails for n < 2.",
    r"We have \[ \sum_{i=1}^{n} (2i - 1) = n^2 \] and $\frac{a}{b} > 0$.",
    "```python\ndef total(n):\n    return sum(2 * i + 1 for i in range(n))  # {n: 3} -> 9\n```",
    "1. Try small cases.\n2. Guess.\n3. Prove by induction: base case, step.\n",
    '{"name": "search", "arguments": {"query": "n^2 \\"odd\\""}}',
    "<b>Hmm</b>, a List<int> or a Map<String, T>? [INST] is not what they meant; a | b & c.",
    "让我再想一想:所以答案是九。Nun ja, naïve Größe, 👩‍👩‍👧‍👦!",
    "\n\n   So, alternatively, could it be 10%s or {} or {{ x }}?\t",
)


def reasoning(rng):
    """Text of 100 to 100,000 characters, all orders of magnitude equally likely."""
    length = round(math.exp(rng.uniform(math.log(100), math.log(100_000))))
    pieces, size = [], 0
    while size < length:
        pieces.append(rng.choice(PIECES) + rng.choice((" ", "\n", "\n\n")))
        size += len(pieces[-1])
    return "".join(pieces)[:length].strip()


def conversation(rng, *, system):
    """One to three questions with reasoning in the content, in its own field, or not at all."""
    messages = [{"role": "system", "content": "Think first."}] if system else []
    for number in range(rng.choice((1, 1, 2, 3))):
        answer = {"role": "assistant", "content": f"The answer is {rng.randint(0, 99)}."}
        form = rng.choice(("inline", "field")) if number == 0 else rng.choice(("", "inline"))
        if form == "inline":
            answer["content"] = f"<think>\n{reasoning(rng)}\n</think>\n\n{answer['content']}"
        elif form == "field":
            answer["reasoning_content"] = reasoning(rng)
        messages += [{"role": "user", "content": f"Question {number}?"}, answer]
    return messages


@pytest.mark.parametrize(
    "count", [8, pytest.param(2_000, marks=[pytest.mark.torture, pytest.mark.timeout(3_600)])]
)
def test_long_reasoning_is_rendered_as_by_transformers(template, count, figure):
    name, source, fast, takes_system = template
    given = name if name in ("chatml", "nanochat") else source
    # `transformers` writes today's date where a template asks for one.
    today = datetime.date.today() if "strftime_now" in source else None
    chat = Chat(given, fast, add_tokens="auto", date=today)
    rng = random.Random(34)
    trained = 0
    for _ in range(count):
        messages = conversation(rng, system=takes_system and rng.random() < 0.3)
        script = chat.render_text(to_conversation(messages))
        expected = fast.apply_chat_template(messages, chat_template=source, tokenize=False)
        assert script.text == expected
        trained += bool(script.trained)
    figure(f"{name}: {count:,} conversations with reasoning, {trained:,} with trained text")
    assert trained
