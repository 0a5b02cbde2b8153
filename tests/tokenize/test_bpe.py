"""Words are those of the pre-tokenizer of `tokenizers`, and learned merges those of its trainer."""

import sysconfig
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import penstock as ps
from penstock.sources.batch import binary_array
from penstock.tokenize.bpe import (
    count_pieces,
    count_words,
    is_cut_safe,
    learn_merges,
)
from penstock.tokenize.definition import byte_alphabet
from penstock.tokenize.train import train_tokenizer

ALPHABET = sorted(byte_alphabet())
PATTERN = pre_tokenizers.ByteLevel(add_prefix_space=False)
# Blanks of all kinds, apostrophes, and letters whose last bytes are those of blanks.
ODD = " \n\t\r\v\0\x1c\x7faZ7-.éàя\u0440一\u2019²\U0001f600\u0301\ufeff"
ODD = [*ODD, *"\u0085\u00a0\u1680\u2003\u2028\u3000", "'", "'s", "'ll"]


def expected(texts):
    words = Counter()
    for text in texts:
        words.update(text[a:b].encode() for _, (a, b) in PATTERN.pre_tokenize_str(text))
    return words


def counted(table):
    words = table.words.to_pylist()
    assert len(set(words)) == len(words)
    return dict(zip(words, table.counts.tolist(), strict=True))


def pieces(texts):
    return count_pieces(binary_array([text.encode() for text in texts]))


@given(st.lists(st.lists(st.sampled_from(ODD), max_size=30).map("".join) | st.text(), max_size=5))
def test_words_of_odd_texts_are_those_of_the_pattern(texts):
    assert counted(count_words([pieces(texts)])) == expected(texts)


def test_words_of_real_texts_are_those_of_the_pattern(data):
    files = [data / "unicode" / "blns.txt", data / "tinystories" / "tinystories.txt"]
    files += sorted((data / "unicode" / "udhr2").iterdir())[::8]
    texts = [text for file in files for text in file.read_text("utf-8").split("<|endoftext|>")]
    half = len(texts) // 2

    assert counted(count_words([pieces(texts[:half]), pieces(texts[half:])])) == expected(texts)
    array = binary_array([b"left out", b"one two", b"", b"two", b"left out"])
    assert counted(count_pieces(array.slice(1, 3))) == {b"one": 1, b" two": 1, b"two": 1}


def test_a_cut_that_changes_words_is_not_safe():
    assert is_cut_safe("one", " two")
    assert not is_cut_safe("one ", "two")
    assert not is_cut_safe("one\u00a0\n", "two")


def learned(texts, vocab_size, min_count=2):
    tokens = [*ALPHABET]
    pairs = learn_merges(count_words([pieces(texts)]), tokens, vocab_size, min_count=min_count)
    return [(tokens[first], tokens[second]) for first, second in pairs]


def reference(texts, vocab_size, special_tokens=(), min_frequency=2):
    """The tokenizer that `tokenizers` trains on the texts themselves."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = PATTERN
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special_tokens),
        initial_alphabet=ALPHABET,
        min_frequency=min_frequency,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    return tokenizer


def naive(texts, num_merges, min_count):
    """Merge the most frequent pair of all words, and count all pairs again."""
    numbers = {letter: number for number, letter in enumerate(ALPHABET)}
    words = Counter(word for text in texts for word, _ in PATTERN.pre_tokenize_str(text))
    split = [([*word], count) for word, count in words.items()]
    merges = []
    while len(merges) < num_merges:
        pairs = Counter()
        for word, count in split:
            for pair in pairwise(word):
                pairs[pair] += count
        best = min(pairs, key=lambda pair: (-pairs[pair], *map(numbers.get, pair)), default=None)
        if best is None or pairs[best] < min_count:
            break
        merges.append(best)
        assert "".join(best) not in numbers  # no token is made twice
        numbers["".join(best)] = len(numbers)
        for word, _ in split:
            place = 0
            while place < len(word) - 1:
                if (word[place], word[place + 1]) == best:
                    word[place : place + 2] = ["".join(best)]
                place += 1
    return merges


# Few letters, so that pairs overlap ("aaaa", "abab") and many counts are equal.
WORDS = st.lists(st.text("ab", min_size=1, max_size=20) | st.text("a", max_size=40), max_size=12)


@given(WORDS, st.integers(1, 3))
def test_merges_are_those_of_counting_all_pairs_each_time(words, min_count):
    texts = [" ".join(words), *words]

    assert learned(texts, 256 + 40, min_count) == naive(texts, 40, min_count)


def assert_equal_file(path, inputs, texts, vocab_size):
    special = ["<|endoftext|>", "<|pad|>"]
    train_tokenizer(inputs, path, vocab_size=vocab_size, special_tokens=special)

    assert path.read_bytes() == reference(texts, vocab_size, special).to_str().encode()


@pytest.mark.parametrize(
    ("name", "vocab_size"),
    [
        ("tinystories/tinystories.txt", 1_500),
        ("cs336_fixtures/corpus.en", 1_000),
        ("unicode/blns.txt", 600),
    ],
)
def test_the_file_is_that_of_tokenizers(data, tmp_path, name, vocab_size):
    texts = [text for text in (data / name).read_text("utf-8").split("<|endoftext|>") if text]

    assert_equal_file(tmp_path / "own.json", ps.Texts(texts), texts, vocab_size)


@pytest.mark.torture
@pytest.mark.parametrize("name", ["web", "wikitext", "standard library"])
def test_32000_tokens_are_those_of_tokenizers(data, tmp_path, name):
    inputs = {
        "web": [data / "web" / "sample.jsonl.zst"],
        "wikitext": [*(data / "wikitext-2-raw").iterdir()],
        "standard library": [
            path
            for path in Path(sysconfig.get_path("stdlib")).rglob("*.py")
            if "site-packages" not in path.parts
        ],
    }[name]
    store = ps.build([*map(str, inputs)], tmp_path / "store", tokenizer="bytes")
    texts = [store.decode(number) for number in range(len(store))]

    assert_equal_file(tmp_path / "own.json", [*map(str, inputs)], texts, 32_000)
