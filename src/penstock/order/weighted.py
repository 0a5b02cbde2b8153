"""Sources drawn by weights, each in its own shuffled order.

    position ── schedule ──► source, ordinal ── size ──► epoch, row ── shuffle ──► sample

A source's rows come in its own order of the epoch, whatever else is in the mixture. Its
epochs follow each other by its own count: the small source may be in its ninth while
the large one is in its first.
"""

from collections.abc import Sequence

import numpy as np

from penstock.order.integers import Integers, label_pairs
from penstock.order.picture import percent
from penstock.order.schedule import Schedule
from penstock.order.shuffle import Block, Domain, Mode, Orders, arrange, epoch_key
from penstock.order.weights import exact_weights

__all__ = ["Mixture"]


class Mixture:
    """Position → (source, epoch, sample) by weights, and back."""

    def __init__(
        self,
        schedule: Schedule,
        *,
        names: Sequence[str],
        domains: Sequence[Domain],
        shuffle: Mode | Block,
        seed: int,
    ) -> None:
        self.schedule = schedule
        self.end = schedule.end
        self._names = [(name,) for name in names]
        self._sizes = np.array([domain.num_rows for domain in domains], dtype=np.int64)
        self._arrangement = arrange(shuffle, domains)
        self._seed = seed

    def locate(self, positions: Integers) -> tuple[Integers, Integers, Integers]:
        """The source, epoch and sample at each position."""
        sources, ordinals = self.schedule.at(positions)
        sizes = self._sizes[sources] if len(self._sizes) > 1 else self._sizes
        epochs = ordinals // sizes
        which, source_of, epoch_of = label_pairs(sources, epochs)
        orders = self._orders(which, source_of, epoch_of)
        return sources, epochs, self._arrangement.rows(ordinals - epochs * sizes, orders)

    def positions_of(self, source: int, sample: int, epochs: Integers) -> Integers:
        """The positions at which a sample comes in these epochs, where it does."""
        drawn, size = self.schedule.counts(self.end)[source], int(self._sizes[source])
        epochs = epochs[epochs < -(-drawn // size)]
        which = np.arange(len(epochs))
        orders = self._orders(which, np.full_like(epochs, source), epochs)
        inside = self._arrangement.positions(np.full_like(epochs, sample), orders)
        ordinals = epochs * size + inside
        return self.schedule.positions(source, ordinals[ordinals < drawn])

    def num_epochs(self, source: int, before: int) -> int:
        """How many epochs of a source have begun in the rows before a position."""
        return -(-self.schedule.counts(before)[source] // int(self._sizes[source]))

    def counts(self, num_rows: int) -> list[int]:
        """How many of the first `num_rows` rows belong to each source."""
        return self.schedule.counts(num_rows)

    @property
    def default_num_rows(self) -> int:
        """As many rows as the sources have."""
        return int(self._sizes.sum())

    def asked(self, num_rows: int) -> list[str]:
        """The share of the first `num_rows` rows that was asked of each source, in words."""
        return [percent(rows / max(num_rows, 1)) for rows in self.schedule.asked(num_rows)]

    @property
    def num_stages(self) -> int:
        """How many stages there are, those that caps began among them."""
        return len(self.schedule.stages)

    def stage(self, number: int) -> str:
        """The shares in a stage, in words; the largest five."""
        start, weights = self.schedule.stages[number]
        exact = exact_weights(weights)
        drawn = [source for source, weight in enumerate(exact) if weight]
        largest = sorted(drawn, key=lambda source: -exact[source])[:5]
        total = sum(exact)
        shares = [f"{self._names[i][0]} {percent(exact[i] / total)}" for i in largest]
        if len(drawn) > 5:
            shares.append(f"and {len(drawn) - 5:,} more")
        return f"from position {start:,}: {', '.join(shares)}"

    def _orders(self, which: Integers, sources: Integers, epochs: Integers) -> Orders:
        keys = [
            epoch_key(self._seed, self._names[source], epoch)
            for source, epoch in zip(sources.tolist(), epochs.tolist(), strict=True)
        ]
        return Orders(which, sources, np.array(keys, dtype=np.uint64))
