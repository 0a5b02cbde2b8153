"""What a plan is asked to do, checked against its sources.

Weights, a temperature, a schedule and caps come in the words of the user: names of
sources, numbers of epochs. Here they become what `Schedule` and `Passes` compute with:
numbers of sources, and rows. What cannot be meant is refused with the value that says so.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from operator import index, itemgetter
from typing import Any, NamedTuple, final

from penstock.errors import PlanError
from penstock.order.schedule import Exhausted, Stage
from penstock.order.segments import Members
from penstock.order.weights import Weight, as_fraction, exact_weights, is_finite, tempered_weights
from penstock.rows.protocol import Rows

__all__ = [
    "Caps",
    "Terms",
    "cap_rows",
    "check_name",
    "part_rows_of",
    "quoted",
    "read_members",
    "read_terms",
    "read_weights",
]


@final
@dataclass(frozen=True, slots=True)
class Caps:
    """How often a source may be read, and what comes then.

    >>> Caps({"code": 4}, then="redistribute")
    Caps(epochs={'code': 4}, then='redistribute')
    """

    epochs: float | Mapping[str, float]
    """The most epochs of every source, or of those named; 1.5 is one and a half."""

    then: Exhausted = "error"
    """Refuse positions past the end of a source, or leave them to the other sources."""

    def __post_init__(self) -> None:
        if self.then not in ("error", "redistribute"):
            raise PlanError(
                f'Caps(then={self.then!r}) is not a way to go on; these are: "error", '
                '"redistribute".'
            )
        named = self.epochs if isinstance(self.epochs, Mapping) else {"every source": self.epochs}
        for name, epochs in named.items():
            if not is_finite(epochs) or epochs <= 0:
                raise PlanError(
                    f"max_epochs of {name} is {epochs!r}; it is a finite number above 0. Leave a "
                    "source out to read it without end."
                )

    def of(self, name: str) -> float | None:
        """The most epochs of one source; None is any number."""
        return self.epochs.get(name) if isinstance(self.epochs, Mapping) else self.epochs

    def spelled(self) -> dict[str, Any]:
        """The caps as JSON."""
        if isinstance(self.epochs, Mapping):
            epochs: Any = {name: _spelled(epochs) for name, epochs in self.epochs.items()}
        else:
            epochs = _spelled(self.epochs)
        return {"epochs": epochs, "then": self.then}


class Terms(NamedTuple):
    """How rows are drawn from a position on; one of the three is given."""

    position: int
    weights: Mapping[str, Weight] | None = None
    temperature: float | None = None
    sources: Sequence[str] | None = None
    """Every sample of these sources once an epoch."""

    def spelled(self) -> dict[str, Any]:
        """The terms as JSON."""
        if self.weights is not None:
            spelled: Any = {name: _spelled(weight) for name, weight in self.weights.items()}
            return {"position": self.position, "weights": spelled}
        if self.temperature is not None:
            return {"position": self.position, "temperature": _spelled(self.temperature)}
        return {"position": self.position, "sources": list(self.sources or ())}


def check_name(name: str) -> str:
    """Return the name of a source, if it is one."""
    if not isinstance(name, str) or not name:
        raise PlanError(f"A source is called {name!r}; a name is a string, and not empty.")
    return name


def part_rows_of(name: str, source: Rows, size: int) -> list[int]:
    """Return the rows of each part of a source."""
    if source.part_rows is None:
        raise PlanError(
            f'shuffle="part" needs to know the parts of source "{name}", but it has no part_rows. '
            'Choose shuffle="full" or shuffle="block".'
        )
    parts = [index(rows) for rows in source.part_rows]
    if sum(parts) != size or min(parts, default=0) < 0:
        raise PlanError(
            f'The parts of source "{name}" hold {sum(parts):,} rows, but it has {size:,}. '
            "part_rows lists the rows of each part."
        )
    return parts


def read_terms(
    names: Sequence[str],
    weights: Mapping[str, Weight] | None,
    temperature: float | None,
    schedule: Mapping[int, Mapping[str, Weight] | Sequence[str]] | None,
) -> list[Terms]:
    """The terms of each stage, in order; all sources from 0 on where nothing is asked."""
    if weights is not None and temperature is not None:
        raise PlanError(
            f"weights={dict(weights)!r} and temperature={temperature!r} both say how to mix. "
            "Give one of them."
        )
    stages = []
    if weights is not None or temperature is not None:
        stages = [Terms(0, weights=weights, temperature=temperature)]
    elif not schedule:
        stages = [Terms(0, sources=names)]
    later = {index(position): asked for position, asked in (schedule or {}).items()}
    for position, asked in sorted(later.items(), key=itemgetter(0)):
        if position == 0 and stages:
            raise PlanError(
                "The schedule has a stage at position 0, where weights= or temperature= already "
                "say how to mix. Leave one of them out."
            )
        if isinstance(asked, Mapping):
            stages.append(Terms(position, weights=asked))
        else:
            listed = [asked] if isinstance(asked, str) else asked
            stages.append(Terms(position, sources=listed))
    _check_terms(stages, names)
    return stages


def _check_terms(stages: Sequence[Terms], names: Sequence[str]) -> None:
    if len({terms.sources is None for terms in stages}) > 1:
        raise PlanError(
            "Some stages have weights and others only names. Without weights every sample is "
            "read once an epoch, and the two do not combine. Give weights in every stage or in "
            "none."
        )
    for terms in stages:
        given = terms.weights if terms.weights is not None else terms.sources or ()
        _check_names(names, given, f"The stage at position {terms.position:,}")


def read_weights(
    stages: Sequence[Terms], names: Sequence[str], sizes: Sequence[int]
) -> list[Stage]:
    """The weights of each stage, by number of source."""
    weighted = []
    for position, asked, temperature, _ in stages:
        if temperature is not None:
            weights = tempered_weights(sizes, temperature)
        else:
            weights = _weights_of(names, asked or {}, position)
        exact_weights(weights, names)  # refuses what is not a weight
        for name, weight, size in zip(names, weights, sizes, strict=True):
            if weight and not size:
                raise PlanError(
                    f'Source "{name}" has no rows, and weight {weight} from position '
                    f"{position:,} on. Give it weight 0, or rows."
                )
        weighted.append(Stage(position, weights))
    return weighted


def _weights_of(names: Sequence[str], weights: Mapping[str, Weight], position: int) -> list[Weight]:
    missing = [name for name in names if name not in weights]
    if missing:
        raise PlanError(
            f"The stage at position {position:,} has no weight for {quoted(missing)}. Write "
            f'"{missing[0]}": 0 to leave a source out.'
        )
    return [weights[name] for name in names]


def read_members(
    stages: Sequence[Terms], names: Sequence[str], sizes: Sequence[int]
) -> list[Members]:
    """The sources of each stage, by number, for a plan without weights."""
    numbers = {name: number for number, name in enumerate(names)}
    read = []
    for terms in stages:
        listed = list(terms.sources or ())
        if not listed or len(set(listed)) < len(listed):
            raise PlanError(
                f"The stage at position {terms.position:,} reads {quoted(listed) or 'nothing'}; "
                "it names one source or more, each once."
            )
        for name in listed:
            if not sizes[numbers[name]]:
                raise PlanError(f'Source "{name}" has no rows to read. Leave it out, or fill it.')
        read.append(Members(terms.position, [numbers[name] for name in listed]))
    return read


def cap_rows(caps: Caps, names: Sequence[str], sizes: Sequence[int]) -> list[int | None]:
    """The most rows of each source; None is any number."""
    if isinstance(caps.epochs, Mapping):
        _check_names(names, caps.epochs, "max_epochs")
    most: list[int | None] = []
    for name, size in zip(names, sizes, strict=True):
        epochs = caps.of(name)
        rows = None if epochs is None or not size else math.floor(as_fraction(epochs) * size)
        if rows == 0:
            raise PlanError(
                f'max_epochs of "{name}" is {epochs!r}, which is less than one of its {size:,} '
                "rows. Give it weight 0, or at least one row."
            )
        most.append(rows)
    return most


def quoted(names: Sequence[str]) -> str:
    """Names for a message, five at most.

    >>> print(quoted(["web", "code"]))
    "web", "code"
    """
    listed = ", ".join(f'"{name}"' for name in names[:5])
    return listed + (f" and {len(names) - 5:,} more" if len(names) > 5 else "")


def _check_names(names: Sequence[str], given: Iterable[str], where: str) -> None:
    unknown = [name for name in given if name not in names]
    if unknown:
        raise PlanError(
            f"{where} names {quoted(unknown)}, but the sources of this plan are {quoted(names)}."
        )


def _spelled(number: Weight) -> float | str:
    """A number as JSON, one spelling for equal ones: 7.0 as 7, 0.7 as 0.7, 1/3 in words."""
    if not is_finite(number):
        return str(float(number))
    exact = as_fraction(number)
    if exact.denominator == 1:
        return int(exact)
    return str(exact) if isinstance(number, Fraction) else float(number)
