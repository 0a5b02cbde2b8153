import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import PlanError
from penstock.order.interleave import Mix
from penstock.order.schedule import Schedule, Stage
from penstock.order.settle import (
    ONE_ROW,
    DebtTable,
    debts_after,
    debts_of_present,
    num_table_rows,
)
from penstock.order.weights import exact_weights


@st.composite
def stages(draw, num_sources=3):
    starts = [0, *sorted(draw(st.sets(st.integers(1, 80), max_size=4)))]
    weights = st.lists(
        st.sampled_from([0, 0, 1, 2, 0.3]), min_size=num_sources, max_size=num_sources
    )
    return [Stage(start, draw(weights.filter(any))) for start in starts]


CAPS = st.lists(st.one_of(st.none(), st.integers(1, 40)), min_size=3, max_size=3)


class Settling:
    """The table of a stage with debts, and then a mix with the debts that the table leaves."""

    def __init__(self, weights, debts):
        self.weights, self.table = weights, DebtTable(weights, debts, num_table_rows(len(weights)))
        num_rows = num_table_rows(len(weights))
        left = debts_after(debts, weights, num_rows, self.table.counts(num_rows))
        self.later = Mix(weights, (left / ONE_ROW).tolist())

    def at(self, positions):
        num_rows = num_table_rows(len(self.weights))
        if positions[0] < num_rows:
            return self.table.at(positions)
        return self.later.at(positions - num_rows)


def naive_rows(stages, caps, num_rows, exhausted="error"):
    """Draw row by row; begin a new mix, with debts, where the weights change or a cap is met."""
    seen, rows, current, start = [0] * 3, [], None, 0
    debts, mix = np.zeros(3, dtype=np.int64), None
    for position in range(num_rows):
        asked = [stage.weights for stage in stages if stage.start <= position][-1]
        begins = any(stage.start == position for stage in stages)
        if exhausted == "redistribute":
            full = [cap is not None and seen[i] >= cap for i, cap in enumerate(caps)]
            asked = [0 if full[i] else weight for i, weight in enumerate(asked)]
        if not any(asked):
            break
        if begins or asked != current:
            if mix is not None:
                drawn = [source for source, _ in rows[start:]]
                counts = [drawn.count(source) for source in range(3)]
                debts = debts_after(debts, mix.weights, position - start, counts)
            current, start = asked, position
            debts = debts_of_present(debts, exact_weights(asked))
            mix = Settling(exact_weights(asked), debts) if debts.any() else Mix(asked)
        source = int(mix.at(np.array([position - start]))[0][0])
        if caps[source] is not None and seen[source] >= caps[source]:
            break
        rows.append((source, seen[source]))
        seen[source] += 1
    return rows


def rows_of(schedule, num_rows):
    sources, ordinals = schedule.at(range(num_rows))
    return list(zip(sources.tolist(), ordinals.tolist(), strict=True))


@given(stages())
@settings(deadline=None)
def test_equals_rows_dealt_one_by_one(stages):
    assert rows_of(Schedule(stages), 120) == naive_rows(stages, [None] * 3, 120)


@given(stages(), CAPS)
@settings(deadline=None)
def test_ends_where_a_source_would_pass_its_cap(stages, caps):
    schedule = Schedule(stages, caps=caps)
    naive = naive_rows(stages, caps, 200)

    assert rows_of(schedule, min(200, schedule.end)) == naive
    if schedule.end < 200:
        assert schedule.end == len(naive)
        assert schedule.counts(schedule.end)[schedule.ended_by] == caps[schedule.ended_by]


@given(stages(), CAPS)
@settings(max_examples=100, deadline=None)
def test_redistributes_from_the_very_row_at_which_a_cap_is_reached(stages, caps):
    schedule = Schedule(stages, caps=caps, exhausted="redistribute")
    naive = naive_rows(stages, caps, 200, "redistribute")

    assert rows_of(schedule, min(200, schedule.end)) == naive
    assert schedule.end == len(naive) or schedule.end > 200
    assert schedule.ended_by is None


@given(stages(), CAPS, st.sampled_from(["error", "redistribute"]))
def test_positions_undo_at(stages, caps, exhausted):
    schedule = Schedule(stages, caps=caps, exhausted=exhausted)
    num_rows = min(schedule.end, 150)
    sources, ordinals = schedule.at(range(num_rows))

    for source in range(3):
        here = np.flatnonzero(sources == source)
        assert [schedule.position(source, o) for o in ordinals[here].tolist()] == here.tolist()


