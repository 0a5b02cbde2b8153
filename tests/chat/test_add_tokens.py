"""A template's markers are tokens, or there is an error that says how to make them so."""

import json
import re
import shlex
from pathlib import Path

import pytest
import tokenizers

import penstock
from penstock.chat.chat import Chat
from penstock.errors import StoreError, TemplateError, TokenizerError
from penstock.tokenize.special_tokens import log_added
from penstock.tokenize.tokenizer import _find, load_tokenizer

ROOT = Path(__file__).parent.parent.parent
TURNS = [
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "It is 4."},
]
CHATML = ["<|im_start|>", "<|im_end|>"]
ZEPHYR = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}</s>\n{% endfor %}"
GEMMA = (
    "{% for m in messages %}<start_of_turn>{{ m.role }}\n{{ m.content }}<end_of_turn>\n{% endfor %}"
)


@pytest.fixture(params=["trained", "bytes"])
def tokenizer(request, make_tokenizer):
    return "bytes" if request.param == "bytes" else make_tokenizer([])


@pytest.mark.parametrize("template", ["chatml", "nanochat", GEMMA, ZEPHYR])
def test_markers_that_are_no_tokens_are_refused_with_what_to_do(template, tokenizer):
    with pytest.raises(TemplateError, match="has no such token") as error:
        Chat(template, tokenizer)

    named = re.search(r"add_tokens=(\[.*?\])", str(error.value)).group(1)
    assert "(--add-tokens auto)" in str(error.value)
    assert Chat(template, tokenizer, add_tokens=json.loads(named)).render(TURNS).loss.any()
    assert Chat(template, tokenizer, add_tokens="auto").render(TURNS).loss.any()


@pytest.mark.parametrize("template", ["chatml", "nanochat", GEMMA, ZEPHYR])
def test_each_marker_is_one_token_that_no_message_can_write(template, tokenizer):
    chat = Chat(template, tokenizer, add_tokens="auto")
    added = chat.tokenizer.added_tokens
    plain = chat.render(TURNS).tokens
    hostile = [{**each, "content": "".join(added) + each["content"]} for each in TURNS]
    tokens = chat.render(hostile).tokens

    first = min(added.values())
    assert list(added.values()) == list(range(first, first + len(added)))
    assert set(added.values()) & set(plain.tolist())
    assert [t for t in tokens if t in added.values()] == [t for t in plain if t in added.values()]
    assert chat.tokenizer.decode(plain) == chat.render(TURNS).text


def test_a_question_of_gsm8k_is_as_long_as_its_words(data, gpt2, gpt2_chat):
    """As text, the markers of ChatML make an example longer by a quarter."""
    record = json.loads((data / "gsm8k" / "train.jsonl").read_bytes().splitlines()[1])
    messages = [
        {"role": "user", "content": record["question"]},
        {"role": "assistant", "content": record["answer"]},
    ]
    chat = Chat("chatml", gpt2_chat)
    plain = gpt2.encode(chat.render_text(messages).text)

    assert (len(chat.render(messages)), len(plain)) == (90, 114)  # 4 markers, 7 tokens each


def test_a_marker_beside_a_token_that_ends_the_turn_may_be_text(make_tokenizer, caplog):
    """As Zephyr and TinyLlama were published: `<|user|>` is text to them, `</s>` a token."""
    chat = Chat(ZEPHYR, load_tokenizer(make_tokenizer(["</s>"])))

    assert chat.compare([chat.render_text(TURNS)]) == 1
    assert "<|user|>, <|assistant|>, which" in caplog.text


def test_a_token_that_is_not_called_special_ends_turns_all_the_same(make_tokenizer):
    """Some tokenizers do not flag `<end_of_turn>`; nobody but the template can write it."""
    made = make_tokenizer([])
    made.add_tokens(["<start_of_turn>", "<end_of_turn>", "<tool>"])
    end = made.token_to_id("<end_of_turn>")
    chat = Chat(GEMMA, load_tokenizer(made))
    hostile = [{**each, "content": f"<end_of_turn><tool>{each['content']}"} for each in TURNS]
    tokens = chat.render(hostile).tokens

    assert (tokens == end).sum() == (chat.render(TURNS).tokens == end).sum() == 2
    assert (tokens == made.token_to_id("<tool>")).sum() == 2  # an ordinary word, as before
    assert chat.compare([chat.render_text(TURNS)]) == 1
    assert chat.tokenizer.digest == load_tokenizer(made).digest


def test_a_role_of_a_record_is_no_word_of_the_template(make_tokenizer):
    made = make_tokenizer(["</s>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"])
    chat = Chat(ZEPHYR, load_tokenizer(made))
    tokens = chat.render([{"role": "end", "content": "x"}, *TURNS]).tokens
    forged = chat.render([{"role": "x</s>", "content": "x"}, *TURNS]).tokens

    assert made.token_to_id("<|end|>") not in tokens
    assert (tokens == made.token_to_id("</s>")).sum() == 3
    assert (forged == made.token_to_id("</s>")).sum() == 3


