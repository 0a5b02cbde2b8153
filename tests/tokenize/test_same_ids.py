"""Ids equal those of `tokenizers` for every definition and every code point, fast or not."""

import importlib.util
import itertools
import json
import logging
import random
from pathlib import Path

import pytest

from penstock.tokenize.tokenizer import load_tokenizer
from penstock.tokenize.train import train_tokenizer

HERE = Path(__file__)
ROOT = HERE.parent.parent.parent


SPEC = importlib.util.spec_from_file_location("variants", HERE.with_name("variants.py"))
known = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(known)
ids, variants = known.ids, known.variants
BLANKS = [*" \n\r\t\x0b\x0c", "\x85", *"\u00a0\u1680\u2003\u2028\u2029\u202f\u3000"]


@pytest.fixture(autouse=True)
def _quiet():
    logging.disable(logging.WARNING)  # a line for each of thousands of tokenizers
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture(scope="module")
def texts(data):
    """Lines of many scripts, the naughty strings, and text of all kinds of pieces."""
    lines = [
        line
        for file in sorted((data / "unicode" / "udhr2").iterdir())
        for line in file.read_text(encoding="utf-8").split("\n")[:12]
    ]
    naughty = json.loads((data / "unicode" / "blns.json").read_text())
    return [*lines, *naughty, *ids.fuzzed(400)]


# The differences that were found, each by its name.


def test_an_added_token_that_must_be_a_word_of_its_own(tmp_path):
    added = [ids.token("word", len(ids.byte_model()["vocab"]), single_word=True)]
    config = ids.definition(pre_tokenizer=ids.byte_level(), added=added)

    assert ids.same(config, ["swords", "a word.", "word", "words"], tmp_path) == "tokenizers"


def test_an_added_token_that_is_looked_for_in_normalized_text(tmp_path):
    added = [ids.token("naïve", len(ids.byte_model()["vocab"]), normalized=True)]
    config = ids.definition(normalizer={"type": "NFC"}, pre_tokenizer=ids.byte_level(), added=added)

    assert ids.same(config, ["nai\u0308ve", "naïve", "naïve\u0301"], tmp_path) == "tokenizers"


def test_byte_level_without_a_pattern(tmp_path):
    config = ids.definition(pre_tokenizer=ids.byte_level(use_regex=False))

    assert ids.same(config, ["a.\n\nb"], tmp_path) == "tokenizers"


def test_a_suffix_at_the_end_of_words(tmp_path):
    (config,) = [made for name, made in variants() if name == "bytes 3"]

    assert config["model"]["end_of_word_suffix"] == "</w>"
    assert ids.same(config, ["how now", "low", "ow"], tmp_path) == "tokenizers"


def test_a_space_before_the_text_and_an_added_token_that_begins_with_one(tmp_path):
    added = [ids.token(" lead", len(ids.byte_model()["vocab"]))]
    config = ids.definition(pre_tokenizer=ids.byte_level(add_prefix_space=True), added=added)

    assert ids.same(config, ["a lead a", " leada", "a", " lead", "lead"], tmp_path) == "tokenizers"


@pytest.mark.parametrize("parse", [False, True])
def test_a_special_token_that_holds_another_added_token(tmp_path, parse):
    first = len(ids.byte_model()["vocab"])
    added = [ids.token("<|end|>", first, special=True), ids.token("end", first + 1)]
    config = ids.definition(pre_tokenizer=ids.byte_level(), added=added)

    ids.same(config, ["a<|end|>b", "end", "the end|>", "<|end"], tmp_path, parse=parse)


def test_added_tokens_that_are_not_looked_for_at_once(tmp_path):
    first = len(ids.byte_model()["vocab"])
    added = [ids.token("<ab", first, normalized=True), ids.token("abc>", first + 1)]
    config = ids.definition(pre_tokenizer=ids.byte_level(), added=added)

    assert ids.same(config, ["<abc>", "<ab", "abc>"], tmp_path) == "tokenizers"


@pytest.mark.parametrize("pattern", [ids.CL100K, ids.GPT_4], ids=["digits", "blanks"])
def test_patterns_that_gigatoken_reads_as_tiktoken_does(tmp_path, pattern):
    model = ids.byte_model(b"a12345678 \n")
    config = ids.definition(model, pre_tokenizer=ids.patterned(pattern))

    assert ids.same(config, ["12345678", "a\n ", "a\n\u3000"], tmp_path) == "tokenizers"


def test_an_added_token_with_the_id_of_another(tmp_path):
    added = [ids.token("a", 5_000), ids.token("wordy", 9_000)]
    config = ids.definition(pre_tokenizer=ids.byte_level(), added=added)

    ids.same(config, ["a wordy a"], tmp_path)


# What stays fast.


