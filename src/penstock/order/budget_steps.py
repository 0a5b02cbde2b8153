"""The steps of a budget, whose numbers are known after all windows before them are cut.

    windows      │   │ │  │ │     │    │ │     │   │  │
    steps        0   1 2  3 4     5    6 7     8   9  …       counted from where a run began
    anchors      ^                             ^              kept for every n-th window, and
                                                              for those that were used last

See `penstock.order.budget` for how windows are cut into batches.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from operator import attrgetter
from threading import Lock
from typing import NamedTuple, Protocol, Self, final

import numpy as np

from penstock.errors import PlanError
from penstock.order.integers import Integers

__all__ = ["NO_ROW", "BudgetShard", "BudgetSteps"]

NO_ROW = -1
"""The position of a row that pads a rank's share; `penstock.order.steps.PADDING`."""
_MOST_ANCHORS = 512  # of 100 bytes each
_MOST_RECENT = 16


class _Budget(Protocol):
    end: int
    multiple: int

    def edges_after(self, position: int) -> Integers: ...


class _Anchor(NamedTuple):
    """A window whose first step is known: its number, and where it begins."""

    step: int
    position: int
    number: int
    """How many windows are before it, from the one at which counting began."""


_STEP: Callable[[_Anchor], int] = attrgetter("step")
_POSITION: Callable[[_Anchor], int] = attrgetter("position")


@final
class BudgetSteps:
    """Step ↔ positions, as `penstock.order.steps.Steps`, found window by window.

    The start of a window is kept for the last few that were used, and for every n-th of the
    others. That is enough to find any step after cutting a few windows. The number n grows with
    the run, so memory does not.
    """

    def __init__(self, budget: _Budget, start: int) -> None:
        self.budget = budget
        self.start = start
        self._anchors = [_Anchor(0, start, 0)]
        self._apart = 1  # windows between two anchors
        self._recent: deque[_Anchor] = deque(maxlen=_MOST_RECENT)
        self._lock = Lock()  # the prefetching thread finds steps, and so may the user

    def __reduce__(self) -> tuple[type[Self], tuple[_Budget, int]]:
        return type(self), (self.budget, self.start)  # a lock cannot be pickled

    def span(self, step: int) -> tuple[int, int]:
        """Return the positions of a step: the first, and the one after the last."""
        starts, rows = self.spans(step, step + 1)
        return int(starts[0]), int(starts[0] + rows[0])

    def spans(self, first: int, stop: int) -> tuple[Integers, Integers]:
        """Return where each of the steps from `first` to before `stop` begins, and its rows."""
        if not 0 <= first <= stop:
            raise PlanError(f"There are no steps from {first:,} to {stop:,}; steps begin at 0.")
        starts, rows = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        while first < stop:
            begin, edges = self._window(first, _STEP)
            wanted = edges[first - begin : stop - begin + 1]
            starts.append(wanted[:-1])
            rows.append(np.diff(wanted))
            first += len(wanted) - 1
        return np.concatenate(starts), np.concatenate(rows)

    def at(self, position: int) -> int:
        """Return the step that reads a position."""
        if position < self.start:
            raise PlanError(f"No step of a run from {self.start:,} reads position {position:,}.")
        first, edges = self._window(position, _POSITION)
        return first + int(np.searchsorted(edges, position, side="right")) - 1

    def count(self, end: int, *, drop_last: bool) -> int:
        """Return how many steps a run takes that ends before position `end`; all are counted."""
        return self.at(end - 1) + 1 if end > self.start else 0

    def _window(self, wanted: int, key: Callable[[_Anchor], int]) -> tuple[int, Integers]:
        """Return the window of a step or a position: its first step, and the edges of its steps.

        Args:
            wanted: The step, or the position.
            key: `_STEP` or `_POSITION`.
        """
        with self._lock:
            anchor = self._anchors[bisect_right(self._anchors, wanted, key=key) - 1]
            anchor = max([anchor, *(each for each in self._recent if key(each) <= wanted)])
            while True:
                edges = self._edges(anchor)
                after = _Anchor(anchor.step + len(edges) - 1, int(edges[-1]), anchor.number + 1)
                self._keep(after)
                if key(after) > wanted:
                    self._recent.append(anchor)
                    return anchor.step, edges
                anchor = after

    def _edges(self, anchor: _Anchor) -> Integers:
        """Return where each step of a window begins, and the end of the last."""
        if anchor.position >= self.budget.end:
            raise PlanError(
                f"There are no steps after position {anchor.position:,}, where the plan ends."
            )
        return np.concatenate(([anchor.position], self.budget.edges_after(anchor.position)))

    def _keep(self, anchor: _Anchor) -> None:
        """Keep an anchor if it is an n-th one, and none is behind it."""
        if anchor.number % self._apart or anchor.number <= self._anchors[-1].number:
            return
        self._anchors.append(anchor)
        if len(self._anchors) > _MOST_ANCHORS:
            self._apart *= 2
            self._anchors = [each for each in self._anchors if each.number % self._apart == 0]


@final
class BudgetShard:
    """The positions that one rank reads, as `penstock.order.steps.Shard`; batches may differ."""

    def __init__(self, steps: BudgetSteps, *, rank: int = 0, world_size: int = 1) -> None:
        if world_size < 1 or not 0 <= rank < world_size:
            raise PlanError(
                f"rank={rank:,} of world_size={world_size:,}: ranks are 0 to world_size - 1."
            )
        self.steps = steps
        self.rank = rank
        self.world_size = world_size

    def rows(self, first: int, stop: int) -> Integers:
        """Return the rows of this rank in each of the steps from `first` to before `stop`."""
        return self._shares(self.steps.spans(first, stop)[1])

    def _shares(self, rows: Integers) -> Integers:
        multiple = self.steps.budget.multiple
        return -(-(-(-rows // multiple) * multiple) // self.world_size)

    def positions(self, first: int, stop: int, *, end: int | None = None) -> Integers:
        """Return the positions this rank reads in those steps; `NO_ROW` pads its share."""
        starts, rows = self.steps.spans(first, stop)
        shares = self._shares(rows)
        begins = starts + self.rank * shares
        positions = np.arange(int(shares.sum())) + np.repeat(
            begins - np.cumsum(shares) + shares, shares
        )
        limits = starts + rows if end is None else np.minimum(starts + rows, end)
        positions[positions >= np.repeat(limits, shares)] = NO_ROW
        return positions
