"""Splitters against references of a line or two, whatever the size of blocks and slices."""

from itertools import groupby

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.sources.text import find_all, splitter_for

WHITE = b" \t\r"
HOW = [
    "lines",
    "paragraphs",
    "file",
    "<|endoftext|>",
    "\n\n",
    "sep:aa",
    "sep:aba",
    "\n",
    "sep:a",
    "\r\n",
    "sep:é",
]

# Few letters, so that separators, blank lines and their halves are everywhere.
scraps = st.lists(
    st.sampled_from(["a", "b", "\n", "\n\n", "\r\n", "\r", " ", "\t", "é", "\u2028", "\x00"])
    | st.sampled_from(["<|endoftext|>", "<|endof", "text|>", "\n \t\n", "aba", " " * 40, "x" * 40]),
    max_size=60,
).map("".join)


def naive(data, how):
    if how == "lines":
        return [line for line in data.split(b"\n") if line.strip(WHITE)]
    if how == "paragraphs":
        runs = groupby(data.split(b"\n"), key=lambda line: bool(line.strip(WHITE)))
        return [b"\n".join(lines) for full, lines in runs if full]
    pieces = [data] if how == "file" else data.split(how.removeprefix("sep:").encode())
    return [piece for piece in pieces if piece.strip(WHITE + b"\n")]


@pytest.mark.parametrize("how", HOW)
@given(text=scraps)
def test_a_splitter_finds_what_the_naive_one_finds(how, text):
    data = text.encode()
    spans = splitter_for(how).spans(data)

    found = [data[a:b] for a, b in zip(spans.starts, spans.stops, strict=True)]

    assert found == naive(data, how)


@pytest.mark.parametrize("how", HOW)
@given(text=scraps)
def test_cutting_at_the_last_border_changes_nothing(how, text):
    data = text.encode()
    border = splitter_for(how).last_border(data)

    assert naive(data[:border], how) + naive(data[border:], how) == naive(data, how)


@pytest.mark.parametrize("how", [how for how in HOW if splitter_for(how).cuts_anywhere])
@given(text=scraps, place=st.integers(0, 200))
def test_a_border_found_without_what_came_before_is_one(how, text, place):
    data = text.encode()
    splitter = splitter_for(how)
    begin = max(0, place - splitter.lead)
    found = splitter.first_border(data[begin:])

    if found >= 0:
        border = begin + found
        assert naive(data[:border], how) + naive(data[border:], how) == naive(data, how)


def test_separators_that_overlap_themselves_are_never_looked_for_blindly():
    assert not splitter_for("\n\n").cuts_anywhere
    assert not splitter_for("aba").cuts_anywhere
    assert splitter_for("<|endoftext|>").cuts_anywhere


@pytest.mark.parametrize("how", HOW)
@given(text=scraps, block=st.integers(1, 64))
@example(text="x" * 40 + "\n" + " " * 40 + "\na", block=1)
def test_documents_do_not_depend_on_the_size_of_blocks(how, text, block, read, scratch):
    path = scratch / "blocks.txt"
    path.write_bytes(text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.sources.read.BLOCK_BYTES", block)
        found = read(path, documents=how)

    assert found.texts == naive(text.encode(), how)
    assert found.tally == read(path, documents=how).tally


@pytest.mark.parametrize("how", HOW)
@given(text=scraps, slice_bytes=st.integers(1, 80), look=st.sampled_from([16, 1 << 16]))
def test_documents_do_not_depend_on_the_size_of_slices(how, text, slice_bytes, look, read, scratch):
    path = scratch / "slices.txt"
    path.write_bytes(text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.sources.slices._LOOK_BYTES", look)
        found = read(path, documents=how, slice_bytes=slice_bytes)

    assert found.texts == naive(text.encode(), how)
    assert found.tally.total_bytes == len(text.encode())


@pytest.mark.parametrize("how", HOW)
@given(text=scraps)
def test_a_document_lies_where_its_origin_says(how, text, read, scratch):
    path = scratch / "origins.txt"
    path.write_bytes(text.encode())
    found = read(path, documents=how, slice_bytes=16)

    for document, (file, offset) in zip(found.texts, found.places, strict=True):
        assert file == 0
        assert text.encode()[offset : offset + len(document)] == document


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"no line end",
        b"\n",
        (b"x" * 9_000 + b"\n") * 100,
        b"\n" * 3_000,
        b"x" * 300_000 + b"\n" * 3_000,  # rare at the beginning only
        b"\n" * 3_000 + b"x" * 300_000,
    ],
    ids=["empty", "none", "one", "rare", "dense", "dense at the end", "dense at the beginning"],
)
def test_all_places_of_a_byte_are_found_however_rare_it_is(data):
    expected = [place for place, byte in enumerate(data) if byte == ord("\n")]

    found = find_all(data, b"\n")

    assert found.tolist() == expected
    assert found.dtype == np.int64
