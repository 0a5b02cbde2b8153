"""The copies of tokenizers to which special tokens are text, and what is refused instead."""

import pickle

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from penstock.errors import TokenizerError
from penstock.tokenize.tokenizer import load_tokenizer

MARK = "\U0010fffd"  # in the names under which penstock hides special tokens


@pytest.fixture
def unigram():
    pieces = [("<unk>", 0.0), ("</s>", 0.0), *((letter, -2.0) for letter in "ab</>sunk")]
    made = tokenizers.Tokenizer(models.Unigram(pieces, 0, False))
    made.decoder = decoders.Fuse()
    made.add_special_tokens(["<unk>", "</s>"])
    return made


def test_ids_stay_and_text_is_decoded_to_itself(unigram):
    tokenizer = load_tokenizer(unigram)

    assert tokenizer.encode("ab").tolist() == unigram.encode("ab").ids
    assert tokenizer.decode(tokenizer.encode("a</s>b")) == "a</s>b"
    assert tokenizer.decode([2, 1]) == "a</s>"  # the token itself


@pytest.mark.parametrize("number", [0, 1, 2, 7, 1_000])
def test_the_names_of_hidden_tokens_can_be_in_a_text(number, unigram):
    tokenizer = load_tokenizer(unigram)
    for text in (f"a{MARK * number}1</s>", f"{MARK * number}0", "</s>" + MARK * number + "1"):
        assert 1 not in tokenizer.encode(text)


def test_a_character_that_only_a_special_token_has_is_refused():
    """Without it, the character would vanish from the text."""
    vocab = {"a": 0, "$": 1}
    made = tokenizers.Tokenizer(models.BPE(vocab, []))
    made.add_special_tokens(["$"])
    with pytest.raises(TokenizerError, match=r"'\$' of Tokenizer is also the only token"):
        load_tokenizer(made)

    assert load_tokenizer(made, special_tokens="parse").encode("a$").tolist() == [0, 1]
    made = tokenizers.Tokenizer(models.BPE({**vocab, "?": 2}, [], unk_token="?"))
    made.add_special_tokens(["$"])
    assert load_tokenizer(made).encode("a$").tolist() == [0, 2]


def test_a_normalizer_that_writes_the_name_of_a_hidden_token_is_refused():
    made = tokenizers.Tokenizer(models.WordLevel({"?": 0, "<eos>": 1}, "?"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.normalizer = normalizers.Replace("hidden", f"{MARK}0")
    made.add_special_tokens(["<eos>"])
    with pytest.raises(TokenizerError, match="gave '<eos>', the id 1, for a text"):
        load_tokenizer(made).encode("the hidden word")


def test_the_unknown_token_in_a_text_is_text_and_unknown_characters_are_unknown(
    unigram,
):
    tokenizer = load_tokenizer(unigram)

    assert 0 not in tokenizer.encode("a<unk>b")
    assert 0 in tokenizer.encode("a\u0901b")


def test_an_id_under_two_names_is_hidden_under_both():
    made = tokenizers.Tokenizer(models.WordLevel({"?": 0, "<eos>": 1, "stop": 1, "a": 2}, "?"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(["<eos>"])

    assert load_tokenizer(made).encode("a stop <eos> a").tolist() == [2, 0, 0, 2]


def test_objects_of_transformers_that_have_no_json_take_text_as_text():
    transformers = pytest.importorskip("transformers")
    theirs = transformers.ByT5Tokenizer()
    tokenizer = load_tokenizer(theirs)

    assert tokenizer.encode("a</s><pad>").tolist() == [each + 3 for each in b"a</s><pad>"]
    canine = load_tokenizer(transformers.CanineTokenizer())
    with pytest.raises(TokenizerError, match=r"CanineTokenizer.encode gave the special token"):
        canine.encode("a\ue000")


def test_an_object_that_parses_special_tokens_is_refused_where_a_text_has_one():
    class Parsing:
        vocab_size = 300

        def encode(self, text):
            return [256] if text == "<end>" else list(text.encode())

        def get_special_tokens(self):
            return ["<end>"]

        def encode_special(self, token):
            return 256

    tokenizer = load_tokenizer(Parsing())
    assert tokenizer.encode("end").tolist() == list(b"end")
    with pytest.raises(TokenizerError, match=r"gave the special token 256 for '<end>'"):
        tokenizer.encode("<end>")


def test_a_tokenizer_under_the_names_of_transformers_takes_text_as_text():
    from penstock.integrations.huggingface import hf_tokenizer

    pytest.importorskip("transformers", reason="needs penstock[hf]")
    named = hf_tokenizer("gpt2")
    assert 50_256 in named.encode("a<|endoftext|>")
    assert 50_256 not in load_tokenizer(named).encode("a<|endoftext|>")


def test_copies_of_a_tokenizer_take_text_as_text(unigram):
    tokenizer = pickle.loads(pickle.dumps(load_tokenizer(unigram)))

    assert 1 not in tokenizer.encode("a</s>")


def test_the_end_token_need_not_be_flagged(tmp_path, unigram):
    """It is enough that tokenizer_config.json names it, or another special token."""
    made = tokenizers.Tokenizer(unigram.model)
    made.save(str(tmp_path / "tokenizer.json"))
    assert 1 in load_tokenizer(tmp_path).encode("a</s>")
    for config in ('{"eos_token": "</s>"}', '{"additional_special_tokens": [{"content": "</s>"}]}'):
        (tmp_path / "tokenizer_config.json").write_text(config)
        assert 1 not in load_tokenizer(tmp_path).encode("a</s>")


def test_an_unknown_token_that_ends_documents_is_refused_where_a_text_gives_it():
    made = tokenizers.Tokenizer(models.WordLevel({"</s>": 0, "a": 1}, "</s>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(["</s>"])
    tokenizer = load_tokenizer(made)

    assert tokenizer.encode("a a").tolist() == [1, 1]
    with pytest.raises(TokenizerError, match="gave '</s>', the id 0, for a text"):
        tokenizer.encode("a b")


def test_a_piece_may_have_the_name_of_a_hidden_one():
    vocab = {"?": 0, "<eos>": 1, f"{MARK}0": 2, f"{MARK}{MARK}0": 3}
    made = tokenizers.Tokenizer(models.WordLevel(vocab, "?"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(["<eos>"])

    assert load_tokenizer(made).encode(f"{MARK}0 <eos> {MARK}{MARK}0").tolist() == [2, 0, 3]
