from math import inf, nan

import pytest

from penstock.errors import PlanError
from penstock.order.arguments import Caps, quoted
from penstock.order.plan import Plan
from penstock.order.shuffle import Block

WEB_CODE = {"web": 1, "code": 1}

REFUSED = {
    "no source": (
        {"rows": {}},
        "A plan needs at least one source; this one has none.",
    ),
    "a name that is none": (
        {"rows": {"": 5}},
        "The name of a source must be a string that is not empty; got ''.",
    ),
    "rows that nothing tells from others": (
        {"rows": [1, 2, 3]},
        'Source "data" must be rows, such as Windows("stores/web", length=1024); got a list. '
        'A mixture of several is Plan({"web": …, "code": …}, weights={…}).',
    ),
    "weight missing": (
        {"weights": {"web": 1}},
        'weights= has no weight for "code". Write "code": 0 to leave a source out.',
    ),
    "weight of no source": (
        {"weights": {"web": 1, "code": 1, "books": 2}},
        'weights= names "books", but the sources of this plan are "web", "code".',
    ),
    "weight of no source, later": (
        {"weights": WEB_CODE, "schedule": {9: {"web": 1, "code": 1, "books": 2}}},
        'The stage at position 9 names "books", but the sources of this plan are "web", "code".',
    ),
    "negative weight": (
        {"weights": {"web": 1, "code": -1}},
        'The weight of source "code" is -1; a weight must be a finite number, 0 or more.',
    ),
    "weight that is not a number": (
        {"weights": {"web": nan, "code": 1}},
        'The weight of source "web" is nan; a weight must be a finite number, 0 or more.',
    ),
    "infinite weight": (
        {"weights": {"web": inf, "code": 1}},
        'The weight of source "web" is inf; a weight must be a finite number, 0 or more.',
    ),
    "no weight above zero": (
        {"weights": {"web": 0, "code": 0}},
        "All 2 weights are 0, so there is nothing to read. Give at least one source a weight "
        "above 0.",
    ),
    "weights and temperature": (
        {"weights": WEB_CODE, "temperature": 2},
        "weights={'web': 1, 'code': 1} and temperature=2 cannot be combined. Pass only one "
        "of them.",
    ),
    "temperature below zero": (
        {"temperature": -1},
        "temperature must be above 0; got -1. With 1, shares are in proportion to sizes; higher "
        "temperatures bring them closer together.",
    ),
    "two beginnings": (
        {"weights": WEB_CODE, "schedule": {0: WEB_CODE}},
        "The schedule has a stage at position 0, but weights= or temperature= already say how "
        "to mix from there. Leave one of them out.",
    ),
    "no beginning": (
        {"schedule": {10: WEB_CODE}},
        "The first stage begins at 10; it must begin at position 0.",
    ),
    "a stage before the first": (
        {"weights": WEB_CODE, "schedule": {-10: WEB_CODE}},
        "A stage that begins at -10 cannot follow one that begins at 0: each must begin later "
        "than the one before it, and below 2^62.",
    ),
    "a stage without weights": (
        {"weights": WEB_CODE, "schedule": {10: ["web"]}},
        "The stage at position 10 is ['web']; it must be a dict with the weight of each source by "
        "its name.",
    ),
    "max_epochs without weights": (
        {"max_epochs": 3},
        "max_epochs=3 needs weights=. Without weights, all sources have the same number of epochs; "
        "pass it to the loader: Loader(plan, …, epochs=2).",
    ),
    "max_epochs of no source": (
        {"weights": WEB_CODE, "max_epochs": {"books": 3}},
        'max_epochs names "books", but the sources of this plan are "web", "code".',
    ),
    "max_epochs of nothing": (
        {"weights": WEB_CODE, "max_epochs": {"web": 0}},
        "max_epochs of web must be a finite number above 0; got 0. To read a source without a "
        "limit, leave it out of max_epochs.",
    ),
    "max_epochs of less than a row": (
        {"weights": WEB_CODE, "max_epochs": 0.01},
        'max_epochs of "web" is 0.01: that is less than one row, because the source has 9 rows. '
        "Set its weight to 0, or raise its max_epochs.",
    ),
    "parts unknown": (
        {"shuffle": "part"},
        'shuffle="part" needs the parts of source "web", but it has no part_rows. Use '
        'shuffle="full" or shuffle="block".',
    ),
    "no such mode": (
        {"shuffle": "buffer"},
        'shuffle must be "full", "block" (or Block(rows=…, group=…)), "part" or "none"; got '
        "'buffer'.",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses_what_cannot_be_meant(numbers, case):
    arguments, message = REFUSED[case]
    arguments = {"rows": {"web": numbers(9), "code": numbers(5)}, **arguments}
    with pytest.raises(PlanError) as caught:
        Plan(arguments.pop("rows"), **arguments)

    assert str(caught.value) == message


def test_refuses_sources_without_rows(numbers):
    sources = {"web": numbers(9), "code": numbers(0)}
    with pytest.raises(PlanError, match=r'^Source "code" has no rows to read. Leave it out'):
        Plan(sources)
    with pytest.raises(
        PlanError, match=r'^Source "code" has no rows, but weight 1 from position 0'
    ):
        Plan(sources, weights=WEB_CODE)


def test_a_source_without_rows_may_have_weight_zero(numbers):
    sources = {"web": numbers(9), "code": numbers(0)}

    assert Plan(sources, weights={"web": 1, "code": 0}).counts(10) == {"web": 10, "code": 0}
    assert Plan(sources, temperature=2, max_epochs=4).counts(10) == {"web": 10, "code": 0}


def test_refuses_parts_that_do_not_add_up(numbers):
    message = r'^The parts of source "data" have 8 rows, but it has 9. part_rows must'
    with pytest.raises(PlanError, match=message):
        Plan(numbers(9, part_rows=[4, 4]), shuffle="part")


def test_refuses_positions_that_are_not_there(numbers):
    plan = Plan({"web": numbers(9), "code": numbers(5)}, weights=WEB_CODE)
    for positions, message in (
        ([-1], "-1 is out of range"),
        ([2**62], "4,611,686,018,427,387,904 is out of range"),
        ([0, -3, 1, -2], "-3 is out of range"),
        ([0.5], "Positions and samples must be integers; got float64."),
    ):
        with pytest.raises(PlanError, match=message):
            plan.locate(positions)


def test_past_the_end_names_source_cap_and_position(numbers):
    plan = Plan({"web": numbers(9), "code": numbers(5)}, weights=WEB_CODE, max_epochs={"code": 4})
    with pytest.raises(PlanError) as caught:
        plan.locate([0, 1000])

    assert str(caught.value) == (
        f"Position 1,000 is after the end of this plan. The plan ends at position {plan.end}, "
        'because "code" has reached its max_epochs of 4. Ask for fewer rows, raise max_epochs, '
        'or let other sources continue: Caps(…, "redistribute").'
    )


def test_past_the_end_of_everything(numbers):
    caps = Caps(2, then="redistribute")
    plan = Plan({"web": numbers(9), "code": numbers(5)}, weights=WEB_CODE, max_epochs=caps)

    assert plan.end == 28
    with pytest.raises(
        PlanError, match="at position 28, because every source has reached its max_epochs"
    ):
        plan.locate([28])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("books", 0, 0), 'There is no source "books"; this plan has "web", "code".'),
        (("code", 5, 0), 'Source "code" has no row 5; its 5 rows are numbered from 0.'),
        (("code", -1, 0), 'Source "code" has no row -1; its 5 rows are numbered from 0.'),
        (("code", 6, 0), 'Source "code" has no row 6; its 5 rows are numbered from 0.'),
        (
            ("code", 1, 2**62 + 1),
            "There is no epoch 4,611,686,018,427,387,905; they are 0 to 2^62 - 1.",
        ),
        (("code", 1, -1), "There is no epoch -1; they are 0 to 2^62 - 1."),
        (
            ("code", 1),
            'Row 1 of "code" occurs in every epoch, without end. Give epoch= or before=.',
        ),
    ],
)
def test_refuses_samples_that_are_not_there(numbers, arguments, message):
    plan = Plan({"web": numbers(9), "code": numbers(5)}, weights=WEB_CODE)
    with pytest.raises(PlanError) as caught:
        plan.positions_of(*arguments)

    assert str(caught.value) == message


