"""The order of a run over a store that is still being written.

It is the order of `shuffle="part"`: parts in order, and the rows of a part shuffled. The order
inside a part depends only on the seed, the epoch, the part's number and its number of rows. So the
row at a position depends only on the parts up to that position, and is the same in a snapshot and
in the finished store.
"""

from dataclasses import dataclass
from html import escape
from operator import index
from threading import Lock
from typing import NamedTuple, final

import numpy as np
import numpy.typing as npt

from penstock.errors import PlanError, UnknownLengthError
from penstock.order.integers import END, Integers, as_unsigned
from penstock.order.plan import Plan
from penstock.order.samples import Sample
from penstock.rows.origins import RowOrigin
from penstock.rows.protocol import Rows, Settings
from penstock.rows.tokens import Stream
from penstock.streaming.snapshots import Snapshot


@dataclass(frozen=True)
class _KnownRows:
    """The rows of the known parts, for a `Plan`: it needs only the number of rows of each part."""

    part_rows: Integers
    digest: str = ""  # that of an unfinished store is not known

    def __len__(self) -> int:
        return int(self.part_rows.sum())


class _Known(NamedTuple):
    """A snapshot, the rows over it and their plan.

    The four values are replaced together, so that no thread sees a mixture of two snapshots.
    """

    rows: Rows
    snapshot: Snapshot
    ends: Integers
    """The number of rows up to the end of each part."""
    plan: Plan | None
    """None while there is no row."""


