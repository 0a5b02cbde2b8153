"""Phases of the splits of a mixture, chosen so that debts are settled.

A split gives its smaller child floor(c * share + phase) of its first c rows (see `interleave`).
The phase is a number from 0 to 1. It decides how far ahead or behind the child is at the start:
the child's debt, minus its share of the parent's debt, is phase - 1/2. If all phases are 1/2,
all debts are 0. So a choice of phases represents debts of the sources, namely debts for which
every split satisfies

    | debt(small) - share * debt(parent) | <= 1/2,    debt(root) = 0.

Given debts rarely satisfy all of this. Then near ones that do are used. Two things add up to the
error of a source: how much its debt was changed, and the rounding of the splits (half a row for
its own split and a share of its parent's rounding: 1.68 rows at most, see `interleave`).

The smallest bound on the error of all sources is found by trying. Given a bound, a source's debt
may change by the bound minus its rounding, so its possible debts are an interval. The interval
of a node follows from those of its children. The bound is large enough if the interval of the
root contains 0. Then each node, from the root down, gets a debt from its interval. One try costs
1 µs per source; three tries are usual.

All numbers are Python floats that are only added, subtracted, multiplied, divided and compared.
IEEE 754 defines the results of these operations exactly, so they are equal on every machine.
"""

from collections.abc import Sequence

__all__ = ["fit_phases"]

_WHOLE = 2**64
_HALF = 0.5


def fit_phases(
    shares: Sequence[float], children: Sequence[int], debts: Sequence[float]
) -> list[int]:
    """Return the phase of every split, in units of 2^-64.

    Args:
        shares: The smaller child's share of each node; a node comes after its children.
        children: The larger and the smaller child of node 0, of node 1, … Source s is ~s.
        debts: The debt of each source, in rows.
    """
    # Index ~s = -1 - s counts from the end. So in a list that begins with the nodes and ends with
    # the sources in reverse order, both node numbers and ~s are valid indices.
    debt = [0.0] * len(shares) + list(debts)[::-1]
    size = [0] * len(shares) + [1] * len(debts)
    # The debt and the number of sources of a node are the sums of its children's.
    for node, (large, small) in enumerate(zip(children[::2], children[1::2], strict=True)):
        debt[node] = debt[large] + debt[small]
        size[node] = size[large] + size[small]
    low, high = _intervals(shares, children, debt)
    phases = [0] * len(shares)
    fitted = [0.0] * len(debt)
    for node in reversed(range(len(shares))):
        large, small, share = children[2 * node], children[2 * node + 1], shares[node]
        here = fitted[node]
        # The debt of this node was changed by `here - debt[node]`. Every source below it gets an
        # equal part of the change, as far as the intervals of both children allow.
        wanted = debt[small] - (debt[node] - here) * size[small] / size[node]
        wanted = max(wanted, low[small], here - high[large])
        wanted = min(wanted, high[small], here - low[large])
        offset = min(max(wanted - share * here, -_HALF), _HALF)
        phases[node] = min(int((offset + _HALF) * _WHOLE), _WHOLE - 1)
        fitted[small] = share * here + offset
        fitted[large] = here - fitted[small]
    return phases


def _intervals(
    shares: Sequence[float], children: Sequence[int], debt: Sequence[float]
) -> tuple[list[float], list[float]]:
    """Return the lowest and highest possible debts of all nodes and sources.

    They are those of the smallest bound, among those tried, for which debts exist.
    """
    error = [0.0] * len(debt)  # the largest rounding error of each node and source
    for node in reversed(range(len(shares))):
        large, small, share = children[2 * node], children[2 * node + 1], shares[node]
        error[small] = _HALF + share * error[node]
        error[large] = _HALF + (1 - share) * error[node]
    # No bound can be below the rounding. 2^-20 covers the inexact sums of floats below.
    worst, more = max(error), 2**-20
    while True:
        bound = worst + more
        low = [owed - bound + own for owed, own in zip(debt, error, strict=True)]
        high = [owed + bound - own for owed, own in zip(debt, error, strict=True)]
        if _fill_nodes(low, high, shares, children):
            return low, high
        more = 1.25 * more + 0.0625


def _fill_nodes(
    low: list[float], high: list[float], shares: Sequence[float], children: Sequence[int]
) -> bool:
    """Compute the intervals of the nodes from those of the sources; return whether 0 is possible.

    With x and y the debts of the small and the large child, a split requires
    |(1 - share) * x - share * y| <= 1/2. Its highest debt is x + y with both children at their
    highest, unless one is too far ahead of the other: then that one is limited by the other.
    """
    for node, share in enumerate(shares):
        large, small, rest = children[2 * node], children[2 * node + 1], 1 - share
        low_x, high_x, low_y, high_y = low[small], high[small], low[large], high[large]
        # Even the extremes are too far apart: no debts within these intervals satisfy the split.
        if rest * high_x - share * low_y < -_HALF or rest * low_x - share * high_y > _HALF:
            return False
        ahead = rest * high_x - share * high_y
        if ahead > _HALF:
            high_x = (share * high_y + _HALF) / rest
        elif ahead < -_HALF:
            high_y = (rest * high_x + _HALF) / share
        ahead = rest * low_x - share * low_y
        if ahead < -_HALF:
            low_x = (share * low_y - _HALF) / rest
        elif ahead > _HALF:
            low_y = (rest * low_x - _HALF) / share
        low[node], high[node] = low_x + low_y, high_x + high_y
    root = len(shares) - 1
    return low[root] <= 0 <= high[root]
