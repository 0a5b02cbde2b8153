"""Rows of whole documents: every token a target once, and none across a border."""

import itertools
import pickle
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import penstock
from penstock.errors import PlanError
from penstock.rows.packs import Packs
from penstock.rows.tokens import Stream
from penstock.rows.windows import cu_seqlens

part_lengths = st.lists(
    st.lists(st.integers(0, 12) | st.integers(0, 90), max_size=20), min_size=1, max_size=4
).filter(lambda parts: any(map(sum, parts)))


def numbered(parts, first=1):
    """Documents of those lengths, whose tokens are numbers that never come again."""
    made = []
    for lengths in parts:
        documents = []
        for length in lengths:
            documents.append(list(range(first, first + length)))
            first += length
        made.append(documents)
    return made


def targets_of(fields):
    """The pairs (input, target) that count, row by row."""
    counted = fields["same_document"].copy()
    if "target_mask" in fields:
        counted &= fields["target_mask"]
    return list(
        zip(
            fields["tokens"][:, :-1][counted].tolist(),
            fields["tokens"][:, 1:][counted].tolist(),
            strict=True,
        )
    )


@given(parts=part_lengths, length=st.integers(2, 40))
@example(parts=[[1]], length=2)
@example(parts=[[2, 1, 0, 2]], length=2)
@example(parts=[[16, 15, 17, 31, 32, 1]], length=16)
@example(parts=[[], [400], [0], [1, 1]], length=7)
def test_every_token_but_the_first_of_a_document_is_a_target_exactly_once(
    write_store, scratch, parts, length
):
    documents = numbered(parts)
    store = write_store(scratch / "packs", documents, dtype="uint32")
    packs = Packs(store, length)
    fields = packs.read(np.arange(len(packs)))
    expected = [
        pair for part in documents for document in part for pair in itertools.pairwise(document)
    ]

    assert sorted(targets_of(fields)) == sorted(expected)
    assert packs.num_tokens == len(expected)
    assert packs.num_empty == sum(lengths.count(0) for lengths in parts)
    assert packs.num_split == sum(size > length for lengths in parts for size in lengths)
    real = np.arange(length) <= fields["num_targets"][:, None]
    assert set(fields["tokens"][:, :-1][real].tolist()) == {
        t for p in documents for d in p for t in d
    }
    assert not fields["tokens"][:, :-1][~real].any()
    assert not fields["tokens"][:, -1].any()
    assert packs.num_padding == (~real).sum()


@given(parts=part_lengths, length=st.integers(2, 40))
def test_positions_and_documents_equal_a_walk_over_the_tokens(write_store, scratch, parts, length):
    documents = numbered(parts)
    owner = {t: (n, k) for n, part in enumerate(documents) for k, d in enumerate(part) for t in d}
    store = write_store(scratch / "walk", documents, dtype="uint32")
    packs = Packs(store, length)
    fields = packs.read(np.arange(len(packs)))
    ends = np.cumsum(packs.part_rows)

    for sample in range(len(packs)):
        row = [int(token) for token in fields["tokens"][sample, :-1]]
        position, document = -1, -1
        for place, token in enumerate(row):
            goes_on = place and (token == row[place - 1] + 1 or token == row[place - 1] == 0)
            same = goes_on and owner.get(token) == owner.get(row[place - 1])
            position, document = (position + 1, document) if same else (0, document + 1)
            assert fields["position_ids"][sample, place] == position
            assert fields["document_ids"][sample, place] == document
            # A row belongs to one part.
            assert not token or owner[token][0] == np.searchsorted(ends, sample, side="right")
    for name in ("position_ids", "document_ids"):
        assert fields[name].dtype == np.int32
    pieces = cu_seqlens(fields["position_ids"])
    assert pieces.dtype == np.int32
    assert len(pieces) - 1 == (fields["document_ids"].max(axis=1) + 1).sum()


@given(parts=part_lengths, length=st.integers(2, 40))
def test_documents_that_fit_a_row_stay_whole(write_store, scratch, parts, length):
    documents = numbered(parts)
    store = write_store(scratch / "whole", documents, dtype="uint32")
    packs = Packs(store, length, borders=False)
    flat = packs.read(np.arange(len(packs)))["tokens"].ravel().tolist()

    for document in (document for part in documents for document in part):
        if 0 < len(document) <= length:
            place = flat.index(document[0])
            assert flat[place : place + len(document)] == document
            assert flat.count(document[0]) == 1


@pytest.fixture(scope="module")
def packs(write_store, tmp_path_factory):
    lengths = [[number * 37 % 61 for number in range(80)], [500], [3, 4], list(range(1, 30))]
    store = write_store(tmp_path_factory.mktemp("packs") / "store", numbered(lengths))
    return Packs(store, 32)


def test_rows_read_alone_equal_rows_read_together(packs):
    samples = np.random.default_rng(1).permutation(np.repeat(np.arange(len(packs)), 2))
    together = packs.read(samples)
    for place, sample in enumerate(samples):
        for name, values in packs.read(np.array([sample])).items():
            assert values[0].tolist() == together[name][place].tolist()


