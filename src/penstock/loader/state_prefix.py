"""States of runs that read parts in order, also while the store is still being written.

What a position holds in such a run follows from the parts up to it, not from those to come. So
its state says how the store is built and carries a chain of digests of the parts whose rows
were read (`penstock.store.prefix_digest`). Taken while the store grew, it can be loaded when that
is finished; taken from the finished store, it can be loaded where another copy is being built.

    "prefix": {"build": {"tokenizer": …, "inputs": …}, "parts": 17, "chain": "5f0c9a…"}

The modification times of inputs have no part in it: they differ between copies of one file, and
states are the same on all machines of a run. A build looks at them itself.
"""

from typing import Any

import numpy as np

from penstock.loader.state import another_order, explained, identify, identify_order, position_in
from penstock.order.growing import GrowingPlan
from penstock.order.integers import END
from penstock.order.plan import Plan
from penstock.store.explain import differences
from penstock.store.prefix_digest import chain, describe_build
from penstock.store.reader import TokenStore

__all__ = ["identity_at", "place_of"]

_CHAIN = 32  # of 64 digits


def identity_at(plan: Any, position: int, identity: dict[str, Any] | None) -> dict[str, Any]:
    """What a state of `plan` at a position says besides the position.

    Args:
        plan: The plan.
        position: The position of the state.
        identity: What `identify` says of the plan; None where it grows.
    """
    if identity is None:
        # By the position alone: the same on all ranks, whoever has seen the end of the build.
        first_epoch = not plan.complete or position <= plan.num_rows
        identity = _short(plan) if first_epoch else identify(plan.whole)
    store = _store_of(plan)
    if store is None:
        return identity
    return {**identity, "prefix": _prefix(plan, store, _parts_before(plan, position))}


def place_of(plan: Any, identity: dict[str, Any] | None, state: dict[str, Any]) -> int:
    """The position that a checked state holds, if it belongs to a run of `plan`.

    Raises:
        ResumeError: it belongs to another order, or to other parts; the message says what differs.
    """
    if identity is not None and state["plan"]:
        return position_in(identity, state)
    store = _store_of(plan)
    now = _short(plan)
    # What a finished store's state says of its source is left out: it is not known here.
    then = {**state, "sources": now["sources"]}
    if store is None or any(then[name] != now[name] for name in ("order", "rows")):
        raise another_order(state, explained(then, now))
    if state["plan"] and (plan.complete or "prefix" not in state or _is_later(state)):
        plan.reach(END)
        return position_in(identify(plan.whole), state)
    _refuse_other_parts(plan, store, state)
    return int(state["position"])


def _refuse_other_parts(plan: Any, store: TokenStore, state: dict[str, Any]) -> None:
    told = state.get("prefix")
    if not isinstance(told, dict) or not isinstance(told.get("build"), dict):
        raise another_order(state, "the plan")
    if changed := differences(told["build"], describe_build(store)):
        raise another_order(state, f"how the store is built ({changed})")
    parts = told.get("parts")
    if type(parts) is not int or parts < 0:
        raise another_order(state, "the plan")
    if store.growing:
        grown: Any = store
        there = grown.await_parts(parts)
    else:
        there = len(store.manifest.parts) >= parts
    if not there or chain(store, parts)[:_CHAIN] != told.get("chain"):
        raise another_order(state, f"the contents of the first {parts:,} parts of {store.path}")


def _is_later(state: dict[str, Any]) -> bool:
    """Whether the state of a finished store is past its first epoch."""
    rows = [each[0] for each in state["sources"].values()]
    return not rows or state["position"] > rows[0]


def _short(plan: Any) -> dict[str, Any]:
    """What `identify` says of a plan, but for its store."""
    described = plan.describe()
    del described["sources"]
    told = identify_order(described, list(plan.sources.values()))
    return {"plan": "", **told, "sources": {}}


def _prefix(plan: Any, store: TokenStore, parts: int) -> dict[str, Any]:
    return {"build": describe_build(store), "parts": parts, "chain": chain(store, parts)[:_CHAIN]}


def _store_of(plan: Any) -> TokenStore | None:
    """The store that `plan` reads part after part; None where it does not do that."""
    if not isinstance(plan, Plan | GrowingPlan) or plan.shuffle != "part":
        return None
    rows: list[Any] = list(plan.sources.values())
    stream = getattr(rows[0], "stream", None)
    if len(rows) > 1 or stream is None:
        return None
    members = stream.members
    return members[0] if len(members) == 1 and isinstance(members[0], TokenStore) else None


def _parts_before(plan: Any, position: int) -> int:
    if isinstance(plan, GrowingPlan):
        return plan.parts_before(position)
    rows: Any = next(iter(plan.sources.values()))
    ends = np.cumsum(rows.part_rows)
    last = min(position, int(ends[-1])) - 1
    return int(np.searchsorted(ends, last, side="right")) + 1 if position else 0
