"""Weights as exact integers.

A weight is a share of the rows, relative to the other weights: 7 and 3 mean what 0.7
and 0.3 say. Sums and quotients of floats are rounded, differently in another order
of the same sources; so weights become integers in the same exact ratios before
anything is computed from them. A float already is such a ratio: 0.1 stands for
3602879701896397 / 2^55, and nothing is lost by saying so.
"""

import math
from collections.abc import Sequence
from decimal import Context, Decimal
from fractions import Fraction
from numbers import Rational, Real
from typing import Any

from penstock.errors import PlanError

__all__ = ["Weight", "as_fraction", "exact_weights", "is_finite", "tempered_weights"]

Weight = int | float | Fraction

# Decimal logarithms are rounded correctly, so that they are the same on every platform;
# those of the C library, behind `math.log` and `**`, are not.
_CONTEXT = Context(prec=40)


def exact_weights(weights: Sequence[Weight], names: Sequence[str] | None = None) -> list[int]:
    """Integers in exactly the ratios of `weights`, as small as they can be.

    Args:
        weights: Finite numbers, none negative, at least one above zero.
        names: What an error calls the sources.

    >>> exact_weights([0.5, 0.25, 0])
    [2, 1, 0]
    """
    names = names if names is not None else [str(number) for number in range(len(weights))]
    if not weights:
        raise PlanError("There are no weights; a mixture needs at least one source.")
    for name, weight in zip(names, weights, strict=True):
        if not is_finite(weight) or weight < 0:
            raise PlanError(
                f'The weight of source "{name}" is {weight!r}; a weight is a finite number, '
                "0 or more."
            )
    if not any(weights):
        raise PlanError(
            f"All {len(weights):,} weights are 0, so no position has a source. Give at least "
            "one source a weight above 0."
        )
    ratios = [_ratio(weight) for weight in weights]
    whole = math.lcm(*(denominator for _, denominator in ratios))
    integers = [numerator * (whole // denominator) for numerator, denominator in ratios]
    divisor = math.gcd(*integers)
    return [integer // divisor for integer in integers]


def tempered_weights(sizes: Sequence[int], temperature: float) -> list[Weight]:
    """Weights in proportion to `size ** (1 / temperature)`.

    Temperature 1 draws each source in proportion to its size, higher ones draw small
    sources more often than that, and infinity draws all alike. The same on every
    platform, to about 30 digits. An empty source has weight 0.

    >>> tempered_weights([1000, 10], temperature=1)
    [1000, 10]
    >>> [round(float(weight), 6) for weight in tempered_weights([100, 4], temperature=2)]
    [10.0, 2.0]
    """
    if not temperature > 0:
        raise PlanError(
            f"The temperature is {temperature!r}; it is a number above 0: 1 keeps the proportions "
            "of the sizes, higher ones even them out."
        )
    if temperature == 1:
        return list(sizes)
    power = Fraction(0) if math.isinf(temperature) else 1 / as_fraction(temperature)
    return [_root(size, power) if size else 0 for size in sizes]


def is_finite(value: object) -> bool:
    """Whether this is a number, and neither infinite nor NaN; NumPy's numbers count."""
    if isinstance(value, float):  # nearly always; the abstract classes take 1 µs to check
        return math.isfinite(value)
    if isinstance(value, int) or isinstance(value, Rational):  # noqa: SIM101  (likewise)
        return True
    return isinstance(value, Real) and math.isfinite(value)


def as_fraction(number: Weight) -> Fraction:
    """Exactly this number."""
    return Fraction(*_ratio(number))


def _ratio(number: Any) -> tuple[int, int]:
    """A numerator and a denominator in Python's integers; NumPy's would overflow."""
    if isinstance(number, int | float):
        numerator, denominator = number.as_integer_ratio()
        return numerator, denominator
    if isinstance(number, Rational):
        return int(number.numerator), int(number.denominator)
    return float(number).as_integer_ratio()


def _root(size: int, power: Fraction) -> Fraction:
    exponent = _CONTEXT.divide(Decimal(power.numerator), Decimal(power.denominator))
    logarithm = _CONTEXT.multiply(_CONTEXT.ln(Decimal(size)), exponent)
    return Fraction(_CONTEXT.exp(logarithm))
