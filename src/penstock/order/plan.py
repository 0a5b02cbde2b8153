"""The order of a run: which sample is at which position.

    position ──► source, epoch, sample          locate, samples
    source, sample ──► positions                positions_of

A plan combines two parts of this package: how sources are interleaved (by weights, or every
sample once per epoch) and how each source is shuffled. It reads no file and has no state. Two plans
with the same digest have the same rows at the same positions, on every machine. A run is a range
of positions.
"""

from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import replace
from functools import cached_property
from html import escape
from typing import TYPE_CHECKING, final

import numpy as np
import numpy.typing as npt

from penstock.digest import digest_json
from penstock.errors import PlanError, UnknownLengthError
from penstock.order import arguments
from penstock.order.arguments import Caps
from penstock.order.integers import END, Integers, as_unsigned
from penstock.order.layout import Layout, OrderSettings
from penstock.order.outlook import SourceOutlook, find_outlook, past_the_end
from penstock.order.samples import Sample, list_samples
from penstock.order.shuffle import Block, Mode, mode_to_json
from penstock.order.tree import draw_tree
from penstock.order.weights import Weight
from penstock.ranges import whole_number
from penstock.rows.protocol import Rows, RowsLike, Settings

if TYPE_CHECKING:
    from penstock.rows.protocol import RowOrigin

ORDER_FORMAT = 1
"""Part of every digest. Increased when the same arguments produce another order."""

# The format of plans whose weights change. Since 2, stages carry over their rounding errors.
_CHANGING_FORMAT = 2

_CHUNK_ROWS = 8_192  # their arrays fit in the cache, which is twice as fast
_MOST_EPOCHS = 10_000_000  # a minute of work, and 80 MB of positions


