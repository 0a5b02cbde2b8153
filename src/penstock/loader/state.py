"""The state of a loader: a position, and a description of the order that it belongs to.

A state is JSON of about a kilobyte, the same on every rank. It contains a digest of itself, so
that a damaged or edited state is refused. Digests decide whether a state belongs to a run. If it
does not, a message names the differences. The description of the plan is only for that message.

A fingerprint is a number for the contents of a batch that does not depend on the world size. Each
row has a 64-bit value, and the fingerprint of a batch is their sum modulo 2^64. A sum does not
depend on the order, so the fingerprints of all ranks add up to the fingerprint of one process that
reads the same global batch. Two runs whose fingerprints agree at a step read the same rows.
"""

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from penstock.digest import derive_key, digest_json, mix64
from penstock.errors import ResumeError
from penstock.rows.protocol import Array, Integers, Rows

if TYPE_CHECKING:  # multiplex loaders use states too, and need no stores
    from penstock.loader.run import AnyPlan

State = dict[str, Any]
"""A state, or a part of one, as JSON."""

_VERSION = 1
_SHORT = 16
_MOST_BYTES = 1_500  # of weights or caps; longer ones are replaced by a digest
_LONGEST_NAME = 42  # bytes as JSON: then a source takes at most 100 bytes of a state
_MULTIPLIERS = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xD6E8FEB86659FD93)
# A field that only this kind of state has.
_KINDS = {"plan": "a loader", "changed": "a multiplex DataLoader", "num_rows": "SFT batches"}
_FIELDS = {"order": dict, "plan": str, "position": int, "rows": dict, "sources": dict}


def identify(plan: "AnyPlan") -> State:
    """Return a short description of the order of `plan`: digests, and settings for messages."""
    described = plan.describe()
    sources = described.pop("sources")
    return {
        "plan": plan.digest[:_SHORT],
        **identify_order(described, [plan.sources[each["name"]] for each in sources]),
        "sources": {
            _short_name(each["name"]): [
                each["rows"],
                each["digest"][:_SHORT],
                str(plan.sources[each["name"]].describe().get("store", ""))[:12],
            ]
            for each in sources
        },
    }


def identify_order(described: State, rows: list[Rows]) -> State:
    """Return how rows are ordered and cut, without their stores."""
    known = [_settings_of(each) for each in rows]
    settings = sorted({name for each in known for name in each})
    return {
        "order": {name: shortened(value) for name, value in described.items()},
        "rows": {name: _shared(known, name) for name in settings},
    }


def write_state(identity: State, position: int) -> State:
    """Return the state of a run whose next row is at `position`."""
    return sealed({"position": position, **identity}, _VERSION)


def check_state(state: Any) -> State:
    """Return the contents of a loader's state.

    Raises:
        ResumeError: the object is damaged, edited, of another version, or not a state.
    """
    otherwise = ", or loader.seek(position) if you know the position"
    return unsealed(state, _VERSION, _FIELDS, of="a loader", otherwise=otherwise)


def sealed(contents: Mapping[str, Any], version: int) -> State:
    """Return a copy of `contents` as a state, with its version and a digest of itself."""
    # A copy through JSON: callers may change the copy, and it equals what a file returns later.
    own: State = json.loads(json.dumps(contents))
    # The check covers the version too: a state of another version must not pass as this one.
    state = {"version": version, **own}
    return {**state, "check": digest_json(state)[:_SHORT]}


def unsealed(
    state: Any, version: int, fields: Mapping[str, type], *, of: str, otherwise: str = ""
) -> State:
    """Return the contents of a state that `sealed` returned.

    Args:
        state: Any object.
        version: The version that can be read.
        fields: The names and types of fields that the contents must have; integers are 0 or more.
        of: The kind of object that the state belongs to, for messages.
        otherwise: Further advice for a state that was changed.

    Raises:
        ResumeError: the object is damaged, edited, of another version, or not a state.
    """
    if not isinstance(state, Mapping) or "version" not in state:
        raise ResumeError(f"{state!r:.80} is not the state of {of}.")
    kind = next((_KINDS[name] for name in _KINDS if name in state), of)
    if kind != of:
        raise ResumeError(
            f"This is the state of {kind}, not of {of}. Load it there, or load the state that was "
            "saved from here."
        )
    if state["version"] != version:
        raise ResumeError(
            f"This state is of version {state['version']!r:.80}; this penstock reads version "
            f"{version}. Resume with the penstock that wrote it."
        )
    contents = {key: value for key, value in state.items() if key != "check"}
    try:
        intact = digest_json(contents)[:_SHORT] == state.get("check")
    except (TypeError, ValueError, RecursionError):
        intact = False
    # Somebody may edit a state and its check. A position must be valid even then.
    typed = all(type(contents.get(name)) is kind for name, kind in fields.items())
    if not intact or not typed or any(contents[name] < 0 for name in fields if fields[name] is int):
        raise ResumeError(
            "This state was changed after it was written: its check does not match. Use the "
            f"checkpoint before it{otherwise}."
        )
    return contents


def position_in(identity: State, state: State) -> int:
    """Return the position of a checked state, if it belongs to the run of `identity`.

    Raises:
        ResumeError: the state belongs to another order; the message says what differs.
    """
    position = int(state["position"])
    if state["plan"] != identity["plan"]:
        raise another_order(state, explained(state, identity))
    return position


