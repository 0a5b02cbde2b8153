from textwrap import dedent

from penstock.order.arguments import Caps
from penstock.order.plan import Plan


def picture(text):
    return dedent(text).strip()


def test_weights_asked_and_delivered(numbers):
    sources = {"web": numbers(80_000, num_tokens=819_200), "code": numbers(1000, num_tokens=7)}
    plan = Plan(sources, weights={"web": 0.7, "code": 0.3}, seed=17)

    assert plan.tree(10_000) == picture("""
        plan ad156226, seed 17, shuffle full; in the first 10,000 rows:
        ├── web   80,000 rows  819,200 tokens  asked 70 %  delivered 7,000 rows  70 %  0.09 epochs
        └── code   1,000 rows        7 tokens  asked 30 %  delivered 3,000 rows  30 %  3.00 epochs
        """)


def test_stages_and_sources_without_tokens(numbers):
    sources = {"web": numbers(80), "code": numbers(10)}
    caps = Caps({"code": 2}, then="redistribute")
    plan = Plan(sources, weights={"web": 0.7, "code": 0.3}, max_epochs=caps)

    assert str(plan) == picture("""
        plan 91d2c986, seed 0, shuffle full; in the first 90 rows:
        ├── web   80 rows  asked 70 %  delivered 70 rows  77.78 %  0.88 epochs
        ├── code  10 rows  asked 30 %  delivered 20 rows  22.22 %  2.00 epochs
        ├── from position 0: web 70 %, code 30 %
        └── from position 65: web 100 %
        """)


def test_one_source(numbers):
    assert str(Plan(numbers(1000))) == picture("""
        plan 7cf07a07, seed 0, shuffle full; in the first 1,000 rows:
        └── data  1,000 rows  asked once an epoch  delivered 1,000 rows  100 %  1.00 epochs
        """)


def test_many_stages_are_cut(numbers):
    names = [str(number) for number in range(30)]
    sources = {name: numbers(10 + int(name)) for name in names}
    weights = dict.fromkeys(names, 1)
    plan = Plan(sources, weights=weights, max_epochs=Caps(1, then="redistribute"))
    lines = str(plan).splitlines()

    assert len(lines) == 1 + 30 + 10 + 1
    assert lines[-1] == "└── … and 20 more stages"
    assert lines[31].endswith("3.333 %, and 25 more")


def test_no_rows_are_drawn_too(numbers):
    plan = Plan({"a": numbers(5), "b": numbers(0)}, weights={"a": 1, "b": 0})

    assert "delivered 0 rows" in plan.tree(0)
