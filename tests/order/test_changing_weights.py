"""Weights that change: every prefix of a run against the integral of the weights asked.

Figures of the torture tests are in docs/reliability.md.
"""

from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import PlanError
from penstock.order.arguments import Caps
from penstock.order.interleave import Mix, _split
from penstock.order.plan import Plan
from penstock.order.schedule import Schedule, Stage, StartingPoint
from penstock.order.settle import ONE_ROW, fit_phases

GOLDEN_SOURCES = [0, 1, 0, 2, 0, 0, 1, 2, 1, 2, 0, 2, 2, 2, 1, 2, 2, 2, 1, 2, 0, 2, 2, 2]
GOLDEN_ORDINALS = [0, 0, 1, 0, 2, 3, 1, 1, 2, 2, 4, 3, 4, 5, 3, 6, 7, 8, 4, 9, 5, 10, 11, 12]
GOLDEN_LATE = [
    (2, 55),
    (2, 58),
    (0, 12),
    (2, 62),
    (0, 34),
    (1, 41),
    (2, 81),
    (0, 35),
    (1, 333322),
    (1, 333333333333322),
]

FEW, MANY = 2, 4  # rows from the integral: up to 32 sources, and up to 1,000


class Integral:
    """The naive oracle: what each source is owed, row by row, in fractions."""

    def __init__(self, num_sources):
        self.debts = [Fraction(0)] * num_sources

    def begin(self, weights):
        """Begin a stage: what sources without weight are owed goes to the others by weight."""
        total = sum(map(Fraction, weights))
        self.shares = [Fraction(weight) / total for weight in weights]
        gone = sum(d for d, share in zip(self.debts, self.shares, strict=True) if not share)
        self.debts = [
            d + gone * share if share else Fraction(0)
            for d, share in zip(self.debts, self.shares, strict=True)
        ]

    def draw(self, source):
        """One row, given to `source`; how far the worst is off after it."""
        self.debts = [d + share for d, share in zip(self.debts, self.shares, strict=True)]
        self.debts[source] -= 1
        return max(map(abs, self.debts))


def exact_deviation(stages, sources):
    """The largest debt at any prefix, less what a weight that became 0 had passed on."""
    integral, worst = Integral(len(stages[0].weights)), 0
    starts = [stage.start for stage in stages] + [len(sources)]
    for stage, (start, stop) in zip(stages, pairwise(starts), strict=True):
        integral.begin(stage.weights)
        passed_on = max(map(abs, integral.debts)) if 0 in stage.weights else 0
        for source in sources[start:stop]:
            off = integral.draw(source)
            worst = max(worst, off if off > passed_on else 0)
    return float(worst)


def deviation(stages, num_rows):
    """The same in floating point, for many rows and no weight of 0.

    Between two of its rows a source falls behind steadily, so the extremes are right before
    and right after a row, and at the ends of stages.
    """
    sources, ordinals = Schedule(stages).at(np.arange(num_rows))
    debts, worst = np.zeros(len(stages[0].weights)), 0.0
    seen = np.zeros(len(debts), dtype=np.int64)
    starts = [stage.start for stage in stages] + [num_rows]
    for stage, (start, stop) in zip(stages, pairwise(starts), strict=True):
        shares = np.array(stage.weights) / sum(stage.weights)
        drawn, rows = sources[start:stop], np.arange(stop - start)
        counts = np.bincount(drawn, minlength=len(debts))
        owed = debts[drawn] + rows * shares[drawn] - (ordinals[start:stop] - seen[drawn])
        worst = max(worst, np.abs(owed).max(), np.abs(owed + shares[drawn] - 1).max())
        debts, seen = debts + (stop - start) * shares - counts, seen + counts
        worst = max(worst, np.abs(debts).max())
    return worst


KINDS = [
    lambda draws, n: draws.dirichlet(np.full(n, 1.0)),
    lambda draws, n: np.maximum(draws.dirichlet(np.full(n, 0.1)), 1e-9),
    lambda draws, n: np.maximum(draws.dirichlet(np.full(n, 0.01)), 1e-6),
    lambda draws, n: np.exp(draws.normal(size=n) * draws.choice([0.1, 1, 3, 6])),
    lambda draws, n: np.where(draws.random(n) < 0.5, 1.0, 10.0 ** -draws.integers(1, 9)),
    lambda draws, n: 1 / draws.permutation(np.arange(1, n + 1)) ** 1.2,
    lambda draws, n: 1 + 1e-6 * draws.random(n),
]


