"""What a checkpoint keeps of a loader: a position, and what it is a position in.

State is JSON, the same on every rank, about a kilobyte. It carries a digest of itself, so
that one that was damaged or edited is refused, and enough of the plan to say in plain
words what differs when it belongs to another run.
"""

from typing import Any

from penstock.digest import digest_json
from penstock.errors import ResumeError
from penstock.order.plan import Plan

__all__ = ["read_state", "write_state"]

_VERSION = 1
_SHORT = 16
_MOST_SPELLED = 2_000  # bytes; a longer schedule is kept as a digest


def write_state(plan: Plan, position: int) -> dict[str, Any]:
    """The state of a run of `plan` whose next row is the one at `position`."""
    state = {"version": _VERSION, "position": position, **_identity(plan)}
    return {**state, "check": digest_json(state)[:_SHORT]}


def read_state(plan: Plan, state: Any) -> int:
    """The position that `state` holds, if it belongs to `plan`.

    Raises:
        ResumeError: it is damaged, of another version, or belongs to another order.
    """
    if not isinstance(state, dict) or "version" not in state:
        raise ResumeError(f"{state!r:.80} is not the state of a loader.")
    if state["version"] != _VERSION:
        raise ResumeError(
            f"This state is of version {state['version']!r}; this penstock reads version "
            f"{_VERSION}. Resume with the penstock that wrote it, or a newer one."
        )
    told = {key: value for key, value in state.items() if key != "check"}
    try:
        intact = digest_json(told)[:_SHORT] == state.get("check")
    except (TypeError, ValueError):
        intact = False
    if not intact:
        raise ResumeError(
            "This state was changed after it was written: its check does not match. Use the "
            "checkpoint before it, or loader.seek(position) if you know the position."
        )
    now = _identity(plan)
    if told["plan"] != now["plan"]:
        raise ResumeError(
            "This checkpoint belongs to another order of the data, so position "
            f"{told['position']:,} would not be the row it was. Changed since: "
            f"{_changes(told, now)}. Restore that to resume exactly, or pass "
            'on_change="restart" to begin the new order at 0.'
        )
    return int(told["position"])


def _identity(plan: Plan) -> dict[str, Any]:
    """What a position is a position in, short."""
    described = plan.describe()
    sources = described.pop("sources")
    stages = described.pop("stages")
    if len(repr(stages)) > _MOST_SPELLED:
        stages = digest_json(stages)[:_SHORT]
    return {
        "plan": plan.digest[:_SHORT],
        "order": {**described, "stages": stages},
        "sources": {each["name"]: _short(plan, each) for each in sources},
    }


def _short(plan: Plan, described: dict[str, Any]) -> list[Any]:
    """Rows and digests of a source: [rows, rows digest, tokenizer digest]."""
    tokenizer = getattr(plan.sources[described["name"]], "tokenizer_digest", None)
    return [described["rows"], described["digest"][:_SHORT], (tokenizer or "")[:8]]


def _changes(then: dict[str, Any], now: dict[str, Any]) -> str:
    """What differs between two runs, in words, five at most."""
    found = [
        f"{key} {then['order'].get(key)!r:.100} -> {now['order'].get(key)!r:.100}"
        for key in sorted({*then["order"], *now["order"]})
        if then["order"].get(key) != now["order"].get(key)
    ]
    old, new = then["sources"], now["sources"]
    found += [f'source "{name}" is gone' for name in old if name not in new]
    found += [f'source "{name}" was not there' for name in new if name not in old]
    for name in old:
        if name in new and old[name] != new[name]:
            found.append(_source_change(name, old[name], new[name]))
    if not found and list(old) != list(new):
        found.append("the order of the sources")
    return ", ".join(found[:5]) or "the plan"


def _source_change(name: str, old: list[Any], new: list[Any]) -> str:
    if old[2] != new[2]:
        return f'the tokenizer of "{name}" (digest {old[2]} -> {new[2]})'
    rows = f", {old[0]:,} rows -> {new[0]:,}" if old[0] != new[0] else ""
    return f'the store or rows of "{name}" (digest {old[1][:8]} -> {new[1][:8]}{rows})'
