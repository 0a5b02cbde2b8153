"""The order of a plan without weights: every sample of every source once per epoch.

An epoch is one shuffled order of the rows of all sources together. Epochs follow each other
without end, each with a separate key. In this example, `web` has 8 rows and `code` has 6:

    position   0             14            28
    web, code  ├─ epoch 0 ───┼─ epoch 1 ───┼─ epoch 2 ──
"""

import numpy as np
import numpy.typing as npt

from penstock.order.integers import END, Integers, label_pairs
from penstock.order.shuffle import Domain, Orders, Sources, arrange, epoch_key

_COUNT_ROWS = 2**18  # rows located at a time when rows have to be counted: 2 MiB per array


class EpochOrder:
    """Maps positions to (source, epoch, sample) and back; each sample occurs once an epoch.

    Immutable. Sources are numbers into `names`.
    """

    end = END
    ended_by = None  # it has no end
    num_stages = 1

    def __init__(self, sources: Sources) -> None:
        sizes = [domain.num_rows for domain in sources.domains]
        parts = [rows for domain in sources.domains for rows in domain.part_rows]
        self.epoch_rows = sum(sizes)
        self._firsts = np.cumsum([0, *sizes[:-1]], dtype=np.int64)
        """The first row of each source in the rows of an epoch."""
        self._sizes = sizes
        self._names = tuple(sources.names)
        self._arrangement = arrange(sources.shuffle, [Domain(self.epoch_rows, parts)])
        self._seed = sources.seed

    @property
    def num_sources(self) -> int:
        """The number of sources."""
        return len(self._names)

    def locate(self, positions: Integers) -> tuple[Integers, Integers, Integers]:
        """Return the source, epoch and sample at each position."""
        # NumPy divides by one number faster than by an array of equal numbers.
        epochs = positions // self.epoch_rows
        rows = self._arrangement.map(positions - epochs * self.epoch_rows, self._orders(epochs))
        sources = np.searchsorted(self._firsts, rows, side="right") - 1
        return sources, epochs, rows - self._firsts[sources]

    def positions_of(self, source: int, samples: npt.ArrayLike, epochs: Integers) -> Integers:
        """Return the positions of samples, each in its epoch, without epochs that lack it."""
        numbers = np.broadcast_to(np.asarray(samples, dtype=np.int64), epochs.shape)
        reached = epochs <= END // self.epoch_rows  # later epochs have no position
        rows, epochs = numbers[reached] + self._firsts[source], epochs[reached]
        inside = self._arrangement.map(rows, self._orders(epochs), inverse=True)
        return np.asarray(epochs * self.epoch_rows + inside)

    def num_epochs(self, source: int, before: int) -> int:
        """Return how many epochs of a source have begun before a position."""
        return -(-before // self.epoch_rows)  # rounded up

    def counts(self, num_rows: int) -> list[int]:
        """Return how many of the first `num_rows` rows belong to each source.

        Rows of complete epochs are computed by a multiplication. Rows of the incomplete epoch are
        counted one by one, at about 30 ns each.
        """
        if len(self._sizes) == 1:
            return [num_rows]
        epochs = num_rows // self.epoch_rows
        counts = np.array(self._sizes, dtype=np.int64) * epochs
        for start in range(epochs * self.epoch_rows, num_rows, _COUNT_ROWS):
            stop = min(start + _COUNT_ROWS, num_rows)
            sources, _, _ = self.locate(np.arange(start, stop, dtype=np.int64))
            counts += np.bincount(sources, minlength=len(counts))
        found: list[int] = counts.tolist()
        return found

    @property
    def default_num_rows(self) -> int:
        """The number of rows of an epoch."""
        return self.epoch_rows

    def asked(self, num_rows: int) -> None:
        """Return None: without weights, each source is read once an epoch."""

    def stage(self, number: int) -> tuple[int, str]:
        """Return where the only stage begins, and its sources as text."""
        return 0, ", ".join(self._names)

    def _orders(self, epochs: Integers) -> Orders:
        which, domains, distinct = label_pairs(np.zeros_like(epochs), epochs)
        keys = [epoch_key(self._seed, self._names, epoch) for epoch in distinct.tolist()]
        return Orders(which, domains, np.array(keys, dtype=np.uint64))
