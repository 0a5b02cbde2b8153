from decimal import Decimal
from fractions import Fraction
from math import inf, nan

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import PlanError
from penstock.order.weights import exact_weights, tempered_weights


@given(st.lists(st.one_of(st.integers(0, 9), st.floats(0, 1e9)), min_size=1).filter(any))
def test_integers_keep_the_exact_ratios(weights):
    exact = exact_weights(weights)
    total = sum(Fraction(weight) for weight in weights)

    for weight, integer in zip(weights, exact, strict=True):
        assert Fraction(weight) / total == Fraction(integer, sum(exact))


def test_integers_are_as_small_as_they_can_be():
    assert exact_weights([30, 70]) == [3, 7]
    assert exact_weights([Fraction(1, 3), Fraction(1, 6)]) == [2, 1]


def test_numbers_of_numpy_are_numbers():
    assert exact_weights([np.float32(0.5), np.int64(3), np.float64(1.5)]) == [1, 6, 3]
    assert exact_weights([np.int8(100), np.int8(50)]) == [2, 1]


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (
            [1, -0.5],
            'The weight of source "b" is -0.5; a weight must be a finite number, 0 or more.',
        ),
        ([nan, 1], 'The weight of source "a" is nan; a weight must be a finite number, 0 or more.'),
        ([1, inf], 'The weight of source "b" is inf; a weight must be a finite number, 0 or more.'),
        (
            [1, "2"],
            "The weight of source \"b\" is '2'; a weight must be a finite number, 0 or more.",
        ),
        (
            [1, None],
            'The weight of source "b" is None; a weight must be a finite number, 0 or more.',
        ),
        (
            [0, 0.0],
            "All 2 weights are 0, so there is nothing to read. Give at least one source a "
            "weight above 0.",
        ),
    ],
)
def test_refuses_what_is_not_a_weight(weights, message):
    with pytest.raises(PlanError) as caught:
        exact_weights(weights, ["a", "b"])

    assert str(caught.value) == message


def test_sources_without_names_are_called_by_number():
    with pytest.raises(PlanError, match='source "1" is -1'):
        exact_weights([1, -1])


def test_temperature_one_keeps_the_sizes():
    assert tempered_weights([1000, 10, 0], 1) == [1000, 10, 0]


def test_infinite_temperature_draws_all_alike():
    assert tempered_weights([1000, 10, 0], inf) == [1, 1, 0]


@given(st.lists(st.integers(1, 10**15), min_size=1, max_size=5), st.floats(0.2, 100))
def test_weights_are_roots_of_the_sizes(sizes, temperature):
    weights = tempered_weights(sizes, temperature)

    for size, weight in zip(sizes, weights, strict=True):
        assert float(weight) == pytest.approx(size ** (1 / temperature), rel=1e-9)


def test_roots_are_the_same_on_every_platform():
    """Digits of our own arithmetic, not of the C library."""
    weight = tempered_weights([7, 3], 3)[0]

    assert weight == Fraction(Decimal("1.912931182772389101199116839548760282862"))


@pytest.mark.parametrize("temperature", [0, -1, nan])
def test_refuses_temperatures_that_are_not_above_zero(temperature):
    with pytest.raises(PlanError, match=f"temperature must be above 0; got {temperature}"):
        tempered_weights([1, 2], temperature)
