"""Counted words are those that the pre-tokenizer of `tokenizers` finds in the whole texts."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from penstock.sources.document import binary_array
from penstock.tokenize.words import add_counts, count_pieces, count_words, is_cut_safe

PATTERN = pre_tokenizers.ByteLevel(add_prefix_space=False)
# Blanks of all kinds, apostrophes, and letters whose last bytes are those of blanks.
ODD = [" ", "\n", "\t", "\r", "\v", "\u0085", "\u00a0", "\u1680", "\u2003", "\u2028", "\u3000"]
ODD += [
    "'",
    "'s",
    "'ll",
    "\0",
    "\x1c",
    "\x7f",
    "a",
    "Z",
    "7",
    "-",
    ".",
    "é",
    "à",
    "я",
    "\u0440",
    "一",
]
ODD += ["\u2019", "²", "\U0001f600", "\u0301", "\ufeff"]


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


@pytest.mark.parametrize("name", ["unicode/blns.txt", "tinystories/tinystories.txt"])
def test_words_of_real_texts_are_those_of_the_pattern(data, name):
    texts = (data / name).read_text("utf-8").split("<|endoftext|>")
    half = len(texts) // 2

    assert counted(count_words([pieces(texts[:half]), pieces(texts[half:])])) == expected(texts)


def test_words_of_all_languages_are_those_of_the_pattern(data):
    files = sorted((data / "unicode" / "udhr2").iterdir())[::8]
    texts = [file.read_text("utf-8") for file in files]

    assert counted(count_words([pieces(texts)])) == expected(texts)


def test_a_slice_of_an_array_of_texts_can_be_counted():
    texts = binary_array([b"left out", b"one two", b"", b"two", b"left out"])

    assert counted(count_pieces(texts.slice(1, 3))) == {b"one": 1, b" two": 1, b"two": 1}


def test_counts_are_added_up():
    both = add_counts([pieces(["a b"]), pieces(["b a b"]), pieces([])])

    assert counted(both) == {b"a": 1, b" b": 2, b"b": 1, b" a": 1}
    assert counted(add_counts([])) == {}


def test_a_cut_that_changes_words_is_not_safe():
    assert is_cut_safe("one", " two")
    assert not is_cut_safe("one ", "two")
    assert not is_cut_safe("one\u00a0\n", "two")
