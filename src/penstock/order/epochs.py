"""Every sample of every source once an epoch.

Without weights, a pass is one order of all rows laid end to end, and passes follow each
other without end, each with a key of its own. Where a source joins in the middle of a
pass (see `segments`), the rows that are left need no list: they are the tail of an
order, and the order of the rest leads into it.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np

from penstock.digest import derive_key
from penstock.order.integers import END, Integers, label_pairs
from penstock.order.schedule import check_starts
from penstock.order.segments import Members, find_segments
from penstock.order.shuffle import Block, Domain, Mode, Orders, arrange, epoch_key

__all__ = ["EpochOrder"]

_COUNT_ROWS = 2**18  # rows located at a time where they have to be counted


@lru_cache(maxsize=1024)
def _join_key(seed: int, names: tuple[str, ...], position: int) -> int:
    return derive_key("join", seed, *names, position)


class EpochOrder:
    """Position → (source, epoch, sample), each sample once a pass, and back."""

    def __init__(
        self,
        stages: Sequence[Members],
        *,
        names: Sequence[str],
        domains: Sequence[Domain],
        shuffle: Mode | Block,
        seed: int,
    ) -> None:
        check_starts([stage.start for stage in stages])
        self.end = END
        self.segments = find_segments(stages, domains)
        self._starts = np.array([segment.start for segment in self.segments], dtype=np.int64)
        self._stops = [*self._starts[1:].tolist(), END]
        self._sizes = np.array([segment.size for segment in self.segments], dtype=np.int64)
        self._names = [
            tuple(names[source] for source in segment.sources) for segment in self.segments
        ]
        self._num_rows = [domain.num_rows for domain in domains]
        self._arrangement = arrange(shuffle, [segment.domain for segment in self.segments])
        self._seed = seed

    def locate(self, positions: Integers) -> tuple[Integers, Integers, Integers]:
        """The source, epoch and sample at each position."""
        if len(self.segments) == 1:
            size = self.segments[0].size
            passes = positions // size
            orders = self._orders(*label_pairs(np.zeros_like(passes), passes))
            rows = self._arrangement.rows(positions - passes * size, orders)
            return self._resolve(0, passes, rows)
        numbers = np.searchsorted(self._starts, positions, side="right") - 1
        inside = positions - self._starts[numbers]
        passes = inside // self._sizes[numbers]
        orders = self._orders(*label_pairs(numbers, passes))
        rows = self._arrangement.rows(inside - passes * self._sizes[numbers], orders)
        located = np.empty((3, len(positions)), dtype=np.int64)
        for number in np.unique(numbers).tolist():
            here = np.flatnonzero(numbers == number)
            located[:, here] = self._resolve(number, passes[here], rows[here])
        return located[0], located[1], located[2]

    def _resolve(
        self, number: int, passes: Integers, rows: Integers
    ) -> tuple[Integers, Integers, Integers]:
        """What the rows of a segment are: those of the tail lead into the segment before."""
        segment = self.segments[number]
        places = np.searchsorted(segment.ends, rows, side="right") - 1
        sources = segment.sources[places]
        epochs = np.array(segment.epochs, dtype=np.int64)[sources] + passes
        samples = rows - segment.ends[places]
        tail = np.flatnonzero(places < 0)
        if tail.size:
            before = self.segments[number - 1]
            last_pass = (segment.start - before.start) // before.size
            orders = self._one_order(number - 1, last_pass, len(tail))
            earlier = self._arrangement.rows(rows[tail] + segment.tail_from, orders)
            resolved = self._resolve(
                number - 1, np.full(len(tail), last_pass, dtype=np.int64), earlier
            )
            sources[tail], epochs[tail], samples[tail] = resolved
        return sources, epochs, samples

    def positions_of(self, source: int, sample: int, epochs: Integers) -> Integers:
        """The positions at which a sample comes in these epochs, where it does."""
        found = [np.empty(0, dtype=np.int64)]
        for number, first_row, begun in self._appearances(source):
            segment = self.segments[number]
            first = segment.epochs[source]
            passes = epochs[(epochs >= first) & (epochs < first + begun)] - first
            which = np.arange(len(passes))
            orders = self._orders(which, np.full_like(passes, number), passes)
            inside = self._arrangement.positions(np.full_like(passes, first_row + sample), orders)
            positions = segment.start + passes * segment.size + inside
            cut = np.flatnonzero(positions >= self._stops[number])
            for row in cut.tolist():  # one at most: the pass that a source joined
                positions[row] = self._follow(number, int(inside[row]))
            found.append(positions)
        return np.concatenate(found)

    def _appearances(self, source: int) -> Iterator[tuple[int, int, int]]:
        """Each segment that lists a source, its first row there, and the passes begun."""
        for number, segment in enumerate(self.segments):
            for place in np.flatnonzero(segment.sources == source).tolist():
                begun = -(-(self._stops[number] - segment.start) // segment.size)
                yield number, int(segment.ends[place]), begun

    def _follow(self, number: int, inside: int) -> int:
        """The position of a row that came after the end of its segment."""
        while True:
            number += 1
            segment = self.segments[number]
            row = np.array([inside - segment.tail_from], dtype=np.int64)
            inside = int(self._arrangement.positions(row, self._one_order(number, 0, 1))[0])
            if segment.start + inside < self._stops[number]:
                return segment.start + inside

    def num_epochs(self, source: int, before: int) -> int:
        """How many epochs of a source have begun, at most, in the rows before a position."""
        begun = 0
        for number, _, _ in self._appearances(source):
            segment = self.segments[number]
            rows = min(before, self._stops[number]) - segment.start
            if rows > 0:
                begun = segment.epochs[source] - (-rows // segment.size)
        return begun

    def counts(self, num_rows: int) -> list[int]:
        """How many of the first `num_rows` rows belong to each source.

        Whole passes are multiplied; the rows of the pass under way are counted, at
        about 30 ns each.
        """
        if len(self._num_rows) == 1:
            return [num_rows]
        number = int(np.searchsorted(self._starts, num_rows, side="right")) - 1
        segment = self.segments[number]
        passes = (num_rows - segment.start) // segment.size
        counts = np.zeros(len(self._num_rows), dtype=np.int64)
        for source, (epochs, size) in enumerate(zip(segment.epochs, self._num_rows, strict=True)):
            counts[source] = (epochs + passes * (source in segment.members)) * size
        for start in range(segment.pass_start + passes * segment.size, num_rows, _COUNT_ROWS):
            stop = min(start + _COUNT_ROWS, num_rows)
            sources, _, _ = self.locate(np.arange(start, stop, dtype=np.int64))
            counts += np.bincount(sources, minlength=len(counts))
        return counts.tolist()

    @property
    def default_num_rows(self) -> int:
        """As many rows as end with a pass over all sources that are read at last."""
        return self.segments[-1].start + self.segments[-1].size

    def asked(self, num_rows: int) -> list[str]:
        """What was asked of each source, in words."""
        return ["once an epoch"] * len(self._num_rows)

    @property
    def num_stages(self) -> int:
        """How many segments there are."""
        return len(self.segments)

    def stage(self, number: int) -> str:
        """What is read in a segment, in words."""
        segment, names = self.segments[number], list(self._names[number])
        if segment.ends[0]:
            names.append(f"and {int(segment.ends[0]):,} rows left of the pass")
        return f"from position {segment.start:,}: {', '.join(names)}"

    def _orders(self, which: Integers, numbers: Integers, passes: Integers) -> Orders:
        keys = [
            self._key(number, pass_number)
            for number, pass_number in zip(numbers.tolist(), passes.tolist(), strict=True)
        ]
        return Orders(which, numbers, np.array(keys, dtype=np.uint64))

    def _one_order(self, number: int, pass_number: int, num_rows: int) -> Orders:
        which = np.zeros(num_rows, dtype=np.intp)
        return self._orders(which, np.array([number]), np.array([pass_number]))

    def _key(self, number: int, pass_number: int) -> int:
        segment = self.segments[number]
        if segment.ends[0]:
            return _join_key(self._seed, self._names[number], segment.start)
        return epoch_key(self._seed, self._names[number], segment.pass_number + pass_number)
