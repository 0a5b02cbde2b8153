"""A continued plan has other weights or sources from a position on, and equal rows before it."""

import pickle
from fractions import Fraction

import numpy as np
import pytest

import penstock as ps
from penstock.errors import PlanError
from penstock.order import Caps


class Lines(list):
    """Rows that a plan can order."""

    @property
    def digest(self):
        return f"{len(self)} lines"


def lines(num_rows):
    return Lines(range(num_rows))


SHUFFLES = ["full", "block", "none"]
GOLDEN = "a9 a30 a21 b4 a3 b9 b8 b1 b0 b2 a37 b6 c3 b7 a26 b6"
GOLDEN_OF_ONE_SOURCE = "a2 a0 a5 a4 a0 a2 c0 a1 c9 c1 a3 c11 c3 a7 c10 c5 a6 c2 c6 a1"
GOLDEN_WITHOUT_WEIGHTS = "b4 a0 a1 a4 b3 a2 b1 a5 b2 a3 b0 a3 b0 a4"


def random_plan(random):
    """A plan with or without weights, schedules and caps."""
    names = [f"source {number}" for number in range(random.integers(1, 5))]
    sources = {name: lines(int(random.integers(1, 60))) for name in names}
    options = {"seed": int(random.integers(100)), "shuffle": str(random.choice(SHUFFLES))}

    def weights():
        drawn = {name: int(random.integers(0, 6)) for name in names}
        return drawn if any(drawn.values()) else dict.fromkeys(names, 1)

    if random.random() < 0.65:
        options["weights"] = weights()
        if random.random() < 0.4:
            starts = sorted({int(random.integers(1, 150)) for _ in range(3)})
            options["schedule"] = {start: weights() for start in starts}
        if random.random() < 0.3:
            then = str(random.choice(["error", "redistribute"]))
            options["max_epochs"] = Caps(float(random.integers(1, 6)), then)
    return ps.Plan(sources, **options)


def random_continuations(random, plan, most=5):
    """Yield a plan with one change more at a time, the plan before it, and the position."""
    for _ in range(random.integers(1, most + 1)):
        position = int(random.integers(0, 200))
        if position >= plan.end:
            continue
        names = [name for name in plan.names if random.random() < 0.8] or [plan.names[0]]
        sources = None
        if random.random() < 0.5:
            sources = {name: plan.sources[name] for name in names}
            if random.random() < 0.7:
                sources[f"new {len(plan.names)}"] = lines(int(random.integers(1, 60)))
        weights = {name: int(random.integers(1, 6)) for name in sources or names}
        before = plan
        plan = plan.continued(position, weights=weights, sources=sources)
        yield before, position, plan, {name for name, weight in weights.items() if weight}


def check_epochs(plan, seen):
    """No row of a source is repeated before its epoch ends, and none is lost in it."""
    for name, size in zip(plan.names, plan.sizes, strict=True):
        epochs = {}
        for each in seen:
            if each.source == name:
                epochs.setdefault(each.epoch, []).append(each.sample)
        # Epochs follow each other; all but the last one have every row, and each row once.
        assert list(epochs) == list(range(len(epochs)))
        for epoch, samples in epochs.items():
            assert len(set(samples)) == len(samples) <= size
            assert len(samples) == size or epoch == len(epochs) - 1