def _public():
    """The public tokenizers that most people use, with a small vocabulary each."""
    plain = ids.byte_model()
    vocab = plain["vocab"]
    first = len(vocab)
    chat = [
        ids.token(f"<|reserved_special_token_{n}|>", first + n, special=True) for n in range(256)
    ]
    end = "<\uff5cend\u2581of\u2581sentence\uff5c>"
    tools = [
        *(
            ids.token(text, first + n, special=True)
            for n, text in enumerate(("<|im_start|>", "<|im_end|>"))
        ),
        *(ids.token(text, first + 2 + n) for n, text in enumerate(("<tool_call>", "</tool_call>"))),
    ]
    nfc = {"type": "NFC"}
    yield (
        "llama-3",
        ids.definition(
            {**plain, "ignore_merges": True}, pre_tokenizer=ids.patterned(ids.LLAMA_3), added=chat
        ),
    )
    yield (
        "gpt-4",
        ids.definition(
            pre_tokenizer=ids.patterned(ids.LLAMA_3, behavior="Removed", invert=True),
            added=[ids.token("<|endoftext|>", first, special=True)],
        ),
    )
    yield (
        "qwen-2",
        ids.definition(normalizer=nfc, pre_tokenizer=ids.patterned(ids.QWEN_2), added=tools),
    )
    yield "o200k", ids.definition(pre_tokenizer=ids.patterned(ids.O200K), added=chat[:2])
    yield (
        "deepseek-v3",
        ids.definition(
            ids.bpe({**vocab, end: first}, plain["merges"]),
            normalizer=ids.normalizers(),
            pre_tokenizer=ids.patterned(ids.DEEPSEEK),
            added=[ids.token(end, first, special=True), ids.token("<\uff5cUser\uff5c>", first + 1)],
        ),
    )
    yield from ((name, made) for name, made in variants() if name in ("fallback 0", "fallback 1"))


@pytest.mark.parametrize("parse", [False, True])
@pytest.mark.parametrize(("name", "config"), [*_public()], ids=[name for name, _ in _public()])
def test_common_tokenizers_stay_fast_and_exact(name, config, texts, tmp_path, parse):
    some = [*texts[::3], "<|im_start|>a<tool_call> <|endoftext|></s><s> x", "a<\uff5cUser\uff5c>b"]

    assert ids.same(config, some, tmp_path, parse=parse) == "gigatoken"


def test_gpt2_and_our_own_tokenizers_stay_fast(data, tmp_path, texts):
    for special in ("text", "parse"):
        assert load_tokenizer("gpt2", special_tokens=special).engine.name == "gigatoken"
        hub = load_tokenizer(data / "gpt2" / "tokenizer.json", special_tokens=special)
        assert hub.engine.name == "gigatoken"
    train_tokenizer([str(data / "unicode" / "blns.txt")], tmp_path / "own.json", vocab_size=400)

    assert (
        ids.same(json.loads((tmp_path / "own.json").read_text()), texts[:200], tmp_path)
        == "gigatoken"
    )


# Samples of what the torture tests compare in full.


def test_a_sample_of_added_tokens_in_text_and_parse_mode(tmp_path):
    engines = [
        ids.same_but_special(
            config,
            random.Random(number).sample(ids.texts_with(content(config)), 150),
            tmp_path,
            parse=parse,
        )
        for number, config in enumerate(random.Random(1).sample([*ids.added_token_grid()], 40))
        for parse in (False, True)
    ]

    assert engines.count("gigatoken") > 15


def content(config):
    return config["added_tokens"][0]["content"]


SOME = [*variants()][::3]


@pytest.mark.parametrize(("name", "config"), SOME, ids=[name for name, _ in SOME])
def test_variants_of_normalizers_splits_and_models(name, config, texts, tmp_path):
    ids.same(config, random.Random(name).sample(texts, 120), tmp_path)


# In full.


@pytest.mark.torture
@pytest.mark.timeout(7_200)
def test_all_added_tokens_in_text_and_parse_mode(tmp_path, figure):
    engines = [
        ids.same_but_special(config, ids.texts_with(content(config)), tmp_path, parse=parse)
        for config in ids.added_token_grid()
        for parse in (False, True)
    ]

    assert len(engines) == 2 * 3_456
    figure(f"3,456 added tokens in two modes, {engines.count('gigatoken'):,} fast: 0 differences")


@pytest.mark.torture
@pytest.mark.timeout(7_200)
def test_all_variants_with_all_texts(tmp_path, texts, data, figure):
    wiki = (data / "wikitext-2-raw" / "wiki.test.raw").read_text(encoding="utf-8").split("\n")
    blanks = [
        "".join(b) + end for b in itertools.product(BLANKS, repeat=3) for end in ("", "a", "!")
    ]
    these = [*texts, *wiki[:500], *ids.fuzzed(3_000, seed=7), *blanks]
    engines = [ids.same(config, these, tmp_path) for _, config in variants()]

    assert len(engines) == 82
    figure(f"82 variants, {engines.count('gigatoken')} fast, {len(these):,} texts: 0 differences")
