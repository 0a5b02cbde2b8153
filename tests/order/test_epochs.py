from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.order.epochs import EpochOrder, Members
from penstock.order.shuffle import Block, Domain, Sources

SIZES = [7, 4, 1, 12]
DOMAINS = [Domain(7, [3, 4]), Domain(4, [4]), Domain(1, [0, 1]), Domain(12, [5, 5, 2])]
MODES = st.sampled_from(["full", "none", "part", Block(rows=2, group=2)])
NUM_ROWS = 150


@st.composite
def members(draw):
    starts = [0, *sorted(draw(st.sets(st.integers(1, 70), max_size=4)))]
    some = st.sets(st.integers(0, 3), min_size=1).map(sorted)
    return [Members(start, draw(some)) for start in starts]


def passes(stages, shuffle="full", seed=0):
    return EpochOrder(stages, Sources("abcd", DOMAINS, shuffle, seed))


def rows_of(layout, num_rows=NUM_ROWS):
    located = layout.locate(np.arange(num_rows))
    return list(zip(*(numbers.tolist() for numbers in located), strict=True))


@given(members(), MODES)
@settings(max_examples=150)
def test_each_epoch_of_a_source_holds_each_sample_once(stages, shuffle):
    seen = defaultdict(list)
    for source, epoch, sample in rows_of(passes(stages, shuffle)):
        seen[source, epoch].append(sample)
        if epoch:
            # An epoch begins when the one before is complete.
            assert sorted(seen[source, epoch - 1]) == list(range(SIZES[source]))

    for samples in seen.values():
        assert len(set(samples)) == len(samples)


@given(members(), MODES)
def test_what_comes_before_a_stage_does_not_depend_on_it(stages, shuffle):
    earlier = rows_of(passes(stages[:-1], shuffle)) if len(stages) > 1 else []
    start = stages[-1].start

    assert rows_of(passes(stages, shuffle))[:start] == earlier[:start]


@given(members())
def test_a_source_is_read_from_where_it_joins_to_the_end_of_the_pass_where_it_leaves(stages):
    layout = passes(stages)
    rows = rows_of(layout)
    for position, (source, _, _) in enumerate(rows):
        listed = [source in stage.sources for stage in stages if stage.start <= position]
        assert any(listed)
        if not listed[-1]:
            number = int(np.searchsorted(layout._starts, position, side="right")) - 1
            assert source in layout.segments[number].members


@given(members())
def test_all_sources_of_the_last_stage_are_read_in_the_end(stages):
    layout = passes(stages)
    last = layout.segments[-1]
    rows = np.arange(last.start, last.start + last.size)

    sources, _, samples = layout.locate(rows)

    expected = [(source, row) for source in stages[-1].sources for row in range(SIZES[source])]
    assert sorted(zip(sources.tolist(), samples.tolist(), strict=True)) == sorted(expected)


@given(members(), MODES, st.integers(0, 3), st.data())
def test_positions_equal_a_search_through_all_rows(stages, shuffle, source, data):
    layout = passes(stages, shuffle)
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


@given(members(), st.integers(0, NUM_ROWS))
def test_counts_equal_the_rows_counted(stages, num_rows):
    layout = passes(stages)
    sources = [source for source, _, _ in rows_of(layout, num_rows)]

    assert layout.counts(num_rows) == [sources.count(source) for source in range(4)]


def test_a_source_that_joins_is_shuffled_into_the_rest_of_the_pass():
    """Newcomers come neither all first nor all last."""
    places = []
    for seed in range(200):
        layout = passes([Members(0, [3]), Members(6, [3, 0])], seed=seed)
        sources = [source for source, _, _ in rows_of(layout)[6:19]]
        assert sources.count(0) == 7
        places += [place for place, source in enumerate(sources) if source == 0]

    counts = np.bincount(places, minlength=13)
    assert np.abs(counts - 1400 / 13).max() < 4.5 * np.sqrt(1400 / 13)


def test_joins_within_joins_end_one_pass_with_every_sample_once():
    stages = [Members(0, [3]), Members(2, [3, 0]), Members(5, [3, 0, 1]), Members(9, [0, 1, 2, 3])]
    rows = rows_of(passes(stages), sum(SIZES))

    assert {epoch for _, epoch, _ in rows} == {0}
    assert len(set(rows)) == sum(SIZES)


def test_rows_pushed_back_by_several_joins_are_found():
    stages = [Members(0, [3]), Members(2, [3, 0]), Members(5, [3, 0, 1]), Members(9, [0, 1, 2, 3])]
    for seed in range(20):
        layout = passes(stages, seed=seed)
        for position, (source, epoch, sample) in enumerate(rows_of(layout, 40)):
            assert layout.positions_of(source, sample, np.array([epoch])).tolist() == [position]
            assert sum(layout.counts(position)) == position


def test_epochs_that_have_not_begun_are_not_counted():
    layout = passes([Members(0, [0]), Members(10, [0, 1])])

    assert [layout.num_epochs(1, before) for before in (0, 10, 11, 18, 19, 30)] == [
        0,
        0,
        1,
        1,
        2,
        3,
    ]


def test_a_source_that_comes_back_goes_on_with_its_next_epoch():
    layout = passes([Members(0, [0, 1]), Members(11, [0]), Members(25, [0, 1])])

    assert {epoch for source, epoch, _ in rows_of(layout, 11) if source == 1} == {0}
    assert {epoch for source, epoch, _ in rows_of(layout, 36)[25:] if source == 1} == {1}


def test_the_first_pass_after_a_change_at_its_border_is_whole():
    layout = passes([Members(0, [0]), Members(14, [0, 1])])

    assert [(segment.start, segment.size) for segment in layout.segments] == [(0, 7), (14, 11)]


def test_a_stage_that_begins_where_a_pending_one_would_replaces_it():
    layout = passes([Members(0, [0, 1]), Members(5, [0]), Members(11, [1])])

    assert [(segment.start, segment.size) for segment in layout.segments] == [(0, 11), (11, 4)]


def test_golden_vector_of_a_join():
    layout = passes([Members(0, [0]), Members(10, [0, 1])], seed=17)

    assert rows_of(layout, 30)[6:22] == [
        (0, 0, 4),
        (0, 1, 1),
        (0, 1, 3),
        (0, 1, 2),
        (0, 1, 0),
        (0, 1, 6),
        (1, 0, 0),
        (0, 1, 4),
        (1, 0, 1),
        (1, 0, 2),
        (0, 1, 5),
        (1, 0, 3),
        (1, 1, 2),
        (1, 1, 3),
        (0, 2, 2),
        (0, 2, 5),
    ]


@pytest.mark.parametrize("position", [10**9, 10**15, 2**62 - 1])
def test_positions_far_out_cost_no_more(position):
    layout = passes([Members(0, [0]), Members(10, [0, 1])])
    (source,), (epoch,), (sample,) = layout.locate(np.array([position]))

    assert position in layout.positions_of(int(source), int(sample), np.array([epoch]))
