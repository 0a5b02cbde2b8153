"""The steps of a budget, which have no number until the windows before them are cut.

    windows      │   │ │  │ │     │    │ │     │   │  │
    steps        0   1 2  3 4     5    6 7     8   9  …       counted from where a run began
    marks        ^                             ^              kept: every so many windows, and
                                                              those that were asked for last

See `penstock.order.budget` for how windows are cut into batches.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from operator import attrgetter
from threading import Lock
from typing import Any, NamedTuple, Protocol, final

import numpy as np
from numpy.typing import NDArray

from penstock.errors import PlanError

__all__ = ["NO_ROW", "BudgetShard", "BudgetSteps"]

NO_ROW = -1
"""Stands for a row that fills up a rank's share; `penstock.order.steps.PADDING`."""
_MOST_MARKS = 512  # of 100 bytes each
_MOST_RECENT = 16

Integers = NDArray[np.int64]


class _Budget(Protocol):
    plan: Any
    multiple: int

    def edges_after(self, position: int) -> Integers: ...


class _Mark(NamedTuple):
    """A window, as steps are counted: the number of its first step, and where that begins."""

    step: int
    position: int
    number: int
    """How many windows lie between it and the one that was counted from."""


_STEP: Callable[[_Mark], int] = attrgetter("step")
_POSITION: Callable[[_Mark], int] = attrgetter("position")


@final
class BudgetSteps:
    """Step ↔ positions, as `penstock.order.steps.Steps`, found window by window.

    Where windows begin is kept for the last few that were asked for, and for every so many of
    the others: enough to find any step by cutting a few windows, and no more in a run without
    end than in a short one.
    """

    def __init__(self, budget: _Budget, start: int) -> None:
        self.budget = budget
        self.start = start
        self._marks = [_Mark(0, start, 0)]
        self._apart = 1  # windows between two marks
        self._recent: deque[_Mark] = deque(maxlen=_MOST_RECENT)
        self._lock = Lock()  # the thread that reads ahead finds steps, and so may the user

    def __getstate__(self) -> dict[str, Any]:
        return {"budget": self.budget, "start": self.start}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)

    def span(self, step: int) -> tuple[int, int]:
        """The positions of a step: the first, and the one after the last."""
        starts, rows = self.spans(step, step + 1)
        return int(starts[0]), int(starts[0] + rows[0])

    def spans(self, first: int, stop: int) -> tuple[Integers, Integers]:
        """Where each of the steps from `first` to before `stop` begins, and its rows."""
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
        """The step that reads a position."""
        if position < self.start:
            raise PlanError(f"No step of a run from {self.start:,} reads position {position:,}.")
        first, edges = self._window(position, _POSITION)
        return first + int(np.searchsorted(edges, position, side="right")) - 1

    def count(self, end: int, *, drop_last: bool) -> int:
        """How many steps a run takes that ends before position `end`; none is left out."""
        return self.at(end - 1) + 1 if end > self.start else 0

    def _window(self, wanted: int, key: Callable[[_Mark], int]) -> tuple[int, Integers]:
        """The window of a step or a position: its first step, and the edges of its steps.

        Args:
            wanted: The step, or the position.
            key: Which of the two it is: `_STEP` or `_POSITION`.
        """
        with self._lock:
            mark = self._marks[bisect_right(self._marks, wanted, key=key) - 1]
            mark = max([mark, *(each for each in self._recent if key(each) <= wanted)])
            while True:
                edges = self._edges(mark)
                after = _Mark(mark.step + len(edges) - 1, int(edges[-1]), mark.number + 1)
                self._keep(after)
                if key(after) > wanted:
                    self._recent.append(mark)
                    return mark.step, edges
                mark = after

    def _edges(self, mark: _Mark) -> Integers:
        """Where each step of a window begins, and the end of the last."""
        if mark.position >= self.budget.plan.end:
            raise PlanError(
                f"There are no steps after position {mark.position:,}, where the plan ends."
            )
        return np.concatenate(([mark.position], self.budget.edges_after(mark.position)))

    def _keep(self, mark: _Mark) -> None:
        """Keep a mark, if it is one of every so many, and none lies behind it."""
        if mark.number % self._apart or mark.number <= self._marks[-1].number:
            return
        self._marks.append(mark)
        if len(self._marks) > _MOST_MARKS:
            self._apart *= 2
            self._marks = [each for each in self._marks if each.number % self._apart == 0]


@final
class BudgetShard:
    """The positions that one rank reads, as `penstock.order.steps.Shard`, of any batch."""

    def __init__(self, steps: BudgetSteps, *, rank: int = 0, world_size: int = 1) -> None:
        if world_size < 1 or not 0 <= rank < world_size:
            raise PlanError(
                f"Rank {rank:,} of {world_size:,} cannot be; ranks are 0 to world_size - 1."
            )
        self.steps = steps
        self.rank = rank
        self.world_size = world_size

    def rows(self, first: int, stop: int) -> Integers:
        """How many rows this rank reads in each of the steps from `first` to before `stop`."""
        return self._shares(self.steps.spans(first, stop)[1])

    def _shares(self, rows: Integers) -> Integers:
        multiple = self.steps.budget.multiple
        return -(-(-(-rows // multiple) * multiple) // self.world_size)

    def positions(self, first: int, stop: int, *, end: int | None = None) -> Integers:
        """The positions this rank reads in those steps; `NO_ROW` fills up its share."""
        starts, rows = self.steps.spans(first, stop)
        shares = self._shares(rows)
        begins = starts + self.rank * shares
        positions = np.arange(int(shares.sum())) + np.repeat(
            begins - np.cumsum(shares) + shares, shares
        )
        limits = starts + rows if end is None else np.minimum(starts + rows, end)
        positions[positions >= np.repeat(limits, shares)] = NO_ROW
        return positions
