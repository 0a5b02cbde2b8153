"""What a page says about a corpus, compared with simple counts."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock.report import corpus
from penstock.report.corpus import count_tokens, find_duplicates, measure_lengths, piece_texts


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """A store of many parts with documents that occur up to nine times."""
    random = np.random.default_rng(17)
    texts = ["word " * (n % 40 + 1) + str(n % 60) for n in random.integers(0, 300, 400).tolist()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ps.sources.slices.cut.__kwdefaults__, "slice_bytes", 4_000)
        made = ps.build(ps.Texts(texts), tmp_path_factory.mktemp("corpus") / "s", tokenizer="bytes")
    assert len(made.manifest.parts) > 3
    return made


@pytest.fixture(scope="module")
def files(store, tmp_path_factory):
    """The ids of the store as an array of NumPy, which does not record documents."""
    path = tmp_path_factory.mktemp("files") / "ids.npy"
    np.save(path, np.concatenate(list(store)).astype(np.uint16))
    return ps.open_tokens(path)


def test_all_tokens_of_a_small_store_are_counted(store, files):
    expected = Counter(np.concatenate(list(store)).tolist())
    for member in (store, files):
        found = count_tokens(member)
        assert found.num_counted == expected.total()
        assert found.num_distinct == len(expected)
        assert [count for _, count in found.most_frequent] == [
            count for _, count in expected.most_common(20)
        ]
        assert all(expected[token] == count for token, count in found.most_frequent)
        assert found.scope == f"all {expected.total():,} tokens"


def test_a_large_store_is_sampled_in_blocks_and_the_page_says_so(store, monkeypatch):
    monkeypatch.setattr(corpus, "_BLOCK", 100)
    found = count_tokens(store, most=store.num_tokens // 4)

    assert store.num_tokens / 6 < found.num_counted < store.num_tokens / 3
    assert found.scope.startswith(f"a sample of {found.num_counted:,} of {store.num_tokens:,}")


def test_duplicates_are_those_of_a_comparison_of_all_documents(store):
    seen = Counter(document.tobytes() for document in store)
    found = find_duplicates(store)

    assert found.num_compared == len(store)
    assert found.num_repeats == sum(count - 1 for count in seen.values())
    assert found.num_repeated_tokens == sum(
        (count - 1) * len(data) // 2 for data, count in seen.items()
    )
    assert [count for _, count in found.most_frequent] == sorted(seen.values())[::-1][:5]
    for number, count in found.most_frequent:
        assert seen[store[number].tobytes()] == count
        assert all(not np.array_equal(store[each], store[number]) for each in range(number))


def test_a_sample_of_documents_has_all_copies_of_each(store, monkeypatch):
    monkeypatch.setattr(corpus, "_MOST_DOCUMENTS", len(store) // 3)
    found = find_duplicates(store)
    lengths = np.array([len(document) for document in store])
    chosen = corpus._is_chosen(lengths, 4)  # a third, rounded up to a whole share
    seen = Counter(store[number].tobytes() for number in np.flatnonzero(chosen).tolist())

    assert 0 < found.num_compared == chosen.sum() < len(store)
    assert found.num_repeats == sum(count - 1 for count in seen.values())
    assert "about one length in 4" in found.scope


def test_documents_of_one_length_are_compared_up_to_the_limit(tmp_path):
    length = next(n for n in range(2, 99) if corpus._is_chosen(np.array([n]), 2).all())
    texts = ps.Texts(["x" * (length - 1)] * 90)  # each ends with an end token
    store = ps.build(texts, tmp_path / "s", tokenizer="bytes")
    found = find_duplicates(store, most=45 * length)

    assert (found.num_compared, found.num_repeats) == (45, 44)
    assert found.scope.endswith("one length in 2 that come first")


def test_files_without_documents_have_neither_lengths_nor_duplicates(files):
    assert measure_lengths(files) is None
    assert find_duplicates(files) is None


def test_the_lengths_of_token_files_are_those_of_a_store(store, tmp_path):
    ids = np.concatenate(list(store)).astype(np.uint16)
    ends = np.cumsum([len(document) for document in store])
    (tmp_path / "a.ds").write_bytes(ids.tobytes())
    (tmp_path / "a.ds.index").write_bytes(ends.astype("<u8").tobytes())
    files = ps.open_tokens(tmp_path / "a.ds", format="datatrove")

    assert measure_lengths(files) == measure_lengths(store)
    assert find_duplicates(files) == find_duplicates(store)


@given(text=st.text(max_size=60))
def test_pieces_of_text_join_to_the_text_and_count_all_tokens(gpt2, text):
    ids = gpt2.encode(text)
    pieces = piece_texts(ids, gpt2)

    assert "".join(piece for _, piece in pieces) == text
    assert sum(count for count, _ in pieces) == len(ids)


def test_a_character_of_several_tokens_is_one_piece(gpt2):
    ids = gpt2.encode("a 𝄞 b")

    assert [text for _, text in piece_texts(ids, gpt2)] == ["a", " ", "𝄞", " b"]
    assert max(count for count, _ in piece_texts(ids, gpt2)) > 1


def test_bytes_that_are_no_character_are_escaped():
    tokenizer = ps.load_tokenizer("bytes")

    assert piece_texts(np.array([0xFF, 0x61, 0xE2, 0x82]), tokenizer) == [
        (1, "\\xff"),
        (1, "a"),
        (2, "\\xe2\\x82"),
    ]
