import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import PlanError
from penstock.order.steps import Steps

RAMPS = st.dictionaries(st.integers(1, 200), st.integers(1, 40), max_size=5).flatmap(
    lambda later: st.integers(1, 40).map(lambda first: {0: first, **later})
)


def naive_spans(sizes, start, num_steps):
    spans = []
    for _ in range(num_steps):
        rows = sizes[max(position for position in sizes if position <= start)]
        spans.append((start, start + rows))
        start += rows
    return spans


@given(RAMPS, st.integers(0, 300))
def test_a_step_has_the_size_in_force_where_it_begins(sizes, start):
    steps = Steps(sizes, start=start)

    assert [steps.span(step) for step in range(30)] == naive_spans(sizes, start, 30)
    starts, rows = steps.spans(3, 30)
    assert list(zip(starts, starts + rows, strict=True)) == naive_spans(sizes, start, 30)[3:]


@given(RAMPS, st.integers(0, 300))
def test_at_undoes_span(sizes, start):
    steps = Steps(sizes, start=start)

    for step in range(20):
        first, stop = steps.span(step)
        assert {steps.at(position) for position in range(first, stop)} == {step}


@given(RAMPS, st.integers(0, 100), st.integers(0, 500))
def test_a_run_drops_or_fills_less_than_one_batch(sizes, start, end):
    steps = Steps(sizes, start=start)
    spans = [span for span in naive_spans(sizes, start, 500) if span[0] < end]
    full = [span for span in spans if span[1] <= end]

    assert steps.count(end, drop_last=True) == len(full)
    assert steps.count(end, drop_last=False) == len(spans)


def test_positions_far_out_are_exact():
    steps = Steps({0: 256, 10**15: 3 * 2**20})
    step = steps.at(2**61)

    assert steps.span(step)[0] <= 2**61 < steps.span(step)[1]


def test_sizes_that_no_step_begins_with_do_not_occur():
    assert Steps({0: 100, 10: 7, 20: 50}).sizes == (100, 50)
    assert Steps({0: 100, 10: 7, 20: 50}, start=15).sizes == (7, 50)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: Steps(0),
            "A batch cannot have 0 rows on all ranks together. Use a batch_size or "
            "global_batch_size from 1 to 2^40.",
        ),
        (
            lambda: Steps({0: 4, -5: 4}),
            "global_batch_size has a size for position -5; positions are 0 to 2^62 - 1.",
        ),
        (
            lambda: Steps({0: 4, -1: 4}),
            "global_batch_size has a size for position -1; positions are 0 to 2^62 - 1.",
        ),
        (
            lambda: Steps({100: 8}),
            "global_batch_size={100: 8} has no size for position 0. Add one, for example "
            "{0: 8, …}.",
        ),
        (lambda: Steps(4, start=-1), "A run must start at a position from 0 to 2^62 - 1; got -1."),
        (
            lambda: Steps(4, start=8).at(7),
            "No step reads position 7: the steps begin at position 8 and end at 2^62.",
        ),
        (lambda: Steps(4).spans(-1, 3), "There are no steps from -1 to 3; steps begin at 0."),
        (lambda: Steps(4).span(2**60), "Step 1,152,921,504,606,846,976 would read past position"),
        (
            lambda: Steps(4).spans(2**60 - 2, 2**60 + 1),
            "Step 1,152,921,504,606,846,976 would read past position",
        ),
    ],
)
def test_refuses_what_is_outside(call, message):
    with pytest.raises(PlanError) as caught:
        call()

    assert str(caught.value).startswith(message)
