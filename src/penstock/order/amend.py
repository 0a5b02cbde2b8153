"""Amendments: changes of a plan from a position on, while everything before it stays the same.

    position     0 ─────────────── P ───────────────────────────
    base plan    web 70 %, code 30 %
    amendment                      web 50 %, code 30 %, math 20 %; from its row 0

An amendment continues the order that it changes: the rows that each source had before P are
computed, and the first row after P is the next one. So nothing is lost or repeated, and the row at
any position is still a pure function of (stores, plan with its amendments, position).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, final

from penstock.errors import PlanError
from penstock.order.arguments import StageArguments, numbers_to_json, quoted
from penstock.order.weights import Weight, tempered_weights
from penstock.rows.protocol import Rows, Settings

if TYPE_CHECKING:
    from penstock.order.plan import Plan

Span = tuple[int, int]
"""The first token of a document in the stream of its source, and the token after its last."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Amendment:
    """What changes from a position on; see `Plan.amend`."""

    position: int
    weights: Mapping[str, Weight] | None = None
    add: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()
    skip: int = 0
    """How many rows are left out at the position."""
    exclude: Mapping[str, tuple[Span, ...]] = field(default_factory=dict)
    """By source, the documents whose tokens are no targets any more."""
    sources: tuple[Settings, ...] = ()
    """The rows and the digest of each source that is new."""

    def to_json(self) -> Settings:
        """Return the amendment as JSON; the digest of a plan is computed from it."""
        excluded = {name: [list(span) for span in spans] for name, spans in self.exclude.items()}
        fields = {
            "weights": None if self.weights is None else numbers_to_json(self.weights),
            "add": list(self.add),
            "drop": list(self.drop),
            "skip": self.skip,
            "exclude": excluded,
            "sources": list(self.sources),
        }
        return {"position": self.position} | {key: each for key, each in fields.items() if each}

    def __str__(self) -> str:
        shown = {name: numbers_to_json(weight) for name, weight in (self.weights or {}).items()}
        weights = ", ".join(f"{name} {weight}" for name, weight in shown.items())
        documents = sum(map(len, self.exclude.values()))
        named = {
            "weights": weights,
            "adds": ", ".join(self.add),
            "drops": ", ".join(self.drop),
            "skips": f"{self.skip:,} row{'s' * (self.skip != 1)}" * bool(self.skip),
            "excludes": f"{documents:,} document{'s' * (documents != 1)}" * bool(documents),
        }
        changes = "; ".join(f"{name} {each}" for name, each in named.items() if each)
        return f"from position {self.position:,}: {changes}"


def weights_from_json(weights: Mapping[str, object]) -> dict[str, Weight]:
    """Return weights that `Amendment.to_json` has written; 1/3 is the text "1/3".

    Raises:
        ValueError: a weight is not a number.
    """
    found: dict[str, Weight] = {}
    for name, each in weights.items():
        if not isinstance(each, int | float | str) or isinstance(each, bool):
            raise ValueError(f"the weight of {name} is {each!r}")
        found[name] = Fraction(each) if isinstance(each, str) else each
    return found


def sources_at(plan: "Plan", stages: Sequence[StageArguments], start: int) -> dict[str, Weight]:
    """Return the sources that are read at a position of the order, with their weights.

    In a plan without weights, each has weight 1.
    """
    stage = [each for each in stages if each.position <= start][-1]
    return _weights_of(stage, plan)


def _weights_of(stage: StageArguments, plan: "Plan") -> dict[str, Weight]:
    if stage.weights is not None:
        return {name: weight for name, weight in stage.weights.items() if weight}
    if stage.temperature is not None:
        tempered = tempered_weights(plan.sizes, stage.temperature)
        return {name: weight for name, weight in zip(plan.names, tempered, strict=True) if weight}
    return dict.fromkeys(stage.sources or (), 1)


def check_amendment(plan: "Plan", amendment: Amendment, added: Mapping[str, Rows]) -> None:
    """Raise PlanError unless an amendment can follow those that a plan has."""
    if amendment.to_json().keys() == {"position"}:
        raise PlanError("This amendment changes nothing. Give weights, add, drop, skip or exclude.")
    first = plan.amendments[-1].position if plan.amendments else 0
    if not first <= amendment.position < plan.end:
        after = "positions begin at 0"
        if plan.amendments:
            after = f"the last amendment begins at {first:,}, and what was amended stays as it is"
        if amendment.position >= plan.end:
            after = f"the plan ends at position {plan.end:,}"
        raise PlanError(f"An amendment cannot begin at position {amendment.position:,}: {after}.")
    if amendment.skip < 0:
        raise PlanError(f"skip={amendment.skip:,} must be a number of rows, 0 or more.")
    if amendment.position + amendment.skip >= plan.end:
        raise PlanError(
            f"skip={amendment.skip:,} rows from position {amendment.position:,} leaves nothing to "
            f"read: the plan ends at position {plan.end:,}."
        )
    for name, rows in added.items():
        _check_fields(plan, name, rows)
    for name, spans in amendment.exclude.items():
        _check_spans({**plan.sources, **added}, name, spans)


