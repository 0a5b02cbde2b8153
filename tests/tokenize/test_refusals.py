"""Mistakes in naming, loading, using and training tokenizers, and the words of their messages."""

import json

import numpy as np
import pytest
import tokenizers

import penstock as ps
from penstock.errors import SourceError, TokenizerError
from penstock.tokenize.tokenizer import load_tokenizer
from penstock.tokenize.train import train_tokenizer

MERGES = {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]]}


class Letters:
    """An object with the least that a tokenizer needs; it returns `ids` for any text."""

    vocab_size = 300

    def __init__(self, *ids):
        self.ids = ids

    def encode(self, text):
        return self.ids


class Bare:
    def encode(self, text):
        return []


NAMES = [
    ("gpt3", r"'gpt3' is not a known tokenizer.*\"hf:NAME\""),
    ("missing.json", "is not a known tokenizer"),
    ("./missing", "is not a known tokenizer"),
    ("/missing", "is not a known tokenizer"),
    ("folder/tokenizer.json", "is not a known tokenizer"),
]


@pytest.mark.parametrize(("name", "message"), NAMES)
def test_a_wrong_name_is_refused_without_the_network(name, message, monkeypatch):
    monkeypatch.setattr("huggingface_hub.hf_hub_download", None)

    with pytest.raises(TokenizerError, match=message):
        load_tokenizer(name)


FILES = [
    ("tokenizer.json", b"\xff\xfe", "is not valid JSON"),
    ("tokenizer.json", b"[]", 'it has no "model"'),
    ("tokenizer.json", b'{"model": 7}', 'it has no "model"'),
    ("tokenizer.json", b'{"model": {}}', "is not a usable tokenizer.json"),
    ("tokenizer.json", b'{"model": {"type": "Evil"}}', "is not a usable tokenizer.json"),
    ("tokenizer.json", json.dumps({"model": MERGES}).encode(), "is not a usable tokenizer.json"),
    ("model.bin", b"", r"no tokenizer\.json in it; it holds model\.bin"),
]


@pytest.mark.parametrize(("name", "data", "message"), FILES)
def test_a_wrong_file_is_refused(name, data, message, tmp_path):
    (tmp_path / name).write_bytes(data)

    with pytest.raises(TokenizerError, match=message):
        load_tokenizer(tmp_path)


LOADS = [
    (17, {}, "has no method encode"),
    (Bare(), {}, "does not say how large its vocabulary is"),
    (Letters(), {"special_tokens": "parse"}, r'special_tokens="parse" needs a tokenizer\.json'),
    (Letters(), {"add_tokens": ["<a>"]}, "cannot extend by <a>"),
    ("bytes", {"special_tokens": "parse"}, "bytes was loaded to treat special tokens"),
    ("gpt2", {"special_tokens": "no"}, "special_tokens='no' is not"),
    ("gpt2", {"engine": "no"}, "engine='no' is not"),
    ("gpt2", {"add_tokens": "<a>"}, r"add_tokens='<a>' is one string; give a list"),
]


@pytest.mark.parametrize(("tokenizer", "options", "message"), LOADS)
def test_a_wrong_object_or_option_is_refused(tokenizer, options, message):
    with pytest.raises(TokenizerError, match=message):
        load_tokenizer(tokenizer, **options)


def words():
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "?": 1}, "?"))
    return json.loads(made.to_str())


CHANGES = [
    (lambda config: config["model"].update(dropout=0.1), {}, "has dropout=0.1"),
    (
        lambda config: config.update(words()),
        {"engine": "gigatoken"},
        r"gigatoken is not used for Tokenizer: its model \(WordLevel\) is not among those",
    ),
    (
        lambda config: config["pre_tokenizer"].update(use_regex=False),
        {"engine": "gigatoken"},
        "its normalizer or pre-tokenizer is not among those that were compared",
    ),
]


@pytest.mark.parametrize(("change", "options", "message"), CHANGES)
def test_a_definition_that_cannot_be_used_as_asked_is_refused(small, change, options, message):
    config = json.loads(json.dumps(small))
    change(config)

    with pytest.raises(TokenizerError, match=message):
        load_tokenizer(tokenizers.Tokenizer.from_str(json.dumps(config)), **options)


WRONG_IDS = [
    (300, r"returned the id 300, .*of 300 ids"),
    (2**32 - 1, r"returned the id 4,294,967,295, .*of 300 ids"),
    (-1, "holds only ids from 0 to 4,294,967,295"),
    (2**40, "holds only ids from 0 to 4,294,967,295"),
]


@pytest.mark.parametrize(("number", "message"), WRONG_IDS)
def test_an_id_that_cannot_be_stored_is_refused_and_never_cut(number, message):
    with pytest.raises(TokenizerError, match=message):
        load_tokenizer(Letters(97, number)).encode("a")


NO_TEXT = [
    ([15496, 50300], "id 50300 is not in the vocabulary of gpt2, which has 50,257 ids"),
    ([15496, -100], "-100 marks a target that is ignored"),
    ([[15496, 995]], r"have the shape \(1, 2\). Decode one row at a time"),
    ([1.5], "ids are float64, and token ids are whole numbers"),
]


@pytest.mark.parametrize(("ids", "message"), NO_TEXT)
def test_ids_without_a_text_are_refused(ids, message):
    with pytest.raises(TokenizerError, match=message):
        load_tokenizer("gpt2").decode(np.array(ids))


def test_a_tiktoken_encoding_without_a_network_says_what_to_do(monkeypatch, tmp_path):
    tiktoken = pytest.importorskip("tiktoken")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    for name in ("HTTPS_PROXY", "https_proxy"):  # nobody answers there
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delitem(tiktoken.registry.ENCODINGS, "r50k_base", raising=False)

    with pytest.raises(TokenizerError, match="TIKTOKEN_CACHE_DIR"):
        load_tokenizer("tiktoken:r50k_base")


TRAINING = [
    ({"vocab_size": 256}, TokenizerError, "the 256 bytes and 1 special tokens, which are 257"),
    ({"vocab_size": 9_000}, TokenizerError, r"fill a vocabulary of 2\d\d tokens, not 9,000"),
    ({"special_tokens": ["the"]}, TokenizerError, "'the' is also the token of the text 'the'"),
    ({"special_tokens": ["<a>", "<a>"]}, TokenizerError, "is not a list of different strings"),
    ({"special_tokens": ["a"]}, TokenizerError, "of at least two characters"),
    ({"special_tokens": "<a>"}, TokenizerError, "special_tokens='<a>' is not a list"),
    ({"inputs": ps.Texts([" "])}, SourceError, "no document to learn from"),
]


@pytest.mark.parametrize(("options", "kind", "message"), TRAINING)
def test_wrong_training_is_refused_and_writes_nothing(
    tmp_path, monkeypatch, options, kind, message
):
    monkeypatch.chdir(tmp_path)
    options = {"inputs": ps.Texts(["the the the"]), "path": "t.json", "vocab_size": 259, **options}

    with pytest.raises(kind, match=message):
        train_tokenizer(options.pop("inputs"), options.pop("path"), **options)
    assert not list(tmp_path.iterdir())
