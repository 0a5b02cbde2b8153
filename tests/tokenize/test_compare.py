"""The comparison that every build starts with, and the samples of every slice."""

import json
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

import penstock
from penstock.errors import TokenizerError, TokenMismatchError
from penstock.sources.batch import Batch
from penstock.sources.settings import Texts
from penstock.tokenize.compare import SliceSample, compare
from penstock.tokenize.definition import Definition
from penstock.tokenize.engines import TokenizersEngine
from penstock.tokenize.tokenizer import load_tokenizer


@pytest.fixture
def wrong(small, small_file):
    """A tokenizer whose reference has one merge less, so that it splits one word otherwise."""
    loaded = load_tokenizer(small_file)
    last = small["model"]["merges"][-1]
    other = json.loads(json.dumps(small))
    other["model"]["merges"].pop()
    reference = TokenizersEngine(Definition("other", other), parse=False)
    return replace(loaded, reference=reference), "".join(last).replace("Ġ", " ")


def array(*texts):
    return pa.array([text.encode() for text in texts], pa.large_binary())


def test_engines_that_agree_pass_and_say_how_much_was_compared(gpt2):
    assert compare(gpt2, array("one", "two", "three"), 13) == 3
    assert compare(gpt2, array(*["word"] * 2_000), 10**12) == 1_000
    assert compare(gpt2, array(*["word " * 1_000] * 300), 10**12) == 200
    assert compare(gpt2, array(*["word " * 1_000] * 300), 1_500_000) == 51
    assert compare(gpt2, array(*["word " * 1_000] * 300), 500_000_000) == 100
    assert compare(gpt2, array("wörd " * 400_000, "next"), 10**12) == 1
    assert compare(gpt2, array(), 0) == 0
    assert compare(load_tokenizer("bytes"), array("one"), 3) == 0


def test_one_id_that_differs_is_found_and_shown(wrong):
    tokenizer, word = wrong

    assert compare(tokenizer, array("x", "y"), 2) == 2
    with pytest.raises(
        TokenizerError, match=r"disagree on document 1 from token .*engine="
    ) as error:
        compare(tokenizer, array("x", f"x{word}", "y"), 3)
    assert repr(f"x{word}".encode()) in str(error.value)


def test_a_build_refuses_an_engine_that_differs_from_its_reference(wrong, tmp_path):
    tokenizer, word = wrong

    with pytest.raises(TokenizerError, match="disagree on document 1"):
        penstock.build(Texts(["x", f"x{word}"]), tmp_path / "store", tokenizer=tokenizer)
    assert not (tmp_path / "store" / "penstock.json").exists()


@pytest.mark.usefixtures("small_slices")
def test_a_first_slice_without_documents_does_not_use_up_the_comparison(wrong, tmp_path):
    tokenizer, word = wrong
    (tmp_path / "a.txt").write_bytes(b" \n" * 4_000)
    (tmp_path / "b.txt").write_text(f"x{word}\n" * 1_000)

    with pytest.raises(TokenizerError, match=r"disagree on (document 0|the document at offset 0)"):
        penstock.build(
            [tmp_path / "a.txt", tmp_path / "b.txt"],
            tmp_path / "s",
            tokenizer=tokenizer,
            workers=1,
            documents="lines",
        )


def lines(folder, word, num_lines, first_wrong):
    """A file whose first lines are too many to be compared at the start, and a word later on."""
    text = "".join(f"line {number} x\n" for number in range(first_wrong))
    text += "".join(f"line {number} x{word}\n" for number in range(first_wrong, num_lines))
    (folder / "later.txt").write_text(text)
    return folder / "later.txt"


def test_a_difference_far_behind_the_first_megabyte_stops_the_build(wrong, tmp_path):
    tokenizer, word = wrong
    file = lines(tmp_path, word, 20_000, first_wrong=2_000)
    options = {"documents": "lines", "workers": 1}

    with pytest.raises(
        TokenMismatchError,
        match=r"disagree on the document at offset [\d,]+ of .*later\.txt from token",
    ) as error:
        penstock.build(file, tmp_path / "store", tokenizer=tokenizer, **options)
    assert repr(f"x{word}".encode())[2:-1] in str(error.value)
    assert not (tmp_path / "store" / "penstock.json").exists()


@pytest.mark.usefixtures("small_slices")
def test_slices_that_were_sealed_before_a_difference_are_made_anew(wrong, tmp_path):
    """Another engine would keep them, and they may hold wrong ids too."""
    tokenizer, word = wrong
    file = lines(tmp_path, word, 20_000, first_wrong=6_000)
    store, options = tmp_path / "store", {"documents": "lines", "workers": 1}

    with pytest.raises(TokenMismatchError):
        penstock.build(file, store, tokenizer=tokenizer, **options)
    made = {path: path.stat().st_ino for path in store.glob("part-*.tokens.npy")}
    assert len(made) > 9
    assert not list(store.glob(".slice-*.json"))
    penstock.build(file, store, tokenizer=replace(tokenizer, reference=None), **options)
    assert all(path.stat().st_ino != number for path, number in made.items())


def test_a_stream_stops_at_a_difference_too(wrong, tmp_path):
    tokenizer, word = wrong
    file = lines(tmp_path, word, 20_000, first_wrong=2_000)

    with (
        pytest.raises(TokenMismatchError, match="disagree on the document at offset"),
        penstock.stream(
            file, tmp_path / "store", tokenizer=tokenizer, documents="lines"
        ) as growing,
    ):
        list(growing)


class Counting(TokenizersEngine):
    """The reference, which counts what it is given."""

    num_bytes = 0

    def encode(self, texts):
        self.num_bytes += sum(map(len, texts.to_pylist()))
        return super().encode(texts)


def batch(texts):
    numbers = np.arange(len(texts), dtype=np.uint64)
    return Batch(array(*texts), np.zeros(len(texts), np.uint64), numbers)


@pytest.mark.parametrize("size", [20, 2_000, 300_000])
def test_what_is_compared_of_a_slice_is_a_small_share_and_always_the_same(gpt2, size):
    reference = Counting(gpt2.definition, parse=False)
    tokenizer = replace(gpt2, reference=reference)
    texts = [f"{number} <|endoftext|> ".ljust(size, "é") for number in range(6_000_000 // size)]
    counts = []
    for _ in range(2):
        num_before = reference.num_bytes
        for index in range(4):
            sample = SliceSample(tokenizer, index, ["a.txt"])
            for start in range(0, len(texts), 5_000):
                sample.add(batch(texts[start : start + 5_000]))
            sample.encoded().compare(tokenizer)
        counts.append(reference.num_bytes - num_before)

    assert counts[0] == counts[1]
    # One document in 10,000, and the first of each slice; of a long one, 8 kB.
    num_bytes = sum(len(text.encode()) for text in texts)
    assert 0 < counts[0] < 4 * (num_bytes / 10_000 + min(2 * size, 8_192))
