"""The order of a plan without weights: every sample of every source once an epoch.

A pass is one shuffled order of the rows of all sources together. Passes follow each other
without end, each with a separate key. If a source joins in the middle of a pass (see
`segments`), the rows that are left need no list. They are the tail of an order that can be
computed, so the order of the rest of the pass refers to positions of that tail.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np

from penstock.digest import derive_key
from penstock.order.integers import END, Integers, group_rows, label_pairs
from penstock.order.schedule import check_starts
from penstock.order.segments import Members, find_segments
from penstock.order.shuffle import Block, Domain, Mode, Orders, arrange, epoch_key

__all__ = ["EpochOrder"]

_COUNT_ROWS = 2**18  # rows located at a time when rows have to be counted: 2 MiB per array


@lru_cache(maxsize=1024)
def _join_key(seed: int, names: tuple[str, ...], position: int) -> int:
    return derive_key("join", seed, *names, position)


class EpochOrder:
    """Maps positions to (source, epoch, sample) and back; each sample occurs once a pass.

    Immutable. Sources are numbers into `names`.
    """

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
        """Return the source, epoch and sample at each position."""
        if len(self.segments) == 1:
            # The usual case, and much faster: NumPy divides by one number by multiplication.
            size = self.segments[0].size
            passes = positions // size
            orders = self._orders(*label_pairs(np.zeros_like(passes), passes))
            rows = self._arrangement.map(positions - passes * size, orders)
            return self._resolve(0, passes, rows)
        # Several segments: find the segment of each position, then its pass within the segment.
        numbers = np.searchsorted(self._starts, positions, side="right") - 1
        inside = positions - self._starts[numbers]
        passes = inside // self._sizes[numbers]
        orders = self._orders(*label_pairs(numbers, passes))
        rows = self._arrangement.map(inside - passes * self._sizes[numbers], orders)
        located = np.empty((3, len(positions)), dtype=np.int64)
        for number, here in group_rows(numbers):
            located[:, here] = self._resolve(number, passes[here], rows[here])
        return located[0], located[1], located[2]

    def _resolve(
        self, number: int, passes: Integers, rows: Integers
    ) -> tuple[Integers, Integers, Integers]:
        """Return the source, epoch and sample of rows of a segment's domain."""
        segment = self.segments[number]
        # `ends` is [end of the tail, end of the first source, …]: -1 is the tail.
        columns = np.searchsorted(segment.ends, rows, side="right") - 1
        sources = segment.sources[columns]
        epochs = np.array(segment.epochs, dtype=np.int64)[sources] + passes
        samples = rows - segment.ends[columns]
        tail = np.flatnonzero(columns < 0)
        if tail.size:
            # Row r of the tail is position tail_from + r of the pass that was cut.
            before = self.segments[number - 1]
            cut_pass = (segment.start - before.start) // before.size
            orders = self._one_order(number - 1, cut_pass, len(tail))
            earlier = self._arrangement.map(rows[tail] + segment.tail_from, orders)
            resolved = self._resolve(number - 1, np.full_like(earlier, cut_pass), earlier)
            sources[tail], epochs[tail], samples[tail] = resolved
        return sources, epochs, samples

    def positions_of(self, source: int, sample: int, epochs: Integers) -> Integers:
        """Return the positions of a sample in these epochs, as far as it occurs in them."""
        found = [np.empty(0, dtype=np.int64)]
        for number, first_row, begun in self._appearances(source):
            segment = self.segments[number]
            first = segment.epochs[source]
            # Only the epochs that begin in this segment; others are found in other segments.
            passes = epochs[(epochs >= first) & (epochs < first + begun)] - first
            orders = self._orders(np.arange(len(passes)), np.full_like(passes, number), passes)
            inside = self._arrangement.map(
                np.full_like(passes, first_row + sample), orders, inverse=True
            )
            positions = segment.start + passes * segment.size + inside
            # At most one: only the pass that a source has joined is cut.
            for row in np.flatnonzero(positions >= self._stops[number]).tolist():
                positions[row] = self._follow(number, int(inside[row]))
            found.append(positions)
        return np.concatenate(found)

    def _appearances(self, source: int) -> Iterator[tuple[int, int, int]]:
        """Yield each segment that lists a source, the source's first row in it, and its passes."""
        for number, segment in enumerate(self.segments):
            for column in np.flatnonzero(segment.sources == source).tolist():
                begun = -(-(self._stops[number] - segment.start) // segment.size)  # rounded up
                yield number, int(segment.ends[column]), begun

    def _follow(self, number: int, inside: int) -> int:
        """Return the position of a row that its segment did not reach: it is in a later tail."""
        while True:
            number += 1
            segment = self.segments[number]
            row = np.array([inside - segment.tail_from], dtype=np.int64)
            inside = int(self._arrangement.map(row, self._one_order(number, 0, 1), inverse=True)[0])
            if segment.start + inside < self._stops[number]:
                return segment.start + inside

    def num_epochs(self, source: int, before: int) -> int:
        """Return how many epochs of a source have begun, at most, before a position."""
        begun = 0
        for number, _, _ in self._appearances(source):
            segment = self.segments[number]
            rows = min(before, self._stops[number]) - segment.start
            if rows > 0:
                # Minus a floor of a negative number adds the number of passes, rounded up.
                begun = segment.epochs[source] - (-rows // segment.size)
        return begun

    def counts(self, num_rows: int) -> list[int]:
        """Return how many of the first `num_rows` rows belong to each source.

        Complete passes are multiplied. Rows of the incomplete pass are counted, at about 30 ns
        each.
        """
        if len(self._num_rows) == 1:
            return [num_rows]
        number = int(np.searchsorted(self._starts, num_rows, side="right")) - 1
        segment = self.segments[number]
        passes = (num_rows - segment.start) // segment.size
        counts = np.zeros(len(self._num_rows), dtype=np.int64)
        for source, (epochs, size) in enumerate(zip(segment.epochs, self._num_rows, strict=True)):
            counts[source] = (epochs + passes * (source in segment.members)) * size
        # A pass that began before the segment (one with a tail) is counted from its beginning.
        for start in range(segment.pass_start + passes * segment.size, num_rows, _COUNT_ROWS):
            stop = min(start + _COUNT_ROWS, num_rows)
            sources, _, _ = self.locate(np.arange(start, stop, dtype=np.int64))
            counts += np.bincount(sources, minlength=len(counts))
        return counts.tolist()

    @property
    def default_num_rows(self) -> int:
        """The number of rows up to the end of the first pass over the last stage's sources."""
        return self.segments[-1].start + self.segments[-1].size

    def asked(self, num_rows: int) -> list[str]:
        """Return what was asked of each source, as text."""
        return ["once an epoch"] * len(self._num_rows)

    @property
    def num_stages(self) -> int:
        """The number of segments."""
        return len(self.segments)

    def stage(self, number: int) -> str:
        """Return the sources of a segment, as text."""
        segment, names = self.segments[number], list(self._names[number])
        if segment.ends[0]:
            names.append(f"and {int(segment.ends[0]):,} rows left of the pass")
        return f"from position {segment.start:,}: {', '.join(names)}"

    def _orders(self, which: Integers, numbers: Integers, passes: Integers) -> Orders:
        pairs = zip(numbers.tolist(), passes.tolist(), strict=True)
        keys = [self._key(number, pass_number) for number, pass_number in pairs]
        return Orders(which, numbers, np.array(keys, dtype=np.uint64))

    def _one_order(self, number: int, pass_number: int, num_rows: int) -> Orders:
        which = np.zeros(num_rows, dtype=np.intp)
        return self._orders(which, np.array([number]), np.array([pass_number]))

    def _key(self, number: int, pass_number: int) -> int:
        segment = self.segments[number]
        # The rest of a pass has no pass number of its own, so its key is derived from the position.
        if segment.ends[0]:
            return _join_key(self._seed, self._names[number], segment.start)
        return epoch_key(self._seed, self._names[number], segment.pass_number + pass_number)
