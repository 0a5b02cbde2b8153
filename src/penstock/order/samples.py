"""The sample at one position of an order."""

from collections.abc import Sequence
from typing import NamedTuple

from penstock.order.integers import Integers


class Sample(NamedTuple):
    """The sample at one position."""

    position: int
    source: str
    epoch: int
    """How often this sample occurred before."""
    sample: int
    """The number of the row in its source."""


def list_samples(
    names: Sequence[str], start: int, located: tuple[Integers, Integers, Integers]
) -> list[Sample]:
    """Return the sample at each position from `start` on, from the result of `locate`."""
    rows = zip(*(numbers.tolist() for numbers in located), strict=True)
    return [
        Sample(position, names[source], epoch, sample)
        for position, (source, epoch, sample) in enumerate(rows, start)
    ]
