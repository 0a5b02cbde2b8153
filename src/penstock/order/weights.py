"""Weights as exact integers.

A weight is a share of the rows, relative to the other weights: 7 and 3 mean the same as 0.7 and
0.3. Sums and quotients of floats are rounded, and differently if the sources are listed in another
order. So weights become integers in exactly the same ratios before anything is computed from
them. A float is such a ratio already: 0.1 is 3602879701896397 / 2^55, and nothing is lost by
writing it so.
"""

import math
from collections.abc import Sequence
from decimal import Context, Decimal
from fractions import Fraction
from numbers import Rational, Real
from typing import Any

from penstock.errors import PlanError

Weight = int | float | Fraction

# `decimal` rounds logarithms correctly, so they are equal on every platform. Those of the C
# library, behind `math.log` and `**`, are not.
_CONTEXT = Context(prec=40)


def exact_weights(weights: Sequence[Weight], names: Sequence[str] | None = None) -> list[int]:
    """Return the smallest integers that are in exactly the ratios of `weights`.

    Args:
        weights: Finite numbers, none negative, at least one above zero.
        names: The names of the sources, for messages.

    >>> exact_weights([0.5, 0.25, 0])
    [2, 1, 0]
    """
    names = names if names is not None else [str(number) for number in range(len(weights))]
    if not weights:
        raise PlanError("There are no weights; a mixture needs at least one source.")
    for name, weight in zip(names, weights, strict=True):
        if not is_finite(weight) or weight < 0:
            raise PlanError(
                f'The weight of source "{name}" is {weight!r}; a weight must be a finite number, '
                "0 or more."
            )
    if not any(weights):
        raise PlanError(
            f"All {len(weights):,} weights are 0, so there is nothing to read. Give at least one "
            "source a weight above 0."
        )
    # Fractions over a common denominator, then reduced: 0.5, 0.25 = 2/4, 1/4 → 2, 1.
    ratios = [_ratio(weight) for weight in weights]
    whole = math.lcm(*(denominator for _, denominator in ratios))
    integers = [numerator * (whole // denominator) for numerator, denominator in ratios]
    divisor = math.gcd(*integers)
    return [integer // divisor for integer in integers]


def tempered_weights(sizes: Sequence[int], temperature: float) -> list[Weight]:
    """Return weights in proportion to `size ** (1 / temperature)`.

    With temperature 1, each source is drawn in proportion to its size. Higher temperatures draw
    small sources more often, and infinity draws all sources equally often. An empty source has
    weight 0. The weights have about 30 correct digits and are equal on every platform.

    >>> tempered_weights([1000, 10], temperature=1)
    [1000, 10]
    >>> [round(float(weight), 6) for weight in tempered_weights([100, 4], temperature=2)]
    [10.0, 2.0]
    """
    if not temperature > 0:
        raise PlanError(
            f"temperature must be above 0; got {temperature!r}. With 1, shares are in proportion "
            "to sizes; higher temperatures bring them closer together."
        )
    if temperature == 1:
        return list(sizes)
    power = Fraction(0) if math.isinf(temperature) else 1 / as_fraction(temperature)
    return [_root(size, power) if size else 0 for size in sizes]


def is_finite(value: object) -> bool:
    """Return whether `value` is a number (also one of NumPy's), and neither infinite nor NaN."""
    if isinstance(value, float):  # the usual case; checks against abstract classes take 1 µs
        return math.isfinite(value)
    if isinstance(value, int) or isinstance(value, Rational):  # noqa: SIM101  (likewise)
        return True
    return isinstance(value, Real) and math.isfinite(value)


def as_fraction(number: Weight) -> Fraction:
    """Return a number as an exact fraction."""
    return Fraction(*_ratio(number))


def _ratio(number: Any) -> tuple[int, int]:
    """Return numerator and denominator as Python integers, because NumPy's would overflow."""
    if isinstance(number, int | float):
        numerator, denominator = number.as_integer_ratio()
        return numerator, denominator
    if isinstance(number, Rational):
        return int(number.numerator), int(number.denominator)
    return float(number).as_integer_ratio()


def _root(size: int, power: Fraction) -> Fraction:
    # size ** power = exp(power * ln(size)), with 40 digits; the rounding costs a few of them.
    exponent = _CONTEXT.divide(Decimal(power.numerator), Decimal(power.denominator))
    logarithm = _CONTEXT.multiply(_CONTEXT.ln(Decimal(size)), exponent)
    return Fraction(_CONTEXT.exp(logarithm))
