"""A tokenizer that is not the one a store was built with is noticed, whatever changed in it."""

import copy
import json

import pytest
import tokenizers

import penstock
from penstock.errors import StoreError
from penstock.sources.settings import Texts
from penstock.tokenize.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def original():
    """A definition with a bit of everything that decides ids."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=False)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Metaspace(split=False),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=290,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the cat sat on the mat", "a hat"] * 4, trainer)
    tokenizer.add_tokens(["[sep]"])
    return json.loads(tokenizer.to_str())


def swap_two_ids(config):
    vocab = config["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]


def drop_a_merge(config):
    config["model"]["merges"].pop()


def reorder_merges(config):
    merges = config["model"]["merges"]
    merges[0], merges[1] = merges[1], merges[0]


def rename_a_token(config):
    config["added_tokens"][1]["content"] = "[SEP]"


def renumber_a_token(config):
    config["added_tokens"][1]["id"] += 1


def special_becomes_ordinary(config):
    config["added_tokens"][0]["special"] = False


def strip_left(config):
    config["added_tokens"][1]["lstrip"] = True


def whole_words_only(config):
    config["added_tokens"][1]["single_word"] = True


def match_after_normalizing(config):
    config["added_tokens"][1]["normalized"] = not config["added_tokens"][1]["normalized"]


def add_a_prefix_space(config):
    config["pre_tokenizer"]["pretokenizers"][1]["add_prefix_space"] = True


def leave_out_the_pattern(config):
    config["pre_tokenizer"]["pretokenizers"][1]["use_regex"] = False


def split_at_spaces(config):
    config["pre_tokenizer"]["pretokenizers"][0]["split"] = True


def lowercase(config):
    config["normalizer"]["lowercase"] = True


def keep_accents(config):
    config["normalizer"]["strip_accents"] = False


def no_normalizer(config):
    config["normalizer"] = None


def ignore_merges(config):
    config["model"]["ignore_merges"] = True


def unknown_token(config):
    config["model"]["unk_token"] = "[sep]"


MUTATIONS = [
    swap_two_ids,
    drop_a_merge,
    reorder_merges,
    rename_a_token,
    renumber_a_token,
    special_becomes_ordinary,
    strip_left,
    whole_words_only,
    match_after_normalizing,
    add_a_prefix_space,
    leave_out_the_pattern,
    split_at_spaces,
    lowercase,
    keep_accents,
    no_normalizer,
    ignore_merges,
    unknown_token,
]


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda mutate: mutate.__name__)
def test_a_mutated_tokenizer_can_neither_append_nor_decode(mutate, original, tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(original))
    store = penstock.build(Texts(["the cat"]), tmp_path / "store", tokenizer=path)
    changed = copy.deepcopy(original)
    mutate(changed)
    other = tmp_path / "other.json"
    other.write_text(json.dumps(changed))

    with pytest.raises(StoreError, match=r"tokenizer: "):
        penstock.build(Texts(["a hat"]), store.path, tokenizer=other, append=True)
    with pytest.raises(StoreError, match="The same id would mean other text"):
        store.decode(0, tokenizer=other)
    assert store.decode(0, tokenizer=path)


def spell_merges_otherwise(config):
    config["model"]["merges"] = [" ".join(pair) for pair in config["model"]["merges"]]


def leave_out_what_holds_anyway(config):
    del config["pre_tokenizer"]["pretokenizers"][1]["use_regex"]
    for key in ("fuse_unk", "byte_fallback", "ignore_merges", "dropout", "type"):
        del config["model"][key]


def another_decoder_and_ends(config):
    config["decoder"]["trim_offsets"] = not config["decoder"].get("trim_offsets")
    config["truncation"] = {"max_length": 9, "strategy": "LongestFirst", "stride": 0}


@pytest.mark.parametrize(
    "mutate", [spell_merges_otherwise, leave_out_what_holds_anyway, another_decoder_and_ends]
)
def test_the_same_tokenizer_spelled_otherwise_is_the_same(mutate, original, tmp_path):
    changed = copy.deepcopy(original)
    mutate(changed)
    paths = [tmp_path / "one.json", tmp_path / "two.json"]
    for path, config in zip(paths, (original, changed), strict=True):
        path.write_text(json.dumps(config))

    one, two = map(load_tokenizer, paths)
    assert (one.digest, one.canary) == (two.digest, two.canary)


def test_a_library_that_splits_otherwise_changes_the_canary(original):
    """The file is the same, the program is not: what marin found after two weeks."""
    from dataclasses import replace

    from penstock.tokenize.definition import Definition
    from penstock.tokenize.engines import TokenizersEngine

    path = tokenizers.Tokenizer.from_str(json.dumps(original))
    loaded = load_tokenizer(path)
    changed = copy.deepcopy(original)
    changed["normalizer"]["lowercase"] = True
    drifted = replace(loaded, engine=TokenizersEngine(Definition("x", changed), parse=False))

    assert drifted.digest == loaded.digest
    assert drifted.canary != loaded.canary


def test_a_tokenizer_without_a_digest_is_known_by_its_canary(tmp_path):
    class Shift:
        vocab_size = 0x11_0000
        eos_token_id = 0

        def __init__(self, by):
            self.by = by

        def encode(self, text):
            return [ord(letter) + self.by for letter in text]

        def decode(self, ids):
            return "".join(chr(each - self.by) for each in ids)

    store = penstock.build(Texts(["abc"]), tmp_path / "store", tokenizer=Shift(1))

    assert store.decode(0, tokenizer=Shift(1)) == "abc"
    with pytest.raises(StoreError, match="would mean other text"):
        store.decode(0, tokenizer=Shift(2))
    with pytest.raises(StoreError, match=r"tokenizer: Shift"):
        penstock.build(Texts(["d"]), store.path, tokenizer=Shift(2), append=True)
