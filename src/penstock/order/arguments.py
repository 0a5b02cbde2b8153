"""The arguments of a plan, checked against its sources.

Users give weights, a temperature, a schedule and caps by the names of sources and in epochs.
`Schedule` and `EpochOrder` compute with numbers of sources and with rows. This module converts the
arguments, and refuses invalid ones with a message that shows the value.
"""

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from operator import index
from typing import NamedTuple, final

from penstock.errors import PlanError
from penstock.order.schedule import Exhausted, Stage
from penstock.order.shuffle import REMOTE_BLOCK, Block, Mode
from penstock.order.weights import Weight, as_fraction, exact_weights, is_finite, tempered_weights
from penstock.rows.protocol import Rows, RowsLike, Settings, as_rows


@final
@dataclass(frozen=True, slots=True)
class Caps:
    """The largest number of epochs of each source, and what happens when it is reached.

    >>> Caps({"code": 4}, then="redistribute")
    Caps(epochs={'code': 4}, then='redistribute')
    """

    epochs: float | Mapping[str, float]
    """The largest number of epochs of every source, or of those named; 1.5 is allowed."""

    then: Exhausted = "error"
    """What happens at the end of a source: "error" ends the plan there, "redistribute" lets the
    other sources continue."""

    def __post_init__(self) -> None:
        if self.then not in ("error", "redistribute"):
            raise PlanError(f'Caps(then=…) must be "error" or "redistribute"; got {self.then!r}.')
        named = self.epochs if isinstance(self.epochs, Mapping) else {"every source": self.epochs}
        for name, epochs in named.items():
            if not is_finite(epochs) or epochs <= 0:
                raise PlanError(
                    f"max_epochs of {name} must be a finite number above 0; got {epochs!r}. To "
                    "read a source without a limit, leave it out of max_epochs."
                )

    def of(self, name: str) -> float | None:
        """Return the largest number of epochs of one source; None means no limit."""
        return self.epochs.get(name) if isinstance(self.epochs, Mapping) else self.epochs

    def to_json(self) -> Settings:
        """Return the caps as JSON."""
        return {"epochs": numbers_to_json(self.epochs), "then": self.then}


class StageArguments(NamedTuple):
    """How rows are drawn from `position` on; exactly one of the other three fields is set."""

    position: int
    weights: Mapping[str, Weight] | None = None
    temperature: float | None = None
    sources: Sequence[str] | None = None
    """The sources of which every sample is read once per epoch."""

    def to_json(self) -> Settings:
        """Return the arguments as JSON."""
        if self.weights is not None:
            return {"position": self.position, "weights": numbers_to_json(self.weights)}
        if self.temperature is not None:
            return {"position": self.position, "temperature": numbers_to_json(self.temperature)}
        return {"position": self.position, "sources": list(self.sources or ())}


def as_caps(max_epochs: float | Mapping[str, float] | Caps | None) -> Caps | None:
    """Return the argument `max_epochs` of a plan as caps."""
    return max_epochs if max_epochs is None or isinstance(max_epochs, Caps) else Caps(max_epochs)


def checked_sources(given: Mapping[str, RowsLike]) -> dict[str, Rows]:
    """Return sources by name; warn of those that lose tokens.

    Raises:
        PlanError: a name is not a string, or a source has no digest.
    """
    found = {check_name(name): as_rows(source, name) for name, source in given.items()}
    for name, source in found.items():
        warn_of_cut(name, source)
    return found


def check_name(name: str) -> str:
    """Return the name of a source; raise PlanError unless it is a string that is not empty."""
    if not isinstance(name, str) or not name:
        raise PlanError(f"The name of a source must be a string that is not empty; got {name!r}.")
    return name


def warn_of_cut(name: str, source: Rows) -> None:
    """Warn if tokens of a source are in no row because its documents are cut."""
    # Windows have a stride, and report their rests themselves. The tokens of a store that is still
    # being written are not counted yet.
    if source.stride is not None or source.stream is None or not source.stream.sealed:
        return
    if lost := source.unread(source.length):
        warnings.warn(
            f'Documents of source "{name}" are cut at their max_length: {lost:,} of '
            f"{source.stream.num_tokens:,} tokens are in no row. "
            'Documents(…, overflow="split") keeps them.',
            stacklevel=4,  # the line that made the plan
        )