def test_no_rows_can_be_read(packs):
    fields = packs.read(np.zeros(0, np.int64))

    assert fields["tokens"].shape == (0, 33)
    assert fields["position_ids"].shape == (0, 32)


def test_rows_that_are_not_there_are_refused(packs):
    for wrong in (-1, len(packs)):
        with pytest.raises(IndexError, match="were requested, but there are"):
            packs.read(np.array([0, wrong]))


def test_several_stores_are_packed_each_for_itself(packs, write_store, tmp_path):
    other = write_store(tmp_path / "other", numbered([[5, 40, 7]], first=9_000))
    joined = Packs([packs.stream.members[0], other.path], 32)
    alone = Packs(other, 32)

    assert len(joined) == len(packs) + len(alone)
    assert joined.part_rows.tolist() == [*packs.part_rows, *alone.part_rows]
    for name, values in alone.read(np.arange(len(alone))).items():
        assert joined.read(np.arange(len(packs), len(joined)))[name].tolist() == values.tolist()


def test_threads_and_copies_read_the_same(packs):
    samples = np.arange(len(packs))
    right = {name: values.tolist() for name, values in packs.read(samples).items()}
    restored = pickle.loads(pickle.dumps(packs))

    def read(number):
        fields = (restored if number % 2 else packs).read(samples)
        return {name: values.tolist() for name, values in fields.items()} == right

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(read, range(32)))
    assert len(pickle.dumps(packs)) < 10_000
    assert restored.digest == packs.digest


def test_the_digest_tells_apart_what_differs_in_its_rows(packs, write_store, tmp_path):
    store = packs.stream.members[0]
    other = write_store(tmp_path / "other", numbered([[5, 40, 7]]))
    made = [packs, Packs(store, 31), Packs(other, 32), penstock.Windows(store, 32)]

    assert len({each.digest for each in made}) == len(made)
    assert Packs(store, 32, borders=False).digest == packs.digest
    assert packs.describe()["kind"] == "packs"


def test_says_what_it_is(packs):
    share = packs.num_padding / (32 * len(packs))
    assert repr(packs) == (
        f"Packs({packs.stream}: {len(packs)} rows of 32 tokens, {share:.3%} padding; "
        f"{packs.num_split} documents split)"
    )
    assert packs.tokenizer_digest == packs.stream.tokenizer_digest
    assert packs.num_split == sum(n * 37 % 61 > 32 for n in range(80)) + 1


class Told(Stream):
    """A stream that notes what is asked for ahead."""

    def read_ahead(self, starts, sizes):
        self.named = list(zip(starts.tolist(), (starts + sizes).tolist(), strict=True))
        return super().read_ahead(starts, sizes)


def test_rows_are_asked_for_ahead_where_their_tokens_lie(packs):
    """Tokens are numbered from 1 on, so each says where in the stream it stands."""
    stream = Told(packs.stream.members)
    packs = Packs(stream, 32)
    for sample in range(len(packs)):
        tokens = packs.read(np.array([sample]))["tokens"][0].astype(int)
        packs.read_ahead(np.array([sample]))
        for token in tokens[tokens > 0].tolist():
            assert any(start < token <= stop for start, stop in stream.named)
        assert all(stop - start <= 32 for start, stop in stream.named)
    with pytest.raises(IndexError, match="were requested, but there are"):
        packs.read_ahead(np.array([len(packs)]))
    stream.named = None
    packs.read_ahead(np.zeros(0, np.int64))
    assert not stream.named


@pytest.mark.parametrize("length", [1, 0, -3, 1 << 24])
def test_lengths_that_make_no_row_are_refused(packs, length):
    with pytest.raises(PlanError, match=r"must be from 2 tokens \(an input and"):
        Packs(packs.stream.members[0], length)


def test_bare_token_files_are_refused(tmp_path):
    np.save(tmp_path / "bare.npy", np.arange(100, dtype=np.uint16))

    with pytest.raises(PlanError, match=r"bare\.npy does not record where documents end"):
        Packs(tmp_path / "bare.npy", 8)


def test_a_store_of_one_document_warns_that_nothing_is_kept_apart(tmp_path):
    def built(name, *texts):
        return penstock.build(penstock.Texts(texts), tmp_path / name, tokenizer="bytes")

    with pytest.warns(UserWarning, match=r"one' is one document, .*documents=\"paragraphs\""):
        Packs(built("one", "a" * 100), 16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Packs(built("two", "a" * 100, "b"), 16)
        Packs(built("short", "a"), 16)


def test_an_imported_store_of_one_document_is_not_told_to_split_its_text(tmp_path):
    np.arange(100, dtype="<u2").tofile(tmp_path / "x.bin")
    named = {"format": "nanogpt", "vocab_size": 100}
    store = penstock.import_tokens(tmp_path / "x.bin", tmp_path / "store", **named)

    with pytest.warns(UserWarning, match=r"import token files of a format .* records") as found:
        Packs(store, 16)
    assert "paragraphs" not in str(found[0].message)
