"""What an object's `encode` gives is what is stored, in whatever shape it comes."""

import numpy as np
import pytest
import tiktoken
import torch
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from penstock.errors import TokenizerError
from penstock.integrations.pytorch import TransformerDataset
from penstock.integrations.pytorch.encoders import as_given
from penstock.tokenize.definition import find_definition


class Encoding:
    def __init__(self, ids):
        self.ids = ids


@pytest.mark.parametrize(
    "returns",
    [
        list,
        tuple,
        np.array,
        lambda ids: np.array(ids, np.uint16),
        lambda ids: np.array(ids, np.int32),
        torch.tensor,
        Encoding,
        iter,
    ],
)
def test_a_list_an_array_a_tensor_or_an_encoding(returns, write, letters):
    letters.returns = returns
    dataset = TransformerDataset(write("a.jsonl", ["abc", "d"]), letters, 1)

    assert dataset.tokenized_data.tolist() == [97, 98, 99, 100]


@pytest.mark.parametrize("returns", [list, np.array, torch.tensor])
def test_a_text_may_have_no_ids(returns, write, letters):
    letters.returns = returns
    assert TransformerDataset(write("a.jsonl", ["", "d", ""]), letters, 1).tokenized_data == [100]


@pytest.mark.parametrize(
    ("returns", "message"),
    [
        (lambda ids: [-1], "returned ids from -1 to -1; ids are stored in 32 bits"),
        (lambda ids: [2**32], "returned ids from 4,294,967,296"),
        (lambda ids: [0.5], r"returned float64 of shape \(1,\)"),
        (lambda ids: [[1, 2]], r"returned int64 of shape \(1, 2\)"),
        (lambda ids: "abc", "must return one row of integers"),
    ],
)
def test_what_are_no_ids_is_refused(returns, message, write, letters):
    letters.returns = returns
    with pytest.raises(TokenizerError, match=message):
        TransformerDataset(write("a.jsonl", ["abc"]), letters, 1)


def test_ids_may_be_as_large_as_32_bits(write, letters):
    letters.returns = lambda ids: [0, 2**32 - 1, 70_000]
    dataset = TransformerDataset(write("a.jsonl", ["abc"]), letters, 2)

    assert dataset[0]["labels"].tolist() == [2**32 - 1, 70_000]


def test_an_object_may_know_only_the_letters_of_its_text(write):
    """As a tokenizer by `stoi` and `itos`, which raises KeyError for any other letter."""

    class OfLetters:
        def __init__(self, text):
            self.numbers = {letter: number for number, letter in enumerate(sorted(set(text)))}

        def encode(self, text):
            return [self.numbers[letter] for letter in text]

    dataset = TransformerDataset(write("a.jsonl", ["to be"]), OfLetters("to be"), 1)

    assert dataset.tokenized_data.tolist() == [4, 3, 0, 1, 2]


def test_what_is_no_tokenizer_is_refused():
    for given, message in [
        (3, "3 is not a tokenizer: it is neither a name nor a path"),
        ("no-such", "is not a known tokenizer"),
    ]:
        with pytest.raises(TokenizerError, match=message):
            as_given(given)


def texts_of(dataset):
    return dataset.tokenized_data.tolist()


@pytest.fixture(scope="module")
def hugging_face():
    return Tokenizer.from_str(find_definition("gpt2").text)


def test_a_hugging_face_object_is_encoded_as_it_would_itself(write, hugging_face):
    texts = ["one two", "three <|endoftext|> four", "naïve 日本"]
    dataset = TransformerDataset(write("a.jsonl", texts), hugging_face, 1)

    assert texts_of(dataset) == [id for text in texts for id in hugging_face.encode(text).ids]
    assert 50_256 in texts_of(dataset)
    assert dataset.tokenizer is hugging_face
    assert as_given(hugging_face).tokenizer.digest is not None


def test_a_name_adds_nothing_and_parses_nothing(write, gpt2):
    texts = ["three <|endoftext|> four"]
    dataset = TransformerDataset(write("a.jsonl", texts), "gpt2", 1)

    assert texts_of(dataset) == gpt2.encode(texts[0]).tolist()
    assert 50_256 not in texts_of(dataset)


def test_tokens_that_an_object_adds_are_kept(write, hugging_face):
    adding = Tokenizer.from_str(hugging_face.to_str())
    adding.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 50_256)]
    )
    dataset = TransformerDataset(write("a.jsonl", ["one", "", "two"]), adding, 1)

    assert texts_of(dataset) == [50_256, 505, 50_256, 50_256, 11_545]


def test_settings_of_an_object_are_respected(write, hugging_face):
    cutting = Tokenizer.from_str(hugging_face.to_str())
    cutting.enable_truncation(1)
    cutting.enable_padding(length=3, pad_id=9)
    dataset = TransformerDataset(write("a.jsonl", ["one two", "two"]), cutting, 1)

    assert texts_of(dataset) == [505, 9, 9, 11_545, 9, 9]


def test_tiktoken_is_encoded_and_known_by_its_ranks(write):
    ranks = {bytes([value]): value for value in range(256)} | {b"ab": 256}
    small = tiktoken.Encoding(
        "small", pat_str=r".", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 300}
    )
    other = tiktoken.Encoding(
        "small", pat_str=r"..?", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 300}
    )
    path = write("a.jsonl", ["ab<|endoftext|>"])

    assert texts_of(TransformerDataset(path, small, 1)) == list(b"ab<|endoftext|>")
    assert texts_of(TransformerDataset(path, other, 1)) == [256, *b"<|endoftext|>"]
    assert as_given(small).tokenizer.digest not in (None, as_given(other).tokenizer.digest)


def test_bytes_are_tokens_too(write):
    dataset = TransformerDataset(write("a.jsonl", ["hé"]), "bytes", 1, eos=True)

    assert texts_of(dataset) == [104, 195, 169, 256]
    assert dataset.tokenized_data.dtype == np.uint16


def test_the_engine_of_penstock_is_known_by_its_digest(gpt2):
    assert as_given(gpt2).tokenizer.digest == as_given("gpt2").tokenizer.digest is not None