def default_shuffle(sources: Mapping[str, Rows], shuffle: Mode | Block | None) -> Mode | Block:
    """Return `shuffle`, or the default for these sources.

    A full shuffle of a remote store would need most of its parts for the first batches.
    """
    if shuffle is not None:
        return shuffle
    return REMOTE_BLOCK if any(source.fetches_parts for source in sources.values()) else "full"


def part_rows_of(name: str, source: Rows, size: int) -> list[int]:
    """Return the number of rows of each part of a source."""
    if source.part_rows is None:
        raise PlanError(
            f'shuffle="part" needs the parts of source "{name}", but it has no part_rows. Use '
            'shuffle="full" or shuffle="block".'
        )
    # Python's integers: an array of a narrow dtype could overflow in the sum.
    parts = [index(rows) for rows in source.part_rows]
    if sum(parts) != size or min(parts, default=0) < 0:
        raise PlanError(
            f'The parts of source "{name}" have {sum(parts):,} rows, but it has {size:,}. '
            "part_rows must list the rows of each part."
        )
    return parts


def read_stages(
    names: Sequence[str],
    weights: Mapping[str, Weight] | object,
    temperature: float | None,
    schedule: Mapping[int, Mapping[str, Weight]] | None,
) -> list[StageArguments]:
    """Return the arguments of each stage, in order; by default, one stage of all sources."""
    if weights is not None and not isinstance(weights, Mapping):
        raise PlanError(
            f"weights={weights!r} must be a dict with the weight of each source by its name."
        )
    if weights is not None and temperature is not None:
        raise PlanError(
            f"weights={dict(weights)!r} and temperature={temperature!r} cannot be combined. "
            "Pass only one of them."
        )
    stages = []
    if weights is not None or temperature is not None:
        stages = [StageArguments(0, weights=weights, temperature=temperature)]
    elif not schedule:
        stages = [StageArguments(0, sources=names)]
    # `index` refuses positions that are not integers, such as 1e6, and accepts NumPy's integers.
    later = {index(position): asked for position, asked in (schedule or {}).items()}
    for position in sorted(later):
        if position == 0 and stages:
            raise PlanError(
                "The schedule has a stage at position 0, but weights= or temperature= already say "
                "how to mix from there. Leave one of them out."
            )
        weights = later[position]
        if not isinstance(weights, Mapping):
            raise PlanError(
                f"The stage at position {position:,} is {weights!r}; it must be a dict with the "
                "weight of each source by its name."
            )
        stages.append(StageArguments(position, weights=weights))
    for stage in stages:
        _check_names(names, stage.weights or (), _stage_name(stage))
    return stages


def read_continuation(
    known: Mapping[str, Rows],
    position: int,
    weights: Mapping[str, Weight],
    given: Mapping[str, Rows] | None,
) -> StageArguments:
    """Return how a plan continues from a position on, with a weight for each source.

    Args:
        known: The sources of the plan.
        position: The position.
        weights: The weights from there on.
        given: The sources from there on; None for those of the plan.
    """
    if not isinstance(weights, Mapping):
        raise PlanError(
            f"weights={weights!r} must be a dict with the weight of each source by its name."
        )
    sources = known if given is None else given
    _check_names([*sources], weights, "weights=")
    if given is not None and (missing := [name for name in given if name not in weights]):
        raise PlanError(
            f"weights= has no weight for {quoted(missing)}, which sources= names. Give each of "
            "these sources a weight."
        )
    fields = _fields_of([*known.values()])
    for name, rows in sources.items():
        if name in known and rows.digest != known[name].digest:
            raise PlanError(
                f'Source "{name}" has other rows than before (digest {known[name].digest[:8]} -> '
                f"{rows.digest[:8]}). Give other rows another name."
            )
        # Batches have the fields of all sources, so a new field would change earlier batches.
        if _fields_of([*known.values(), rows]) != fields:
            raise PlanError(
                f'Source "{name}" is a {rows.type_name}, whose batches have other fields than '
                "those of the sources of this plan. Add it as rows of the same kind."
            )
    return StageArguments(position, weights={n: weights.get(n, 0) for n in {**known, **sources}})


