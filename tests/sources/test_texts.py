"""Documents that are in memory already."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock
from penstock.errors import SourceError
from penstock.sources.settings import Texts


@given(
    texts=st.lists(st.text(max_size=30), max_size=20),
    slice_bytes=st.integers(1, 99),
    block=st.integers(1, 64),
)
def test_texts_are_read_as_they_are_whatever_the_slices(texts, slice_bytes, block, read):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.sources.tables.BLOCK_BYTES", block)
        found = read(Texts(texts), slice_bytes=slice_bytes)
    full = [(i, text.encode()) for i, text in enumerate(texts) if text.strip(" \t\r\n")]

    assert found.texts == [text for _, text in full]
    assert found.places == [(0, i) for i, _ in full]
    assert found.tally.total_bytes == Texts(texts).num_bytes


def test_blank_texts_can_be_kept(read):
    texts = ["one", " ", "\n\t", "two"]

    assert read(Texts(texts, keep_blank=True)).texts == [text.encode() for text in texts]
    assert read(Texts(texts)).texts == [b"one", b"two"]


def test_what_is_not_a_string_is_refused_by_its_number():
    with pytest.raises(SourceError, match=r"Text 1 is of type bytes, not a string: b'x'"):
        Texts(["a", b"x"])


@given(one=st.lists(st.text(max_size=3)), two=st.lists(st.text(max_size=3)))
def test_the_digest_tells_lists_apart(one, two):
    assert (Texts(one).digest == Texts(two).digest) == (one == two)


def test_a_single_string_is_refused_because_each_character_would_be_a_document():
    with pytest.raises(SourceError, match=r"got a single str: 'one string'.*Texts\(\[text\]\)"):
        Texts("one string")


def test_texts_of_a_generator_are_built_like_those_of_a_list(read):
    assert read(Texts(str(number) for number in range(3))).texts == [b"0", b"1", b"2"]
    assert Texts(iter(["a", "b"])).digest == Texts(["a", "b"]).digest


@pytest.mark.parametrize(
    "text",
    [
        "a text",
        "one\ntwo",
        "What? [sic] **bold**",
        "see http://example.org for more",
        "long " * 999,
    ],
)
def test_a_text_in_place_of_a_file_name_is_refused_with_the_name_of_texts(text, tmp_path):
    with pytest.raises(SourceError, match=r"There is no file .*penstock\.Texts\(\[text\]\)"):
        penstock.build([text], tmp_path / "store")


def test_a_missing_file_with_a_space_in_its_name_is_not_taken_for_a_text(tmp_path):
    with pytest.raises(SourceError, match=r"my notes\.txt matches no file"):
        penstock.build(tmp_path / "my notes.txt", tmp_path / "store")
