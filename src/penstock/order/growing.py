"""The order of a run over a store that is still being written.

It is the order of `shuffle="part"`: parts in order, rows anywhere inside their part. Where a
part begins in it depends on the parts before, and the order inside on its own size, so every
position up to the last part that is known holds already what it will hold in the finished
store. Past that, asking waits. Once the last part is known, epochs follow each other as ever.
"""

from functools import cached_property
from operator import index
from threading import Lock
from typing import Any, NamedTuple, NoReturn, Protocol, final

import numpy as np
import numpy.typing as npt

from penstock.errors import PlanError, UnknownLengthError
from penstock.order.epochs import EpochOrder
from penstock.order.integers import END, Integers, as_unsigned
from penstock.order.plan import Plan, Sample
from penstock.order.segments import Members
from penstock.order.shuffle import Domain

__all__ = ["GrowingPlan", "GrowingRows"]


class GrowingRows(Protocol):
    """Rows of a store that is still being written."""

    stream: Any

    def settled(self) -> tuple[npt.NDArray[np.int64], bool]:
        """The rows of each part that is known, and whether these are all."""
        ...


class _Known(NamedTuple):
    ends: Integers
    """Where the rows of each part end."""
    complete: bool
    passes: EpochOrder | None

    @property
    def num_rows(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0


@final
class GrowingPlan:
    """What a `Plan` over one source with `shuffle="part"` is, as far as it is known.

    Args:
        rows: The source, which is called "data".
        seed: Any integer. Another seed, another order.
    """

    names = ("data",)
    shuffle = "part"
    end = END

    def __init__(self, rows: GrowingRows, *, seed: int = 0) -> None:
        self.sources: dict[str, Any] = {"data": rows}
        self.seed = index(seed)
        self._rows = rows
        self._known = _Known(np.zeros(0, np.int64), False, None)
        self._place = -1
        self._looking = Lock()
        self._look()

    def __getstate__(self) -> dict[str, Any]:
        return {"rows": self._rows, "seed": self.seed}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["rows"], seed=state["seed"])

    @property
    def complete(self) -> bool:
        """Whether all rows are known."""
        return self._known.complete

    @property
    def drops_parts(self) -> bool:
        """Whether parts behind the readers are removed."""
        return bool(self._rows.stream.members[0].drops_parts)

    @property
    def num_rows(self) -> int:
        """The rows that are known: those of an epoch, if all are."""
        return self._known.num_rows

    @property
    def epoch_rows(self) -> int | None:
        """The rows of an epoch; None as long as that is not known."""
        return self.num_rows if self.complete or self._look() else None

    def __len__(self) -> int:
        """The rows of an epoch, once they are known."""
        return self._refuse("its length") if self.epoch_rows is None else self.epoch_rows

    def __bool__(self) -> bool:
        return True  # also where there is no length to ask for

    def __str__(self) -> str:
        if self.complete:
            return str(self.whole)
        return f"plan of a store that is still being written, {self.num_rows:,} rows so far"

    def _look(self) -> bool:
        """See which parts are known by now; whether these are all."""
        with self._looking:  # so that what is known only ever grows
            if self._known.complete:
                return True
            part_rows, complete = self._rows.settled()
            if complete or len(part_rows) > len(self._known.ends):
                ends = np.cumsum(part_rows, dtype=np.int64)
                total = int(ends[-1]) if len(ends) else 0
                passes = self._passes(total, part_rows.tolist()) if total else None
                self._known = _Known(ends, complete, passes)
            return complete

    def _passes(self, num_rows: int, part_rows: list[int]) -> EpochOrder:
        return EpochOrder(
            [Members(0, [0])],
            names=self.names,
            domains=[Domain(num_rows, part_rows)],
            shuffle="part",
            seed=self.seed,
        )

    def reach(self, position: int) -> None:
        """Wait until all rows before a position are known, or it is known that there are fewer.

        Raises:
            BaseException: whatever ended the build, or the waiting.
        """
        while not self._known.complete and self._known.num_rows < position:
            stream = self._rows.stream
            num_parts, num_tokens = len(stream.ends), stream.least_tokens
            if not self._look() and self._known.num_rows < position:
                stream.members[0].await_news(num_parts, num_tokens)

    def locate(self, positions: npt.ArrayLike) -> tuple[Integers, Integers, Integers]:
        """The source, epoch and sample at each of `positions`, as three int64 arrays."""
        numbers = as_unsigned(positions, END).view(np.int64)
        if not len(numbers):
            return numbers, numbers.copy(), numbers.copy()
        self.reach(int(numbers.max()) + 1)
        passes = self._known.passes
        if passes is None:
            raise PlanError("The store was finished without a row to read.")
        return passes.locate(numbers)

    def samples(self, start: int, stop: int) -> list[Sample]:
        """What the positions from `start` to before `stop` hold, for people to read."""
        located = [each.tolist() for each in self.locate(np.arange(start, stop, dtype=np.int64))]
        return [
            Sample(position, "data", epoch, sample)
            for position, epoch, sample in zip(range(start, stop), *located[1:], strict=True)
        ]

    def handed_out(self, position: int) -> None:
        """Say that the rows before a position were read; raises what ended the build, if anything.

        Parts that lie behind may be dropped now, where the store is not kept.
        """
        store = self._rows.stream.members[0]
        store.check()
        if position > self._known.num_rows:
            self._look()
        known = self._known
        inside = position % known.num_rows if known.complete else position
        place = int(np.searchsorted(known.ends, inside, side="right"))
        if place != self._place:
            self._place = place
            store.reading(self, place)

    def parts_before(self, position: int) -> int:
        """How many parts, from the first on, the rows before a position begin in."""
        if position == 0:
            return 0
        self.reach(position)
        last = min(position, self._known.num_rows) - 1
        return int(np.searchsorted(self._known.ends, last, side="right")) + 1

    def describe(self) -> dict[str, Any]:
        """How rows are ordered, as `Plan` says it, but not of which store."""
        if self.complete:
            return self.whole.describe()
        # Of any rows: what a plan says of its order does not depend on them.
        described = Plan(_Nothing(), seed=self.seed, shuffle="part").describe()
        return {**described, "sources": []}

    @property
    def digest(self) -> str:
        """The digest of the finished plan."""
        return self.whole.digest

    def positions_of(
        self, source: str, sample: int, epoch: int | None = None, before: int | None = None
    ) -> Integers:
        """The positions that hold a sample, as `Plan.positions_of`, once all rows are known."""
        return self.whole.positions_of(source, sample, epoch, before)

    @cached_property
    def whole(self) -> Plan:
        """The plan over the finished store, once it is finished."""
        if self.epoch_rows is None:
            self._refuse("what comes after the last part that is sealed")
        rows: Any = self._rows
        return Plan(rows, seed=self.seed, shuffle="part")

    def _refuse(self, what: str) -> NoReturn:
        raise UnknownLengthError(
            f"The store is still being written: {self.num_rows:,} rows are known so far, and "
            f"{what} is not. Wait until it is sealed, or build it first."
        )


class _Nothing:
    digest = ""
    part_rows = (1,)

    def __len__(self) -> int:
        return 1
