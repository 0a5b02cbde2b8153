import json
import pickle
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.digest import derive_key, digest_json
from penstock.errors import PlanError
from penstock.order.arguments import Caps
from penstock.order.permute import permute
from penstock.order.plan import Plan, Sample
from penstock.order.shuffle import Block

MODES = ["full", "none", "part", "block", Block(rows=3, group=2)]


@st.composite
def plans(draw, numbers):
    sizes = draw(st.lists(st.integers(1, 20), min_size=1, max_size=4))
    sources = {
        name: numbers(n, part_rows=[n // 3, n - n // 3])
        for name, n in zip("abcd", sizes, strict=False)
    }
    names = list(sources)
    weights = st.fixed_dictionaries({name: st.sampled_from([0, 1, 2, 0.1]) for name in names})
    weights = weights.filter(lambda weights: any(weights.values()))
    weighted = draw(st.booleans())
    starts = [0, *draw(st.sets(st.integers(1, 60), max_size=2))] if weighted else []
    return Plan(
        sources,
        schedule={start: draw(weights) for start in starts},
        seed=draw(st.integers(0, 10)),
        shuffle=draw(st.sampled_from(MODES)),
        max_epochs=draw(st.sampled_from([None, 2, Caps(3, "redistribute")])) if weighted else None,
    )


def rows_of(plan, stop, start=0):
    located = plan.locate(np.arange(start, stop))
    return list(zip(*(numbers.tolist() for numbers in located), strict=True))


def assert_each_epoch_holds_each_sample_once(plan, rows):
    seen = defaultdict(set)
    for source, epoch, sample in rows:
        assert sample not in seen[source, epoch]
        seen[source, epoch].add(sample)
        assert 0 <= sample < plan.sizes[source]
        assert epoch == 0 or len(seen[source, epoch - 1]) == plan.sizes[source]


class TestGoldens:
    """The first 16 positions of known plans. To change one is to change everyone's order."""

    def test_one_source(self, numbers):
        _, epochs, samples = Plan(numbers(10), seed=17).locate(range(16))

        assert samples.tolist() == [8, 5, 4, 9, 2, 1, 3, 7, 6, 0, 8, 7, 3, 6, 1, 9]
        assert epochs.tolist() == [0] * 10 + [1] * 6

    def test_one_large_source(self, numbers):
        assert Plan(numbers(10**9), seed=17).locate(range(16))[2].tolist() == [
            563755587,
            263190828,
            916141911,
            347143034,
            564886060,
            258113726,
            17180857,
            605619767,
            718146950,
            458666495,
            147095553,
            481782284,
            468989305,
            928444521,
            835066499,
            579302416,
        ]

    def test_two_sources_without_weights(self, numbers):
        plan = Plan({"web": numbers(9), "code": numbers(5)}, seed=17)

        assert [row[::2] for row in rows_of(plan, 16)] == [
            (0, 0),
            (1, 0),
            (0, 1),
            (0, 2),
            (0, 7),
            (0, 8),
            (1, 2),
            (0, 5),
            (0, 3),
            (0, 6),
            (0, 4),
            (1, 4),
            (1, 1),
            (1, 3),
            (0, 8),
            (0, 2),
        ]

    def test_weights(self, numbers):
        sources = {"web": numbers(9), "code": numbers(5)}
        plan = Plan(sources, weights={"web": 0.7, "code": 0.3}, seed=17)

        assert rows_of(plan, 16) == [
            (0, 0, 6),
            (1, 0, 0),
            (0, 0, 5),
            (0, 0, 2),
            (1, 0, 4),
            (0, 0, 7),
            (0, 0, 8),
            (0, 0, 0),
            (1, 0, 2),
            (0, 0, 3),
            (0, 0, 4),
            (1, 0, 1),
            (0, 0, 1),
            (0, 1, 0),
            (1, 0, 3),
            (0, 1, 3),
        ]

    def test_blocks(self, numbers):
        plan = Plan(numbers(50), shuffle=Block(rows=4, group=3), seed=17)

        assert plan.locate(range(16))[2].tolist() == [
            38,
            19,
            37,
            20,
            22,
            26,
            27,
            21,
            25,
            28,
            40,
            39,
            49,
            41,
            48,
            43,
        ]

    def test_parts(self, numbers):
        plan = Plan(numbers(50, part_rows=[10, 20, 20]), shuffle="part", seed=17)

        assert plan.locate(range(16))[2].tolist() == [
            9,
            0,
            8,
            1,
            3,
            5,
            6,
            2,
            4,
            7,
            18,
            23,
            24,
            10,
            17,
            12,
        ]

    def test_digest(self, numbers):
        plan = Plan({"web": numbers(9), "code": numbers(5)}, weights={"web": 0.7, "code": 0.3})

        assert plan.digest == "54324d2abe4eff01515e6cb67eb1c0cd03338801ed284d10fb04c446290c849f"


@given(data=st.data())
@settings(max_examples=100)
def test_each_epoch_holds_each_sample_once(numbers, data):
    plan = data.draw(plans(numbers))

    assert_each_epoch_holds_each_sample_once(plan, rows_of(plan, min(plan.end, 120)))


@pytest.mark.parametrize("number", [2_000, pytest.param(10_000, marks=pytest.mark.torture)])
def test_thousands_of_plans_hold_each_sample_once_an_epoch(numbers, number):
    draws = np.random.default_rng(0)
    for seed in range(number):
        sizes = draws.integers(1, 12, size=int(draws.integers(1, 4))).tolist()
        sources = {str(i): numbers(n, part_rows=[n // 2, n - n // 2]) for i, n in enumerate(sizes)}
        weights = {name: float(draws.integers(1, 5)) for name in sources} if seed % 2 else None
        plan = Plan(sources, weights=weights, seed=seed, shuffle=MODES[seed // 2 % 5])
        rows = rows_of(plan, 2 * sum(sizes))

        assert_each_epoch_holds_each_sample_once(plan, rows)
        if weights is None:
            assert len(set(rows)) == len(rows) == 2 * len(plan)


@given(data=st.data())
@settings(max_examples=100)
def test_positions_of_equals_a_search_through_all_rows(numbers, data):
    plan = data.draw(plans(numbers))
    stop = min(plan.end, 100)
    source = data.draw(st.sampled_from(plan.names))
    sample = data.draw(st.integers(0, len(plan.sources[source]) - 1))
    found = [
        (position, epoch)
        for position, (number, epoch, row) in enumerate(rows_of(plan, stop))
        if (plan.names[number], row) == (source, sample)
    ]

    assert plan.positions_of(source, sample, before=stop).tolist() == [p for p, _ in found]
    for position, epoch in found:
        assert plan.positions_of(source, sample, epoch=epoch).tolist() == [position]


@given(data=st.data())
def test_counts_equal_the_rows_counted(numbers, data):
    plan = data.draw(plans(numbers))
    num_rows = data.draw(st.integers(0, min(plan.end, 100)))
    names = [plan.names[source] for source, _, _ in rows_of(plan, num_rows)]

    assert plan.counts(num_rows) == {name: names.count(name) for name in plan.names}


@given(data=st.data())
def test_any_positions_in_any_order_give_what_they_give_alone(numbers, data):
    plan = data.draw(plans(numbers))
    stop = min(plan.end, 100)
    positions = data.draw(st.lists(st.integers(0, stop - 1), max_size=30))
    located = plan.locate(positions)

    rows = rows_of(plan, stop)
    assert list(zip(*map(np.ndarray.tolist, located), strict=True)) == [rows[p] for p in positions]


def test_large_calls_equal_small_ones(numbers):
    plan = Plan({"a": numbers(10**6), "b": numbers(10)}, weights={"a": 3, "b": 1})
    positions = np.arange(20_000)
    pieces = [plan.locate(piece) for piece in np.array_split(positions, 9)]

    assert np.array_equal(plan.locate(positions), np.concatenate(pieces, axis=1))


def test_a_source_keeps_its_order_when_others_come_or_move(numbers):
    web, code, books = numbers(100), numbers(50), numbers(70)
    weights = {"books": 1, "code": 1, "web": 2}
    two = Plan({"web": web, "code": code}, weights={"web": 2, "code": 1}, seed=5)
    three = Plan({"books": books, "code": code, "web": web}, weights=weights, seed=5)

    def samples_of_code(plan):
        return [row[1:] for row in rows_of(plan, 400) if plan.names[row[0]] == "code"]

    assert samples_of_code(two)[:90] == samples_of_code(three)[:90]


def test_the_order_of_a_source_is_the_permutation_of_its_epoch(numbers):
    plan = Plan({"web": numbers(5000)}, weights={"web": 1}, seed=17)
    expected = permute(np.arange(5000), 5000, derive_key("shuffle", 17, "web", 3))

    assert np.array_equal(plan.locate(np.arange(15_000, 20_000))[2], expected)


def test_one_source_has_the_same_order_with_and_without_weights(numbers):
    rows = numbers(100)

    assert rows_of(Plan(rows), 500) == rows_of(Plan(rows, weights={"data": 2}), 500)


def test_epochs_and_seeds_have_orders_of_their_own(numbers):
    orders = {
        tuple(Plan(numbers(30), seed=seed).locate(range(30 * epoch, 30 * epoch + 30))[2].tolist())
        for seed in range(20)
        for epoch in range(20)
    }

    assert len(orders) == 400


def test_positions_of_huge_plans_are_exact(numbers):
    sources = {"web": numbers(10**12), "code": numbers(10**9)}
    plan = Plan(sources, weights={"web": 0.7, "code": 0.3}, seed=3)
    positions = np.array([0, 2**31, 2**40, 10**15, 2**62 - 1])

    for position, (source, epoch, sample) in zip(
        positions, zip(*plan.locate(positions), strict=True), strict=True
    ):
        assert plan.positions_of(plan.names[source], sample, epoch=int(epoch)) == [position]


def test_samples_are_records_for_people(numbers):
    plan = Plan({"web": numbers(9), "code": numbers(5)}, weights={"web": 1, "code": 1}, seed=1)
    samples = plan.samples(100, 103)

    assert [sample.position for sample in samples] == [100, 101, 102]
    assert samples[0] == Sample(100, "web", 5, samples[0].sample)
    assert (samples[0].sample,) == tuple(plan.locate([100])[2])


def test_temperature_evens_out_sizes(numbers):
    sources = {"web": numbers(10_000), "code": numbers(100)}

    assert Plan(sources, temperature=1).counts(10_100) == {"web": 10_000, "code": 100}
    assert Plan(sources, temperature=2).counts(1100) == {"web": 1000, "code": 100}
    assert Plan(sources, temperature=float("inf")).counts(100) == {"web": 50, "code": 50}


def test_weights_hold_until_the_schedule_changes_them(numbers):
    sources = {"web": numbers(50), "code": numbers(50)}
    plan = Plan(sources, weights={"web": 1, "code": 0}, schedule={10: {"web": 0, "code": 1}})

    assert plan.counts(15) == {"web": 10, "code": 5}


def test_a_run_ends_where_a_source_would_pass_max_epochs(numbers):
    sources = {"web": numbers(100), "code": numbers(10)}
    plan = Plan(sources, weights={"web": 1, "code": 1}, max_epochs={"code": 1.5})

    assert plan.end == 31
    assert plan.counts(plan.end) == {"web": 16, "code": 15}
    assert plan.positions_of("code", 3).size == plan.positions_of("code", 3, before=31).size


def test_redistribution_leaves_the_rest_to_the_others(numbers):
    sources = {"web": numbers(100), "code": numbers(10)}
    caps = Caps({"code": 2}, then="redistribute")
    plan = Plan(sources, weights={"web": 1, "code": 1}, max_epochs=caps)

    assert plan.counts(1000) == {"web": 980, "code": 20}
    assert plan.positions_of("code", 3, epoch=2).tolist() == []


class TestLength:
    def test_an_epoch_without_weights_has_a_length(self, numbers):
        plan = Plan({"a": numbers(7), "b": numbers(5)})

        assert len(plan) == plan.epoch_rows == 12

    def test_mixtures_have_none(self, numbers):
        plan = Plan({"a": numbers(7), "b": numbers(5)}, weights={"a": 1, "b": 1})

        assert plan.epoch_rows is None
        assert plan
        with pytest.raises(PlanError, match=r"This plan has no length.*number of steps\."):
            len(plan)


class TestDigest:
    def changed(self, numbers):
        sources = {"web": numbers(9), "code": numbers(5)}
        weights = {"web": 0.7, "code": 0.3}
        yield Plan(sources, weights=weights)
        yield Plan(sources, weights=weights, seed=1)
        yield Plan(sources, weights={"web": 0.6, "code": 0.4})
        yield Plan(sources)
        yield Plan(sources, temperature=2)
        yield Plan(sources, temperature=float("inf"))
        yield Plan(sources, weights=weights, shuffle="none")
        yield Plan(sources, weights=weights, shuffle="block")
        yield Plan(sources, weights=weights, shuffle=Block(rows=7))
        yield Plan(sources, weights=weights, schedule={5: {"web": 1, "code": 1}})
        yield Plan(sources, weights=weights, max_epochs=4)
        yield Plan(sources, weights=weights, max_epochs=Caps(4, "redistribute"))
        yield Plan(dict(reversed(sources.items())), weights=weights)
        yield Plan({"web": numbers(9, digest="other"), "code": numbers(5)}, weights=weights)
        yield Plan({"web": numbers(10), "code": numbers(5)}, weights=weights)
        yield Plan({"net": numbers(9), "code": numbers(5)}, weights={"net": 0.7, "code": 0.3})
        yield Plan(numbers(9, part_rows=[4, 5]), shuffle="part")
        yield Plan(numbers(9, part_rows=[5, 4]), shuffle="part")

    def test_binds_everything_the_order_depends_on(self, numbers):
        digests = [plan.digest for plan in self.changed(numbers)]

        assert len(set(digests)) == len(digests) == 18

    def test_is_of_the_description(self, numbers):
        for plan in self.changed(numbers):
            assert plan.digest == digest_json(json.loads(json.dumps(plan.describe())))

    def test_one_spelling_for_equal_arguments(self, numbers):
        sources = {"web": numbers(9), "code": numbers(5)}
        one = Plan(sources, weights={"web": 7, "code": 3}, max_epochs=4)
        other = Plan(sources, weights={"code": np.int64(3), "web": 7.0}, max_epochs=Caps(4.0))

        assert one.digest == other.digest
        assert Plan(sources, shuffle="block").digest == Plan(sources, shuffle=Block()).digest

    def test_description_names_what_is_bound(self, numbers):
        sources = {"web": numbers(9), "code": numbers(5)}
        plan = Plan(sources, weights={"web": 0.7, "code": 0.3}, seed=17)

        assert plan.describe() == {
            "format": 1,
            "seed": 17,
            "shuffle": {"mode": "full"},
            "sources": [
                {"name": "web", "rows": 9, "digest": "numbers"},
                {"name": "code", "rows": 5, "digest": "numbers"},
            ],
            "stages": [{"position": 0, "weights": {"web": 0.7, "code": 0.3}}],
        }


def test_a_plan_travels_to_other_processes(numbers):
    plan = Plan({"a": numbers(100), "b": numbers(50)}, weights={"a": 1, "b": 2})
    plan.sources = {}  # the rows of this test are made inside a fixture

    assert rows_of(pickle.loads(pickle.dumps(plan)), 50) == rows_of(plan, 50)


def test_threads_may_share_a_plan(numbers):
    plan = Plan({"a": numbers(10**6), "b": numbers(50)}, weights={"a": 1, "b": 2})
    starts = [1000 * number for number in range(32)]
    expected = [rows_of(plan, start + 1000, start) for start in starts]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda start: rows_of(plan, start + 1000, start), starts))

    assert found == expected


@pytest.mark.torture
def test_whole_epochs_of_large_plans_hold_each_sample_once(numbers):
    for mode in ("full", "block", "none"):
        for size in (10**6, 2**20, 2**20 + 1, 3_141_592):
            plan = Plan(numbers(size), shuffle=mode, seed=size)
            samples = plan.locate(np.arange(size, 2 * size))[2]
            assert np.array_equal(np.bincount(samples, minlength=size), np.ones(size, dtype=int))


def test_a_plan_of_many_sources_shows_five_and_the_number_of_the_others(numbers):
    plan = Plan({f"s{number}": numbers(3) for number in range(7)})

    assert "s4: 3 rows and 2 more; each once per epoch" in repr(plan)


def test_a_stage_of_many_sources_shows_its_five_largest_shares(numbers):
    names = "abcdefg"
    later = dict.fromkeys(names, 10)
    plan = Plan(
        {name: numbers(9) for name in names}, schedule={0: dict.fromkeys(names, 1), 8: later}
    )

    five = ", ".join(f"{name} 14.29 %" for name in "abcde")
    assert str(plan).count(f"{five}, and 2 more") == 2


def test_each_source_is_described_with_its_own_parts(numbers):
    sources = {"a": numbers(9, part_rows=[4, 5]), "b": numbers(5, part_rows=[2, 3])}
    described = Plan(sources, shuffle="part").describe()["sources"]

    assert [each["parts"] for each in described] == [digest_json([4, 5]), digest_json([2, 3])]