@given(stages(), st.integers(0, 150))
def test_counts_are_what_at_has_dealt(stages, num_rows):
    schedule = Schedule(stages)
    sources, _ = schedule.at(range(num_rows))

    assert schedule.counts(num_rows) == np.bincount(sources, minlength=3).tolist()


def test_a_source_goes_on_where_it_was_when_weights_change():
    schedule = Schedule([Stage(0, [1, 1]), Stage(6, [1, 0]), Stage(8, [0, 1])])

    assert rows_of(schedule, 10) == [
        *[(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)],
        *[(0, 3), (0, 4)],
        *[(1, 3), (1, 4)],
    ]


def test_a_cap_met_at_the_end_of_a_stage_begins_no_empty_one():
    schedule = Schedule(
        [Stage(0, [1, 1]), Stage(4, [1, 2])], caps=[None, 2], exhausted="redistribute"
    )

    assert schedule.stages == [Stage(0, [1, 1]), Stage(4, [1, 0])]


@pytest.mark.parametrize("seed", range(20))
def test_the_first_of_many_near_caps_is_found(seed):
    """Caps that fall due within a few rows of each other, in every order."""
    draws = np.random.default_rng(seed)
    weights = draws.integers(90, 110, size=30).tolist()
    caps = [weight + int(draws.integers(-1, 2)) for weight in weights]
    schedule = Schedule([Stage(0, weights)], caps=caps, exhausted="redistribute")
    ends = [Mix(weights).position(source, cap - 1) + 1 for source, cap in enumerate(caps)]

    assert schedule.stages[1].start == min(ends)
    assert schedule.end == sum(caps)


def test_caps_far_away_are_found_without_scanning():
    schedule = Schedule(
        [Stage(0, [0.7, 0.3, 1e-9])], caps=[10**15, 10**14, 5], exhausted="redistribute"
    )

    assert [stage.start for stage in schedule.stages] == [0, 4500000005, 333333333333337]
    assert schedule.end == 10**15 + 10**14 + 5


def test_many_capped_sources_run_out_one_after_the_other():
    caps = [1000 + source for source in range(300)]
    schedule = Schedule([Stage(0, [1] * 300)], caps=caps, exhausted="redistribute")

    assert schedule.end == sum(caps)
    assert schedule.counts(schedule.end) == caps


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: Schedule([Stage(5, [1])]),
            "The first stage begins at 5; it must begin at position 0.",
        ),
        (lambda: Schedule([]), "The first stage is missing; it must begin at position 0."),
        (
            lambda: Schedule([Stage(0, [1]), Stage(9, [1]), Stage(9, [1])]),
            "A stage that begins at 9 cannot follow one that begins at 9: each must begin "
            "later than the one before it, and below 2^62.",
        ),
        (
            lambda: Schedule([Stage(0, [1]), Stage(2**62 + 1, [1])]),
            "A stage that begins at 4,611,686,018,427,387,905 cannot follow one that begins at 0:",
        ),
        (lambda: Schedule([Stage(0, [0, 0])]), "All 2 weights are 0, so there is nothing to read."),
        (
            lambda: Schedule([Stage(0, [1])], caps=[3]).at([3]),
            "3 is out of range: this order has rows 0 to 2.",
        ),
    ],
)
def test_refuses_what_is_outside(call, message):
    with pytest.raises(PlanError) as caught:
        call()

    assert str(caught.value).startswith(message)


def test_a_row_after_the_end_or_of_weight_0_has_no_position():
    schedule = Schedule([Stage(0, [1, 0])], caps=[3, None])

    assert [schedule.position(0, row) for row in (2, 3, 4)] == [2, None, None]
    assert schedule.position(1, 0) is None


def test_the_weights_of_each_stage_ask_for_its_rows_only():
    schedule = Schedule([Stage(0, [1, 1]), Stage(10, [1, 0]), Stage(30, [0, 1])])

    assert schedule.asked(6) == [3, 3]
    assert schedule.asked(20) == [15, 5]
    assert schedule.asked(40) == [25, 15]
