"""Where the pieces of a row lie in the stream."""

import numpy as np
import pytest

from penstock.rows.documents import Documents
from penstock.rows.packs import Packs


@pytest.mark.parametrize("length", [5, 16, 64])
def test_the_spans_of_a_row_hold_its_tokens(parted, length):
    rows = Packs(parted, length)
    for sample in range(len(rows)):
        read = rows.read(np.array([sample]))
        spans = rows.spans(sample)
        pieces = [rows.stream.tokens(offset, offset + size) for offset, size in spans]
        placed = int(read["num_targets"][0]) + 1

        assert np.concatenate(pieces).tolist() == read["tokens"][0, :placed].tolist()
        ids = read["document_ids"][0, :placed]
        assert [size for _, size in spans] == np.bincount(ids).tolist()


def test_a_row_that_is_not_there_has_no_spans(parted):
    with pytest.raises(IndexError, match="were requested, but there are"):
        Packs(parted, 16).spans(10_000)


def test_a_document_is_one_span(parted):
    rows = Documents(parted, max_length=1_000)
    for sample in range(len(rows)):
        (span,) = rows.spans(sample)
        read = rows.read(np.array([sample]))

        assert span[1] == int(read["num_targets"][0]) + 1
        assert (
            rows.stream.tokens(span[0], sum(span)).tolist() == read["tokens"][0, : span[1]].tolist()
        )
