"""What a checkpoint keeps of a loader: a position, and what it is a position in.

State is JSON, the same on every rank, about a kilobyte. It carries a digest of itself, so
that one that was damaged or edited is refused, and enough of the plan to say in plain
words what differs when it belongs to another run. The digests decide; the words explain.
"""

import json
from collections.abc import Mapping
from typing import Any

from penstock.digest import digest_json
from penstock.errors import ResumeError
from penstock.order.plan import Plan

__all__ = [
    "another_order",
    "check_state",
    "explained",
    "identify",
    "identify_order",
    "position_in",
    "sealed",
    "shortened",
    "unsealed",
    "write_state",
]

_VERSION = 1
_SHORT = 16
_MOST_SPELLED = 1_500  # bytes; longer weights, or caps, are kept as a digest
_LONGEST_NAME = 42  # bytes as JSON: a source then takes at most 100
_FIELDS = {"order": dict, "plan": str, "position": int, "rows": dict, "sources": dict}


def identify(plan: Plan) -> dict[str, Any]:
    """What a position of `plan` is a position in, short: digests, and words for messages."""
    described = plan.describe()
    sources = described.pop("sources")
    return {
        "plan": plan.digest[:_SHORT],
        **identify_order(described, [plan.sources[each["name"]] for each in sources]),
        "sources": {
            _short_name(each["name"]): [each["rows"], each["digest"][:_SHORT], _store(plan, each)]
            for each in sources
        },
    }


def identify_order(described: dict[str, Any], rows: list[Any]) -> dict[str, Any]:
    """How rows are ordered and how they are cut, but not from which stores."""
    told = [_told(each) for each in rows]
    settings = sorted({name for each in told for name in each})
    return {
        "order": {name: shortened(value) for name, value in described.items()},
        "rows": {name: _shared(told, name) for name in settings},
    }


def write_state(identity: dict[str, Any], position: int) -> dict[str, Any]:
    """The state of a run whose next row is the one at `position`."""
    return sealed({"position": position, **identity}, _VERSION)


def check_state(state: Any) -> dict[str, Any]:
    """The state itself, if it is one, and as it was written.

    Raises:
        ResumeError: it is damaged, edited, of another version, or no state.
    """
    otherwise = ", or loader.seek(position) if you know the position"
    return unsealed(state, _VERSION, _FIELDS, of="a loader", otherwise=otherwise)


def sealed(told: Mapping[str, Any], version: int) -> dict[str, Any]:
    """What a state tells, with its version and a digest of itself."""
    own: dict[str, Any] = json.loads(json.dumps(told))  # the caller may write to it
    state = {"version": version, **own}
    return {**state, "check": digest_json(state)[:_SHORT]}


def unsealed(
    state: Any, version: int, fields: Mapping[str, type], *, of: str, otherwise: str = ""
) -> dict[str, Any]:
    """What a state tells, if it is as `sealed` gave it.

    Args:
        state: What may be one.
        version: The one that can be read.
        fields: What it has, and of which types; whole numbers are 0 or more.
        of: What it is the state of, for messages.
        otherwise: What else to do about one that was changed.

    Raises:
        ResumeError: it is damaged, edited, of another version, or no state.
    """
    if not isinstance(state, Mapping) or "version" not in state:
        raise ResumeError(f"{state!r:.80} is not the state of {of}.")
    if state["version"] != version:
        raise ResumeError(
            f"This state is of version {state['version']!r:.80}; this penstock reads version "
            f"{version}. Resume with the penstock that wrote it, or a newer one."
        )
    told = {key: value for key, value in state.items() if key != "check"}
    try:
        intact = digest_json(told)[:_SHORT] == state.get("check")
    except (TypeError, ValueError, RecursionError):
        intact = False
    # A check can be made to match; a position must be one all the same.
    typed = all(type(told.get(name)) is kind for name, kind in fields.items())
    if not intact or not typed or any(told[name] < 0 for name in fields if fields[name] is int):
        raise ResumeError(
            "This state was changed after it was written: its check does not match. Use the "
            f"checkpoint before it{otherwise}."
        )
    return told


def position_in(identity: dict[str, Any], state: dict[str, Any]) -> int:
    """The position that a checked state holds, if it belongs to the run of `identity`.

    Raises:
        ResumeError: it belongs to another order; the message says what differs.
    """
    position = int(state["position"])
    if state["plan"] != identity["plan"]:
        raise another_order(state, explained(state, identity))
    return position