def random_stages(seed, num_sources, num_stages, longest):
    """Stages of one kind of weights, or of a mixture that wavers, or of two in turn."""
    draws = np.random.default_rng(seed)
    kind = draws.integers(len(KINDS) + 3)
    base = KINDS[draws.integers(len(KINDS))](draws, num_sources)
    even = draws.integers(3)
    stages, start = [], 0
    for number in range(num_stages):
        if kind < len(KINDS):
            weights = KINDS[kind](draws, num_sources)
        elif kind == len(KINDS):
            weights = base * np.exp(draws.normal(size=num_sources) * 0.1)
        elif kind == len(KINDS) + 1:
            weights = draws.permutation(base)
        else:
            weights = base if number % 2 else base[::-1]
        stages.append(Stage(start, weights.tolist()))
        if even == 0:
            start += int(np.exp(draws.uniform(0, np.log(longest))))
        else:
            start += int(draws.integers(1, longest if even == 1 else 10))
    return stages, start


# Two reproductions of what went wrong when every stage began its rounding anew.


def test_five_hundred_tiny_changes_of_weight_leave_no_source_out():
    stages = [Stage(8 * i, [0.95 + 1e-6 * (i % 2), 0.05]) for i in range(500)]

    sources, _ = Schedule(stages).at(range(4_000))

    assert abs(int((sources == 1).sum()) - 200) <= 1
    assert deviation(stages, 4_000) < 1


def test_a_stage_every_seven_rows_at_even_weights_stays_even():
    stages = [Stage(7 * i, [0.5, 0.5]) for i in range(1_000)]

    assert Schedule(stages).counts(7_000) == [3_500, 3_500]
    assert deviation(stages, 7_000) <= 0.5


def test_a_plan_with_a_schedule_keeps_the_shares_of_the_whole_run(numbers):
    names = {"web": numbers(50), "code": numbers(70)}
    even = {"web": 0.5, "code": 0.5}
    plan = Plan(names, weights=even, schedule={7 * i: even for i in range(1, 1_000)})

    assert plan.counts(7_000) == {"web": 3_500, "code": 3_500}


# The bound.


@st.composite
def some_stages(draw, zeros=False):
    num_sources = draw(st.integers(2, 6))
    weight = st.sampled_from([1, 2, 7, 0.3, 1e-3, 1e-9, Fraction(1, 3)] + [0] * 3 * zeros)
    starts = [0, *sorted(draw(st.sets(st.integers(1, 250), max_size=12)))]
    some = st.lists(weight, min_size=num_sources, max_size=num_sources).filter(any)
    return [Stage(start, draw(some)) for start in starts]


@given(some_stages())
@settings(max_examples=60, deadline=None)
def test_every_prefix_is_within_two_rows_of_the_integral(stages):
    sources, _ = Schedule(stages).at(range(400))

    assert exact_deviation(stages, sources.tolist()) < FEW


@given(some_stages(zeros=True))
@settings(max_examples=60, deadline=None)
def test_what_a_source_without_weight_is_owed_goes_to_the_others(stages):
    """Within two rows of the integral so adjusted, or no further than the change had put it."""
    sources, _ = Schedule(stages).at(range(400))

    assert exact_deviation(stages, sources.tolist()) < FEW


def test_a_source_comes_back_with_no_debt():
    stages = [Stage(0, [5, 5, 3]), Stage(10, [0, 5, 3]), Stage(20, [5, 5, 3])]
    schedule = Schedule(stages)
    integral = Integral(3)
    for stage, stop in zip(stages, (10, 20, 30), strict=True):
        integral.begin(stage.weights)
        for source in schedule.at(range(stage.start, stop))[0].tolist():
            integral.draw(source)
        assert schedule.owed(stop) == pytest.approx([float(d) for d in integral.debts], abs=1e-9)

    assert schedule.owed(10)[0] != 0  # what goes to the others when its weight becomes 0
    assert schedule.owed(11)[0] == schedule.owed(20)[0] == 0