@final
class Plan:
    """The order in which the rows of one or more sources are read, without end.

    Without weights, every sample of every source occurs once per epoch. With weights, every source
    has separate epochs, in which each of its samples occurs once. In every prefix of such a run,
    the row count of a source is within two rows of its share. If weights change, the share of a
    source is the integral of its weight: see `penstock.order.schedule`. A plan is immutable and can
    be shared between threads and processes. Its memory does not grow with rows or positions.

    Args:
        rows: One source, which is called "data", or several by name.
        weights: Shares of the rows by name, as ratios: 7 and 3 mean 0.7 and 0.3.
        seed: Any integer. Another seed gives another order.
        shuffle: "full", "block" or a `Block`, "part", "none"; see `penstock.order.shuffle`. If it
            is None, "full"; with a remote store among the sources, `Block(rows="part", group=4)`.
        temperature: Instead of weights: shares in proportion to rows ** (1 / temperature).
        schedule: By position, the weights that apply from there on. Each source continues where it
            stopped.
        max_epochs: In a plan with weights, the largest number of epochs of each source: a number,
            numbers by name, or `Caps`, which also say what happens when it is reached.

    >>> class Lines(list):
    ...     digest = "a name for the contents"
    >>> sources = {"web": Lines("abcde"), "code": Lines("xyz")}
    >>> plan = Plan(sources, weights={"web": 2, "code": 1}, seed=17)
    >>> for sample in plan.samples(1_000_000, 1_000_003):
    ...     print(*sample)
    1000000 code 111111 1
    1000001 web 133333 0
    1000002 web 133333 2
    >>> plan.positions_of("code", 0, before=30)
    array([ 1, 16, 19])
    """

    def __init__(
        self,
        rows: RowsLike | Mapping[str, RowsLike],
        *,
        weights: Mapping[str, Weight] | None = None,
        seed: int = 0,
        shuffle: Mode | Block | None = None,
        temperature: float | None = None,
        schedule: Mapping[int, Mapping[str, Weight]] | None = None,
        max_epochs: float | Mapping[str, float] | Caps | None = None,
    ) -> None:
        given = rows if isinstance(rows, Mapping) else {"data": rows}
        self.sources: dict[str, Rows] = arguments.checked_sources(given)
        """The rows by name, in the order given."""
        if not self.sources:
            raise PlanError("A plan needs at least one source; this one has none.")
        self.names = tuple(self.sources)
        """The names of the sources, by the numbers that `locate` returns."""
        self.sizes = tuple(map(len, self.sources.values()))
        """The rows of each source."""
        self.seed = whole_number("seed", seed)
        self.shuffle: Mode | Block = arguments.default_shuffle(self.sources, shuffle)
        self._caps = arguments.as_caps(max_epochs)
        stages = arguments.read_stages(self.names, weights, temperature, schedule)
        self._settings = OrderSettings(self.sources, self.shuffle, self.seed, self._caps, stages)
        self.is_weighted = self._settings.is_weighted
        """Whether sources are drawn by weights; otherwise every sample occurs once per epoch."""
        self._layout: Layout = self._settings.lay_out()
        self._parent: Plan | None = None  # the plan that this one continues
        self.epoch_rows = self._layout.epoch_rows
        """The rows of an epoch; None if sources have separate epochs."""
        self.end = self._layout.end
        """The first position that has no sample: 2^62, or where `max_epochs` is reached."""

    def __len__(self) -> int:
        """Return the rows of an epoch."""
        if self.epoch_rows is None:
            raise UnknownLengthError(
                "This plan has no length: with weights, every source has separate epochs. Give the "
                "run a number of steps."
            )
        return self.epoch_rows

    def __bool__(self) -> bool:
        return True  # without this, bool() would call len()

    def locate(self, positions: npt.ArrayLike) -> tuple[Integers, Integers, Integers]:
        """Return the source, epoch and sample at each of `positions`, as three int64 arrays.

        Sources are indices into `names`. Positions may be in any order, and may repeat.
        """
        numbers = as_unsigned(positions, END).view(np.int64)
        if numbers.size and self.end < END and int(numbers.max()) >= self.end:
            raise past_the_end(self, self._layout, self._caps, int(numbers.max()))
        if len(numbers) <= _CHUNK_ROWS:
            return self._layout.locate(numbers)
        located = np.empty((3, len(numbers)), dtype=np.int64)
        for start in range(0, len(numbers), _CHUNK_ROWS):
            rows = slice(start, start + _CHUNK_ROWS)
            located[:, rows] = self._layout.locate(numbers[rows])
        return located[0], located[1], located[2]

    def samples(self, start: int, stop: int) -> list[Sample]:
        """Return the samples at the positions from `start` to before `stop`."""
        return list_samples(self.names, start, self.locate(np.arange(start, stop, dtype=np.int64)))

    def origins(self, position: int) -> "list[RowOrigin]":
        """Return the documents in the row at a position, and where they come from.

        See `Rows.origins`; the row itself is `plan.sources[source][sample]` of `samples`.
        """
        ((_, source, _, sample),) = self.samples(position, position + 1)
        return self.sources[source].origins(sample)

    def positions_of(
        self,
        source: str,
        sample: int | Integers,
        epoch: int | None = None,
        before: int | None = None,
    ) -> Integers:
        """Return the positions that hold a sample, one per epoch: the inverse of `locate`.

        Args:
            source: The name of the source.
            sample: The number of a row in this source; or several, as an array.
            epoch: Only this epoch of the source.
            before: Only positions below this one. Optional if an epoch is given, or if the plan
                has an end.
        """
        if source not in self.sources:
            raise PlanError(
                f'There is no source "{source}"; this plan has {arguments.quoted(self.names)}.'
            )
        number = self.names.index(source)
        size = self.sizes[number]
        samples = np.atleast_1d(np.asarray(sample, dtype=np.int64))
        wrong = samples[(samples < 0) | (samples >= size)].tolist()
        if wrong:
            raise PlanError(
                f'Source "{source}" has no row {wrong[0]:,}; its {size:,} rows are numbered from 0.'
            )
        shown = f"Row {samples[0]:,}" if samples.size == 1 else f"Each of {samples.size:,} rows"
        if before is None:
            before = self.end
        if epoch is not None:
            if not 0 <= epoch < END:
                raise PlanError(f"There is no epoch {epoch:,}; they are 0 to 2^62 - 1.")
            epochs = np.array([epoch], dtype=np.int64)
        elif before < END:
            num_epochs = self._layout.num_epochs(number, min(before, self.end))
            if num_epochs * samples.size > _MOST_EPOCHS:
                raise PlanError(
                    f'{shown} of "{source}" occurs {num_epochs:,} times before position '
                    f"{before:,}. Ask for an earlier position, or for one epoch with epoch=."
                )
            epochs = np.arange(num_epochs, dtype=np.int64)
        else:
            raise PlanError(
                f'{shown} of "{source}" occurs in every epoch, without end. Give epoch= or before=.'
            )
        # All epochs of the first row, then all epochs of the next one.
        pairs = np.repeat(samples, len(epochs)), np.tile(epochs, samples.size)
        positions = self._layout.positions_of(number, *pairs)
        return positions[positions < before]

    def counts(self, num_rows: int) -> dict[str, int]:
        """Return how many of the first `num_rows` rows belong to each source, exactly.

        With weights, the counts are computed. Without weights, rows of full epochs are computed by
        a multiplication, and rows of the last epoch are counted one by one, at about 30 ns each.
        """
        if not 0 <= num_rows <= self.end:
            raise PlanError(
                f"num_rows must be from 0 to {self.end:,}, where this plan ends; got {num_rows:,}."
            )
        return dict(zip(self.names, self._layout.counts(num_rows), strict=True))

    def continued(
        self,
        position: int,
        *,
        weights: Mapping[str, Weight],
        sources: Mapping[str, RowsLike] | None = None,
    ) -> "Plan":
        """Return a plan that is equal before `position` and has other weights from there on.

        Each source continues where it is: no row is repeated before its epoch ends, and none is
        lost. The rounding errors of earlier weights are carried over, so they do not grow with the
        number of changes. A later schedule of this plan ends. A loader of the new plan loads states
        of this one, if they are not after `position`. Continued plans can be continued.

        Args:
            position: The first position that may have another row.
            weights: Shares of the rows by name, as ratios. A source without a weight is not read
                from there on; if a later change gives it a weight, it continues where it stopped.
            sources: The sources that are read from there on, if others than those of this plan.
                New ones begin with their first row.
        """
        position = whole_number("position", position)
        given = None if sources is None else arguments.checked_sources(sources)
        stage = arguments.read_continuation(self.sources, position, weights, given)
        if not 0 <= position < self.end:
            end = "has no end" if self.end == END else f"ends at position {self.end:,}"
            raise PlanError(
                f"A plan cannot be continued from position {position:,}: positions begin at 0, and "
                f"this plan {end}."
            )
        plan = copy(self)
        plan.__dict__.pop("digest", None)
        plan._parent = self
        plan.sources = {**self.sources, **(given or {})}
        plan.names, plan.sizes = tuple(plan.sources), tuple(map(len, plan.sources.values()))
        plan._settings = replace(self._settings, sources=plan.sources, stages=[stage])
        plan._layout = plan._settings.continued(self._layout)
        plan.is_weighted, plan.epoch_rows, plan.end = True, None, plan._layout.end
        return plan

    def ancestors(self) -> Iterator[tuple["Plan", int]]:
        """Yield the plans that this one continues, the last one first.

        Each comes with the position before which it has the same rows as this plan.
        """
        plan, same_before = self, END
        while plan._parent is not None:
            same_before = min(same_before, plan._settings.stages[0].position)
            plan = plan._parent
            yield plan, same_before

    def outlook(self, num_rows: int) -> tuple[SourceOutlook, ...]:
        """Return the share of each source in the first `num_rows` rows, and when it repeats."""
        return find_outlook(self, self._layout, num_rows)

    @cached_property
    def digest(self) -> str:
        """A digest of this order: equal digests mean equal samples at every position."""
        return digest_json(self.describe())

    def describe(self) -> Settings:
        """Return everything that the order depends on, as JSON; `digest` is computed from it."""
        sources = [self._settings.describe(*each) for each in self.sources.items()]
        if self._parent is not None:
            before = self._parent.describe()
            added = self.names[len(self._parent.names) :]
            change = {**self._settings.stages[0].to_json(), "added": list(added)}
            changes = [*before.get("continued", ()), change]
            return {**before, "sources": sources, "continued": changes}
        # Weights change during the run by a schedule, or because of a cap.
        redistributes = self._caps is not None and self._caps.then == "redistribute"
        changing = self.is_weighted and (len(self._settings.stages) > 1 or redistributes)
        described: Settings = {
            "format": _CHANGING_FORMAT if changing else ORDER_FORMAT,
            "seed": self.seed,
            "shuffle": mode_to_json(self.shuffle),
            "sources": sources,
            "stages": [stage.to_json() for stage in self._settings.stages],
        }
        if self._caps is not None:
            described["max_epochs"] = self._caps.to_json()
        return described

    def tree(self, num_rows: int | None = None) -> str:
        """Return a tree of the sources as text, with their shares in the first `num_rows` rows.

        By default, `num_rows` is the number of rows of all sources, or of one epoch. Equal plans
        give equal text, so logs of two runs can be compared.

            plan ad156226, seed 17, shuffle full; in the first 10,000 rows:
            ├── web   8,000 rows  asked 70 %  delivered 7,000 rows  70 %  0.88 epochs
            └── code  1,000 rows  asked 30 %  delivered 3,000 rows  30 %  3.00 epochs
        """
        return draw_tree(self, self._layout, num_rows)

    def __str__(self) -> str:
        return self.tree()

    def __repr__(self) -> str:
        sizes = zip(self.names, self.sizes, strict=True)
        shown = [f"{name}: {size:,} rows" for name, size in sizes]
        more = f" and {len(shown) - 5:,} more" if len(shown) > 5 else ""
        mixed = "weighted" if self.is_weighted else "each once per epoch"
        mode = mode_to_json(self.shuffle)["mode"]
        rows = ", ".join(shown[:5]) + more
        return f"Plan({rows}; {mixed}, seed {self.seed}, shuffle {mode})"

    def _repr_html_(self) -> str:
        """Return the tree, for notebooks."""
        return f"<pre>{escape(self.tree())}</pre>"
