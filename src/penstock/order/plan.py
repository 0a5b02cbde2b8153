"""The order of a run: which sample lies at which position.

    position ──► source, epoch, sample          locate, samples
    source, sample ──► positions                positions_of

A plan composes the pieces of this package: a way to interleave the sources (by weights,
or everything once an epoch) and a way to shuffle each. It reads no file and keeps no
state; two plans of equal digest give the same rows at the same positions, on every
machine. A run is a range of its positions.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from operator import index
from typing import Any, NamedTuple, final

import numpy as np
import numpy.typing as npt

from penstock.digest import digest_json
from penstock.errors import PlanError
from penstock.order.arguments import (
    Caps,
    cap_rows,
    check_name,
    part_rows_of,
    quoted,
    read_members,
    read_terms,
    read_weights,
)
from penstock.order.epochs import Passes
from penstock.order.integers import END, Integers, as_unsigned
from penstock.order.picture import Leaf, draw_tree
from penstock.order.schedule import Schedule
from penstock.order.shuffle import Block, Domain, Mode, spell_mode
from penstock.order.weighted import Mixture
from penstock.order.weights import Weight
from penstock.rows.protocol import Rows, RowsLike, as_rows

__all__ = ["ORDER_FORMAT", "Plan", "Sample"]

ORDER_FORMAT = 1
"""Bound into every digest. It grows when equal arguments come to mean another order."""

_CHANGING_FORMAT = (
    2  # the same where weights change: since 2 rounding is carried from stage to stage
)

_CHUNK_ROWS = 8_192  # at a time: their arrays stay in the cache, which is twice as fast
_DRAWN_STAGES = 10
_MOST_EPOCHS = 10_000_000  # a minute of work, and 80 MB of positions


class Sample(NamedTuple):
    """What lies at one position."""

    position: int
    source: str
    epoch: int
    """How often this sample has come before."""
    sample: int
    """Its number among the rows of the source."""


@final
class Plan:
    """The order in which the rows of one source or several are read, without end.

    Without weights, every sample of every source comes once an epoch. With weights,
    every prefix of the run holds each source within two rows of its share (where weights
    change, of their integral: see `penstock.order.schedule`), and a source's samples come
    once in each epoch of its own. Immutable, safe to share between threads
    and processes; memory does not grow with rows or positions.

    Args:
        rows: One source, called "data", or several by name.
        weights: Shares of the rows by name, as ratios: 7 and 3 mean 0.7 and 0.3.
        seed: Any integer. Another seed, another order.
        shuffle: "full", "block" or a `Block`, "part", "none"; see `penstock.order.shuffle`.
        temperature: In place of weights: shares in proportion to rows ** (1 / temperature).
        schedule: From each position on, other weights; or, in a plan without weights, the
            names of the sources that are read. Each source goes on where it was.
        max_epochs: The most epochs of each source, in a plan with weights: a number, or
            numbers by name, or `Caps`, which also say what comes then.

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
        shuffle: Mode | Block = "full",
        temperature: float | None = None,
        schedule: Mapping[int, Mapping[str, Weight] | Sequence[str]] | None = None,
        max_epochs: float | Mapping[str, float] | Caps | None = None,
    ) -> None:
        given = rows if isinstance(rows, Mapping) else {"data": rows}
        self.sources: dict[str, Rows] = {
            check_name(name): as_rows(source, name) for name, source in given.items()
        }
        """The rows by name, in the order given."""
        if not self.sources:
            raise PlanError("A plan needs at least one source; this one has none.")
        self.names = tuple(self.sources)
        """The names of the sources by the numbers that `locate` gives."""
        self.sizes = tuple(map(len, self.sources.values()))
        """The rows of each source."""
        self.seed = index(seed)
        self.shuffle = shuffle
        self._caps = _as_caps(max_epochs)
        self._terms = read_terms(self.names, weights, temperature, schedule)
        self._layout = self._lay_out()
        self.end = self._layout.end
        """The first position that has no sample: 2^62, or where `max_epochs` is reached."""

    def _lay_out(self) -> Mixture | Passes:
        domains = [
            Domain(size, part_rows_of(name, source, size) if self.shuffle == "part" else ())
            for (name, source), size in zip(self.sources.items(), self.sizes, strict=True)
        ]
        if not self.is_weighted:
            if self._caps is not None:
                raise PlanError(
                    f"max_epochs={self._caps.epochs!r} needs weights: without them every source "
                    "has as many epochs as the run. Give the run its number of epochs."
                )
            stages = read_members(self._terms, self.names, self.sizes)
            return Passes(
                stages, names=self.names, domains=domains, shuffle=self.shuffle, seed=self.seed
            )
        schedule = Schedule(
            read_weights(self._terms, self.names, self.sizes),
            caps=cap_rows(self._caps, self.names, self.sizes) if self._caps else None,
            exhausted=self._caps.then if self._caps else "error",
        )
        return Mixture(
            schedule, names=self.names, domains=domains, shuffle=self.shuffle, seed=self.seed
        )

    @property
    def is_weighted(self) -> bool:
        """Whether sources are drawn by weights, or every sample comes once an epoch."""
        return self._terms[0].sources is None

    @property
    def _changes_weights(self) -> bool:
        """Whether weights change on the way, by a schedule or because a source is used up."""
        redistributes = self._caps is not None and self._caps.then == "redistribute"
        return self.is_weighted and (len(self._terms) > 1 or redistributes)

    @property
    def epoch_rows(self) -> int | None:
        """The rows of an epoch; None where sources have epochs of their own, or join later."""
        if isinstance(self._layout, Mixture) or len(self._layout.segments) > 1:
            return None
        return self._layout.segments[0].size

    def __len__(self) -> int:
        """The rows of an epoch, where there is such a thing."""
        if self.epoch_rows is None:
            raise PlanError(
                "This plan has no length: with weights, or sources that join later, each source "
                "has epochs of its own. Give the run a number of steps."
            )
        return self.epoch_rows

    def __bool__(self) -> bool:
        return True  # also where there is no length to ask for

    def locate(self, positions: npt.ArrayLike) -> tuple[Integers, Integers, Integers]:
        """The source, epoch and sample at each of `positions`, as three int64 arrays.

        Sources are numbers into `names`. Positions may come in any order, and again.
        """
        numbers = as_unsigned(positions, END).view(np.int64)
        if numbers.size and self.end < END and int(numbers.max()) >= self.end:
            raise self._past_the_end(int(numbers.max()))
        if len(numbers) <= _CHUNK_ROWS:
            return self._layout.locate(numbers)
        located = np.empty((3, len(numbers)), dtype=np.int64)
        for start in range(0, len(numbers), _CHUNK_ROWS):
            rows = slice(start, start + _CHUNK_ROWS)
            located[:, rows] = self._layout.locate(numbers[rows])
        return located[0], located[1], located[2]

    def samples(self, start: int, stop: int) -> list[Sample]:
        """What the positions from `start` to before `stop` hold, for people to read."""
        located = self.locate(np.arange(start, stop, dtype=np.int64))
        return [
            Sample(position, self.names[source], epoch, sample)
            for position, source, epoch, sample in zip(
                range(start, stop), *(numbers.tolist() for numbers in located), strict=True
            )
        ]

    def positions_of(
        self, source: str, sample: int, epoch: int | None = None, before: int | None = None
    ) -> Integers:
        """The positions that hold a sample, one for each epoch: the inverse of `locate`.

        Args:
            source: The name of the source.
            sample: A row of it.
            epoch: This epoch of the source only.
            before: Only positions below this one. May be left out where an epoch is given,
                or where the plan has an end.
        """
        if source not in self.sources:
            raise PlanError(f'There is no source "{source}"; this plan has {quoted(self.names)}.')
        number = self.names.index(source)
        size = self.sizes[number]
        if not 0 <= sample < size:
            raise PlanError(f'Source "{source}" has no row {sample:,}; it has {size:,}.')
        if before is None:
            before = self.end
        if epoch is not None:
            if not 0 <= epoch < END:
                raise PlanError(f"There is no epoch {epoch:,}; they are 0 to 2^62 - 1.")
            epochs = np.array([epoch], dtype=np.int64)
        elif before < END:
            num_epochs = self._layout.num_epochs(number, min(before, self.end))
            if num_epochs > _MOST_EPOCHS:
                raise PlanError(
                    f'Row {sample:,} of "{source}" comes {num_epochs:,} times before position '
                    f"{before:,}. Ask for an earlier position, or for one epoch with epoch=."
                )
            epochs = np.arange(num_epochs, dtype=np.int64)
        else:
            raise PlanError(
                f'Row {sample:,} of "{source}" comes again in every epoch, without end. Say '
                "which with epoch=, or up to where with before=."
            )
        positions = self._layout.positions_of(number, sample, epochs)
        return positions[positions < before]

    def counts(self, num_rows: int) -> dict[str, int]:
        """How many of the first `num_rows` rows belong to each source, exactly.

        Computed from the weights; without weights, whole passes are multiplied and the
        rows of the one under way are counted, at about 30 ns each.
        """
        if not 0 <= num_rows <= self.end:
            raise PlanError(f"{num_rows:,} rows cannot be counted; this plan has {self.end:,}.")
        return dict(zip(self.names, self._layout.counts(num_rows), strict=True))

    @cached_property
    def digest(self) -> str:
        """A name for this order: equal digests mean equal samples at every position."""
        return digest_json(self.describe())

    def describe(self) -> dict[str, Any]:
        """Everything the order depends on, as JSON: what `digest` is computed from."""
        described: dict[str, Any] = {
            "format": _CHANGING_FORMAT if self._changes_weights else ORDER_FORMAT,
            "seed": self.seed,
            "shuffle": spell_mode(self.shuffle),
            "sources": [self._described_source(number) for number in range(len(self.names))],
            "stages": [terms.spelled() for terms in self._terms],
        }
        if self._caps is not None:
            described["max_epochs"] = self._caps.spelled()
        return described

    def tree(self, num_rows: int | None = None) -> str:
        """A picture of the sources, and of what the first `num_rows` rows take from each.

        Without a number, as many rows as all sources have, or as end with a pass. The
        same text for the same plan.
        """
        if num_rows is None:
            num_rows = min(self.end, self._layout.natural_rows)
        counts = self.counts(num_rows)
        asked = self._layout.asked(num_rows)
        leaves = [
            Leaf(
                name=name,
                rows=size,
                tokens=self.sources[name].num_tokens,
                asked=share,
                delivered=counts[name],
            )
            for name, size, share in zip(self.names, self.sizes, asked, strict=True)
        ]
        mode = spell_mode(self.shuffle)["mode"]
        heading = (
            f"plan {self.digest[:8]}, seed {self.seed}, shuffle {mode}; "
            f"in the first {num_rows:,} rows:"
        )
        num_stages = self._layout.num_stages
        stages = [self._layout.stage(number) for number in range(min(num_stages, _DRAWN_STAGES))]
        if num_stages > len(stages):
            stages.append(f"… and {num_stages - len(stages):,} more stages")
        return draw_tree(heading, leaves, num_rows, stages if num_stages > 1 else ())

    def __str__(self) -> str:
        return self.tree()

    def _described_source(self, number: int) -> dict[str, Any]:
        name, size = self.names[number], self.sizes[number]
        source = self.sources[name]
        described = {"name": name, "rows": size, "digest": source.digest}
        if self.shuffle == "part":
            described["parts"] = digest_json(part_rows_of(name, source, size))
        return described

    def _past_the_end(self, position: int) -> PlanError:
        assert isinstance(self._layout, Mixture)  # the others have no end
        number = self._layout.schedule.ended_by
        cause = "every source has reached its max_epochs"
        if number is not None and self._caps is not None:
            name = self.names[number]
            cause = f'"{name}" has reached its max_epochs of {self._caps.of(name)}'
        return PlanError(
            f"Position {position:,} is past the end of this plan at {self.end:,}: there {cause}. "
            'Ask for fewer rows, raise max_epochs, or let others go on: Caps(…, "redistribute").'
        )


def _as_caps(max_epochs: float | Mapping[str, float] | Caps | None) -> Caps | None:
    return max_epochs if max_epochs is None or isinstance(max_epochs, Caps) else Caps(max_epochs)
