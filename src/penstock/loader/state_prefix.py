"""States of runs that read parts in order, also while the store is still being written.

In such a run, the row at a position depends on the parts up to that row, not on later parts. So
the state records how the store is built, and a chain of digests of the parts whose rows were read
(`penstock.store.verify`). A state that was saved while the store was being written can be
loaded when the store is finished. A state of the finished store can be loaded while another copy
of the store is being built.

    "prefix": {"build": {"tokenizer": …, "inputs": …}, "parts": 17, "chain": "5f0c9a…"}

The modification times of inputs are not part of a state: they differ between copies of one file,
but states must be the same on all machines of a run. A build itself checks modification times.
"""

import numpy as np

from penstock.errors import ResumeError
from penstock.loader import state as states
from penstock.loader.run import AnyPlan
from penstock.loader.state import State
from penstock.order.integers import END
from penstock.order.plan import Plan
from penstock.store.reader import TokenStore
from penstock.store.verify import chain, describe_build, differences
from penstock.streaming.plan import StreamedPlan

_CHAIN_DIGITS = 32  # of 64


def identity_at(plan: AnyPlan, position: int, identity: State | None) -> State:
    """Return everything in a state of `plan` at a position except the position.

    Args:
        plan: The plan.
        position: The position of the state.
        identity: The result of `identify` for the plan; None for a streamed plan.
    """
    if isinstance(plan, StreamedPlan):
        # The identity depends on the position only, not on whether this rank has seen the end of
        # the build: states are the same on all ranks.
        first_epoch = not plan.complete or position <= plan.num_rows
        identity = _short(plan) if first_epoch else states.identify(plan.whole)
    assert identity is not None  # only a streamed plan has none
    store = _store_of(plan)
    if store is None:
        return identity
    parts = _parts_before(plan, position)
    prefix = {
        "build": describe_build(store),
        "parts": parts,
        "chain": chain(store, parts)[:_CHAIN_DIGITS],
    }
    return {**identity, "prefix": prefix}


def comparable(plan: AnyPlan, identity: State | None) -> State:
    """Return the part of `identify` that ranks have in common, however much of a store is written.

    Some ranks may read the finished store, and others have opened it before.
    """
    return _short(plan) if identity is None or _store_of(plan) is not None else identity


def position_of(plan: AnyPlan, identity: State | None, state: State) -> int:
    """Return the position of a checked state, if it belongs to a plan.

    Args:
        plan: The plan. States of plans that it continues belong to it while the rows are the same.
        identity: The result of `identify` for the plan; None for a streamed plan.
        state: The state.

    Raises:
        ResumeError: the state belongs to another order or to other parts; the message says which.
    """
    for earlier, same_before in plan.ancestors() if isinstance(plan, Plan) else ():
        if state["plan"] != states.identify(earlier)["plan"]:
            continue
        position = int(state["position"])
        if position > same_before:
            raise ResumeError(
                f"The weights of this plan change at position {same_before:,}, but this checkpoint "
                f"was saved without that change at position {position:,}, so its run has read "
                f"other rows. Resume from a checkpoint at or before position {same_before:,}, or "
                "continue the plan from a later position."
            )
        return position
    if identity is not None and state["plan"]:
        return states.position_in(identity, state)
    now = _short(plan)
    # The state of a finished store describes its sources, and `now` does not. So sources are not
    # compared.
    then = {**state, "sources": now["sources"]}
    store = _store_of(plan)
    if store is None or any(then[name] != now[name] for name in ("order", "rows")):
        raise states.another_order(state, states.explained(then, now))
    needs_digest = state["plan"] and ("prefix" not in state or _is_later(state))
    if isinstance(plan, StreamedPlan) and (needs_digest or (state["plan"] and plan.complete)):
        plan.reach(END)  # only the finished store has a digest to compare
        return states.position_in(states.identify(plan.whole), state)
    if changed := _changed_parts(plan, store, state.get("prefix")):
        raise states.another_order(state, changed)
    return int(state["position"])


def _changed_parts(plan: AnyPlan, store: TokenStore, prefix: object) -> str:
    """Describe how the parts of a store differ from those that a state has read; "" if equal."""
    if not isinstance(prefix, dict) or not isinstance(prefix.get("build"), dict):
        return "the plan"
    if changed := differences(prefix["build"], describe_build(store)):
        return f"how the store is built ({changed})"
    # The check of a state does not protect against one that was edited together with its check.
    parts = prefix.get("parts")
    if type(parts) is not int or parts < 0:
        return "the plan"
    if isinstance(plan, StreamedPlan) and plan.store.await_parts(parts):
        store = plan.store.snapshot()
    exists = len(store.manifest.parts) >= parts
    if exists and chain(store, parts)[:_CHAIN_DIGITS] == prefix.get("chain"):
        return ""
    return f"the contents of the first {parts:,} parts of {store.path}"


def _is_later(state: State) -> bool:
    """Return whether the state of a finished store is past its first epoch."""
    rows = [each[0] for each in state["sources"].values()]
    return not rows or state["position"] > rows[0]


def _short(plan: AnyPlan) -> State:
    """Return the result of `identify` for a plan, without the plan's digest and its sources."""
    described = plan.describe()
    del described["sources"]
    order = states.identify_order(described, list(plan.sources.values()))
    return {"plan": "", **order, "sources": {}}


def _store_of(plan: AnyPlan) -> TokenStore | None:
    """Return the store that `plan` reads part by part; None if it does not."""
    if plan.shuffle != "part" or len(plan.names) > 1:
        return None
    (rows,) = plan.sources.values()
    members = () if rows.stream is None else rows.stream.members
    store = members[0] if len(members) == 1 else None
    return store if isinstance(store, TokenStore) else None


def _parts_before(plan: AnyPlan, position: int) -> int:
    """Return how many parts hold the first tokens of the rows before a position."""
    if isinstance(plan, StreamedPlan):
        return plan.parts_before(position)
    if position == 0:
        return 0
    (rows,) = plan.sources.values()
    assert rows.part_rows is not None  # the plan reads it part by part
    # The part of the last row before the position; after the first epoch, the last part.
    ends = np.cumsum(rows.part_rows)
    last = min(position, int(ends[-1])) - 1
    return int(np.searchsorted(ends, last, side="right")) + 1