@final
class StreamedPlan:
    """The plan of a run over a store that is being written, with `shuffle="part"`.

    It has the methods of `Plan` that a loader uses; `whole` has all of them, once the store is
    finished. Methods that need a row of a later snapshot wait for it.

    Args:
        rows: Rows over a stream; the source is called "data".
        seed: Any integer. Another seed gives another order.
    """

    names = ("data",)
    shuffle = "part"
    end = END

    def __init__(self, rows: Rows, *, seed: int = 0) -> None:
        self.seed = index(seed)
        self._lock = Lock()
        self._known = self._plan_of(rows)
        self.store = self._known.snapshot.source

    def tree(self, num_rows: int | None = None) -> str:
        """Return a picture of the plan over the finished store; see `Plan.tree`."""
        return self.whole.tree(num_rows)

    def __getstate__(self) -> Settings:
        return {"rows": self.rows, "seed": self.seed}

    def __setstate__(self, state: Settings) -> None:
        self.__init__(state["rows"], seed=state["seed"])

    def _plan_of(self, rows: Rows) -> _Known:
        snapshot = rows.stream.members[0] if rows.stream is not None else None
        if not isinstance(snapshot, Snapshot):
            raise PlanError(f"{rows.type_name} is not over a store of ps.stream. Use Plan.")
        # For a snapshot, these are only the parts whose number of rows is final: see
        # `Windows.part_rows`.
        part_rows = np.asarray(rows.part_rows, np.int64)
        # `len(rows)` is not known before the store is finished, so an unfinished plan is made of
        # the parts whose rows are final.
        ordered = rows if snapshot.sealed else _KnownRows(part_rows)
        has_rows = snapshot.sealed or part_rows.any()
        plan = Plan(ordered, seed=self.seed, shuffle="part") if has_rows else None
        return _Known(rows, snapshot, np.cumsum(part_rows), plan)

    @property
    def rows(self) -> Rows:
        """The rows over the current snapshot."""
        return self._known.rows

    @property
    def sources(self) -> dict[str, Rows]:
        """The rows over the current snapshot, by name."""
        return {"data": self.rows}

    @property
    def complete(self) -> bool:
        """Whether the current snapshot is the finished store."""
        return self._known.snapshot.sealed

    @property
    def num_rows(self) -> int:
        """The number of rows that are known; all rows of an epoch if the store is finished."""
        ends = self._known.ends
        return int(ends[-1]) if len(ends) else 0

    @property
    def epoch_rows(self) -> int | None:
        """The number of rows of an epoch; None until the store is finished."""
        return self.num_rows if self.complete or self._exchange() else None

    def __len__(self) -> int:
        """Return the number of rows of an epoch."""
        return len(self.whole)

    def __bool__(self) -> bool:
        return True  # without this, bool() would ask for the length

    def __str__(self) -> str:
        if self.complete:
            return str(self.whole)
        return f"plan of a store that is still being written, {self.num_rows:,} rows so far"

    def __repr__(self) -> str:
        return f"StreamedPlan({self.rows!r}; {self.num_rows:,} rows so far, seed {self.seed})"

    def _repr_html_(self) -> str:
        """Return the plan as text, for notebooks."""
        return f"<pre>{escape(str(self))}</pre>"

    def _exchange(self) -> bool:
        """Replace the snapshot by the latest one; return whether that is the finished store."""
        with self._lock:  # of two threads, neither may put back an earlier snapshot
            latest = self.store.snapshot()
            if latest is not self._known.snapshot:
                self._known = self._plan_of(self.rows.over(Stream([latest])))
        return self.complete

    def _exchange_later(self) -> None:
        """Wait for a later snapshot, and replace the current one by it."""
        current = self._known.snapshot
        if not self._exchange() and current is self._known.snapshot:
            self.store.await_later(current)
            self._exchange()

    def reach(self, position: int) -> None:
        """Wait until all rows before a position are known, or the store is finished.

        Raises:
            BaseException: the error that ended the build or the wait.
        """
        # A later snapshot may have no new rows, so more than one may be needed.
        while not self.complete and self.num_rows < position:
            self._exchange_later()

    def readable(self, samples: Integers) -> Rows:
        """Return the rows over a snapshot in which all `samples` can be read; wait for it.

        A row at the end of a part reaches into the next part, which may not be sealed yet.
        """
        last = int(samples.max(initial=-1))
        while not self.complete and self.rows.num_readable <= last:
            self._exchange_later()
        return self.rows

    def locate(self, positions: npt.ArrayLike) -> tuple[Integers, Integers, Integers]:
        """Return the source, epoch and sample at each of `positions`, as three int64 arrays."""
        numbers = as_unsigned(positions, END).view(np.int64)
        if not len(numbers):
            return numbers, numbers.copy(), numbers.copy()
        self.reach(int(numbers.max()) + 1)
        plan = self._known.plan
        assert plan is not None  # there are rows, or `reach` has raised
        return plan.locate(numbers)

    def samples(self, start: int, stop: int) -> list[Sample]:
        """Return the samples at the positions `[start, stop)`."""
        self.reach(stop)
        return [] if self._known.plan is None else self._known.plan.samples(start, stop)

    def origins(self, position: int) -> list[RowOrigin]:
        """Return the documents in the row at a position; wait for it. See `Plan.origins`."""
        _, _, samples = self.locate([position])
        return self.readable(samples).origins(int(samples[0]))

    def parts_before(self, position: int) -> int:
        """Return how many parts, counted from the first, the rows before a position start in."""
        if position == 0:
            return 0
        self.reach(position)
        # After the first epoch, all parts were read.
        last = min(position, self.num_rows) - 1
        return int(np.searchsorted(self._known.ends, last, side="right")) + 1

    def describe(self) -> Settings:
        """Return what `Plan.describe` returns; without sources until the store is finished."""
        if self.complete:
            return self.whole.describe()
        # The description of an order does not depend on the rows, so one row is enough.
        described = Plan(_KnownRows(np.ones(1, np.int64)), seed=self.seed, shuffle="part")
        return {**described.describe(), "sources": []}

    @property
    def digest(self) -> str:
        """The digest of the plan over the finished store."""
        return self.whole.digest

    @property
    def whole(self) -> Plan:
        """The plan over the finished store."""
        if self.epoch_rows is None or self._known.plan is None:
            raise UnknownLengthError(
                f"The store is still being written, and {self.num_rows:,} rows are known so far, "
                "so the number of all rows is not known. Wait until it is sealed, or build it "
                "first."
            )
        return self._known.plan
