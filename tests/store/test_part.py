"""Documents end to end, against a list comprehension."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.store.part import join_documents


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
    tokens, ends = join_documents(ids, offsets, np.dtype(dtype), eos_id=eos, bos_id=bos)
    expected = list(naive(documents, bos, eos))

    assert tokens.tolist() == [token for document in expected for token in document]
    assert ends.tolist() == np.cumsum(list(map(len, expected))).tolist()
    assert tokens.dtype == np.dtype(dtype)
