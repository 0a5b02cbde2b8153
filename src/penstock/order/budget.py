"""Batches of documents of similar length, each with as many rows as a token limit allows.

    positions       0         window         4096                       8192
    plan            │ a bbbb cc ddd e ffff … │ …                        │
    sorted          │ a e … │ cc ddd … │ bbbb ffff … │                    by length, and cut:
                      rows * width ≤ tokens                               one batch each
    shuffled        │ cc ddd … │ bbbb ffff … │ a e … │                    the order of batches

The positions of a plan are grouped into windows of a fixed number of rows. Inside a window, rows
are sorted by length and cut into batches, and the batches are shuffled. A window depends only on
the plan and on where the window begins. So the row at a position is a pure function of (stores,
plan, position), a run resumes at any position after one window is computed, and the number of
ranks changes nothing. If a plan has epochs, windows begin anew in each epoch, so that an epoch
holds every row once.

The cost: the number of a step is not known without cutting all windows before it. So steps are
counted from where a loader began or was resumed, and a run with an end counts its steps when it is
opened, in about a third of a microsecond per row.
"""

from array import array
from bisect import bisect_right
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple, Self, final

import numpy as np
import numpy.typing as npt

from penstock.digest import derive_key, digest_json
from penstock.errors import PlanError
from penstock.order.integers import Integers
from penstock.order.plan import Plan
from penstock.order.samples import Sample, list_samples
from penstock.order.steps import Steps
from penstock.ranges import group_rows, whole_number
from penstock.rows.protocol import RowsLike, Settings

if TYPE_CHECKING:
    from penstock.rows.protocol import RowOrigin

_MOST_KEPT = 16  # windows, of 40 KB each


class _Window(NamedTuple):
    start: int
    stop: int
    order: Integers
    """For each position of the window, the plan's position of its row; both count from `start`."""
    edges: Integers
    """Where each batch begins, counted from the start of the window, and the end."""