def check_inverse(plan, end):
    """`positions_of`, `counts` and `outlook` agree with all positions, one by one."""
    found = plan.samples(0, end)
    for name, size in zip(plan.names, plan.sizes, strict=True):
        for sample in range(size):
            expected = [
                each.position for each in found if (each.source, each.sample) == (name, sample)
            ]
            assert sorted(plan.positions_of(name, sample, before=end).tolist()) == expected
    for num_rows in {0, 1, end // 3, end // 2, end}:
        counts = plan.counts(num_rows)
        assert sum(counts.values()) == num_rows
        for name in plan.names:
            assert counts[name] == sum(each.source == name for each in found[:num_rows])
    for each in plan.outlook(end):
        again = [row.position for row in found if row.source == each.source and row.epoch > 0]
        assert (each.repeats_at is None) == (not again)
        # An epoch of a plan without weights begins before each of its sources has a row in it.
        assert not again or each.repeats_at <= again[0]


def check_continuations(seed):
    random = np.random.default_rng(seed)
    plan, num = random_plan(random), 0
    for before, position, after, read in random_continuations(random, plan):
        assert after.samples(0, position) == before.samples(0, position)
        new = {name: 0 for name in after.names if name not in before.names}
        assert after.counts(position) == before.counts(position) | new
        later = after.samples(position, min(after.end, position + 50))
        assert {each.source for each in later} <= read
        plan, num = after, num + 1
    end = min(plan.end, 500)
    check_epochs(plan, plan.samples(0, end))
    check_inverse(plan, end)
    assert pickle.loads(pickle.dumps(plan)).samples(0, end) == plan.samples(0, end)
    return num


@pytest.mark.parametrize("seed", range(30))
def test_random_changes_change_nothing_before_them_and_lose_and_repeat_nothing(seed):
    check_continuations(seed)


@pytest.mark.torture
def test_many_random_changes_change_nothing_before_them_and_lose_and_repeat_nothing(figure):
    found = sum(check_continuations(seed) for seed in range(10_000, 10_400))
    figure(f"400 random plans, {found:,} changes: nothing changed before, repeated or lost")


def mixture(**options):
    return ps.Plan({"a": lines(40), "b": lines(10)}, weights={"a": 3, "b": 1}, seed=17, **options)


def as_text(samples):
    return " ".join(f"{each.source}{each.sample}" for each in samples)


def test_the_order_of_a_continued_plan_is_the_same_for_ever():
    plan = mixture().continued(8, weights={"a": 1, "b": 1}).continued(12, weights={"a": 0, "b": 1})
    plan = plan.continued(
        16,
        sources={**plan.sources, "c": lines(5)},
        weights={"a": 1, "b": 1, "c": Fraction(1, 3)},
    )
    one = ps.Plan({"a": lines(8)}, seed=5)
    one = one.continued(20, sources={"a": lines(8), "c": lines(12)}, weights={"a": 1, "c": 2})
    joint = ps.Plan({"a": lines(6), "b": lines(5)}, seed=5).continued(5, weights={"a": 1, "b": 1})

    assert as_text(plan.samples(6, 22)) == GOLDEN
    assert as_text(one.samples(14, 34)) == GOLDEN_OF_ONE_SOURCE
    assert as_text(joint.samples(0, 14)) == GOLDEN_WITHOUT_WEIGHTS


def test_the_digest_is_that_of_the_whole_chain():
    plan = mixture()
    chain = plan.continued(8, weights={"a": 1, "b": 1}).continued(12, weights={"b": 2})
    again = mixture().continued(8, weights={"b": 1.0, "a": 1}).continued(12, weights={"b": 2})
    others = [
        plan,
        plan.continued(8, weights={"a": 1, "b": 1}),
        plan.continued(12, weights={"b": 2}),
        plan.continued(8, weights={"a": 2, "b": 1}).continued(12, weights={"b": 2}),
        chain.continued(12, weights={"b": 1, "c": 1}, sources={"b": lines(10), "c": lines(3)}),
    ]

    assert again.digest == chain.digest
    assert len({chain.digest, *(each.digest for each in others)}) == 1 + len(others)
    assert [(each.digest, end) for each, end in chain.ancestors()] == [
        (others[1].digest, 12),
        (plan.digest, 8),
    ]


def test_a_change_before_an_earlier_one_replaces_it():
    plan = mixture()
    twice = plan.continued(20, weights={"b": 1}).continued(8, weights={"a": 1, "b": 1})

    once = plan.continued(8, weights={"a": 1, "b": 1})
    assert twice.samples(0, 60) == once.samples(0, 60)
    assert [end for _, end in twice.ancestors()] == [8, 8]


def test_a_source_without_a_weight_continues_where_it_stopped_when_it_has_one_again():
    plan = mixture().continued(20, weights={"b": 1}).continued(32, weights={"a": 1})
    rows = [each.sample for each in plan.samples(0, 57) if each.source == "a"]

    assert {each.source for each in plan.samples(20, 32)} == {"b"}
    assert {each.source for each in plan.samples(32, 57)} == {"a"}
    assert sorted(rows) == list(range(40))


def test_a_new_source_begins_at_its_first_row():
    sources = {"b": lines(10), "c": lines(9)}  # without "a"
    plan = mixture().continued(20, weights={"b": 1, "c": 2}, sources=sources)
    alone = ps.Plan({"c": lines(9)}, weights={"c": 1}, seed=17)
    rows = [each[2:] for each in plan.samples(0, 100) if each.source == "c"]

    assert rows == [each[2:] for each in alone.samples(0, len(rows))]
    assert "a" not in {each.source for each in plan.samples(20, 100)}


def test_the_error_does_not_grow_with_the_number_of_changes():
    random = np.random.default_rng(3)
    plan = ps.Plan({name: lines(500) for name in "abcde"}, weights=dict.fromkeys("abcde", 1))
    asked = np.zeros(5)
    for number in range(300):
        weights = random.integers(1, 20, 5)
        asked += 7 * weights / weights.sum()
        plan = plan.continued(7 * number, weights=dict(zip("abcde", weights.tolist(), strict=True)))

        counts = [*plan.counts(7 * (number + 1)).values()]
        assert np.abs(counts - asked).max() < 3.1


def test_sources_that_join_leave_earlier_changes_of_weights_as_they_were():
    """The rows after a change depend on the number of sources that there were."""
    plan = ps.Plan(
        {"a": lines(99), "b": lines(99), "c": lines(99)}, weights={"a": 5, "b": 3, "c": 3}
    )
    for position, weights in ((7, (3, 1, 7)), (18, (11, 2, 3)), (301, (1, 9, 5))):
        plan = plan.continued(position, weights=dict(zip("abc", weights, strict=True)))
    sources = {**plan.sources, **{f"new {number}": lines(20) for number in range(40)}}
    later = plan.continued(700, weights=dict.fromkeys(sources, 1), sources=sources)

    assert later.samples(0, 700) == plan.samples(0, 700)
    for sample in range(0, 99, 7):
        found = plan.positions_of("b", sample, before=700)
        assert later.positions_of("b", sample, before=700).tolist() == found.tolist()


def test_new_weights_end_a_schedule():
    scheduled = ps.Plan(
        {"a": lines(40), "b": lines(10), "c": lines(9)},
        schedule={0: {"a": 1, "b": 1, "c": 0}, 40: {"a": 1, "b": 0, "c": 3}},
    )

    assert scheduled.counts(90)["c"] > 0
    assert scheduled.continued(20, weights={"a": 1, "b": 1}).counts(90)["c"] == 0


def test_caps_hold_across_changes():
    ends = mixture(max_epochs=2).continued(10, weights={"a": 1, "b": 1})
    shared = mixture(max_epochs=Caps(2, "redistribute")).continued(10, weights={"a": 1, "b": 1})

    later = mixture(max_epochs=2).continued(10, weights={"a": 1, "b": 0})

    assert ends.counts(ends.end)["b"] == 20
    assert later.end > mixture(max_epochs=2).end > ends.end
    with pytest.raises(PlanError, match=r'because "b" has reached its max_epochs of 2'):
        ends.locate([ends.end])
    assert shared.counts(shared.end) == {"a": 80, "b": 20}


def test_the_tree_shows_from_where_weights_apply():
    joint = ps.Plan({"a": lines(6), "b": lines(5)}).continued(5, weights={"a": 1, "b": 3})

    assert "from position 8: b 66.67 %, a 33.33 %" in str(
        mixture().continued(8, weights={"a": 0.5, "b": 1})
    )
    assert "├── from position 0: a, b\n└── from position 5: b 75 %, a 25 %" in str(joint)


def test_mistakes_are_explained():
    plan, ends = mixture(), mixture(max_epochs=2)
    both = {"a": 1, "b": 1}
    for made, position, options, message in (
        (plan, -1, {"weights": both}, "from position -1: positions begin at 0, and this plan has"),
        (ends, ends.end, {"weights": both}, rf"from position {ends.end}: .*ends at position"),
        (plan, 1.5, {"weights": both}, "position=1.5 is not a whole number"),
        (plan, 9, {"weights": [1, 1]}, r"weights=\[1, 1\] must be a dict"),
        (plan, 9, {"weights": {}}, "All 2 weights are 0"),
        (plan, 9, {"weights": {"a": -1}}, 'The weight of source "a" is -1'),
        (plan, 9, {"weights": {"x": 1}}, r'weights= names "x", but the sources .* are "a", "b"'),
        (plan, 9, {"weights": both, "sources": {"a": lines(40)}}, 'weights= names "b"'),
        (
            plan,
            9,
            {"weights": both, "sources": {**plan.sources, "c": lines(2)}},
            'weights= has no weight for "c", which sources= names',
        ),
        (plan, 9, {"weights": both, "sources": {"a": lines(9), "b": lines(10)}}, "has other rows"),
        (plan, 9, {"weights": {"c": 1}, "sources": {"c": [1]}}, "must be rows"),
        (plan, 9, {"weights": {"c": 1}, "sources": {"c": lines(0)}}, '"c" has no rows'),
    ):
        with pytest.raises((PlanError, TypeError), match=message):
            made.continued(position, **options)
