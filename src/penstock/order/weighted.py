"""The order of a plan with weights: a mixture, in which each source has its own epochs.

    position ── schedule ──► source, ordinal ── size ──► epoch, row ── shuffle ──► sample

The order of a source's rows within an epoch does not depend on the other sources of the
mixture. Epochs are counted per source: a small source may be in its ninth epoch while a large
one is in its first.
"""

import numpy as np
import numpy.typing as npt

from penstock.order.integers import Integers, label_pairs
from penstock.order.schedule import Schedule
from penstock.order.shuffle import Orders, Sources, arrange, epoch_key
from penstock.order.weights import exact_weights


def percent(share: float) -> str:
    """Return a share in percent with up to four significant digits.

    >>> percent(0.3), percent(1 / 3), percent(1e-9)
    ('30 %', '33.33 %', '1e-07 %')
    """
    return f"{100 * share:.4g} %"


class Mixture:
    """Maps positions to (source, epoch, sample) by weights, and back.

    Immutable. Sources are numbers into `names`.
    """

    epoch_rows = None  # every source has separate epochs

    def __init__(self, schedule: Schedule, sources: Sources) -> None:
        self.schedule = schedule
        self.end = schedule.end
        # As tuples, because `epoch_key` takes the names of several sources.
        self._names = [(name,) for name in sources.names]
        self._sizes = np.array([domain.num_rows for domain in sources.domains], dtype=np.int64)
        self._arrangement = arrange(sources.shuffle, sources.domains)
        self._seed = sources.seed

    def locate(self, positions: Integers) -> tuple[Integers, Integers, Integers]:
        """Return the source, epoch and sample at each position."""
        sources, ordinals = self.schedule.at(positions)
        # Dividing by one number is faster than by an array of equal numbers.
        sizes = self._sizes[sources] if len(self._sizes) > 1 else self._sizes
        # Row 25 of a source of 10 rows is row 5 of its epoch 2.
        epochs = ordinals // sizes
        orders = self._orders(*label_pairs(sources, epochs))
        return sources, epochs, self._arrangement.map(ordinals - epochs * sizes, orders)

    def positions_of(self, source: int, samples: npt.ArrayLike, epochs: Integers) -> Integers:
        """Return the positions of samples, each in its epoch, without epochs that lack it."""
        numbers = np.broadcast_to(np.asarray(samples, dtype=np.int64), epochs.shape)
        drawn, size = self.schedule.counts(self.end)[source], int(self._sizes[source])
        begun = epochs < -(-drawn // size)  # epochs that have begun, rounded up
        numbers, epochs = numbers[begun], epochs[begun]
        orders = self._orders(*label_pairs(np.full_like(epochs, source), epochs))
        inside = self._arrangement.map(numbers, orders, inverse=True)
        ordinals = epochs * size + inside
        # The last epoch may be incomplete, so the sample may not occur in it.
        found = [
            self.schedule.position(source, each) for each in ordinals[ordinals < drawn].tolist()
        ]
        return np.array(found, dtype=np.int64)

    def num_epochs(self, source: int, before: int) -> int:
        """Return how many epochs of a source have begun before a position."""
        return -(-self.schedule.counts(before)[source] // int(self._sizes[source]))

    def counts(self, num_rows: int) -> list[int]:
        """Return how many of the first `num_rows` rows belong to each source."""
        return self.schedule.counts(num_rows)

    @property
    def default_num_rows(self) -> int:
        """The number of rows of all sources together."""
        return int(self._sizes.sum())

    def asked(self, num_rows: int) -> list[float]:
        """Return how many of the first `num_rows` rows the weights ask for, for each source."""
        return self.schedule.asked(num_rows)

    @property
    def ended_by(self) -> int | None:
        """The source whose cap ends the order; None if no single source does."""
        return self.schedule.ended_by

    @property
    def num_stages(self) -> int:
        """The number of stages, including those that begin because a cap is reached."""
        return len(self.schedule.stages)

    def stage(self, number: int) -> tuple[int, str]:
        """Return where a stage begins, and its five largest shares as text."""
        start, weights = self.schedule.stages[number]
        exact = exact_weights(weights)
        drawn = [source for source, weight in enumerate(exact) if weight]
        largest = sorted(drawn, key=lambda source: -exact[source])[:5]
        total = sum(exact)
        shares = [f"{self._names[i][0]} {percent(exact[i] / total)}" for i in largest]
        if len(drawn) > 5:
            shares.append(f"and {len(drawn) - 5:,} more")
        return start, ", ".join(shares)

    def _orders(self, which: Integers, sources: Integers, epochs: Integers) -> Orders:
        pairs = zip(sources.tolist(), epochs.tolist(), strict=True)
        keys = [epoch_key(self._seed, self._names[source], epoch) for source, epoch in pairs]
        return Orders(which, sources, np.array(keys, dtype=np.uint64))
