"""Ids equal those of the reference, and masks follow characters, for tokenizers of all kinds."""

import pickle

import numpy as np
import pytest

from penstock.chat.chat import Chat, render
from penstock.errors import ChatError, TokenizerError
from penstock.tokenize.tokenizer import load_tokenizer

TURNS = [
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "It is 4, naïve Å 你好 👩‍👩‍👧‍👦."},
]
SPECIAL = ["<|im_start|>", "<|im_end|>"]
VICUNA = (
    "{% for m in messages %}{{ 'USER: ' + m.content if m.role == 'user' else "
    "' ASSISTANT: ' + m.content + '</s>' }}{% endfor %}"
)


def test_tokens_unpack_to_ids_and_mask():
    tokens, loss = rendered = render(TURNS, "chatml", "gpt2", add_tokens="auto")

    assert tokens.dtype == np.uint32
    assert loss.dtype == np.uint8
    assert len(tokens) == len(loss) == len(rendered)


def test_a_token_that_straddles_a_border_is_trained_on(gpt2_chat):
    """` It` holds a blank of the template and a word of the assistant."""
    joined = Chat(VICUNA, gpt2_chat).render(TURNS)
    cut = Chat(VICUNA, gpt2_chat, borders="cut").render(TURNS)

    assert gpt2_chat.decode(joined.tokens[joined.loss == 1]).startswith(" It is 4")
    assert gpt2_chat.decode(cut.tokens[cut.loss == 1]).startswith("It is 4")
    assert gpt2_chat.decode(joined.tokens) == gpt2_chat.decode(cut.tokens) == joined.text


def tiktoken_encoding():
    """All bytes, two merges and two special tokens."""
    tiktoken = pytest.importorskip("tiktoken")
    ranks = {bytes([byte]): byte for byte in range(256)} | {b"It": 256, b" i": 257}
    special = {"<|im_start|>": 258, "<|im_end|>": 259}
    return tiktoken.Encoding(
        "small", pat_str=r"\s?\w+|.|\n", mergeable_ranks=ranks, special_tokens=special
    )


@pytest.mark.parametrize("make", [lambda: "bytes", lambda: "gpt2", tiktoken_encoding])
def test_any_tokenizer_masks_the_same_text(make):
    chat = Chat("chatml", make(), add_tokens="auto")
    rendered = chat.render(TURNS)

    assert chat.tokenizer.decode(rendered.tokens[rendered.loss == 1]) == (
        TURNS[1]["content"] + "<|im_end|>"
    )


def test_special_tokens_of_tiktoken_are_tokens():
    tokens, loss = Chat("chatml", tiktoken_encoding()).render(TURNS)

    assert (tokens == 258).sum() == (tokens == 259).sum() == 2
    assert loss[tokens == 259].tolist() == [0, 1]


class Encoding:
    """A tokenizer that is neither a file nor known, with special tokens of its own."""

    vocab_size = 300
    eos_token_id = 256

    def encode(self, text):
        return list(text.encode())

    def decode(self, ids):
        return bytes(each for each in ids if each < 256).decode(errors="replace")

    def get_special_tokens(self):
        return ["<|im_start|>", "<|im_end|>"]

    def encode_special(self, token):
        return 256 + self.get_special_tokens().index(token)


def test_an_object_that_gives_no_places_is_refused():
    with pytest.raises(TokenizerError, match="gives no positions"):
        Chat("chatml", Encoding()).render(TURNS)


def sentencepiece(scheme):
    """A tokenizer in the manner of Llama: blanks become ▁, bytes stand in for the unknown."""
    import tokenizers

    words = [f"<0x{byte:02X}>" for byte in range(256)]
    letters = sorted({*"▁abcdefghijklmnopqrstuvwxyzWIU+24?,.|<>_:AST\n/", *words})
    vocab = {word: number for number, word in enumerate(letters)}
    merges = [("▁", "I"), ("i", "s"), ("I", "t"), ("▁", "is"), ("▁I", "t")]
    for pair in merges:
        vocab.setdefault("".join(pair), len(vocab))
    made = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab, merges, byte_fallback=True, fuse_unk=True)
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    made.decoder = tokenizers.decoders.Sequence(
        [tokenizers.decoders.ByteFallback(), tokenizers.decoders.Metaspace(prepend_scheme=scheme)]
    )
    made.add_special_tokens([*SPECIAL, "</s>"])
    return made


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
@pytest.mark.parametrize("template", ["chatml", VICUNA])
def test_vocabularies_that_are_not_of_bytes_go_by_the_places_of_tokenizers(scheme, template):
    made = sentencepiece(scheme)
    chat = Chat(template, load_tokenizer(made))
    scripts = [chat.render_text(TURNS), chat.render_text([*TURNS, *TURNS])]
    encoded = chat.encode(scripts)

    assert chat.compare(scripts) == 2
    ids = encoded.ids[: encoded.offsets[1]][encoded.loss[: encoded.offsets[1]] == 1]
    tokens = "".join(made.id_to_token(int(each)) for each in ids)
    assert tokens.lstrip("▁").startswith("It▁is▁4,▁na")
    assert tokens.endswith(".<|im_end|>" if template == "chatml" else ".</s>")


