from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.order.epochs import EpochOrder
from penstock.order.shuffle import Block, Domain, Sources

SIZES = [7, 4, 1, 12]
DOMAINS = [Domain(7, [3, 4]), Domain(4, [4]), Domain(1, [0, 1]), Domain(12, [5, 5, 2])]
MODES = st.sampled_from(["full", "none", "part", Block(rows=2, group=2)])
NUM_ROWS = 150


def order(shuffle="full", seed=0):
    return EpochOrder(Sources("abcd", DOMAINS, shuffle, seed))


def rows_of(layout, num_rows=NUM_ROWS):
    located = layout.locate(np.arange(num_rows))
    return list(zip(*(numbers.tolist() for numbers in located), strict=True))


@given(MODES, st.integers(0, 2**64))
@settings(max_examples=40)
def test_each_epoch_of_a_source_holds_each_sample_once(shuffle, seed):
    seen = defaultdict(list)
    for position, (source, epoch, sample) in enumerate(rows_of(order(shuffle, seed))):
        assert epoch == position // sum(SIZES)
        seen[source, epoch].append(sample)

    for (source, epoch), samples in seen.items():
        assert len(set(samples)) == len(samples)
        if epoch < NUM_ROWS // sum(SIZES):
            assert sorted(samples) == list(range(SIZES[source]))


@given(MODES, st.integers(0, 3), st.data())
def test_positions_equal_a_search_through_all_rows(shuffle, source, data):
    layout = order(shuffle)
    sample = data.draw(st.integers(0, SIZES[source] - 1))
    found = [
        (epoch, position)
        for position, (s, epoch, row) in enumerate(rows_of(layout))
        if (s, row) == (source, sample)
    ]

    epochs = np.arange(layout.num_epochs(source, NUM_ROWS))
    positions = layout.positions_of(source, sample, epochs)

    assert positions[positions < NUM_ROWS].tolist() == [position for _, position in found]
    for epoch, position in found:
        assert layout.positions_of(source, sample, np.array([epoch])).tolist() == [position]


@given(MODES, st.integers(0, NUM_ROWS))
def test_counts_equal_the_rows_counted(shuffle, num_rows):
    layout = order(shuffle)
    sources = [source for source, _, _ in rows_of(layout, num_rows)]

    assert layout.counts(num_rows) == [sources.count(source) for source in range(4)]


@pytest.mark.parametrize("position", [10**9, 10**15, 2**62 - 1])
def test_positions_far_out_cost_no_more(position):
    layout = order()
    (source,), (epoch,), (sample,) = layout.locate(np.array([position]))

    assert position in layout.positions_of(int(source), int(sample), np.array([epoch]))


def test_an_epoch_that_no_position_reaches_has_no_position():
    assert order().positions_of(0, 3, np.array([2**62 - 1])).tolist() == []
