"""Amendments change a plan from a position on, and nothing before it."""

from fractions import Fraction

import numpy as np
import pytest

import penstock as ps
from penstock.errors import PlanError
from penstock.order import Caps
from penstock.order.amend import sources_at, weights_from_json
from penstock.order.skips import Skips


class Lines(list):
    """Rows that a plan can order."""

    @property
    def digest(self):
        return f"{len(self)} lines"


def lines(num_rows):
    return Lines(range(num_rows))


SHUFFLES = ["full", "block", "none"]
GOLDEN = "a9 a30 a21 b4 a3 b9 b1 b0 b2 b6 a36 b7 c3 b6 a33 b9"
DIGEST = "c538008674009acd7b55622d99d5247e08008cbf4830afdf19f80294cfd5b930"


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


def random_amendment(random, plan, position):
    """Arguments of `Plan.amend`."""
    kind = random.choice(["weights", "add", "drop", "skip"])
    options = {}
    if kind == "skip" or random.random() < 0.2:
        options["skip"] = int(random.integers(1, 40))
    start = plan._skips.after(position) + options.get("skip", 0)
    read = set(sources_at(plan, plan._settings.stages, start))
    left = set(read)
    if kind == "drop" and len(read) > 1 and plan.is_weighted:
        options["drop"] = [str(random.choice(sorted(read)))]
        left -= set(options["drop"])
    if kind == "add" and (plan.is_weighted or len(plan.names) == 1):
        idle = [name for name in plan.names if name not in read]
        name = f"added {len(plan.names)}"
        if idle and random.random() < 0.5:
            name = str(random.choice(idle))
        is_new = name not in plan.names
        options["add"] = {name: lines(int(random.integers(1, 60))) if is_new else None}
        left.add(name)
    with_weights = plan.is_weighted or len(plan.names) == 1
    if with_weights and (kind in ("weights", "add") or random.random() < 0.3):
        options["weights"] = {name: int(random.integers(1, 6)) for name in sorted(left)}
    return options


def leaves_nothing(plan, position, dropped):
    """Whether a later stage of the schedule has no source but these."""
    start, stages = plan._skips.after(position), plan._settings.stages
    later = [each for each in stages if each.position > start]
    return any(set(sources_at(plan, [each], each.position)) <= set(dropped) for each in later)


def random_amendments(random, plan, most=5):
    """Yield a plan with one amendment more at a time, and what each left out."""
    position = 0
    for _ in range(random.integers(1, most + 1)):
        position += int(random.integers(0, 60)) * int(random.random() < 0.8)
        if position >= min(plan.end, 400):
            return
        options = random_amendment(random, plan, position)
        if not options:
            continue
        skip = options.get("skip", 0)
        if position + skip >= plan.end:
            continue
        before, left_out = plan, plan.samples(position, position + skip)
        if "drop" in options and leaves_nothing(plan, position + skip, options["drop"]):
            continue
        plan = before.amend(position, **options)
        yield before, position, plan, left_out


def check_before(before, position, plan):
    """Rows before an amendment are those of the plan that was amended."""
    assert plan.samples(0, position) == before.samples(0, position)
    new = {name: 0 for name in plan.names if name not in before.names}
    assert plan.counts(position) == before.counts(position) | new
    assert plan.cursors(position) == before.cursors(position) | new


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
    """`positions_of`, `counts`, `cursors` and `outlook` agree with all positions, one by one."""
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
        if each.repeats_at is not None and not plan._skips.skips:
            assert each.repeats_at == again[0] or not plan.is_weighted


def check_amendments(seed):
    random = np.random.default_rng(seed)
    plan, skipped, num = random_plan(random), [], 0
    for before, position, amended, left_out in random_amendments(random, plan):
        check_before(before, position, amended)
        skipped += [(position, each) for each in left_out]
        plan, num = amended, num + 1
    end = min(plan.end, 500)
    rows = plan.samples(0, end)
    # What was left out at a position comes before the row at that position.
    ordered = []
    for each in rows:
        ordered += [left_out for at, left_out in skipped if at == each.position]
        ordered.append(each)
    check_epochs(plan, ordered)
    check_inverse(plan, end)
    cursors = plan.cursors(end)
    for name in plan.names:
        assert cursors[name] == sum(each.source == name for each in ordered)
    return num


@pytest.mark.parametrize("seed", range(15))
def test_random_amendments_change_nothing_before_them_and_lose_and_repeat_nothing(seed):
    check_amendments(seed)


@pytest.mark.torture
def test_many_random_amendments_change_nothing_before_them_and_lose_and_repeat_nothing(figure):
    found = sum(check_amendments(seed) for seed in range(10_000, 12_000))
    figure(f"2,000 random plans, {found:,} amendments: nothing changed before, repeated or lost")


def mixture(**options):
    return ps.Plan({"a": lines(40), "b": lines(10)}, weights={"a": 3, "b": 1}, seed=17, **options)


def test_the_order_of_an_amended_plan_is_the_same_for_ever():
    plan = mixture().amend(8, weights={"a": 1, "b": 1}).amend(12, skip=3, drop=["a"])
    plan = plan.amend(
        16, add={"c": lines(5), "a": None}, weights={"a": 1, "b": 1, "c": Fraction(1, 3)}
    )

    found = [f"{each.source}{each.sample}" for each in plan.samples(6, 22)]
    assert " ".join(found) == GOLDEN
    assert plan.digest == DIGEST