@pytest.mark.parametrize("num_sources", [2, 3, 5, 9, 17, 32])
def test_every_prefix_of_random_schedules_is_within_two_rows(num_sources):
    for seed in range(4):
        stages, num_rows = random_stages(seed, num_sources, 150, 300)
        assert deviation(stages, num_rows) < FEW, seed


@pytest.mark.parametrize(("num_sources", "longest"), [(100, 800), (1_000, 3_000)])
def test_every_prefix_of_random_schedules_of_many_sources_is_within_four_rows(num_sources, longest):
    for seed in range(3):
        stages, num_rows = random_stages(seed, num_sources, 20, longest)
        assert deviation(stages, num_rows) < MANY, seed


@pytest.mark.torture
@pytest.mark.parametrize(
    ("num_sources", "num_schedules", "num_stages", "longest", "bound"),
    [
        (2, 6, 10_000, 200, FEW),
        (3, 8, 10_000, 200, FEW),
        (5, 10, 10_000, 200, FEW),
        (8, 10, 10_000, 200, FEW),
        (16, 10, 10_000, 200, FEW),
        (32, 10, 10_000, 200, FEW),
        (16, 60, 400, 2_000, FEW),
        (32, 60, 400, 2_000, FEW),
        (100, 20, 1_000, 500, MANY),
        (1_000, 10, 150, 5_000, MANY),
        (1_000, 1, 10_000, 20, MANY),
    ],
)
def test_torture_every_prefix_of_random_schedules(
    num_sources, num_schedules, num_stages, longest, bound
):
    worst, rows = 0.0, 0
    for seed in range(num_schedules):
        stages, num_rows = random_stages(1_000 + seed, num_sources, num_stages, longest)
        worst, rows = max(worst, deviation(stages, num_rows)), rows + num_rows
    print(  # noqa: T201  (figures for docs/reliability.md)
        f"{num_sources:,} sources, {num_schedules} schedules of {num_stages:,} stages, "
        f"{rows:,} rows: {worst:.3f}"
    )
    assert worst < bound


# The worst case: someone who knows the order so far and chooses the next weights to do harm.


class Game:
    """A run whose weights are set row by row, as `set_weights` does."""

    def __init__(self, num_sources):
        self.num_sources, self.position, self.worst = num_sources, 0, 0.0
        self.schedule = None
        self.debts = np.zeros(num_sources)

    def play(self, weights, num_rows=1):
        """Set weights and draw some rows by them; the rows of each source."""
        weights = np.asarray(weights, dtype=float)
        if self.schedule is None:
            self.schedule = Schedule([Stage(0, weights.tolist())])
        else:
            self.schedule = self.schedule.changed(self.position, weights.tolist())
        sources, _ = self.schedule.at(np.arange(self.position, self.position + num_rows))
        shares = weights / weights.sum()
        for source in sources.tolist():
            self.debts += shares
            self.debts[source] -= 1
            self.worst = max(self.worst, np.abs(self.debts).max())
        self.position += num_rows
        return np.bincount(sources, minlength=self.num_sources)

    def play_last_man(self, little):
        """Only those that were not drawn yet have weight, but for a little."""
        left = np.ones(self.num_sources, dtype=bool)
        while left.sum() > 1:
            left &= self.play(np.where(left, 1.0, little)) == 0

    def play_anything(self, draws):
        """Weights that depend on debts, for as long as a table lasts, or less, or more."""
        n, order = self.num_sources, np.argsort(self.debts)
        weights = np.full(n, 10.0 ** -draws.integers(1, 9))
        some = int(draws.integers(1, n + 1))
        chosen = [order[:some], order[-some:], order[[0, -1]], draws.permutation(n)[:some]]
        weights[chosen[draws.integers(4)]] = draws.choice([1.0, draws.random()])
        if draws.random() < 0.2:
            weights = np.exp(4 * np.sort(draws.normal(size=n))[np.argsort(order)])
        self.play(weights, int(draws.choice([1, 1, 2, n, n + 64, n + 65, 2 * n + 99])))


def least_worst_case(num_sources):
    """What no method can avoid that does not know the next weights: 1/2 + 1/3 + … + 1/n."""
    return sum(1 / k for k in range(2, num_sources + 1))