@final
class Budget:
    """A plan in batches of at most `tokens` tokens, including padding, on all ranks together.

    Pass it to a `Loader` instead of the plan, without a batch size. Each rank gets an equal share
    of the rows of a batch. The last batch of a window may not divide evenly: it is padded to
    `rows_multiple_of` rows, on any number of ranks, with rows whose targets are all -100. If the
    number of ranks does not divide `rows_multiple_of`, every batch is also padded to equal shares.
    Then a batch may exceed `tokens` by up to `world_size - 1` rows.

    Args:
        plan: A `Plan` over `Documents`; or `Documents`, for a plan of them alone.
        tokens: The largest size of a batch: its number of rows times its width.
        window: How many rows are sorted together. Larger windows waste less on padding, and make
            batches less random.
        rows_multiple_of: The number of rows of a batch is a multiple of this.
    """

    def __init__(
        self, plan: Plan | RowsLike, tokens: int, *, window: int = 4096, rows_multiple_of: int = 8
    ) -> None:
        self.plan = plan = plan if isinstance(plan, Plan) else Plan(plan)
        if plan.amendments:
            # A window sorts rows from both sides of a position, so rows before it would move.
            raise PlanError(
                f"A budget sorts rows by length, and this plan is amended {plan.amendments[0]}. "
                "Give the loader a batch size instead of a budget."
            )
        self.sources, self.names, self.sizes = plan.sources, plan.names, plan.sizes
        self.seed, self.shuffle = plan.seed, plan.shuffle
        self.end, self.epoch_rows = plan.end, plan.epoch_rows
        self.tokens, self.window = whole_number("tokens", tokens), whole_number("window", window)
        self.multiple = whole_number("rows_multiple_of", rows_multiple_of)
        if self.multiple < 1 or self.window < self.multiple:
            raise PlanError(
                f"window={self.window:,} and rows_multiple_of={self.multiple:,}: rows_multiple_of "
                "must be at least 1, and window at least rows_multiple_of."
            )
        for name, rows in plan.sources.items():
            if rows.side is None:
                raise PlanError(
                    f'Source "{name}" is a {rows.type_name}, whose rows are all equally long. '
                    "A budget of tokens is for Documents; give the loader a batch size instead."
                )
            if rows.length * self.multiple > self.tokens:
                raise PlanError(
                    f'{self.multiple:,} rows of "{name}" may take {self.multiple:,} x '
                    f"{rows.length:,} = {rows.length * self.multiple:,} tokens, more than "
                    f"tokens={self.tokens:,}. Raise it, or lower max_length= of Documents or "
                    "rows_multiple_of=."
                )
        self._kept: dict[int, _Window] = {}

    def __getstate__(self) -> Settings:
        return {**self.__dict__, "_kept": {}}

    def __len__(self) -> int:
        return len(self.plan)

    def __bool__(self) -> bool:
        return True  # without this, bool() would call len()

    def __repr__(self) -> str:
        size = f"{self.tokens:,} tokens a batch, windows of {self.window:,} rows"
        return f"Budget({size}; {self.plan!r})"

    def __str__(self) -> str:
        return f"{self.plan}\n{self!r}"

    def tree(self, num_rows: int | None = None) -> str:
        """Return a tree of the sources as text; see `Plan.tree`."""
        return self.plan.tree(num_rows)

    @cached_property
    def digest(self) -> str:
        """A digest of the plan, the budget, the window and the padding."""
        return digest_json(self.describe())

    def describe(self) -> Settings:
        """Return everything that the order depends on, as JSON."""
        # Batches are cut by padded widths, so the settings of the padding are part of the order.
        sources = list(self.sources.values())
        budget = {
            "tokens": self.tokens,
            "window": self.window,
            "rows": self.multiple,
            "multiples": [rows.multiple for rows in sources],
            "lengths": [rows.length for rows in sources],
        }
        return {**self.plan.describe(), "budget": budget}

    def locate(self, positions: npt.ArrayLike) -> tuple[Integers, Integers, Integers]:
        """Return the source, epoch and sample at each of `positions`; see `Plan.locate`."""
        numbers = np.asarray(positions, np.int64)
        inner = numbers.copy()
        for start, chosen in group_rows(self._starts(numbers)):
            inner[chosen] = start + self._at(start).order[numbers[chosen] - start]
        return self.plan.locate(inner)

    def samples(self, start: int, stop: int) -> list[Sample]:
        """Return the samples at the positions from `start` to before `stop`."""
        return list_samples(self.names, start, self.locate(np.arange(start, stop)))

    def origins(self, position: int) -> "list[RowOrigin]":
        """Return the documents in the row at a position; see `Plan.origins`."""
        ((_, source, _, sample),) = self.samples(position, position + 1)
        return self.sources[source].origins(sample)

    def positions_of(
        self,
        source: str,
        sample: int | Integers,
        epoch: int | None = None,
        before: int | None = None,
    ) -> Integers:
        """Return the positions that hold a sample; see `Plan.positions_of`."""
        limit = None if before is None or before < 1 else self._at(self._start(before - 1)).stop
        inner = self.plan.positions_of(source, sample, epoch, before if limit is None else limit)
        found = []
        # The plan returns the position before sorting; the window knows where sorting moved it.
        for position in inner.tolist():
            window = self._at(self._start(position))
            found.append(
                window.start + int(np.flatnonzero(window.order == position - window.start)[0])
            )
        return np.array([each for each in found if before is None or each < before], np.int64)

    def steps(self, start: int = 0) -> "BudgetSteps":
        """Return the steps from a position on."""
        return BudgetSteps(self, start)

    def edges_after(self, position: int) -> Integers:
        """Return where batches after `position` begin in its window, and the end of the window."""
        window = self._at(self._start(position))
        edges = window.edges + window.start
        return edges[edges > position]

    def _start(self, position: int) -> int:
        return int(self._starts(np.array([position]))[0])

    def _starts(self, positions: Integers) -> Integers:
        """Return where the window of each position begins."""
        rows = self.epoch_rows
        epochs = positions - positions % rows if rows else np.zeros_like(positions)
        return np.asarray(epochs + (positions - epochs) // self.window * self.window)

    def _at(self, start: int) -> _Window:
        """Return the window that begins at `start`."""
        kept = self._kept.get(start)
        if kept is None:
            kept = self._compute(start)
            # Replaced, not cleared: another thread may be reading the old dict.
            if len(self._kept) >= _MOST_KEPT:
                self._kept = {}
            self._kept[start] = kept
        return kept

    def _compute(self, start: int) -> _Window:
        stop = min(start + self.window, self.end)
        if self.epoch_rows:
            stop = min(stop, start - start % self.epoch_rows + self.epoch_rows)
        sources, _, samples = self.plan.locate(np.arange(start, stop))
        widths = np.zeros(stop - start, np.int64)
        for number, chosen in group_rows(sources):
            widths[chosen] = self.sources[self.names[number]].widths(samples[chosen])
        # Stable, so that rows of equal width keep the order of the plan on every machine.
        order = np.argsort(widths, kind="stable")
        batches = np.split(order, _cut(widths[order], self.tokens, self.multiple))
        # In an unshuffled plan, every epoch has the order of the first.
        first = start
        if self.shuffle == "none" and self.epoch_rows:
            first = start % self.epoch_rows
        keys = [derive_key("budget", self.seed, first, each) for each in range(len(batches))]
        # Rows of a batch keep the order of the plan, so a rank's rows do not depend on length.
        turns = np.argsort(np.array(keys, np.uint64)).tolist()
        ordered = [np.sort(batches[each]) for each in turns]
        edges = np.cumsum([0] + [len(each) for each in ordered])
        return _Window(start, stop, np.concatenate(ordered), edges)


@final
class BudgetSteps(Steps):
    """The steps of a budget of tokens, computed window by window.

        windows      │   │ │  │ │     │    │ │     │   │  │
        steps        0   1 2  3 4     5    6 7     8   9  …       counted from where a run began

    The number of a step is known after all windows before it are cut. The start and the first step
    of each window are kept: 16 bytes per window, which is 4 MB after a billion rows.
    """

    def __init__(self, budget: Budget, start: int) -> None:
        self.budget = budget
        self.start = start
        self.multiple, self.sizes = budget.multiple, ()
        # Of each window: its first step, and where it begins.
        self._first_steps, self._positions = array("q", [0]), array("q", [start])
        self._lock = Lock()  # the prefetching thread and the user's thread find steps

    def __reduce__(self) -> tuple[type[Self], tuple[Budget, int]]:
        return type(self), (self.budget, self.start)  # a lock cannot be pickled

    def spans(self, first: int, stop: int) -> tuple[Integers, Integers]:
        """Return where each of the steps from `first` to before `stop` begins, and its rows."""
        if not 0 <= first <= stop:
            raise PlanError(f"There are no steps from {first:,} to {stop:,}; steps begin at 0.")
        starts, rows = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        while first < stop:
            begin, edges = self._window(first, self._first_steps)
            wanted = edges[first - begin : stop - begin + 1]
            starts.append(wanted[:-1])
            rows.append(np.diff(wanted))
            first += len(wanted) - 1
        return np.concatenate(starts), np.concatenate(rows)

    def at(self, position: int) -> int:
        """Return the step that reads a position."""
        if position < self.start:
            raise PlanError(f"No step of a run from {self.start:,} reads position {position:,}.")
        first, edges = self._window(position, self._positions)
        return first + int(np.searchsorted(edges, position, side="right")) - 1

    def count(self, end: int, *, drop_last: bool) -> int:
        """Return the number of steps of a run up to position `end`; a padded last step counts."""
        return self.at(end - 1) + 1 if end > self.start else 0

    def _window(self, wanted: int, known: "array[int]") -> tuple[int, Integers]:
        """Return the window of a step or a position: its first step, and the edges of its steps.

        Args:
            wanted: The step, or the position.
            known: The first steps of the windows, or where the windows begin.
        """
        with self._lock:
            # Cut windows one after the other, until the next one begins after `wanted`.
            while known[-1] <= wanted:
                edges = self._edges(self._positions[-1])
                self._first_steps.append(self._first_steps[-1] + len(edges) - 1)
                self._positions.append(int(edges[-1]))
            number = bisect_right(known, wanted) - 1
        return self._first_steps[number], self._edges(self._positions[number])

    def _edges(self, position: int) -> Integers:
        """Return where each step of a window begins, and the end of the last."""
        if position >= self.budget.end:
            raise PlanError(f"There are no steps after position {position:,}, where the plan ends.")
        return np.concatenate(([position], self.budget.edges_after(position)))


def _cut(widths: Integers, tokens: int, multiple: int) -> list[int]:
    """Return where to cut rows of ascending widths, so that a batch has at most `tokens` tokens.

    >>> _cut(np.array([1, 1, 1, 2, 2, 3, 3, 5]), tokens=8, multiple=1)
    [4, 6, 7]
    """
    stops = np.minimum(np.arange(multiple, len(widths) + multiple, multiple), len(widths))
    widest = widths[stops - 1]
    cuts = []
    begin = 0
    while begin < len(stops):
        # Rows times width grows with every row, so the last row that fits is found by bisection.
        sizes = np.arange(multiple, (len(stops) - begin + 1) * multiple, multiple) * widest[begin:]
        begin += max(1, int(np.searchsorted(sizes, tokens, side="right")))
        cuts.append(int(stops[begin - 1]))
    return cuts[:-1]