def test_a_dropped_source_continues_where_it_stopped_when_it_is_added_again():
    plan = mixture().amend(20, drop=["a"]).amend(32, add={"a": None}, weights={"a": 1, "b": 0})
    rows = [each.sample for each in plan.samples(0, 57) if each.source == "a"]

    assert {each.source for each in plan.samples(20, 32)} == {"b"}
    assert {each.source for each in plan.samples(32, 57)} == {"a"}
    assert sorted(rows) == list(range(40))


def test_an_added_source_begins_at_its_first_row():
    plan = mixture().amend(20, add={"c": lines(9)}, weights={"a": 1, "b": 1, "c": 2})
    alone = ps.Plan({"c": lines(9)}, weights={"c": 1}, seed=17)
    rows = [each[2:] for each in plan.samples(0, 100) if each.source == "c"]

    assert rows == [each[2:] for each in alone.samples(0, len(rows))]


def test_sources_that_join_leave_earlier_changes_of_weights_as_they_were():
    """The rows after a change depend on the number of sources that there were."""
    plan = ps.Plan(
        {"a": lines(99), "b": lines(99), "c": lines(99)}, weights={"a": 5, "b": 3, "c": 3}
    )
    for position, weights in ((7, (3, 1, 7)), (18, (11, 2, 3)), (301, (1, 9, 5))):
        plan = plan.amend(position, weights=dict(zip("abc", weights, strict=True)))
    new = {f"new {number}": lines(20) for number in range(40)}
    amended = plan.amend(700, add=new, weights=dict.fromkeys([*plan.names, *new], 1))

    assert amended.samples(0, 700) == plan.samples(0, 700)
    for sample in range(0, 99, 7):
        found = plan.positions_of("b", sample, before=700)
        assert amended.positions_of("b", sample, before=700).tolist() == found.tolist()


def test_weights_of_an_amendment_end_a_schedule_and_dropping_a_source_does_not():
    plan = mixture().amend(10, weights={"a": 1, "b": 1})
    scheduled = ps.Plan(
        {"a": lines(40), "b": lines(10), "c": lines(9)},
        schedule={0: {"a": 1, "b": 1, "c": 0}, 40: {"a": 1, "b": 0, "c": 3}},
    )

    assert plan.counts(90)["b"] in range(41, 45)
    dropped = scheduled.amend(20, drop=["a"])
    assert {each.source for each in dropped.samples(20, 40)} == {"b"}
    assert {each.source for each in dropped.samples(40, 90)} == {"c"}
    changed = scheduled.amend(20, weights={"a": 1, "b": 1})
    assert changed.counts(90)["c"] == 0


def test_caps_hold_across_amendments():
    ends = mixture(max_epochs=2).amend(10, weights={"a": 1, "b": 1})
    shared = mixture(max_epochs=Caps(2, "redistribute")).amend(10, weights={"a": 1, "b": 1})

    later = mixture(max_epochs=2).amend(10, weights={"a": 1, "b": 0})

    assert ends.counts(ends.end)["b"] == 20
    assert later.end > mixture(max_epochs=2).end > ends.end
    with pytest.raises(PlanError, match=r'because "b" has reached its max_epochs of 2'):
        ends.locate([ends.end])
    assert shared.counts(shared.end) == {"a": 80, "b": 20}


def test_the_tree_lists_amendments():
    tree = str(mixture().amend(8, weights={"a": 0.5, "b": 1}).amend(12, skip=3, drop=["a"]))

    assert "from position 8: b 66.67 %, a 33.33 %" in tree
    assert "amendment 1: from position 8: weights a 0.5, b 1" in tree
    assert tree.endswith("amendment 2: from position 12: drops a; skips 3 rows")


def test_skips_at_one_position_are_one():
    plan = mixture()
    once, twice = plan.amend(9, skip=5), plan.amend(9, skip=2).amend(9, skip=3)

    assert [each[1:] for each in once.samples(9, 60)] == [each[1:] for each in plan.samples(14, 65)]
    assert twice.samples(0, 60) == once.samples(0, 60)
    assert Skips([(9, 5)]).skips == twice._skips.skips


def test_mistakes_are_explained():
    plan = mixture(max_epochs=2).amend(20, weights={"a": 1, "b": 1})
    single = ps.Plan({"a": lines(8), "b": lines(8)})
    for made, options, message in (
        (plan, {"position": 10, "skip": 1}, "cannot begin at position 10: the last amendment be"),
        (plan, {"position": -1, "skip": 1}, "cannot begin at position -1"),
        (plan, {"position": plan.end, "skip": 1}, f"the plan ends at position {plan.end:,}"),
        (plan, {"position": 20, "skip": 99}, "leaves nothing to read"),
        (plan, {"position": 20, "skip": -1}, "0 or more"),
        (plan, {"position": 20}, "changes nothing"),
        (plan, {"position": 20, "drop": ["a"], "weights": {"a": 1, "b": 1}}, "dropped and have a"),
        (plan, {"position": 20, "exclude": {"a": [(0, 5)]}}, "has no documents"),
        (plan, {"position": 20, "exclude": {"x": [(0, 5)]}}, 'exclude names "x"'),
        (plan, {"position": 20, "add": {"c": [1]}}, "must be rows"),
        (single, {"position": 3, "weights": {"a": 1, "b": 2}}, "This plan has no weights"),
    ):
        with pytest.raises(PlanError, match=message):
            made.amend(**options)


def test_a_weight_of_a_ledger_must_be_a_number():
    assert weights_from_json({"a": "1/3", "b": 0.5}) == {"a": Fraction(1, 3), "b": 0.5}
    with pytest.raises(ValueError, match="the weight of a is None"):
        weights_from_json({"a": None})