def _check_fields(plan: "Plan", name: str, rows: Rows) -> None:
    """Raise if the rows of a new source would change the fields of batches before it."""
    known = list(plan.sources.values())
    if _fields_of([*known, rows]) != _fields_of(known):
        raise PlanError(
            f'Source "{name}" is a {rows.type_name}, whose batches have other fields than those of '
            f"the sources of this plan, such as {known[0].type_name}. Batches before the amendment "
            "would change. Add it as rows of the same kind."
        )


def _fields_of(sources: Sequence[Rows]) -> tuple[object, ...]:
    """Return what decides about the fields and the width of batches of these sources."""
    return (
        any(rows.whole_documents for rows in sources),
        any(rows.gives_positions for rows in sources),
        any(rows.gives_labels for rows in sources),
        {rows.side for rows in sources},
    )


def _check_spans(sources: Mapping[str, Rows], name: str, spans: Iterable[Span]) -> None:
    if name not in sources:
        raise PlanError(f'exclude names "{name}", but the sources are {quoted([*sources])}.')
    stream = sources[name].stream
    if stream is None:
        raise PlanError(f'Source "{name}" has no documents: its rows do not come from a store.')
    for start, stop in spans:
        if not 0 <= start < stop <= stream.num_tokens:
            raise PlanError(
                f'exclude has the tokens {start:,} to {stop:,} of "{name}", which has '
                f"{stream.num_tokens:,}. Use the span that find_documents returns."
            )


def amended_stages(
    plan: "Plan", stages: Sequence[StageArguments], start: int, amendment: Amendment
) -> list[StageArguments]:
    """Return the stages of a plan after an amendment.

    Args:
        plan: The plan that is amended.
        stages: Its stages.
        start: The position of the amendment in the order of the plan.
        amendment: The amendment.

    Raises:
        PlanError: the amendment names sources that are not there, or leaves none.
    """
    read = sources_at(plan, stages, start)
    _check_names(plan, read, amendment)
    if not (amendment.weights or amendment.add or amendment.drop):
        return list(stages)
    if not plan.is_weighted and (len(plan.names) > 1 or amendment.weights is None):
        raise PlanError(
            "This plan has no weights: every row of all sources is read once an epoch, in one "
            "order of all, so weights cannot begin in the middle of it, and sources cannot be "
            "added or dropped. Start a run with weights."
        )
    if amendment.weights is not None:
        names = [*plan.names, *(each["name"] for each in amendment.sources)]
        weights = {name: amendment.weights.get(name, 0) for name in names}
        # A source alone is in the same order with weights as without.
        kept = [
            each._replace(sources=None, weights={plan.names[0]: 1}) if each.sources else each
            for each in stages
            if each.position < start
        ]
        return [*kept, StageArguments(start, weights=weights)]
    if amendment.add and plan.is_weighted:
        raise PlanError(
            f"Give the weights of all sources together with add={quoted(amendment.add)}: this plan "
            "has weights, and they say what share a source has."
        )
    changed = [each for each in stages if each.position < start]
    # The stage at `start`, and all later ones of the schedule.
    active = [each for each in stages if each.position <= start][-1]
    later = [active._replace(position=start), *(each for each in stages if each.position > start)]
    return [*changed, *(_changed(stage, plan, amendment) for stage in later)]


def _changed(stage: StageArguments, plan: "Plan", amendment: Amendment) -> StageArguments:
    """Return a stage with the sources that an amendment adds, and without those that it drops."""
    left = [name for name in _weights_of(stage, plan) if name not in amendment.drop]
    left += [name for name in amendment.add if name not in left]
    if not left:
        raise PlanError(
            f"Without {quoted(amendment.drop)}, no source is left from position "
            f"{stage.position:,} on. Add another one in the same amendment."
        )
    weights = _weights_of(stage, plan)
    kept = {name: weights[name] if name in left else 0 for name in plan.names}
    return StageArguments(stage.position, weights=kept)


def _check_names(plan: "Plan", read: Mapping[str, Weight], amendment: Amendment) -> None:
    new = [each["name"] for each in amendment.sources]
    known = [*plan.names, *(name for name in new if name not in plan.names)]
    if again := [name for name in new if name in plan.names]:
        raise PlanError(
            f"add has rows for {quoted(again)}, which this plan has already. A source that was "
            "dropped is added again by its name alone."
        )
    if absent := [name for name in amendment.add if name not in known]:
        raise PlanError(f"add has no rows for {quoted(absent)}, which is not in this plan yet.")
    for what, names in (("drop", amendment.drop), ("weights", amendment.weights or ())):
        if unknown := [name for name in names if name not in known]:
            raise PlanError(f"{what} names {quoted(unknown)}, but the sources are {quoted(known)}.")
    if idle := [name for name in amendment.drop if name not in read]:
        raise PlanError(
            f"drop names {quoted(idle)}, which the run does not read at this position anyway."
        )
    if busy := [name for name in amendment.add if name in read]:
        raise PlanError(f"add names {quoted(busy)}, which the run reads already.")
    if amendment.weights is None:
        return
    kept = [each for each in (*read, *amendment.add) if each not in amendment.drop]
    if missing := [name for name in kept if name not in amendment.weights]:
        raise PlanError(
            f"weights has no weight for {quoted(missing)}. Give the weights of all sources that "
            "are read from there on, or drop a source."
        )
    if twice := [name for name in amendment.drop if amendment.weights.get(name)]:
        raise PlanError(f"{quoted(twice)} cannot be dropped and have a weight.")