def test_a_setting_of_a_record_is_no_word_of_the_template(gpt2_chat):
    source = "{{ greeting }}{% for m in messages %}{{ m.content }}</s>{% endfor %}"
    record = {"messages": TURNS, "chat_template_kwargs": {"greeting": "Hi</s>"}}
    rendered = Chat(source, gpt2_chat).render(record)

    assert rendered.text.startswith("Hi</s>What")
    assert (rendered.tokens == gpt2_chat.token_id("</s>")).sum() == 2


@pytest.mark.parametrize("method", ["{0}.ljust(9)", "{0}.swapcase()", "'%s' % {0}", "{0} | pprint"])
def test_a_name_that_is_formatted_is_still_no_word_of_the_template(method, gpt2_chat):
    call = {"name": "f</s>", "arguments": {}}
    source = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{% for c in m.tool_calls or [] %}"
        f"{{{{ {method.format('c.function.name')} }}}}"
        "{% endfor %}</s>\n{% endfor %}"
    )
    said = [TURNS[0], {**TURNS[1], "tool_calls": [call]}]

    assert (Chat(source, gpt2_chat).render(said).tokens == gpt2_chat.token_id("</s>")).sum() == 2


def written(tmp_path, number=20):
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join([json.dumps({"messages": TURNS})] * number))
    return path


def test_a_store_records_its_tokens_and_finds_them_again(tmp_path, gpt2, gpt2_chat):
    chat = Chat("chatml", gpt2, add_tokens="auto")
    store = penstock.build(written(tmp_path), tmp_path / "store", chat=chat)
    told = store.manifest.contents["tokenizer"]
    again = penstock.TokenStore(tmp_path / "store")

    assert told["added_tokens"] == {"<|im_start|>": 50_257, "<|im_end|>": 50_258}
    assert told["vocab_size"] == 50_259
    assert again.decode(0).endswith("<|im_start|>assistant\nIt is 4.<|im_end|>\n")
    assert again.decode(0, tokenizer=gpt2) == again.decode(0)
    more = tmp_path / "more.jsonl"
    more.write_text(json.dumps({"messages": TURNS}))
    same = Chat("chatml", gpt2, add_tokens=CHATML)
    assert len(penstock.build(more, tmp_path / "store", append=True, chat=same)) == 21
    settings = {"tokenizer": gpt2_chat, "chat": "chatml"}  # which has more tokens
    with pytest.raises(StoreError, match="other settings"):
        penstock.build(written(tmp_path, 3), tmp_path / "store", append=True, **settings)


def test_documents_may_be_built_with_the_same_tokens(tmp_path, make_tokenizer):
    plain = make_tokenizer([])
    added = penstock.load_tokenizer(plain, add_tokens=CHATML)
    chats = penstock.build(written(tmp_path), tmp_path / "a", chat="chatml", tokenizer=added)
    texts = penstock.Texts(["a<|im_end|>b"])
    documents = penstock.build(texts, tmp_path / "b", tokenizer=added)
    parses = penstock.load_tokenizer(plain, add_tokens=CHATML, special_tokens="parse")
    parsed = penstock.build(texts, tmp_path / "c", tokenizer=parses)
    end = chats.manifest.contents["tokenizer"]["added_tokens"]["<|im_end|>"]

    assert documents.manifest.contents["tokenizer"] == chats.manifest.contents["tokenizer"]
    assert end not in documents.document(0)
    assert end in parsed.document(0)


def test_what_was_added_is_logged_with_the_sizes_a_model_needs(caplog, gpt2):
    for _ in range(2):
        load_tokenizer(gpt2, add_tokens=["<|only in this test|>"])
    (line,) = [each.message for each in caplog.records if "only in this test" in each.message]

    assert "<|only in this test|> (50,257)" in line
    assert "vocabulary now has 50,258 tokens" in line
    assert "multiple of 64 is 50,304" in line


@pytest.mark.parametrize("base", ["gpt2", "bytes"])
@pytest.mark.parametrize("given", [True, False])
def test_what_was_added_is_not_logged_again_when_a_store_is_read(base, given, tmp_path, caplog):
    log_added.cache_clear()
    tokenizer = penstock.load_tokenizer(base, add_tokens=["<|read|>"])
    store = penstock.build(penstock.Texts(["a"]), tmp_path / "a", tokenizer=tokenizer)
    assert "<|read|>" in caplog.text
    caplog.clear()
    log_added.cache_clear()  # as in a new process
    _find.cache_clear()

    assert store.load_tokenizer(base if given else None).added_tokens
    assert not caplog.text


def test_an_extended_tokenizer_is_the_one_that_tokenizers_extends(small_tokenizers):
    for made in small_tokenizers:
        more = ["<|a|>", "<|b|>"]
        ours = load_tokenizer(made, add_tokens=more)
        parsed = load_tokenizer(made, add_tokens=more, special_tokens="parse")
        made.add_special_tokens(more)
        text = "x<|b|>y <|a|> the"

        assert ours.added_tokens == {each: made.token_to_id(each) for each in more}
        assert parsed.encode(text).tolist() == made.encode(text, add_special_tokens=False).ids
        assert not set(ours.encode(text).tolist()) & set(ours.added_tokens.values())
        assert ours.vocab_size == made.get_vocab_size()


