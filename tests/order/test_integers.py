import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.order.integers import label_pairs

NEAR = st.tuples(st.integers(0, 5), st.integers(0, 3))
FAR = st.tuples(st.integers(0, 1000), st.integers(0, 2**62 - 1))


@given(st.one_of(st.lists(NEAR), st.lists(FAR)))
def test_labels_lead_back_to_the_pairs(pairs):
    firsts = np.array([first for first, _ in pairs], dtype=np.int64)
    seconds = np.array([second for _, second in pairs], dtype=np.int64)

    which, first_of, second_of = label_pairs(firsts, seconds)

    found = list(zip(first_of[which].tolist(), second_of[which].tolist(), strict=True))
    assert found == pairs
    assert len(first_of) == len(set(pairs))


def test_small_sources_in_late_epochs_are_labelled_without_sorting():
    firsts = np.arange(10_000) % 64
    seconds = firsts * 10**12 + np.arange(10_000) // 5000

    which, first_of, second_of = label_pairs(firsts, seconds)

    assert len(first_of) == 128
    assert np.array_equal(second_of[which], seconds)