def another_order(state: dict[str, Any], changed: str) -> ResumeError:
    """The error for a state of another order, in which `changed` was otherwise."""
    return ResumeError(
        f"This checkpoint belongs to another order of the data, so position {state['position']:,} "
        f"would not be the row it was. Changed since: {changed}. Restore that to resume exactly. "
        "To begin the new order at 0, start without this state; a Loader also does so by "
        'load_state_dict(state, on_change="restart").'
    )


def _told(rows: Any) -> dict[str, Any]:
    """What rows say of themselves, but for the store: how they are cut, and the tokenizer."""
    described = rows.describe() if hasattr(rows, "describe") else {}
    told = {name: value for name, value in described.items() if name != "store"}
    tokenizer = getattr(rows, "tokenizer_digest", None)
    return {**told, "tokenizer": tokenizer[:8]} if tokenizer else told


def _store(plan: Plan, described: dict[str, Any]) -> str:
    rows: Any = plan.sources[described["name"]]
    return str(rows.describe().get("store", ""))[:12] if hasattr(rows, "describe") else ""


def _shared(told: list[dict[str, Any]], name: str) -> Any:
    """A setting, once for all sources that have it; a digest where they differ in it."""
    values = [each[name] for each in told if name in each]
    return values[0] if all(value == values[0] for value in values) else _digested(values)


def shortened(value: Any) -> Any:
    """The value itself, or a digest of it where it is long."""
    return value if len(json.dumps(value)) <= _MOST_SPELLED else _digested(value)


def _digested(value: Any) -> str:
    return f"digest {digest_json(value)[:8]}"


def _short_name(name: str) -> str:
    if len(json.dumps(name)) <= _LONGEST_NAME:
        return name
    begin = name[:24] if name.isascii() else name[:3]
    return f"{begin}… {digest_json(name)[:8]}"


def explained(then: dict[str, Any], now: dict[str, Any]) -> str:
    """What differs between two runs, in words."""
    try:
        return _changes(then, now)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        return "the plan"  # not as we write it, though its check matches


def _changes(then: dict[str, Any], now: dict[str, Any]) -> str:
    """What differs between two runs, in words, five at most."""
    settings = _differences(then["rows"], now["rows"])
    found = _differences(then["order"], now["order"]) + settings
    old, new = then["sources"], now["sources"]
    found += [f'source "{name}" is gone' for name in old if name not in new]
    found += [f'source "{name}" was not there' for name in new if name not in old]
    for name in old:
        if name in new and old[name] != new[name]:
            found += _source_changes(name, old[name], new[name], explained=bool(settings))
    if not found and list(old) != list(new):
        found.append("the order of the sources")
    more = f" and {len(found) - 5:,} more" if len(found) > 5 else ""
    return (", ".join(found[:5]) + more) or "the plan"


def _differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    found: list[str] = []
    for name in sorted({*old, *new}):
        before, after = old.get(name), new.get(name)
        if before == after:
            continue
        if name == "stages":
            found += _stage_changes(before, after)
        else:
            found.append(f"{name} {_spelled(before)} -> {_spelled(after)}")
    return found


def _stage_changes(old: Any, new: Any) -> list[str]:
    """Which weights are others, where the stages are otherwise the same."""
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        found = []
        for before, after in zip(old, new, strict=True):
            weights = [stage.get("weights") for stage in (before, after)]
            if before["position"] != after["position"] or None in weights:
                break
            found += [
                f'weight of "{name}" {weights[0].get(name)} -> {weights[1].get(name)}'
                for name in sorted({*weights[0], *weights[1]})
                if weights[0].get(name) != weights[1].get(name)
            ]
        else:
            return found
    return [f"stages {_spelled(old)} -> {_spelled(new)}"]


def _source_changes(name: str, old: list[Any], new: list[Any], *, explained: bool) -> list[str]:
    rows = f", {old[0]:,} rows -> {new[0]:,}" if old[0] != new[0] else ""
    if old[2] != new[2]:
        return [f'the store of "{name}" (digest {old[2][:8]} -> {new[2][:8]}{rows})']
    if explained:  # a setting that was named already accounts for it
        return []
    return [f'the rows of "{name}" (digest {old[1][:8]} -> {new[1][:8]}{rows})']


def _spelled(value: Any) -> str:
    if isinstance(value, dict) and list(value) == ["mode"]:
        value = value["mode"]
    return "none" if value is None else f"{value!r:.100}"