def test_refuses_to_list_more_positions_than_anyone_reads(numbers):
    with pytest.raises(PlanError) as caught:
        Plan(numbers(9)).positions_of("data", 2, before=10**15)

    assert str(caught.value) == (
        'Row 2 of "data" occurs 111,111,111,111,112 times before position 1,000,000,000,000,000. '
        "Ask for an earlier position, or for one epoch with epoch=."
    )


def test_refuses_to_count_more_rows_than_there_are(numbers):
    plan = Plan(numbers(9), weights={"data": 1}, max_epochs=2)
    with pytest.raises(PlanError, match="from 0 to 18, where this plan ends; got 19"):
        plan.counts(19)


def test_refuses_another_way_to_go_on():
    with pytest.raises(PlanError) as caught:
        Caps(4, then="stop")

    assert str(caught.value) == ('Caps(then=…) must be "error" or "redistribute"; got \'stop\'.')


def test_long_lists_of_names_are_cut():
    assert quoted("abcdefg") == '"a", "b", "c", "d", "e" and 2 more'
    assert quoted("abcdefghijkl") == '"a", "b", "c", "d", "e" and 7 more'


def test_caps_and_blocks_are_values():
    assert Caps(4) == Caps(4)
    assert Block(rows=7) == Block(rows=7)
