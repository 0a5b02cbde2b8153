"""Numbers of a store against the same numbers computed the plain way."""

import json
from itertools import pairwise

import made_store
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock.store import summary as module
from penstock.store.summary import bytes_per_token, count_lengths, summarize


@pytest.fixture
def build(tmp_path):
    """Build a store of texts of the given lengths, an end token included; a byte is a token."""

    def build(lengths, name="store", **options):
        texts = ps.Texts(["x" * (length - 1) for length in lengths])
        return ps.build(texts, tmp_path / name, tokenizer="bytes", **options, documents="lines")

    return build


def plain(lengths):
    """Every number of `Lengths` with NumPy and all lengths in memory."""
    quantiles = {
        name: int(np.quantile(lengths, share, method="inverted_cdf"))
        for name, share in (
            ("p1", 0.01),
            ("p10", 0.1),
            ("median", 0.5),
            ("p90", 0.9),
            ("p99", 0.99),
        )
    }
    return {"min": min(lengths), "max": max(lengths), "mean": np.mean(lengths), **quantiles}


class Fake:
    """As much of a store as `count_lengths` touches, with bounds and no tokens."""

    def __init__(self, *parts):
        self.manifest = self
        self.parts = parts

    def part_array(self, number, kind):
        assert kind == "bounds"
        return np.cumsum(self.parts[number], dtype=np.uint64)


PARTS = st.lists(st.lists(st.integers(1, 200_000), max_size=30), min_size=1, max_size=4).filter(any)


@given(parts=PARTS, at_once=st.integers(1, 8))
def test_lengths_equal_those_of_numpy_however_they_are_read(parts, at_once):
    lengths = [length for part in parts for length in part]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_AT_ONCE", at_once)
        values, counts = count_lengths(Fake(*parts))
    found = module._lengths(values, counts)

    expected = np.unique(lengths, return_counts=True)
    assert (values.tolist(), counts.tolist()) == (expected[0].tolist(), expected[1].tolist())
    for name, value in plain(lengths).items():
        assert getattr(found, name) == pytest.approx(value), name


@given(parts=PARTS)
def test_the_histogram_counts_every_document_once(parts):
    lengths = np.array([length for part in parts for length in part])
    bins = module._lengths(*count_lengths(Fake(*parts))).histogram

    assert sum(each.num_documents for each in bins) == len(lengths)
    for each in bins:
        inside = (lengths >= each.first) & (lengths <= each.last)
        assert each.num_documents == inside.sum()
    assert bins[0].num_documents
    assert bins[-1].num_documents
    assert all(a.last + 1 == b.first for a, b in pairwise(bins))


def test_bins_are_two_an_octave(build):
    bins = summarize(build(range(2, 40))).lengths.histogram

    assert [(each.first, each.last) for each in bins] == [
        (2, 2), (3, 3), (4, 5), (6, 7), (8, 11), (12, 15), (16, 23), (24, 31), (32, 47),
    ]  # fmt: skip


def test_lengths_are_counted_across_parts(tmp_path, small_slices):
    path = tmp_path / "a.txt"
    lengths = [3 + number % 40 for number in range(1_000)]
    path.write_text("".join("x" * (length - 1) + "\n" for length in lengths))
    store = ps.build(str(path), tmp_path / "store", tokenizer="bytes", documents="lines")

    summary = summarize(store)

    assert summary.num_parts > 3
    assert summary.lengths.mean == pytest.approx(np.mean(lengths))
    assert summary.lengths.p90 == plain(lengths)["p90"]


def test_counts_are_those_of_the_store(build, tmp_path):
    store = build([5, 6, 7])
    summary = summarize(store)

    assert (summary.num_documents, summary.num_tokens) == (3, 18)
    assert summary.bytes_per_token == 15 / 18
    assert summary.disk_bytes == sum(path.stat().st_size for path in store.path.iterdir())
    assert summary.eos_id == 256
    assert summary.bos_id is None
    assert summary.tokenizer["name"] == "bytes"
    assert (summary.split, summary.side) == (None, None)
    assert json.loads(json.dumps(summary.inputs))[0]["bytes"] == 15


def test_an_empty_store_has_no_lengths(build):
    """Earlier versions built such stores."""
    store = build([7])
    contents = {**store.manifest.contents, "counts": {"documents": 0, "tokens": 0}}
    del contents["digest"]
    made_store.write(store.path, contents, [])
    summary = summarize(ps.TokenStore(store.path))

    assert summary.num_documents == 0
    assert summary.lengths is None


def test_appends_add_up(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text('{"text": "good"}\nbad\n')
        ps.build(
            str(tmp_path / f"{name}.jsonl"),
            tmp_path / "store",
            tokenizer="bytes",
            append=name == "b",
            documents="lines",
            max_bad=1,
        )

    summary = summarize(ps.TokenStore(tmp_path / "store"))

    assert summary.num_builds == 2
    assert summary.rejects == {"bad_json": 2}
    assert len(summary.inputs) == 2


def test_both_sides_of_a_split_have_the_bytes_a_token_of_the_whole(build):
    whole = bytes_per_token(build(range(2, 300)))
    train = build(range(2, 300), "both", split="hash:0.3")
    val = ps.TokenStore(train.path.parent / "val")

    assert bytes_per_token(train) == bytes_per_token(val) == whole
    assert (summarize(train).side, summarize(val).side) == ("train", "val")


def test_a_side_that_lost_the_other_does_not_guess(build, tmp_path):
    train = build(range(2, 300), split="hash:0.3")
    (tmp_path / "store" / "val").rename(tmp_path / "elsewhere")

    assert bytes_per_token(train) is None
    assert bytes_per_token(ps.TokenStore(tmp_path / "elsewhere")) is None
    assert bytes_per_token(build(range(2, 9), "elsewhere2")) is not None


def test_json_lines_are_never_taken_for_text(tmp_path):
    """The line is longer than the text in it, and the quotient would be too large."""
    (tmp_path / "a.jsonl").write_text('{"id": "0123456789", "text": "four"}\n')
    store = ps.build(
        str(tmp_path / "a.jsonl"), tmp_path / "store", tokenizer="bytes", documents="lines"
    )

    assert bytes_per_token(store) in (None, 4 / 5)