def _fields_of(sources: Sequence[Rows]) -> tuple[object, ...]:
    """Return what decides about the fields and the width of batches of these sources."""
    return (
        any(rows.whole_documents for rows in sources),
        any(rows.gives_positions for rows in sources),
        any(rows.gives_labels for rows in sources),
        {rows.side for rows in sources},
    )


def read_weights(
    stages: Sequence[StageArguments], names: Sequence[str], sizes: Sequence[int]
) -> list[Stage]:
    """Return the weights of each stage, in the order of `names`."""
    weighted = []
    for stage in stages:
        position, asked, temperature, _ = stage
        if temperature is not None:
            weights = tempered_weights(sizes, temperature)
        else:
            given = asked or {}
            if missing := [name for name in names if name not in given]:
                raise PlanError(
                    f"{_stage_name(stage)} has no weight for {quoted(missing)}. "
                    f'Write "{missing[0]}": 0 to leave a source out.'
                )
            weights = [given[name] for name in names]
        exact_weights(weights, names)  # raises for invalid weights, with the source's name
        for name, weight, size in zip(names, weights, sizes, strict=True):
            if weight and not size:
                raise PlanError(
                    f'Source "{name}" has no rows, but weight {weight} from position '
                    f"{position:,} on. Give it weight 0, or rows."
                )
        weighted.append(Stage(position, weights))
    return weighted


def refuse_empty(names: Sequence[str], sizes: Sequence[int]) -> None:
    """Raise a PlanError if a source of a plan without weights has no rows."""
    for name, size in zip(names, sizes, strict=True):
        if not size:
            raise PlanError(f'Source "{name}" has no rows to read. Leave it out.')


def cap_rows(caps: Caps, names: Sequence[str], sizes: Sequence[int]) -> list[int | None]:
    """Return the largest number of rows of each source; None means no limit."""
    if isinstance(caps.epochs, Mapping):
        _check_names(names, caps.epochs, "max_epochs")
    most: list[int | None] = []
    for name, size in zip(names, sizes, strict=True):
        epochs = caps.of(name)
        # The product of exact fractions, because a product of floats may be rounded up.
        rows = None if epochs is None or not size else math.floor(as_fraction(epochs) * size)
        if rows == 0:
            raise PlanError(
                f'max_epochs of "{name}" is {epochs!r}: that is less than one row, because the '
                f"source has {size:,} rows. Set its weight to 0, or raise its max_epochs."
            )
        most.append(rows)
    return most


def quoted(names: Sequence[str]) -> str:
    """Return up to five names in quotes, for messages.

    >>> print(quoted(["web", "code"]))
    "web", "code"
    """
    listed = ", ".join(f'"{name}"' for name in names[:5])
    return listed + (f" and {len(names) - 5:,} more" if len(names) > 5 else "")


def _stage_name(stage: StageArguments) -> str:
    """Return what messages call a stage: most plans have weights and no schedule."""
    if stage.position == 0:
        return "weights="
    return f"The stage at position {stage.position:,}"


def _check_names(names: Sequence[str], given: Iterable[str], where: str) -> None:
    if unknown := [name for name in given if name not in names]:
        raise PlanError(
            f"{where} names {quoted(unknown)}, but the sources of this plan are {quoted(names)}."
        )


def numbers_to_json(number: Weight | Mapping[str, Weight]) -> object:
    """Return numbers as JSON, equal for equal numbers: 7.0 is 7, 0.7 is 0.7, 1/3 is "1/3"."""
    if isinstance(number, Mapping):
        return {name: numbers_to_json(each) for name, each in number.items()}
    if not is_finite(number):
        return str(float(number))
    # The digest of a plan is computed from this, so 7 and 7.0 must give the same text.
    exact = as_fraction(number)
    if exact.denominator == 1:
        return int(exact)
    return str(exact) if isinstance(number, Fraction) else float(number)