def test_a_normalizer_that_changes_characters_costs_time_and_no_token(make_tokenizer):
    import tokenizers

    made = make_tokenizer(SPECIAL)
    made.normalizer = tokenizers.normalizers.NFC()
    chat = Chat("chatml", load_tokenizer(made))
    angstrom, joined = "A\u030a \u212b cafe\u0301", "\u00c5 \u00c5 caf\u00e9"
    messages = [{"role": "user", "content": angstrom}, {"role": "assistant", "content": angstrom}]
    plain = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    scripts = [chat.render_text(plain), chat.render_text(messages), chat.render_text(plain)]
    encoded = chat.encode(scripts)

    assert chat.compare(scripts) == 3
    said = encoded.ids[encoded.loss == 1]
    assert chat.tokenizer.decode(said) == f"y<|im_end|>{joined}<|im_end|>y<|im_end|>"


def test_no_begin_token_is_added_to_the_one_of_the_template(make_tokenizer):
    """Tokenizers add theirs by themselves when asked to encode a text; that is not asked."""
    import tokenizers

    made = make_tokenizer(["<s>", *SPECIAL])
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", made.token_to_id("<s>"))]
    )
    source = "{{ '<s>' }}{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    tokens, _ = Chat(source, load_tokenizer(made)).render(TURNS)

    assert tokens[0] == made.token_to_id("<s>")
    assert (tokens == tokens[0]).sum() == 1


def test_the_prompt_asks_for_the_next_answer(gpt2_chat):
    chat = Chat("chatml", gpt2_chat)

    assert gpt2_chat.decode(chat.prompt(TURNS[:1])).endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize("template", ["chatml", "nanochat"])
@pytest.mark.parametrize("system", [[], [{"role": "system", "content": "Be brief."}]])
def test_the_writers_of_built_in_templates_write_what_jinja_does(template, system, gpt2_chat):
    written, rendered = Chat(template, gpt2_chat), Chat(template, gpt2_chat)
    rendered._renderer._writes_plain = False
    for messages in ([*system, *TURNS], [*system, *TURNS, *TURNS], [*TURNS, TURNS[0]]):
        assert written.render_text(messages) == rendered.render_text(messages)


def test_nanochat_reads_the_output_of_python_and_is_not_trained_on_it(gpt2_chat):
    parts = [
        {"type": "python", "text": "7*191"},
        {"type": "python_output", "text": "1337"},
        {"type": "text", "text": "It is 1337."},
    ]
    rendered = Chat("nanochat", gpt2_chat).render(
        [TURNS[0], {"role": "assistant", "content": parts}]
    )

    assert [rendered.text[a:b] for a, b in rendered.trained] == [
        "<|python_start|>7*191<|python_end|>",
        "It is 1337.<|assistant_end|>",
    ]
    with pytest.raises(ChatError, match="a user begins"):
        Chat("nanochat", gpt2_chat).render([TURNS[1]])


def test_many_are_rendered_as_one_by_one(chat_records):
    chat = Chat("chatml", "gpt2", add_tokens="auto")
    records = chat_records[::50]
    for record, (tokens, loss) in zip(records, chat.render_many(records), strict=True):
        alone = chat.render(record)
        assert np.array_equal(alone.tokens, tokens)
        assert np.array_equal(alone.loss, loss)
    assert chat.render_many([]) == []


def test_a_chat_can_be_sent_to_another_process():
    chat = Chat("chatml", "gpt2", add_tokens="auto", rewritten="train", date="2026-01-31")
    again = pickle.loads(pickle.dumps(chat))

    assert again.describe() == chat.describe()
    assert np.array_equal(again.render(TURNS).tokens, chat.render(TURNS).tokens)


def test_the_digest_tells_templates_settings_and_tokenizers_apart(gpt2_chat):
    chats = [
        Chat("chatml", gpt2_chat),
        Chat("nanochat", gpt2_chat),
        Chat("chatml", "bytes", add_tokens="auto"),
        Chat("chatml", gpt2_chat, rewritten="train"),
        Chat("chatml", gpt2_chat, borders="cut"),
        Chat("chatml", gpt2_chat, date="2026-01-31"),
        Chat("chatml", gpt2_chat, settings={"a": 1}),
    ]

    assert len({chat.digest for chat in chats}) == len(chats)
    assert Chat("chatml", gpt2_chat).digest == chats[0].digest
