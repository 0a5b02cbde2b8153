"""What a mixture of datasets is asked to do, checked: strategy, weights, schedule, lengths."""

from collections.abc import Callable, Mapping, Sequence
from operator import index
from typing import Any, Literal, get_args

from penstock.errors import PlanError
from penstock.order.arguments import quoted
from penstock.order.weights import Weight, exact_weights

__all__ = [
    "Lengths",
    "Strategy",
    "Weights",
    "read_schedule",
    "read_strategy",
    "read_weights",
    "token_counts",
    "whole_number",
]

Strategy = Literal["proportional", "uniform", "weighted"]
Weights = Sequence[Weight] | Mapping[str, Weight]
Lengths = Callable[[Any], int] | Mapping[str, Sequence[int]] | Sequence[Sequence[int]]


def read_strategy(strategy: str, weights: Weights | None) -> Strategy:
    """The strategy that is meant, if it fits the weights."""
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


def read_schedule(schedule: Any) -> list[tuple[int, Weights]]:
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


def token_counts(lengths: Lengths, names: Sequence[str], rows: Sequence[Any]) -> list[int]:
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


def whole_number(name: str, value: Any) -> int:
    """The value of an argument that counts something.

    Raises:
        PlanError: it is no whole number; the message names the argument.
    """
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise PlanError(f"{name}={value!r:.80} is not a whole number.")
    return index(value)
