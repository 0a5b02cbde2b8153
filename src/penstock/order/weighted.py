"""The order of a plan with weights: a mixture, in which each source has its own epochs.

    position ── schedule ──► source, ordinal ── size ──► epoch, row ── shuffle ──► sample

The order of a source's rows within an epoch does not depend on the other sources of the
mixture. Epochs are counted per source: a small source may be in its ninth epoch while a large
one is in its first.
"""

from functools import cached_property

import numpy as np
import numpy.typing as npt

from penstock.order.epochs import EpochOrder
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
        return sources, epochs, self._samples(sources, epochs, ordinals - epochs * sizes)

    def positions_of(self, source: int, samples: npt.ArrayLike, epochs: Integers) -> Integers:
        """Return the positions of samples, each in its epoch, without epochs that lack it."""
        numbers = np.broadcast_to(np.asarray(samples, dtype=np.int64), epochs.shape)
        drawn, size = self.schedule.counts(self.end)[source], int(self._sizes[source])
        begun = epochs < -(-drawn // size)  # epochs that have begun, rounded up
        numbers, epochs = numbers[begun], epochs[begun]
        sources = np.full_like(epochs, source)
        ordinals = epochs * size + self._samples(sources, epochs, numbers, inverse=True)
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

    def _samples(
        self, sources: Integers, epochs: Integers, rows: Integers, *, inverse: bool = False
    ) -> Integers:
        """Return the sample at each row of an epoch, or with `inverse` the row of each sample."""
        orders = self._orders(*label_pairs(sources, epochs))
        return self._arrangement.map(rows, orders, inverse=inverse)

    def _orders(self, which: Integers, sources: Integers, epochs: Integers) -> Orders:
        pairs = zip(sources.tolist(), epochs.tolist(), strict=True)
        keys = [epoch_key(self._seed, self._names[source], epoch) for source, epoch in pairs]
        return Orders(which, sources, np.array(keys, dtype=np.uint64))


class MixtureAfterEpochs(Mixture):
    """An order without weights up to a position, and a mixture from there on.

    Without weights, all sources share one shuffled order. The mixture takes the rows of a source
    that are left of the interrupted epoch in that order too, so each occurs once in the epoch. When
    the first of them is needed, all rows of that epoch are located. That takes about 0.2 µs for
    each row, and 16 bytes of memory as long as the plan is in use.

    Args:
        before: The order without weights.
        schedule: Begins where `before` ends, with the counts of that position.
        sources: The sources of `before`, and others that join after it.
    """

    def __init__(self, before: EpochOrder, schedule: Schedule, sources: Sources) -> None:
        super().__init__(schedule, sources)
        self.before, self.start = before, schedule.origin.position
        self._interrupted = self.start // before.epoch_rows

    @cached_property
    def _rest(self) -> tuple[Integers, Integers, Integers]:
        """The samples of the interrupted epoch by source, their inverse, and where each begins."""
        first = self._interrupted * self.before.epoch_rows
        numbers, _, samples = self.before.locate(first + np.arange(self.before.epoch_rows))
        begins = np.cumsum(self._sizes) - self._sizes
        ordered = np.argsort(numbers, kind="stable")
        samples, begin = samples[ordered], begins[numbers[ordered]]
        rows = np.empty_like(samples)
        rows[begin + samples] = np.arange(len(samples)) - begin
        return samples, rows, begins

    def _samples(
        self, sources: Integers, epochs: Integers, rows: Integers, *, inverse: bool = False
    ) -> Integers:
        found = super()._samples(sources, epochs, rows, inverse=inverse)
        old = (epochs == self._interrupted) & (sources < self.before.num_sources)
        if self.start % self.before.epoch_rows and old.any():
            samples, numbers, begins = self._rest
            found[old] = (numbers if inverse else samples)[begins[sources[old]] + rows[old]]
        return found

    def locate(self, positions: Integers) -> tuple[Integers, Integers, Integers]:
        """Return the source, epoch and sample at each position."""
        late = positions >= self.start
        located = np.empty((3, len(positions)), np.int64)
        located[:, ~late] = self.before.locate(positions[~late])
        located[:, late] = super().locate(positions[late])
        return located[0], located[1], located[2]

    def positions_of(self, source: int, samples: npt.ArrayLike, epochs: Integers) -> Integers:
        """Return the positions of samples, each in its epoch, without epochs that lack it."""
        numbers = np.broadcast_to(np.asarray(samples, dtype=np.int64), epochs.shape)
        late, early = np.ones(len(epochs), bool), np.zeros(0, np.int64)
        if source < self.before.num_sources:
            begun = np.flatnonzero(epochs <= self._interrupted)
            found = self.before.positions_of(source, numbers[begun], epochs[begun])
            early = found[found < self.start]
            late[begun[found < self.start]] = False
        return np.concatenate((early, super().positions_of(source, numbers[late], epochs[late])))

    def num_epochs(self, source: int, before: int) -> int:
        """Return how many epochs of a source have begun before a position."""
        begun = super().num_epochs(source, max(before, self.start))
        return begun if before >= self.start else min(begun, self.before.num_epochs(source, before))

    def counts(self, num_rows: int) -> list[int]:
        """Return how many of the first `num_rows` rows belong to each source."""
        if num_rows >= self.start:
            return super().counts(num_rows)
        counts = self.before.counts(num_rows)
        return counts + [0] * (len(self._sizes) - len(counts))

    def asked(self, num_rows: int) -> list[float]:
        """Return how many rows the weights ask for; before them, how many there are."""
        counts = self.counts(min(num_rows, self.start))
        return [asked + count for asked, count in zip(super().asked(num_rows), counts, strict=True)]

    @property
    def num_stages(self) -> int:
        """The number of stages, with that without weights."""
        return super().num_stages + 1

    def stage(self, number: int) -> tuple[int, str]:
        """Return where a stage begins, and its five largest shares as text."""
        return super().stage(number - 1) if number else self.before.stage(0)
