"""How examples of several datasets are drawn into one order.

    "proportional"   every example once an epoch, in one shuffled order of all of them
    "uniform"        as many examples of each dataset
    "weighted"       shares that are given; 7 and 3 mean 0.7 and 0.3

A blend says it in the words of the face and hands it to `penstock.order`, which computes the
order. Weights may change on the way: each dataset then goes on with the example after its last
one, so nothing is repeated or left out by the change.

With lengths, shares are shares of tokens. A dataset whose examples have 200 tokens on average
is then drawn half as often as one of equal weight whose examples have 100. As every example
of a dataset comes once in each of its epochs, the tokens of whole epochs stand exactly in the
ratio asked; inside an epoch they differ by the luck of the shuffle, and by two examples.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from operator import index
from typing import Any, Literal, get_args

from penstock.digest import canonical_json, digest_bytes
from penstock.errors import PlanError
from penstock.order.plan import Plan
from penstock.order.terms import quoted
from penstock.order.weights import Weight, as_fraction, exact_weights

__all__ = ["Blend", "Lengths", "Strategy", "Weights", "blend_of", "whole_number"]

Strategy = Literal["proportional", "uniform", "weighted"]
Weights = Sequence[Weight] | Mapping[str, Weight]
Lengths = Callable[[Any], int] | Mapping[str, Sequence[int]] | Sequence[Sequence[int]]

_SAMPLED = 16  # examples of a dataset that its digest is taken of


@dataclass(frozen=True, slots=True)
class Stage:
    """From `position` on, these weights, one a dataset; none where each example comes once."""

    position: int
    weights: tuple[Weight, ...]

    def spelled(self) -> list[Any]:
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

    @property
    def total(self) -> int:
        """All examples, which is the length of an epoch for every strategy."""
        return sum(self.sizes)

    @cached_property
    def plan(self) -> Plan:
        """The order itself."""
        rows = {name: _Counted(size) for name, size in zip(self.names, self.sizes, strict=True)}
        if not self.stages:
            return Plan(rows, seed=self.seed)
        first, *later = ({stage.position: self._by_name(stage)} for stage in self.stages)
        schedule = {position: weights for stage in later for position, weights in stage.items()}
        return Plan(rows, weights=first[0], seed=self.seed, schedule=schedule)

    def shares(self, position: int) -> list[float]:
        """The share of each dataset at a position: by size, equal, or as asked."""
        if not self.stages:
            return [size / self.total for size in self.sizes]
        reached = [stage for stage in self.stages if stage.position <= position]
        exact = exact_weights(reached[-1].weights)
        return [weight / sum(exact) for weight in exact]

    def changed(self, position: int, weights: Weights) -> "Blend":
        """The same up to `position`, and other weights from there on.

        Raises:
            PlanError: these are no weights, or the blend has none to change.
        """
        if not self.stages:
            raise PlanError(
                "Weights cannot change in a proportional loader: it reads every example once an "
                "epoch. Make it with sampling_weights; the numbers of examples, "
                f"{list(self.sizes)}, give the same shares."
            )
        kept = [stage for stage in self.stages if stage.position < position]
        stage = Stage(position if kept else 0, read_weights(weights, self.names))
        return replace(self, strategy="weighted", stages=(*kept, stage))

    def restarted(self, position: int) -> "Blend":
        """The weights in force at `position`, from 0 on."""
        if len(self.stages) < 2:
            return self
        last = [stage for stage in self.stages if stage.position <= position][-1]
        return replace(self, stages=(replace(last, position=0),))

    def _by_name(self, stage: Stage) -> dict[str, Weight]:
        weights = stage.weights
        if self.num_tokens is not None:
            # Examples drawn per token asked: the inverse of the mean length, as exact fractions.
            weights = tuple(
                as_fraction(weight) * Fraction(size, tokens) if weight else 0
                for weight, size, tokens in zip(weights, self.sizes, self.num_tokens, strict=True)
            )
        return dict(zip(self.names, weights, strict=True))


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
    chosen = _strategy(strategy, weights)
    sizes = tuple(len(each) for each in rows)
    blend = Blend(tuple(names), sizes, chosen, seed, _stages(chosen, weights, names))
    if lengths is not None:
        if not blend.stages:
            raise PlanError(
                "lengths= makes weights shares of tokens, and a proportional loader has none: it "
                'reads every example once. Give sampling_weights, or sampling_strategy="uniform".'
            )
        blend = replace(blend, num_tokens=tuple(_token_counts(lengths, names, rows)))
    for position, later in _scheduled(schedule):
        if position < 1:
            raise PlanError(
                f"schedule has weights from example {position:,} on; those of the start are "
                "sampling_weights, and later ones begin at 1 or more."
            )
        blend = blend.changed(position, later)
    blend.plan  # noqa: B018  (refuses now what it cannot do, not at the first batch)
    return blend


def whole_number(name: str, value: Any) -> int:
    """The value of an argument that counts something.

    Raises:
        PlanError: it is no whole number; the message names the argument.
    """
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise PlanError(f"{name}={value!r:.80} is not a whole number.")
    return index(value)


def _scheduled(schedule: Any) -> list[tuple[int, Weights]]:
    """The weights of a schedule by position, in order."""
    if schedule is not None and not isinstance(schedule, Mapping):
        raise PlanError(
            f"schedule={schedule!r:.80} is not weights by the example from which on they are in "
            "force, such as {10_000: [0.2, 0.8]}."
        )
    stages = {}
    for position, weights in (schedule or {}).items():
        if not isinstance(weights, Sequence | Mapping) and not hasattr(weights, "tolist"):
            raise PlanError(
                f"schedule={schedule!r:.80} has no list of weights from {position!r:.20} on."
            )
        stages[whole_number("position in schedule", position)] = weights
    return sorted(stages.items())


def read_weights(weights: Weights, names: Sequence[str]) -> tuple[Weight, ...]:
    """Weights in the order of the datasets, from a list or by name.

    Raises:
        PlanError: too many, too few, other names, negative, NaN, or all zero.
    """
    if isinstance(weights, Mapping):
        missing = [name for name in names if name not in weights]
        unknown = [str(name) for name in weights if name not in names]
        if missing or unknown:
            told = [f"none for {quoted(missing)}"] if missing else []
            told += [f"one for {quoted(unknown)}, which there is not"] if unknown else []
            raise PlanError(
                f"sampling_weights has {' and '.join(told)}. The datasets are {quoted(names)}."
            )
        listed: Any = [weights[name] for name in names]
    else:
        listed = weights.tolist() if hasattr(weights, "tolist") else weights
        if isinstance(listed, str) or not isinstance(listed, Sequence):
            raise PlanError(
                f"sampling_weights={weights!r:.80} is not a list of numbers, one for each dataset "
                "such as [0.7, 0.3], nor numbers by name."
            )
    if len(listed) != len(names):
        raise PlanError(
            f"sampling_weights has {len(listed):,} numbers for {len(names):,} datasets "
            f"({quoted(names)}). Give one for each."
        )
    exact_weights(listed, names)  # refuses what is no weight, by name
    return tuple(listed)


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


def _strategy(strategy: str, weights: Weights | None) -> Strategy:
    known = get_args(Strategy)
    if strategy not in known:
        raise PlanError(f"sampling_strategy={strategy!r} is none of {quoted(known)}.")
    if strategy == "uniform" and weights is not None:
        raise PlanError(
            f'sampling_strategy="uniform" draws all datasets alike, and sampling_weights={weights} '
            'says otherwise. Leave the weights out, or say "weighted".'
        )
    if strategy == "weighted" and weights is None:
        raise PlanError(
            'sampling_strategy="weighted" needs sampling_weights: a number for each dataset, such '
            "as [0.7, 0.3], or by name."
        )
    # Weights given with the default strategy can only mean this.
    return "weighted" if weights is not None else strategy  # type: ignore[return-value]


def _stages(strategy: Strategy, weights: Weights | None, names: Sequence[str]) -> tuple[Stage, ...]:
    if strategy == "proportional":
        return ()
    asked = [1] * len(names) if weights is None else weights
    return (Stage(0, read_weights(asked, names)),)


def _token_counts(lengths: Lengths, names: Sequence[str], rows: Sequence[Any]) -> list[int]:
    """The tokens of each dataset; a function is called once for each example."""
    if callable(lengths):
        listed = [[lengths(each[number]) for number in range(len(each))] for each in rows]
    elif isinstance(lengths, Mapping):
        missing = [name for name in names if name not in lengths]
        if missing:
            raise PlanError(f"lengths has none for {quoted(missing)}.")
        listed = [lengths[name] for name in names]  # type: ignore[misc]
    elif isinstance(lengths, Sequence):
        listed = list(lengths)  # type: ignore[arg-type]
    else:
        raise PlanError(
            f"lengths={lengths!r:.80} is neither a function of an example nor the token counts of "
            "all examples, by dataset."
        )
    if len(listed) != len(names):
        raise PlanError(f"lengths are for {len(listed):,} datasets; there are {len(names):,}.")
    counts = []
    for name, examples, each in zip(names, rows, listed, strict=True):
        numbers = _counts(name, each)
        if len(numbers) != len(examples) or min(numbers) < 0 or not any(numbers):
            raise PlanError(
                f'lengths of "{name}": {len(numbers):,} numbers for {len(examples):,} examples, '
                f"from {min(numbers, default=0):,} to {max(numbers, default=0):,}. Give one for "
                "each example: its tokens, 0 or more, and not all 0."
            )
        counts.append(sum(numbers))
    return counts


def _counts(name: str, listed: Any) -> list[int]:
    """The token counts of a dataset as integers."""
    try:
        return list(map(index, listed))
    except TypeError:
        pass
    if not hasattr(listed, "__iter__"):
        raise PlanError(f'lengths of "{name}" is {listed!r:.40}; give a number for each example.')
    wrong = next(each for each in listed if not hasattr(each, "__index__"))
    raise PlanError(f'lengths of "{name}": {wrong!r:.40} is not a whole number of tokens.')


def _spelled(weight: Weight) -> int | float | str:
    if isinstance(weight, int):
        return int(weight)
    return str(weight) if isinstance(weight, Fraction) else float(weight)


def parse_stage(spelled: Any) -> Stage:
    """The stage that was spelled so."""
    position, weights = spelled
    return Stage(
        position, tuple(Fraction(each) if isinstance(each, str) else each for each in weights)
    )