@pytest.mark.parametrize("num_sources", [3, 8, 32, 100])
def test_the_worst_case_is_the_one_that_no_method_can_avoid(num_sources):
    game = Game(num_sources)
    for _ in range(2 if num_sources > 32 else 5):  # it does not become worse when repeated
        game.play_last_man(1e-9)

    assert game.worst == pytest.approx(least_worst_case(num_sources), abs=0.01)


def searched_worst_case(num_sources, steps, seeds):
    worst = 0.0
    for seed in range(seeds):
        draws, game = np.random.default_rng(seed), Game(num_sources)
        for _ in range(steps):
            game.play_anything(draws)
            if draws.random() < 0.03:
                game.play_last_man(10.0 ** -draws.integers(2, 9))
        worst = max(worst, game.worst)
    return worst


@pytest.mark.parametrize("num_sources", [2, 3, 8, 32])
def test_a_search_for_harmful_weights_finds_little_more(num_sources):
    worst = searched_worst_case(num_sources, steps=80, seeds=2)

    assert worst < least_worst_case(num_sources) + 0.3


@pytest.mark.torture
@pytest.mark.parametrize("num_sources", [2, 3, 5, 8, 16, 32, 100, 300])
def test_torture_a_search_for_harmful_weights(num_sources):
    steps, seeds = (500, 20) if num_sources <= 32 else (200, 4)
    worst = searched_worst_case(num_sources, steps, seeds)
    print(f"{num_sources:,} sources, {seeds} games of {steps:,} moves: {worst:.3f}")  # noqa: T201

    assert worst < least_worst_case(num_sources) + 0.3


@pytest.mark.torture
def test_torture_the_worst_case_of_a_thousand_sources():
    game = Game(1_000)
    game.play_last_man(1e-12)

    assert game.worst == pytest.approx(least_worst_case(1_000), abs=0.01)


# The rows, and the way back.


@given(some_stages(zeros=True), st.integers(0, 5))
@settings(max_examples=40, deadline=None)
def test_positions_undo_at_and_counts_agree(stages, seed):
    schedule, num_rows = Schedule(stages), 500
    sources, ordinals = schedule.at(range(num_rows))
    for source in range(len(stages[0].weights)):
        here = np.flatnonzero(sources == source)
        assert ordinals[here].tolist() == list(range(len(here)))
        assert [schedule.position(source, o) for o in ordinals[here].tolist()] == here.tolist()
    upto = int(np.random.default_rng(seed).integers(num_rows))
    drawn = np.bincount(sources[:upto], minlength=len(stages[0].weights))
    assert schedule.counts(upto) == drawn.tolist()


@given(some_stages(zeros=True))
@settings(max_examples=15, deadline=None)
def test_rows_asked_one_by_one_or_in_any_order_are_the_same(stages):
    schedule = Schedule(stages)
    together = np.stack(schedule.at(range(300)))
    shuffled = np.random.default_rng(0).permutation(300)

    assert np.array_equal(np.hstack([schedule.at([row]) for row in range(300)]), together)
    assert np.array_equal(np.stack(schedule.at(shuffled)), together[:, shuffled])


@given(some_stages(zeros=True))
@settings(max_examples=30, deadline=None)
def test_rows_do_not_depend_on_later_stages(stages):
    start = stages[-1].start
    before = np.stack(Schedule(stages).at(range(start)))

    if len(stages) > 1:
        assert np.array_equal(before, np.stack(Schedule(stages[:-1]).at(range(start))))


@given(some_stages(zeros=True))
@settings(max_examples=30, deadline=None)
def test_weights_set_on_the_way_are_those_of_a_schedule(stages):
    schedule = Schedule(stages[:1])
    for start, weights in stages[1:]:
        schedule = schedule.changed(start, weights)

    assert schedule.stages == Schedule(stages).stages
    assert np.array_equal(schedule.at(range(400)), Schedule(stages).at(range(400)))


def test_a_change_gives_up_the_stages_after_it():
    schedule = Schedule([Stage(0, [1, 1]), Stage(10, [1, 2]), Stage(20, [1, 3])])

    assert schedule.changed(10, [5, 1]).stages == [Stage(0, [1, 1]), Stage(10, [5, 1])]
    assert schedule.changed(0, [5, 1]).stages == [Stage(0, [5, 1])]