def another_order(state: State, changed: str) -> ResumeError:
    """Return the error for a state of another order; `changed` says what differs."""
    return ResumeError(
        f"This checkpoint belongs to another order of the data, so position {state['position']:,} "
        f"may hold another row. Changed after it was written: {changed}. Restore the old values "
        "to resume exactly. To begin the new order at 0, start without this state, or call "
        'Loader.load_state_dict(state, on_change="restart"); with Lightning, make '
        'LLMDataModule(…, on_change="restart").'
    )


def _settings_of(rows: Rows) -> State:
    """Return how rows are cut, and their tokenizer, but not their store."""
    settings = {name: value for name, value in rows.describe().items() if name != "store"}
    tokenizer = rows.tokenizer_digest
    return {**settings, "tokenizer": tokenizer[:8]} if tokenizer else settings


def _shared(known: list[State], name: str) -> object:
    """Return the value of a setting in all sources; a digest of all values if they differ."""
    values = [each[name] for each in known if name in each]
    return values[0] if all(value == values[0] for value in values) else _digested(values)


def shortened(value: object) -> object:
    """Return the value itself, or a digest of it if it is long."""
    return value if len(json.dumps(value)) <= _MOST_BYTES else _digested(value)


def _digested(value: object) -> str:
    return f"digest {digest_json(value)[:8]}"


def _short_name(name: str) -> str:
    if len(json.dumps(name)) <= _LONGEST_NAME:
        return name
    # JSON writes a character that is not ASCII as 6 bytes or more, so fewer of them fit.
    begin = name[:24] if name.isascii() else name[:3]
    return f"{begin}… {digest_json(name)[:8]}"


def explained(then: State, now: State) -> str:
    """Return what differs between two runs, for a message."""
    try:
        return _changes(then, now)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        return "the plan"  # another program wrote the state, though its check matches


def _changes(then: State, now: State) -> str:
    """Return at most five differences between two runs, for a message."""
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


def _differences(old: State, new: State) -> list[str]:
    found: list[str] = []
    for name in sorted({*old, *new} - {"format"}):  # the format follows from the other settings
        before, after = old.get(name), new.get(name)
        if before == after:
            continue
        weights, others = _weights(name, before), _weights(name, after)
        if weights and others:
            found += _differences(weights, others)
        else:
            found.append(f"{name} {_as_text(before)} -> {_as_text(after)}")
    return found


def _weights(name: str, stages: object) -> State:
    """Return each weight of a plan's stages, keyed by how a message names it; {} if none.

    An example of a key: `weight of "code" from position 8,000 on`.
    """
    if name not in ("stages", "continued") or not isinstance(stages, list):
        return {}
    return {
        f'weight of "{source}"' + f" from position {position:,} on" * (position > 0): weight
        for position, weights in ((each["position"], each.get("weights", {})) for each in stages)
        for source, weight in weights.items()
    }


def _source_changes(name: str, old: list[Any], new: list[Any], *, explained: bool) -> list[str]:
    rows = f", {old[0]:,} rows -> {new[0]:,}" if old[0] != new[0] else ""
    if old[2] != new[2]:
        return [f'the store of "{name}" (digest {old[2][:8]} -> {new[2][:8]}{rows})']
    if explained:  # a setting that differs is listed already, and it is the reason
        return []
    return [f'the rows of "{name}" (digest {old[1][:8]} -> {new[1][:8]}{rows})']


def _as_text(value: object) -> str:
    if isinstance(value, dict) and list(value) == ["mode"]:
        value = value["mode"]
    return "none" if value is None else f"{value!r:.100}"


def source_keys(names: Sequence[str]) -> NDArray[np.uint64]:
    """Return a key for each source, which depends on its name and not on its number."""
    return np.array([derive_key("fingerprint", name) for name in names], np.uint64)


def of_samples(keys: NDArray[np.uint64], *located: Integers) -> NDArray[np.uint64]:
    """Return a value for each row, from the key of its source, its epoch, sample and position."""
    # Mixed one after the other, so that (epoch 1, sample 2) and (epoch 2, sample 1) differ.
    value = keys
    for numbers in located:
        value = _mixed(value ^ numbers.astype(np.uint64))
    return value


def of_tokens(
    tokens: Array, targets: NDArray[np.bool_] | None, positions: Integers
) -> NDArray[np.uint64]:
    """Return a value for each row, from its tokens, its ignored targets and its position.

    `targets` is None if all targets count. The value of a row does not depend on other rows.
    """
    columns = np.arange(1, tokens.shape[1] + 1, dtype=np.uint64)
    # An odd number times x is 0 modulo 2^64 only if x is 0. So a change of one token always changes
    # the sum.
    weights = _mixed(columns * np.uint64(_MULTIPLIERS[3])) | np.uint64(1)
    with np.errstate(over="ignore"):
        value = ((tokens.astype(np.uint64) + np.uint64(1)) * weights).sum(axis=1, dtype=np.uint64)
        if targets is not None:
            value += (~targets * weights[1:] * np.uint64(_MULTIPLIERS[1])).sum(1, dtype=np.uint64)
    return _mixed(_mixed(value) ^ positions.astype(np.uint64))


def combine(values: NDArray[np.uint64], begins: Sequence[int]) -> list[int]:
    """Return the fingerprints of batches: sums of the values of their rows, modulo 2^64.

    Each batch begins at one of `begins` and has at least one row.

    >>> combine(np.array([2**64 - 1, 3, 7], np.uint64), [0, 2])
    [2, 7]
    """
    sums: list[int] = np.add.reduceat(values, begins).tolist()
    return sums


def _mixed(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply a bijection of 64-bit integers; every bit of the result depends on all bits."""
    return mix64(value + np.uint64(_MULTIPLIERS[0]))
