"""Documents end to end, against a list comprehension."""

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.store.part import PartBuilder


def naive(documents, bos, eos):
    for document in documents:
        begin = [bos] if bos is not None and document[0] != bos else []
        end = [eos] if eos is not None and document[-1] != eos else []
        yield [*begin, *document, *end]


ids = st.integers(0, 9)
edge = st.none() | ids


@pytest.mark.parametrize("dtype", ["<u2", "<u4"])
@given(
    documents=st.lists(st.lists(ids, min_size=1, max_size=6)), bos=edge, eos=edge, data=st.data()
)
def test_documents_are_joined_as_a_list_would_be(dtype, documents, bos, eos, data):
    if data.draw(st.booleans()):  # long ones too
        documents = [document * 300 for document in documents]
    ids = np.array([each for document in documents for each in document], np.uint32)
    offsets = np.cumsum([0, *map(len, documents)])
    builder = PartBuilder(SimpleNamespace(dtype=np.dtype(dtype)), eos, bos)
    expected = list(naive(documents, bos, eos))

    tokens, ends, loss = builder.join(ids, offsets)

    assert tokens.tolist() == [token for document in expected for token in document]
    assert ends.tolist() == np.cumsum(list(map(len, expected))).tolist()
    assert tokens.dtype == np.dtype(dtype)
    assert loss is None


@given(documents=st.lists(st.lists(ids, min_size=1, max_size=6), min_size=1), data=st.data())
def test_an_end_token_is_trained_on_after_a_trained_token(documents, data):
    ids = np.array([each for document in documents for each in document], np.uint32)
    offsets = np.cumsum([0, *map(len, documents)])
    loss = np.array(data.draw(st.lists(st.integers(0, 1), min_size=len(ids), max_size=len(ids))))
    builder = PartBuilder(SimpleNamespace(dtype=np.dtype("<u2")), 10, 11)

    tokens, ends, joined = builder.join(ids, offsets, loss=loss.astype(np.uint8))

    for (start, stop), bounds in zip(pairwise([0, *ends]), pairwise(offsets), strict=True):
        own = loss[slice(*bounds)].tolist()
        assert joined[start:stop].tolist() == [0, *own, own[-1]]
        assert (tokens[start], tokens[stop - 1]) == (11, 10)