@given(some_stages(zeros=True), st.integers(0, 300))
@settings(max_examples=40, deadline=None)
def test_an_origin_is_all_that_later_rows_need(stages, position):
    whole = Schedule(stages)
    position = stages[-1].start
    origin = whole.origin_at(position)
    resumed = Schedule([Stage(position, stages[-1].weights)], origin=StartingPoint(*origin))

    later = range(position, position + 200)
    assert np.array_equal(resumed.at(later), whole.at(later))
    assert resumed.counts(position + 100) == whole.counts(position + 100)
    assert resumed.owed(position + 100) == whole.owed(position + 100)
    sources, ordinals = whole.at(later)
    for source in set(sources.tolist()):
        for ordinal in ordinals[sources == source].tolist():
            assert resumed.position(source, ordinal) == whole.position(source, ordinal)


def test_positions_before_the_origin_have_no_answer():
    whole = Schedule([Stage(0, [1, 1]), Stage(10, [1, 2])])
    resumed = Schedule([Stage(10, [1, 2])], origin=whole.origin_at(10))

    message = "Position 9 is before position 10, where this order was resumed"
    for call in (
        lambda: resumed.at([12, 9]),
        lambda: resumed.position(0, 4),
        lambda: resumed.counts(9),
    ):
        with pytest.raises(PlanError, match=message):
            call()


def test_the_first_rows_of_a_later_stage_go_to_the_largest_debt():
    """Row by row, by the oracle's own debts; equal ones to the first."""
    stages = [Stage(0, [3, 2, 2, 1]), Stage(13, [1, 2, 3, 5])]
    sources, _ = Schedule(stages).at(range(13 + 64 + 4))
    integral = Integral(4)
    integral.begin(stages[0].weights)
    for source in sources[:13].tolist():
        integral.draw(source)
    integral.begin(stages[1].weights)
    for source in sources[13:].tolist():
        due = [d + share for d, share in zip(integral.debts, integral.shares, strict=True)]
        assert due[source] > max(due) - Fraction(1, 2**30)
        integral.draw(source)


def test_golden_vector():
    schedule = Schedule(
        [Stage(0, [0.6, 0.3, 0.1]), Stage(7, [0.1, 0.2, 0.7]), Stage(90, [1, 1, 1])]
    )

    sources, ordinals = schedule.at(range(24))
    assert sources.tolist() == GOLDEN_SOURCES
    assert ordinals.tolist() == GOLDEN_ORDINALS
    late = schedule.at([85, 89, 90, 100, 156, 157, 158, 159, 10**6, 10**15])
    assert list(zip(*(each.tolist() for each in late), strict=True)) == GOLDEN_LATE


# Debts and phases.


