"""Batches of documents of like length, as many as a number of tokens allows.

    positions       0         window         4096                       8192
    plan            │ a bbbb cc ddd e ffff … │ …                        │
    sorted          │ a e … │ cc ddd … │ bbbb ffff … │                    by length, and cut:
                      rows * width ≤ tokens                               a batch each
    batches dealt   │ cc ddd … │ bbbb ffff … │ a e … │                    in shuffled order

The positions of a plan are taken in windows of a fixed number of rows. Inside a window, rows
are sorted by length and cut into batches; the batches then come in an order of their own.
A window depends on the plan and on its place alone: so the row at a position is still a
pure function of (stores, plan, position), a run resumes at any position by computing one
window, and nothing depends on how many ranks there are. Where a plan has epochs, windows
begin anew with each, so that an epoch still holds every row once.

What is given up: a step has no number that is known without cutting all windows before it,
so steps are counted from where a loader began or was resumed; and a run with an end counts
its steps when it is opened, at about a third of a microsecond a row.
"""

from functools import cached_property
from operator import index
from typing import Any, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from penstock.digest import derive_key, digest_json
from penstock.errors import PlanError
from penstock.order.budget_steps import NO_ROW, BudgetShard, BudgetSteps

__all__ = ["NO_ROW", "Budget", "BudgetShard", "BudgetSteps"]

_MOST_KEPT = 16  # windows, of 40 KB each

Integers = NDArray[np.int64]


class _Window(NamedTuple):
    start: int
    stop: int
    order: Integers
    """For each place of the window, the place of the plan that comes there."""
    edges: Integers
    """Where each batch begins, from the start of the window, and the end."""


