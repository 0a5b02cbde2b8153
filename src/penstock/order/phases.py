"""Where each split of a mix begins, so that debts are settled on the way.

A split gives its smaller child floor(c * share + phase) of its first c rows. The phase is
anything from 0 to 1 and decides how far ahead or behind the child is at the start: its
debt, less the share of its parent's debt, is phase - 1/2. With all phases at 1/2 nothing
is owed. So phases stand for debts of the sources: those for which every split has

    | debt(small) - share * debt(parent) | <= 1/2,    debt(root) = 0.

Given debts seldom satisfy all of this; then near ones that do are used. From there on a
source is off by at most two things: how much its debt was changed, and its own rounding,
which is half a row for its split and a share of the rounding of its parent (see `mix`:
1.68 rows at most). The least bound on their sum, over all sources, is found by trying. If
the change may be no more than the bound less the rounding, the possible debts of a node
are an interval, which follows from those of its children; and the bound is large enough
when 0 is possible at the root. On the way back down, each node takes a debt from its
interval. One try costs 1 µs a source; three are usual.

All numbers are Python's floats, and only added, multiplied, divided and compared: these
are the same on every machine.
"""

from collections.abc import Sequence

__all__ = ["fit_phases"]

_WHOLE = 2**64
_HALF = 0.5


def fit_phases(
    shares: Sequence[float], children: Sequence[int], debts: Sequence[float]
) -> list[int]:
    """The phase of every split, in units of 2^-64.

    Args:
        shares: The smaller child's share of each node; a node comes after its children.
        children: The larger and the smaller child of node 0, of node 1, … Source s is ~s.
        debts: What each source is owed, in rows.
    """
    # A source s is at index ~s, counted from the end. So lists that begin with the nodes and
    # end with the sources in reverse are indexed by both.
    nodes = [0.0] * len(shares)
    debt = nodes + list(debts)[::-1]
    size = [0] * len(shares) + [1] * len(debts)
    for node, (large, small) in enumerate(zip(children[::2], children[1::2], strict=True)):
        debt[node] = debt[large] + debt[small]
        size[node] = size[large] + size[small]
    low, high = _intervals(shares, children, debt)
    phases = [0] * len(shares)
    fitted = [0.0] * len(debt)
    for node in reversed(range(len(shares))):
        large, small, share = children[2 * node], children[2 * node + 1], shares[node]
        here = fitted[node]
        # All sources below the node share the change equally, as far as possible.
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
    """The possible debts of nodes and sources, with the least bound for which there are any."""
    error = [0.0] * len(debt)  # rounding, at most
    for node in reversed(range(len(shares))):
        large, small, share = children[2 * node], children[2 * node + 1], shares[node]
        error[small] = _HALF + share * error[node]
        error[large] = _HALF + (1 - share) * error[node]
    worst, more = max(error), 2**-20  # rounding in the sums is far less
    while True:
        bound = worst + more
        low = [owed - bound + own for owed, own in zip(debt, error, strict=True)]
        high = [owed + bound - own for owed, own in zip(debt, error, strict=True)]
        if _fill(low, high, shares, children):
            return low, high
        more = 1.25 * more + 0.0625


def _fill(
    low: list[float], high: list[float], shares: Sequence[float], children: Sequence[int]
) -> bool:
    """Compute the intervals of the nodes from those of the sources; False where there is none.

    With x and y the debts of the small and the large child, a split needs
    |(1 - share) * x - share * y| <= 1/2. Its highest debt x + y is that of both children at
    their highest, unless one is too far ahead of the other: then that one is held back.
    """
    for node, share in enumerate(shares):
        large, small, rest = children[2 * node], children[2 * node + 1], 1 - share
        low_x, high_x, low_y, high_y = low[small], high[small], low[large], high[large]
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
