"""The order in which examples of several datasets are read.

    "proportional"   every example once per epoch, in one shuffled order of all datasets, so
                     shares are exact in an epoch and random inside it
    "uniform"        the same number of examples from every dataset
    "weighted"       shares set by weights; 7 and 3 mean 0.7 and 0.3

`penstock.order` computes the order. `Mixing` checks the arguments and translates them.

Weights may change during a run. Each dataset then continues with the example after its last
one, so a change neither repeats nor skips an example. The rounding error of each dataset is
carried over as well, so the shares of the whole run stay exact however often weights change.

If token counts are given, weights are shares of tokens. A dataset whose examples have 200 tokens
on average is then drawn half as often as one of equal weight whose examples have 100. Every
example of a dataset is read once in each epoch of that dataset, so over whole epochs the ratio of
tokens is exactly the ratio of the weights. Within an epoch the ratio may differ: it depends on the
lengths of the examples that the shuffle puts first, and on rounding by up to two examples.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from operator import add, attrgetter
from typing import Any, NamedTuple

from penstock.digest import digest_json
from penstock.errors import PlanError
from penstock.order.arguments import quoted
from penstock.order.plan import Plan
from penstock.order.schedule import Schedule, Stage, StartingPoint
from penstock.order.shuffle import Domain, Sources
from penstock.order.weighted import Mixture
from penstock.order.weights import Weight, as_fraction, exact_weights
from penstock.ranges import whole_number

Json = dict[str, Any]
Weights = Sequence[Weight] | Mapping[str, Weight]
Lengths = Callable[[Any], int] | Mapping[str, Sequence[int]] | Sequence[Sequence[int]]

_STRATEGIES = ("proportional", "uniform", "weighted")
_position = attrgetter("position")  # of a WeightStage


class WeightStage(NamedTuple):
    """The weights that apply from `position` on, one per dataset."""

    position: int
    weights: tuple[Weight, ...]
    history: str = ""
    """Digest of all earlier stages; empty for the first one."""

    def to_json(self) -> list[object]:
        """The position and the exact weights; fractions are written as "1/3"."""
        return [self.position, [_weight_to_json(weight) for weight in self.weights]]


@dataclass(frozen=True)
class Mixing:
    """An order of the examples of several datasets. Immutable and cheap to pickle."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    """The number of examples of each dataset."""
    strategy: str
    seed: int
    stages: tuple[WeightStage, ...]
    """Weights in the order of their positions; empty if each example is read once per epoch."""
    num_tokens: tuple[int, ...] | None = None
    """The tokens of each dataset, if weights are shares of tokens."""
    origin: StartingPoint | None = None
    """Where the first stage begins in a resumed mixing, if that is not position 0."""

    def __getstate__(self) -> dict[str, object]:
        # The cached properties grow with every change of weights and can be computed again.
        return {name: v for name, v in vars(self).items() if name not in ("order", "schedule")}

    @property
    def total(self) -> int:
        """The examples of all datasets, which is the length of an epoch for every strategy."""
        return sum(self.sizes)

    @cached_property
    def schedule(self) -> Schedule:
        """The exact interleaving of the datasets. Only a mixing with weights has one."""
        stages = [Stage(stage.position, self._per_example(stage.weights)) for stage in self.stages]
        return Schedule(stages, origin=self.origin)

    @cached_property
    def order(self) -> Plan | Mixture:
        """The order: `locate(positions)` returns the dataset, epoch and example at each."""
        if not self.stages:
            counts = map(_RowCount, self.sizes)
            return Plan(dict(zip(self.names, counts, strict=True)), seed=self.seed)
        domains = [Domain(size) for size in self.sizes]
        return Mixture(self.schedule, Sources(self.names, domains, "full", self.seed))

    def statistics(self, position: int) -> list[tuple[str, int, float, float, int]]:
        """Return for each dataset: name, size, percentage, examples asked for, and delivered.

        The percentage follows from the sizes, or from the weights at `position`. Examples before
        `position` are counted. The number that the weights ask for is usually a fraction.
        """
        if isinstance(self.order, Plan):
            shares = [size / self.total for size in self.sizes]
            delivered = list(self.order.counts(position).values())
            asked = [position * share for share in shares]
        else:
            # Integers first: a sum of floats would depend on the order of the datasets.
            exact = exact_weights(self._weights_at(position))
            shares = [weight / sum(exact) for weight in exact]
            delivered = self.schedule.counts(position)
            # The schedule carries the difference of both through all changes of weights. Summing
            # the weights again would need all stages, which a resumed mixing does not have.
            asked = list(map(add, delivered, self.schedule.owed(position)))
        percent = [100 * share for share in shares]
        return list(zip(self.names, self.sizes, percent, asked, delivered, strict=True))

    def changed(self, position: int, weights: Weights, argument: str = "weights") -> "Mixing":
        """Return this mixing with other weights from `position` on; later stages are dropped.

        The call takes the same time however often weights changed before. `argument` is the name
        of the weights in error messages.

        Raises:
            PlanError: The weights are invalid, or the mixing has none that could change.
        """
        if not self.stages:
            raise PlanError(
                "Weights cannot change in a proportional loader: it reads every example once per "
                "epoch. Create it with sampling_weights; the numbers of examples, "
                f"{list(self.sizes)}, give the same shares."
            )
        # A stage that begins at this very position has no example yet, so it is replaced too.
        kept = self.stages[: bisect_left(self.stages, position, key=_position)]
        # A change at the very beginning replaces the first stage. In a resumed mixing that
        # stage begins at the origin, and so must the one that replaces it.
        start = position if kept else self.stages[0].position
        history = self.stages[0].history
        if kept:
            # Each digest includes the one before, so it covers all stages at a fixed size.
            history = digest_json([kept[-1].history, kept[-1].to_json()])[:16]
        stage = WeightStage(start, _read_weights(weights, self.names, argument), history)
        changed = replace(self, strategy="weighted", stages=(*kept, stage))
        # Extend the schedule instead of computing all its stages again.
        schedule = self.schedule.changed(start, self._per_example(stage.weights))
        changed.__dict__["schedule"] = schedule
        return changed

    def scheduled(self, schedule: Mapping[int, Weights] | None) -> "Mixing":
        """This mixing with other weights from each position of `schedule` on."""
        if schedule is not None and not isinstance(schedule, Mapping):
            raise PlanError(
                f"schedule={schedule!r:.80} must map numbers of examples to the weights that "
                "apply from there on, such as {10_000: [0.2, 0.8]}."
            )
        given = {whole_number("position in schedule", at): w for at, w in (schedule or {}).items()}
        mixing = self
        for position, weights in sorted(given.items(), key=lambda item: item[0]):
            if position < 1:
                raise PlanError(
                    f"schedule has weights for example {position:,}. Pass the weights of the start "
                    "as sampling_weights; the positions in schedule are 1 or more."
                )
            mixing = mixing.changed(position, weights, f"schedule[{position}]")
        return mixing

    def restarted(self, position: int) -> "Mixing":
        """A mixing that has the weights of `position` from position 0 on."""
        if not self.stages or (len(self.stages) == 1 and self.origin is None):
            return self
        stage = WeightStage(0, self._weights_at(position))
        return replace(self, stages=(stage,), origin=None)

    def to_resume(self) -> Json:
        """The JSON that `resumed` needs to continue after the last change of weights.

        Its size does not depend on how often weights changed before.
        """
        last = self.stages[-1]
        _, weights = last.to_json()
        origin = self.schedule.origin_at(last.position)
        return {**origin._asdict(), "weights": weights, "history": last.history}

    def resumed(self, saved: Mapping[str, Any]) -> "Mixing":
        """Return the mixing whose `to_resume` returned `saved`.

        Positions before its last change of weights cannot be located any more.
        """
        origin = StartingPoint(saved["position"], saved["counts"], saved["debts"])
        weights = tuple(Fraction(w) if isinstance(w, str) else w for w in saved["weights"])
        stage = WeightStage(origin.position, weights, saved["history"])
        begin = origin if origin.position else None
        return replace(self, strategy="weighted", stages=(stage,), origin=begin)

    def _weights_at(self, position: int) -> tuple[Weight, ...]:
        number = bisect_right(self.stages, position, key=_position) - 1
        return self.stages[max(0, number)].weights

    def _per_example(self, weights: tuple[Weight, ...]) -> tuple[Weight, ...]:
        """Return shares of examples; `weights` that are shares of tokens are converted."""
        if self.num_tokens is None:
            return weights
        # Divide each weight by the mean length tokens / size. Fractions keep the ratio exact.
        return tuple(
            as_fraction(weight) * Fraction(size, tokens) if weight else 0
            for weight, size, tokens in zip(weights, self.sizes, self.num_tokens, strict=True)
        )


class _RowCount:
    """The rows of a dataset for a Plan, which needs their number and never reads them."""

    digest = ""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size


def new_mixing(
    datasets: Sequence[tuple[str, Any]],
    strategy: str,
    weights: Weights | None,
    seed: int,
    schedule: Mapping[int, Weights] | None,
    lengths: Lengths | None,
) -> Mixing:
    """Return the mixing of these datasets, for the arguments of a `MultiplexDataset`.

    Raises:
        PlanError: An argument is invalid, or contradicts another one.
    """
    if strategy not in _STRATEGIES:
        raise PlanError(f"sampling_strategy={strategy!r} must be one of {quoted(_STRATEGIES)}.")
    if strategy == "uniform" and weights is not None:
        raise PlanError(
            'sampling_strategy="uniform" draws all datasets equally often, which contradicts '
            f'sampling_weights={weights}. Remove the weights, or use "weighted".'
        )
    if strategy == "weighted" and weights is None:
        raise PlanError(
            'sampling_strategy="weighted" needs sampling_weights: one number per dataset, such '
            "as [0.7, 0.3], or numbers by name."
        )
    names, sizes = tuple(name for name, _ in datasets), tuple(len(rows) for _, rows in datasets)
    # Weights mean "weighted" even if the strategy is "proportional": that is the default value, so
    # the user has probably not set it.
    if weights is not None:
        strategy = "weighted"
    mixing = Mixing(names, sizes, strategy, whole_number("shuffle_seed", seed), ())
    if strategy != "proportional":
        given = [1] * len(names) if weights is None else weights
        stage = WeightStage(0, _read_weights(given, names, "sampling_weights"))
        mixing = replace(mixing, stages=(stage,))
    if lengths is not None:
        if not mixing.stages:
            raise PlanError(
                "lengths= makes weights shares of tokens, but a proportional loader has no "
                "weights: it reads every example once per epoch. Pass sampling_weights, or "
                'sampling_strategy="uniform".'
            )
        mixing = replace(mixing, num_tokens=_token_counts(lengths, datasets))
    return mixing.scheduled(schedule)


def _read_weights(weights: Weights, names: Sequence[str], argument: str) -> tuple[Weight, ...]:
    """Weights in the order of the datasets; only their ratio matters."""
    listed = _by_dataset(weights, names, argument)
    exact_weights(listed, names)  # raises if a number cannot be a weight
    return tuple(listed)


def _token_counts(lengths: Lengths, datasets: Sequence[tuple[str, Any]]) -> tuple[int, ...]:
    """The number of tokens of each dataset; a function is called once per example."""
    if callable(lengths):
        listed = [[lengths(rows[n]) for n in range(len(rows))] for _, rows in datasets]
    else:
        names = [name for name, _ in datasets]
        if isinstance(lengths, Mapping):  # lengths of other datasets are ignored
            lengths = {name: lengths[name] for name in names if name in lengths}
        listed = _by_dataset(lengths, names, "lengths")
    totals = []
    for (name, rows), given in zip(datasets, listed, strict=True):
        if not isinstance(given, Iterable):
            raise PlanError(
                f'lengths of "{name}" is {given!r:.40}, but must be a list with the number of '
                "tokens of each example."
            )
        counts = [whole_number(f'lengths of "{name}"', value) for value in given]
        if len(counts) != len(rows) or min(counts) < 0 or not any(counts):
            raise PlanError(
                f'lengths of "{name}" has {len(counts):,} numbers for {len(rows):,} examples, '
                f"from {min(counts, default=0):,} to {max(counts, default=0):,}. Give one token "
                "count per example, each 0 or more and at least one above 0."
            )
        totals.append(sum(counts))
    return tuple(totals)


def _by_dataset(given: Any, names: Sequence[str], argument: str) -> list[Any]:
    """The values of an argument in the order of the datasets: a list, an array, or by name."""
    if isinstance(given, Mapping):
        missing = [name for name in names if name not in given]
        unknown = [str(name) for name in given if name not in names]
        if missing or unknown:
            raise PlanError(
                f"{argument} must have a value for each of the datasets {quoted(names)}. Missing: "
                f"{quoted(missing) or 'none'}; unknown: {quoted(unknown) or 'none'}."
            )
        return [given[name] for name in names]
    # NumPy arrays, tensors and pandas Series: `tolist` gives Python's own numbers.
    listed = given.tolist() if hasattr(given, "tolist") else given
    if isinstance(listed, str) or not isinstance(listed, Sequence):
        raise PlanError(
            f"{argument}={given!r:.80} must be a list of values, one per dataset, such as "
            "[0.7, 0.3], or values by name."
        )
    if len(listed) != len(names):
        raise PlanError(
            f"{argument} has {len(listed):,} values for {len(names):,} datasets "
            f"({quoted(names)}). Give one per dataset."
        )
    return list(listed)


def _weight_to_json(weight: Weight) -> int | float | str:
    if isinstance(weight, int):
        return int(weight)
    return str(weight) if isinstance(weight, Fraction) else float(weight)