@pytest.fixture
def small_tokenizers(make_tokenizer):
    unigram = tokenizers.Tokenizer(
        tokenizers.models.Unigram([("<unk>", 0.0), *((c, -2.0) for c in "xytheab<>| ")], 0, False)
    )
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 0, "the": 1}, "?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return [make_tokenizer(["</s>"]), unigram, words]


@pytest.mark.parametrize("kind", ["gpt2", "trained"])
def test_an_extended_tokenizer_survives_save_and_load(kind, tmp_path, make_tokenizer):
    source = "gpt2" if kind == "gpt2" else make_tokenizer(["</s>"])
    chat = Chat("chatml", source, add_tokens="auto")
    chat.tokenizer.save(tmp_path / "saved")
    again = load_tokenizer(tmp_path / "saved")
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    tokens = chat.render(TURNS).tokens

    assert again.digest == chat.tokenizer.digest
    assert (again.vocab_size, again.eos_id) == (chat.tokenizer.vocab_size, chat.tokenizer.eos_id)
    assert Chat("chatml", again).render(TURNS).tokens.tolist() == tokens.tolist()
    assert theirs(chat.render_text(TURNS).text)["input_ids"] == tokens.tolist()


def test_tiktoken_encodings_are_extended():
    tiktoken = pytest.importorskip("tiktoken")
    ranks = {bytes([byte]): byte for byte in range(256)}
    small = tiktoken.Encoding(
        "small", pat_str=r"\S+|\s+", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 256}
    )
    chat = Chat("chatml", small, add_tokens="auto")

    assert chat.tokenizer.added_tokens == {"<|im_start|>": 257, "<|im_end|>": 258}
    assert chat.tokenizer.decode(chat.render(TURNS).tokens) == chat.render_text(TURNS).text


def test_tokens_that_are_there_are_not_added_again(gpt2):
    once = load_tokenizer(gpt2, add_tokens=CHATML)
    twice = load_tokenizer(once, add_tokens=[*CHATML, "<|endoftext|>", "<|im_end|>"])
    more = load_tokenizer(once, add_tokens=["</s>"])

    assert twice is once
    assert load_tokenizer(gpt2, add_tokens=["<|endoftext|>"]) is gpt2
    assert more.added_tokens == {"<|im_start|>": 50_257, "<|im_end|>": 50_258, "</s>": 50_259}
    assert load_tokenizer(load_tokenizer("bytes", add_tokens=["a", "b"]), add_tokens=["b", "c"])


def test_a_piece_of_the_vocabulary_becomes_special_and_keeps_its_id():
    pieces = [("<unk>", 0.0), ("</s>", 0.0), ("a", -1.0), ("<", -2.0), ("/", -2.0), ("s", -2.0)]
    made = tokenizers.Tokenizer(tokenizers.models.Unigram([*pieces, (">", -2.0)], 0, False))
    plain, extended = load_tokenizer(made), load_tokenizer(made, add_tokens=["</s>"])

    assert plain.encode("a</s>").tolist() == [2, 1]  # nothing calls it special
    assert extended.encode("a</s>").tolist() == [2, 3, 4, 5, 6]
    assert extended.vocab_size == 7
    assert extended.added_tokens == {"</s>": 1}


def test_a_vocabulary_with_gaps_is_refused():
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 0, "a": 5}, "?"))
    with pytest.raises(TokenizerError, match="has gaps: '<a>' would be 6"):
        load_tokenizer(made, add_tokens=["<a>"])


def test_the_command_of_the_docs_works_as_printed(tmp_path, quick_python, invoke):
    page = (ROOT / "docs" / "chat.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"`penstock (build chats\.jsonl[^`]*)`", page)
    written(tmp_path)
    run = "import os, sys; os.chdir(sys.argv.pop(1)); from penstock.cli import main; main()"
    done = quick_python(run, tmp_path, *shlex.split(command))
    store = penstock.TokenStore(tmp_path / "stores" / "chats")

    assert len(store) == 20
    assert "50,304" in done.stderr
    told = json.loads(invoke(*shlex.split(command), "--json").stdout)
    assert (told["vocab_size"], told["padded_vocab_size"]) == (50_259, 50_304)
    shown = invoke("info", "stores/chats").stdout
    assert "<|im_start|>, <|im_end|>" in shown
    assert "next multiple of 64: 50,304" in shown


def test_the_command_line_says_what_to_type(tmp_path, invoke):
    chats = written(tmp_path)
    failed = invoke("build", chats, "-o", tmp_path / "a", "--chat", "chatml", code=1)
    tokens = [word for token in CHATML for word in ("--add-tokens", token)]
    done = invoke("build", chats, "-qo", tmp_path / "b", "--chat", "chatml", *tokens)

    assert "--add-tokens auto" in failed.stderr
    assert (done.stdout, done.stderr) == ("", "")
    assert len(penstock.TokenStore(tmp_path / "b")) == 20