@final
class Budget:
    """A plan in batches of `tokens` tokens at most, padding included, on all ranks together.

    For a `Loader`, in place of the plan and without a batch size. Each rank gets an equal share
    of the rows of a batch. The last batch of a window may not divide: it is filled up to
    `rows_multiple_of`, on any number of ranks, with rows whose targets are all -100. On a number
    of ranks that does not divide `rows_multiple_of`, every batch is filled up to equal shares
    as well, and that comes on top of `tokens`: up to `world_size - 1` rows of it.

    Args:
        plan: A `Plan` over `Documents`.
        tokens: Rows times width of a batch, at most.
        window: How many rows are sorted together. More waste less padding, and make batches
            less random.
        rows_multiple_of: Batches have a multiple of so many rows.
    """

    def __init__(
        self, plan: Any, tokens: int, *, window: int = 4096, rows_multiple_of: int = 8
    ) -> None:
        self.plan = plan
        self.tokens, self.window = index(tokens), index(window)
        self.multiple = index(rows_multiple_of)
        if self.multiple < 1 or self.window < self.multiple:
            raise PlanError(
                f"window={self.window:,} and rows_multiple_of={self.multiple:,}: a window holds at "
                "least one batch of at least 1 row."
            )
        for name, rows in plan.sources.items():
            if not hasattr(rows, "widths"):
                raise PlanError(
                    f'Source "{name}" is a {type(rows).__name__}, whose rows are all equally long. '
                    "A budget of tokens is for Documents; give the loader a batch size instead."
                )
            if rows.length * self.multiple > self.tokens:
                raise PlanError(
                    f'{self.multiple:,} rows of "{name}" may take {self.multiple:,} x '
                    f"{rows.length:,} = {rows.length * self.multiple:,} tokens, more than "
                    f"tokens={self.tokens:,}. Raise it, or lower max_length or rows_multiple_of."
                )
        self._kept: dict[int, _Window] = {}

    def __getattr__(self, name: str) -> Any:
        if name == "plan" or name.startswith("_"):  # not there yet, while being unpickled
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.plan, name)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __len__(self) -> int:
        return len(self.plan)

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"Budget({self.tokens:,} tokens a batch, windows of {self.window:,} rows)"

    def __str__(self) -> str:
        return f"{self.plan}\n{self!r}"

    @cached_property
    def digest(self) -> str:
        """A name for this order: of the plan, the budget, the window and the padding."""
        return digest_json(self.describe())

    def describe(self) -> dict[str, Any]:
        """Everything the order depends on, as JSON."""
        # Batches are cut by padded widths, so what rows are padded to is part of the order.
        sources = list(self.plan.sources.values())
        budget = {
            "tokens": self.tokens,
            "window": self.window,
            "rows": self.multiple,
            "multiples": [getattr(rows, "multiple", 1) for rows in sources],
            "lengths": [rows.length for rows in sources],
        }
        return {**self.plan.describe(), "budget": budget}

    def locate(self, positions: Any) -> tuple[Integers, Integers, Integers]:
        """The source, epoch and sample at each of `positions`; see `Plan.locate`."""
        numbers = np.asarray(positions, np.int64)
        inner = numbers.copy()
        starts = self._starts(numbers)
        for start in np.unique(starts).tolist():
            chosen = starts == start
            inner[chosen] = start + self._at(start).order[numbers[chosen] - start]
        located: tuple[Integers, Integers, Integers] = self.plan.locate(inner)
        return located

    def samples(self, start: int, stop: int) -> list[Any]:
        """What the positions from `start` to before `stop` hold, for people to read."""
        inner = [self._inner(position) for position in range(start, stop)]
        found = [self.plan.samples(place, place + 1)[0] for place in inner]
        return [
            sample._replace(position=position)
            for position, sample in zip(range(start, stop), found, strict=True)
        ]

    def positions_of(
        self, source: str, sample: int, epoch: int | None = None, before: int | None = None
    ) -> Integers:
        """The positions that hold a sample; see `Plan.positions_of`."""
        limit = None if before is None or before < 1 else self._at(self._start(before - 1)).stop
        inner = self.plan.positions_of(source, sample, epoch, before if limit is None else limit)
        found = []
        for place in inner.tolist():
            window = self._at(self._start(place))
            found.append(
                window.start + int(np.flatnonzero(window.order == place - window.start)[0])
            )
        return np.array([each for each in found if before is None or each < before], np.int64)

    def steps(self, start: int = 0) -> BudgetSteps:
        """The batches from a position on."""
        return BudgetSteps(self, start)

    def edges_after(self, position: int) -> Integers:
        """Where the batches begin that follow `position` in its window, and the window's end."""
        window = self._at(self._start(position))
        edges = window.edges + window.start
        return edges[edges > position]

    def _inner(self, position: int) -> int:
        start = self._start(position)
        return start + int(self._at(start).order[position - start])

    def _start(self, position: int) -> int:
        return int(self._starts(np.array([position]))[0])

    def _starts(self, positions: Integers) -> Integers:
        """Where the window of each position begins."""
        epoch_rows = self.plan.epoch_rows
        epochs = positions - positions % epoch_rows if epoch_rows else np.zeros_like(positions)
        return np.asarray(epochs + (positions - epochs) // self.window * self.window)

    def _at(self, start: int) -> _Window:
        """The window that begins at `start`."""
        kept = self._kept.get(start)
        if kept is None:
            kept = self._arranged(start)
            if len(self._kept) >= _MOST_KEPT:
                self._kept = {}
            self._kept[start] = kept
        return kept

    def _arranged(self, start: int) -> _Window:
        stop = min(start + self.window, self.plan.end)
        if self.plan.epoch_rows:
            stop = min(stop, start - start % self.plan.epoch_rows + self.plan.epoch_rows)
        sources, _, samples = self.plan.locate(np.arange(start, stop))
        widths = np.zeros(stop - start, np.int64)
        for number in np.unique(sources).tolist():
            rows = self.plan.sources[self.plan.names[number]]
            widths[sources == number] = rows.widths(samples[sources == number])
        order = np.argsort(widths, kind="stable")
        cuts = _cut(widths[order], self.tokens, self.multiple)
        batches = np.split(order, cuts)
        # Unshuffled, every epoch has the order of the first.
        again = self.plan.shuffle == "none" and self.plan.epoch_rows
        place = start % self.plan.epoch_rows if again else start
        keys = [derive_key("budget", self.plan.seed, place, each) for each in range(len(batches))]
        # As they came within a batch: which rank gets which row has nothing to do with length.
        dealt = [np.sort(batches[each]) for each in np.argsort(np.array(keys, np.uint64)).tolist()]
        edges = np.cumsum([0] + [len(each) for each in dealt])
        return _Window(start, stop, np.concatenate(dealt), edges)


def _cut(widths: Integers, tokens: int, multiple: int) -> list[int]:
    """Where to cut rows of ascending widths, so that no batch has more than `tokens` places.

    >>> _cut(np.array([1, 1, 1, 2, 2, 3, 3, 5]), tokens=8, multiple=1)
    [4, 6, 7]
    """
    stops = np.minimum(np.arange(multiple, len(widths) + multiple, multiple), len(widths))
    widest = widths[stops - 1]
    cuts = []
    begin = 0
    while begin < len(stops):
        # Rows times width grows with each further row, so the last that fits can be searched for.
        sizes = np.arange(multiple, (len(stops) - begin + 1) * multiple, multiple) * widest[begin:]
        begin += max(1, int(np.searchsorted(sizes, tokens, side="right")))
        cuts.append(int(stops[begin - 1]))
    return cuts[:-1]
