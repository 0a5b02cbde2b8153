"""What each source is owed, in exact integers.

A source is owed the integral of its weight so far (for every stage, rows times share),
less the rows that it was given. Debts are whole multiples of 2^-40 row and always add up
to 0. A stage adds at most two such units of rounding, whatever its length, so half a
million changes of weight are off by less than a millionth of a row.
"""

from collections.abc import Sequence

import numpy as np

from penstock.order.integers import Integers

__all__ = ["ONE_ROW", "debts_after", "debts_of_present", "split_exactly"]

ONE_ROW = 2**40
"""A debt of one row. 64 bits then hold debts of up to eight million rows."""


def split_exactly(amount: int, weights: Sequence[int]) -> list[int]:
    """Split an integer in proportion to `weights`, each part to within 1, the sum exact.

    >>> split_exactly(10, [1, 0, 2]), split_exactly(-10, [1, 0, 2])
    ([4, 0, 6], [-3, 0, -7])
    """
    total = sum(weights)
    parts = [amount * weight // total for weight in weights]
    left = amount - sum(parts)  # less than one for each source that has a weight
    for source, weight in enumerate(weights):
        if not left:
            break
        if weight:
            parts[source] += 1
            left -= 1
    return parts


def debts_of_present(debts: Integers, weights: Sequence[int]) -> Integers:
    """Debts when a stage begins: those of sources without weight pass to the others.

    They are spread over the sources of the stage by weight. So a source that comes back
    later starts with no debt.
    """
    absent = np.array([not weight for weight in weights])
    passed_on = int(debts[absent].sum())
    debts = np.where(absent, 0, debts)
    if passed_on:
        debts += np.array(split_exactly(passed_on, weights), dtype=np.int64)
    return debts


def debts_after(
    debts: Integers, weights: Sequence[int], num_rows: int, counts: Sequence[int]
) -> Integers:
    """Debts after `num_rows` rows of a stage, of which each source was given `counts`."""
    # Python's integers: rows times 2^40 do not fit into 64 bits, their difference does.
    asked = split_exactly(num_rows * ONE_ROW, weights)
    owed = [rows - count * ONE_ROW for rows, count in zip(asked, counts, strict=True)]
    return debts + np.array(owed, dtype=np.int64)
