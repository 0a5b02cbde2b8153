"""The comparison that every build starts with."""

import json
from dataclasses import replace

import pyarrow as pa
import pytest

import penstock
from penstock.errors import TokenizerError
from penstock.sources.texts import Texts
from penstock.tokenize.definition import Definition
from penstock.tokenize.engines import HubEngine
from penstock.tokenize.oracle import compare
from penstock.tokenize.tokenizer import load_tokenizer


@pytest.fixture
def wrong(small, small_file):
    """A tokenizer whose reference has one merge less, so that it splits one word otherwise."""
    loaded = load_tokenizer(small_file)
    last = small["model"]["merges"][-1]
    other = json.loads(json.dumps(small))
    other["model"]["merges"].pop()
    reference = HubEngine(Definition("other", other), parse=False)
    return replace(loaded, reference=reference), "".join(last).replace("Ġ", " ")


def array(*texts):
    return pa.array([text.encode() for text in texts], pa.large_binary())


def test_engines_that_agree_pass_and_say_how_much_was_compared(gpt2):
    assert compare(gpt2, array("one", "two", "three")) == 3
    assert compare(gpt2, array(*["word"] * 2_000)) == 1_000
    assert compare(gpt2, array(*["word " * 1_000] * 300)) == 200
    assert compare(gpt2, array("wörd " * 400_000, "next")) == 1
    assert compare(gpt2, array()) == 0
    assert compare(load_tokenizer("bytes"), array("one")) == 0


def test_one_id_that_differs_is_found_and_shown(wrong):
    tokenizer, word = wrong

    assert compare(tokenizer, array("x", "y")) == 2
    with pytest.raises(
        TokenizerError, match=r"disagree on document 1 from token .*engine="
    ) as error:
        compare(tokenizer, array("x", f"x{word}", "y"))
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

    with pytest.raises(TokenizerError, match="disagree on document 0"):
        penstock.build(
            [tmp_path / "a.txt", tmp_path / "b.txt"],
            tmp_path / "s",
            tokenizer=tokenizer,
            threads=1,
            documents="lines",
        )
