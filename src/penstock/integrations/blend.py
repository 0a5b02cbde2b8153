"""How examples of several datasets are drawn into one order.

    "proportional"   every example once an epoch, in one shuffled order of all of them
    "uniform"        as many examples of each dataset
    "weighted"       shares that are given; 7 and 3 mean 0.7 and 0.3

A blend says it in the words of the face and hands it to `penstock.order`, which computes the
order. Weights may change on the way: each dataset then goes on with the example after its last
one, so nothing is repeated or left out by the change. What a dataset is owed by rounding is
carried over too, so the shares of the whole run stay exact however often weights change.

With lengths, shares are shares of tokens. A dataset whose examples have 200 tokens on average
is then drawn half as often as one of equal weight whose examples have 100. As every example
of a dataset comes once in each of its epochs, the tokens of whole epochs stand exactly in the
ratio asked; inside an epoch they differ by the luck of the shuffle, and by two examples.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from fractions import Fraction
from functools import cached_property
from operator import add, attrgetter, index
from typing import Any

from penstock.digest import canonical_json, digest_bytes, digest_json
from penstock.errors import PlanError, ResumeError
from penstock.integrations.shares import (
    Lengths,
    Strategy,
    Weights,
    read_schedule,
    read_strategy,
    read_weights,
    token_counts,
)
from penstock.order.plan import Plan
from penstock.order.schedule import Schedule, StartingPoint
from penstock.order.schedule import Stage as OrderStage
from penstock.order.shuffle import Domain
from penstock.order.weighted import Mixture
from penstock.order.weights import Weight, as_fraction, exact_weights

__all__ = ["Blend", "Stage", "blend_of", "digest_examples"]

_SAMPLED = 16  # examples of a dataset that its digest is taken of
_position = attrgetter("position")  # of a stage


@dataclass(frozen=True, slots=True)
class Stage:
    """From `position` on, these weights, one a dataset."""

    position: int
    weights: tuple[Weight, ...]
    history: str = ""
    """A digest of all stages before; empty for the first one."""

    def to_json(self) -> list[Any]:
        """The stage as JSON, exactly."""
        return [self.position, [_spelled(weight) for weight in self.weights]]


@dataclass(frozen=True)
class Blend:
    """The order of all examples, by dataset and number. Immutable, and cheap to pickle."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    strategy: Strategy
    seed: int
    stages: tuple[Stage, ...]
    """What was asked, in the order of positions; empty where each example comes once."""
    num_tokens: tuple[int, ...] | None = None
    """The tokens of each dataset, where weights are shares of tokens."""
    origin: StartingPoint | None = None
    """Where the first stage begins in a blend that was resumed, if not at 0."""
    _schedule: Schedule | None = field(default=None, repr=False, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        # What is computed from the others stays here: it grows with every change of weights.
        return {each.name: getattr(self, each.name) for each in fields(self)} | {"_schedule": None}

    @property
    def total(self) -> int:
        """All examples, which is the length of an epoch for every strategy."""
        return sum(self.sizes)

    @cached_property
    def schedule(self) -> Schedule:
        """How datasets are drawn, where there are weights."""
        if self._schedule is not None:
            return self._schedule
        stages = [OrderStage(stage.position, self._drawn(stage.weights)) for stage in self.stages]
        return Schedule(stages, origin=self.origin)

    @cached_property
    def order(self) -> Plan | Mixture:
        """The order itself: `locate` gives the dataset, epoch and example at positions."""
        if not self.stages:
            rows = {name: _Counted(size) for name, size in zip(self.names, self.sizes, strict=True)}
            return Plan(rows, seed=self.seed)
        domains = [Domain(size) for size in self.sizes]
        return Mixture(
            self.schedule, names=self.names, domains=domains, shuffle="full", seed=self.seed
        )

    def shares(self, position: int) -> list[float]:
        """The share of each dataset at a position: by size, equal, or as asked."""
        if not self.stages:
            return [size / self.total for size in self.sizes]
        reached = self.stages[: bisect_right(self.stages, position, key=_position)]
        exact = exact_weights(reached[-1].weights)
        return [weight / sum(exact) for weight in exact]

    def delivered(self, position: int) -> list[int]:
        """The examples of each dataset before a position of the order."""
        if isinstance(self.order, Plan):
            return list(self.order.counts(position).values())
        return self.schedule.counts(position)

    def asked(self, position: int) -> list[float]:
        """The examples of each dataset before a position by weights alone: their integral."""
        if not self.stages:
            return [position * size / self.total for size in self.sizes]
        return list(map(add, self.delivered(position), self.schedule.owed(position)))

    def changed(self, position: int, weights: Weights) -> "Blend":
        """The same up to `position`, and other weights from there on.

        Costs the same however often weights changed before.

        Raises:
            PlanError: these are no weights, or the blend has none to change.
        """
        if not self.stages:
            raise PlanError(
                "Weights cannot change in a proportional loader: it reads every example once an "
                "epoch. Make it with sampling_weights; the numbers of examples, "
                f"{list(self.sizes)}, give the same shares."
            )
        kept = self.stages[: bisect_left(self.stages, position, key=_position)]
        start = position if kept else self.stages[0].position
        stage = Stage(start, read_weights(weights, self.names), _history(kept, self.stages[0]))
        schedule = self.schedule.changed(start, self._drawn(stage.weights))
        return replace(self, strategy="weighted", stages=(*kept, stage), _schedule=schedule)

    def restarted(self, position: int) -> "Blend":
        """The weights in force at `position`, from 0 on."""
        if not self.stages or (len(self.stages) == 1 and self.origin is None):
            return self
        last = self.stages[bisect_right(self.stages, position, key=_position) - 1]
        return replace(self, stages=(Stage(0, last.weights),), origin=None, _schedule=None)

    def to_resume(self) -> dict[str, Any]:
        """What `resumed` needs to continue after the last change of weights, as JSON.

        Its size does not depend on how often weights changed before.
        """
        last = self.stages[-1]
        _, weights = last.to_json()
        origin = self.schedule.origin_at(last.position)
        return {**origin._asdict(), "weights": weights, "history": last.history}

    def resumed(self, changed: Any) -> "Blend":
        """The blend that gave `changed`, but for what came before its last change of weights.

        Raises:
            ResumeError: it belongs to other datasets, or is not as `to_resume` writes it.
        """
        try:
            origin = StartingPoint(changed["position"], changed["counts"], changed["debts"])
            weights = read_weights([_parsed(each) for each in changed["weights"]], self.names)
            stage = Stage(origin.position, weights, str(changed["history"]))
            # A wrong sum, or numbers that are none, would come out as other examples later on.
            sums = sum(map(index, origin.counts)), sum(map(index, origin.debts))
            whole = sums == (index(origin.position), 0) and min(origin.counts) >= 0
            whole = whole and len(origin.counts) == len(origin.debts) == len(self.names)
        except (KeyError, TypeError, ValueError, ZeroDivisionError):  # a PlanError among them
            whole = False
        if not whole:
            raise ResumeError(
                f"This state has no weights for these {len(self.names):,} datasets, or they were "
                f"changed after it was written: {changed!r:.80}. Use the checkpoint before it."
            )
        begin = origin if origin.position else None
        return replace(self, strategy="weighted", stages=(stage,), origin=begin, _schedule=None)

    def _drawn(self, weights: tuple[Weight, ...]) -> tuple[Weight, ...]:
        """Shares of examples, also where `weights` are shares of tokens."""
        if self.num_tokens is None:
            return weights
        # Examples drawn per token asked: the inverse of the mean length, as exact fractions.
        return tuple(
            as_fraction(weight) * Fraction(size, tokens) if weight else 0
            for weight, size, tokens in zip(weights, self.sizes, self.num_tokens, strict=True)
        )


class _Counted:
    """Rows as a plan wants them: it needs their number, and never reads one."""

    digest = ""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size


def blend_of(
    names: Sequence[str],
    rows: Sequence[Any],
    *,
    strategy: str,
    weights: Weights | None,
    seed: int,
    schedule: Mapping[int, Weights] | None,
    lengths: Lengths | None,
) -> Blend:
    """The blend that was asked for.

    Raises:
        PlanError: it cannot be; the message says what to change.
    """
    chosen = read_strategy(strategy, weights)
    sizes = tuple(len(each) for each in rows)
    blend = Blend(tuple(names), sizes, chosen, seed, _stages(chosen, weights, names))
    if lengths is not None:
        if not blend.stages:
            raise PlanError(
                "lengths= makes weights shares of tokens, and a proportional loader has none: it "
                'reads every example once. Give sampling_weights, or sampling_strategy="uniform".'
            )
        blend = replace(blend, num_tokens=tuple(token_counts(lengths, names, rows)))
    for position, later in read_schedule(schedule):
        if position < 1:
            raise PlanError(
                f"schedule has weights from example {position:,} on; those of the start are "
                "sampling_weights, and later ones begin at 1 or more."
            )
        blend = blend.changed(position, later)
    blend.order  # noqa: B018  (refuses now what it cannot do, not at the first batch)
    return blend


def digest_examples(rows: Any) -> str:
    """A name for a dataset, from a sample of its examples; "" where reading them may differ.

    Only what lies in a list or a tuple is sure to be the same when read again. Of values that
    are not JSON only the type counts.
    """
    if not isinstance(rows, list | tuple):
        return ""
    numbers = sorted({place * (len(rows) - 1) // (_SAMPLED - 1) for place in range(_SAMPLED)})
    return digest_bytes(canonical_json([_plain(rows[number]) for number in numbers]))[:16]


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return type(value).__name__


def _stages(strategy: Strategy, weights: Weights | None, names: Sequence[str]) -> tuple[Stage, ...]:
    if strategy == "proportional":
        return ()
    asked = [1] * len(names) if weights is None else weights
    return (Stage(0, read_weights(asked, names)),)


def _spelled(weight: Weight) -> int | float | str:
    if isinstance(weight, int):
        return int(weight)
    return str(weight) if isinstance(weight, Fraction) else float(weight)


def _parsed(weight: Any) -> Weight:
    """The weight that `_spelled` wrote so."""
    return Fraction(weight) if isinstance(weight, str) else weight


def _history(kept: Sequence[Stage], first: Stage) -> str:
    """A digest of the stages `kept`, by that of those before them."""
    if not kept:
        return first.history
    return digest_json([kept[-1].history, kept[-1].to_json()])[:16]