def test_debts_add_up_to_nothing_after_a_million_rows_of_many_stages():
    stages, num_rows = random_stages(3, 7, 400, 5_000)
    schedule = Schedule(stages)

    for position in (0, 1, num_rows // 2, num_rows, 10**12):
        assert sum(schedule.origin_at(position).debts) == 0
    assert max(map(abs, schedule.origin_at(num_rows).debts)) < 2 * ONE_ROW


@given(st.lists(st.integers(1, 10**6), min_size=2, max_size=20, unique=True), st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_phases_that_can_stand_for_the_debts_do_so_exactly(weights, num_rows):
    """A mix that begins with the debts of another goes on as that one does."""
    mix, total = Mix(weights), sum(weights)
    counts = mix.counts(num_rows)
    owed = [Fraction(num_rows * w, total) - c for w, c in zip(weights, counts, strict=True)]
    later = Mix(weights, [float(debt) for debt in owed])

    sources, ordinals = mix.at(range(num_rows, num_rows + 200))
    # Only where a row is due at exactly one half may the two differ, by a rounded phase.
    again, from_zero = later.at(range(200))
    differs = np.flatnonzero(again != sources)
    assert len(differs) <= 4
    same = again == sources
    assert (ordinals - from_zero - np.array(counts)[sources])[same].__abs__().max() <= 1


@given(
    st.lists(st.floats(1e-9, 1), min_size=2, max_size=12),
    st.lists(st.floats(-3, 3), min_size=12, max_size=12),
)
@settings(max_examples=100, deadline=None)
def test_debts_of_any_size_are_settled_as_far_as_phases_can(weights, debts):
    """Never further off than at the start and two rows more, however long the stage."""
    debts = np.array(debts[: len(weights)])
    debts -= debts.mean()
    mix = Mix(weights, debts.tolist())
    sources, ordinals = mix.at(range(2_000))
    shares = np.array(weights) / sum(weights)
    owed = debts[sources] + np.arange(2_000) * shares[sources] - ordinals

    assert np.abs(owed).max() < np.abs(debts).max() + FEW
    for source in set(sources.tolist()):
        here = np.flatnonzero(sources == source)
        assert [mix.position(source, o) for o in ordinals[here].tolist()] == here.tolist()
        assert all(mix.not_before(source, o) <= p for o, p in enumerate(here.tolist()))


def test_no_debts_are_phases_of_one_half():
    assert fit_phases([0.25, 0.5], [~0, ~1, 0, ~2], [0.0, 0.0, 0.0]) == [2**63, 2**63]


@pytest.mark.parametrize(
    ("weights", "debts", "phases"),
    [
        (
            [1, 5, 1, 1000],
            [3.0, 0.5, 0.75, -4.25],
            [18446744073709551615, 18446744073709551615, 18446744073709551615],
        ),
        (
            [5, 3, 1, 10, 1, 1],
            [-3.0, 2.0, 1.25, -3.0, 0.0, 2.75],
            [18446744073709551615, 18446744073709551615, 14883168514015660032, 0, 0],
        ),
        (
            [3, 10, 3, 3, 1000, 5, 1],
            [0.25, 1.25, 2.0, -2.25, -1.75, 2.0, -1.5],
            [
                0,
                18446744073709551615,
                0,
                922337203685476352,
                18446744073709551615,
                18446744073709551615,
            ],
        ),
        (
            [1, 10, 100000, 100, 100000],
            [2.25, -1.5, -0.75, -0.75, 0.75],
            [
                18446744073709551615,
                18446744073709551615,
                12692363142119723008,
                18446744073709551615,
            ],
        ),
        (
            [1, 1000, 100000, 1, 2],
            [1.0, 0.0, -0.25, 0.75, -1.5],
            [11529215046068469760, 0, 7385777438509649920, 13835058055282163712],
        ),
        (
            [5, 1, 5, 100000],
            [-1.5, 1.75, 0.25, -0.5],
            [18446744073709551615, 15536038619419889664, 18446744073709551615],
        ),
    ],
)
def test_golden_phases_of_debts_that_phases_cannot_represent(weights, debts, phases):
    """Pins the order of data after a change of weights: the bounds, their steps, and the fit."""
    assert sum(debts) == 0
    assert Mix(weights, debts)._phases.tolist() == phases


@given(st.integers(0, 2**62 - 1), st.integers(0, 2**63), st.integers(0, 2**64 - 1))
def test_splits_with_a_phase_are_exact_products_of_128_bits(counter, share, phase):
    small, before = _split(*(np.array([n], dtype=np.uint64) for n in (counter, share, phase)))

    counts = [(rows * share + phase) >> 64 for rows in (counter, counter + 1)]
    assert before.tolist() == counts[:1]
    assert small.tolist() == [counts[1] > counts[0]]


# Caps whose weight passes to the others are changes of weight too.


@pytest.mark.parametrize("seed", range(6))
def test_prefixes_are_near_the_integral_while_sources_run_out(seed):
    draws = np.random.default_rng(seed)
    weights = draws.integers(1, 30, size=8).tolist()
    caps = draws.integers(20, 400, size=8).tolist()
    schedule = Schedule([Stage(0, weights)], caps=caps, exhausted="redistribute")
    sources, _ = schedule.at(range(schedule.end))

    assert schedule.counts(schedule.end) == caps
    assert exact_deviation(schedule.stages, sources.tolist()) < FEW


def test_changing_weights_have_a_digest_of_their_own(numbers):
    """Plans of constant weights keep theirs: their order is what it was."""
    sources = {"web": numbers(50), "code": numbers(70)}
    weights = {"web": 1, "code": 2}

    def format_of(**options):
        return Plan(sources, weights=weights, **options).describe()["format"]

    assert format_of() == format_of(max_epochs=2) == 1
    assert format_of(schedule={9: {"web": 2, "code": 1}}) == 2
    assert format_of(max_epochs=Caps(2, "redistribute")) == 2
    assert Plan(sources).describe()["format"] == 1
