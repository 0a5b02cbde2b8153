"""Rows as sequences: indices, slices, negative numbers, iteration."""

import numpy as np
import pytest
import torch

import penstock as ps
from penstock.transforms import TokenDropout, Transformed

TEXTS = ["word " * (number * 7 % 23 + 1) for number in range(60)]
KINDS = {
    "windows": lambda store: ps.Windows(store, 16),
    "padded windows": lambda store: ps.Windows(store, 16, stride=5, tail="pad", borders=True),
    "packs": lambda store: ps.Packs(store, 32),
    "documents": lambda store: ps.Documents(store, 64),
    "documents, left": lambda store: ps.Documents(store, 64, side="left"),
    "transformed": lambda store: Transformed(ps.Packs(store, 32), TokenDropout(0.5)),
}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return ps.build(ps.Texts(TEXTS), tmp_path_factory.mktemp("s") / "store", tokenizer="bytes")


@pytest.fixture(params=KINDS)
def rows(request, store):
    return KINDS[request.param](store)


def test_rows_and_stores_can_be_indexed_and_iterated(rows, store):
    assert len(list(rows)) == len(rows)
    for number, row in enumerate(rows):
        read = rows.read(np.array([number]))
        assert row.keys() == read.keys()
        if rows.side is None:
            assert all(np.array_equal(row[name], read[name][0]) for name in row)
        assert np.array_equal(rows[number - len(rows)]["tokens"], row["tokens"])

    assert len(list(store)) == len(store) == 60
    assert [store.decode(number) for number in range(60)] == TEXTS
    for number, tokens in enumerate(store):
        assert np.array_equal(store[number], tokens)
        assert np.array_equal(store[number - 60], tokens)


def test_a_row_is_a_row_of_read_without_padding_to_other_rows(store):
    windows, documents = ps.Windows(store, 16), ps.Documents(store, 64)

    assert windows[3]["tokens"].tolist() == store.tokens(48, 65).tolist()
    assert documents[0]["tokens"].tolist() == [*TEXTS[0].encode(), 256, 256]
    assert documents[0]["attention_mask"].tolist() == [1] * 6
    left = ps.Documents(store, 64, side="left")[0]
    assert left["tokens"].tolist()[:-1] == [*TEXTS[0].encode(), 256]


def test_a_slice_of_rows_has_them_all_and_a_slice_of_a_store_is_a_list(rows, store):
    some = rows[-3:]
    assert len(some["tokens"]) == 3
    assert np.array_equal(some["tokens"], rows[len(rows) - 3 : len(rows)]["tokens"])
    assert len(rows[::10]["tokens"]) == len(range(0, len(rows), 10))
    assert len(rows[5:5]["tokens"]) == 0

    assert [tokens.tolist() for tokens in store[-2:]] == [store[58].tolist(), store[59].tolist()]
    assert store[60:] == []


def test_an_index_past_the_end_is_an_index_error(rows, store):
    for number in (len(rows), -len(rows) - 1, 10**12):
        with pytest.raises(IndexError, match=f"row {number:,} is not among {len(rows):,} rows"):
            rows[number]
    with pytest.raises(TypeError):
        rows["0"]
    with pytest.raises(IndexError, match="document 60 is not in a store of 60 documents"):
        store[60]


def test_a_torch_dataloader_reads_rows(store):
    windows = ps.Windows(store, 16)
    loader = torch.utils.data.DataLoader(windows, batch_size=4, shuffle=False)

    batch = next(iter(loader))["tokens"]

    assert batch.tolist() == windows[:4]["tokens"].tolist()
