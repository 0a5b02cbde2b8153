"""Laws that users can hold their own set-up to.

`assert_resumable` stops a run at every step, restores it into a fresh loader through JSON,
on other numbers of ranks and threads, and compares everything that follows with the run
that was never stopped. If it passes for your loader, your checkpoints are exact.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from inspect import Parameter, signature
from itertools import product
from typing import Any

import numpy as np

from penstock.loader.loader import Loader

__all__ = ["assert_resumable", "global_rows"]

_ENDED = object()

Topology = dict[str, int]
Step = dict[str, Any]


def assert_resumable(
    make_loader: Callable[..., Loader],
    *,
    world_sizes: Sequence[int] = (1, 2, 4),
    prefetch: Sequence[int] = (0, 2),
    steps: int = 32,
    stops: Iterable[int] | None = None,
) -> None:
    """Raise unless a run that is stopped at any step goes on exactly.

    The rows of all ranks together must be the same at every step, in order, and so must the
    state, whichever rank and topology it is taken from. As states are equal, one resume from
    each into every topology stands for all pairs of topologies, and for chains of resumes.

    Args:
        make_loader: Makes a fresh loader, the same every time. If it takes `rank` and
            `world_size`, the run is also resumed on each of `world_sizes`; its global batch
            size must then divide by all of them and stay the same. If it takes `prefetch`,
            likewise.
        world_sizes: Numbers of ranks to go from and to.
        prefetch: Numbers of blocks made ahead, to go from and to.
        steps: How many steps of the run to compare, at most.
        stops: Where to stop; after every step where not given.

    Raises:
        AssertionError: something differs; the message names what, the step and the topology.
    """
    topologies = _topologies(make_loader, world_sizes, prefetch)
    expected, states = _run(_ranks(make_loader, topologies[0]), steps, _spelled(topologies[0]))
    for topology in topologies[1:]:
        where = _spelled(topology)
        found, found_states = _run(_ranks(make_loader, topology), steps, where)
        _compare(expected, found, 0, where)
        _compare_states(states, found_states, 0, where)
    # A run that ended here must end there too: one step more is asked for.
    more = len(expected) < steps
    for stop in range(len(expected) + 1) if stops is None else stops:
        for topology in topologies:
            where = f"stopped after {stop:,} steps and resumed on {_spelled(topology)}"
            ranks = _ranks(make_loader, topology)
            for loader in ranks:
                loader.load_state_dict(json.loads(json.dumps(states[stop])))
            found, found_states = _run(ranks, len(expected) - stop + more, where)
            _compare(expected[stop:], found, stop, where)
            _compare_states(states[stop:], found_states, stop, where)


def global_rows(ranks: Sequence[Loader], steps: int) -> list[Step]:
    """The next steps of a run, each with the rows of all ranks in order.

    Every step is a dict of NumPy arrays, and `fingerprint`, the sum over ranks.

    Raises:
        AssertionError: some ranks end before others.
    """
    return _run(ranks, steps, "these loaders")[0]


def _run(ranks: Sequence[Loader], steps: int, where: str) -> tuple[list[Step], list[Any]]:
    """The next steps; and the state before each and after the last, equal on all ranks."""
    states = [_state(ranks, 0, where)]
    found: list[Step] = []
    iterators = [iter(loader) for loader in ranks]
    while len(found) < steps:
        batches = [next(iterator, _ENDED) for iterator in iterators]
        ended = [rank for rank, batch in enumerate(batches) if batch is _ENDED]
        if len(ended) == len(ranks):
            break
        if ended:
            raise AssertionError(
                f"{where}: rank {ended[0]} ends after {len(found):,} steps and others do not."
            )
        found.append(_joined(ranks, [_fields(batch) for batch in batches]))
        states.append(_state(ranks, len(found), where))
    return found, states


def _joined(ranks: Sequence[Loader], fields: list[dict[str, Any]]) -> Step:
    joined = {
        name: np.concatenate([each[name] for each in fields])
        for name in fields[0]
        if name != "cu_seqlens"  # counted within a rank
    }
    total = sum(loader.fingerprint or 0 for loader in ranks) % 2**64
    return {**joined, "fingerprint": total}


def _state(ranks: Sequence[Loader], step: int, where: str) -> Any:
    states = [json.loads(json.dumps(loader.state_dict())) for loader in ranks]
    for rank, state in enumerate(states):
        if state != states[0]:
            raise AssertionError(
                f"{where}: after {step:,} steps the state of rank {rank} is not that of rank 0."
            )
    return states[0]


def _fields(batch: Any) -> dict[str, Any]:
    named = batch if isinstance(batch, dict) else dict(enumerate(batch))
    return {str(name): np.asarray(values.cpu()) for name, values in named.items()}


def _topologies(
    make_loader: Callable[..., Loader], world_sizes: Sequence[int], prefetch: Sequence[int]
) -> list[Topology]:
    """Every combination of what `make_loader` lets us choose."""
    parameters = signature(make_loader).parameters
    anything = any(each.kind is Parameter.VAR_KEYWORD for each in parameters.values())
    choices: dict[str, Sequence[int]] = {}
    if anything or {"rank", "world_size"} <= set(parameters):
        choices["world_size"] = world_sizes
    if anything or "prefetch" in parameters:
        choices["prefetch"] = prefetch
    return [dict(zip(choices, chosen, strict=True)) for chosen in product(*choices.values())]


def _ranks(make_loader: Callable[..., Loader], topology: Topology) -> list[Loader]:
    if "world_size" not in topology:
        return [make_loader(**topology)]
    return [make_loader(rank=rank, **topology) for rank in range(topology["world_size"])]


def _spelled(topology: Topology) -> str:
    return ", ".join(f"{name}={value}" for name, value in topology.items()) or "one loader"


def _compare(expected: list[Step], found: list[Step], stop: int, where: str) -> None:
    for number, (right, wrong) in enumerate(zip(expected, found, strict=False)):
        if set(right) != set(wrong):
            raise AssertionError(
                f"{where}: step {stop + number:,} has {sorted(wrong)} instead of {sorted(right)}."
            )
        for name in right:
            if not np.array_equal(right[name], wrong[name]):
                raise AssertionError(f"{where}: {name!r} differs at step {stop + number:,}.")
    if len(found) < len(expected):
        raise AssertionError(
            f"{where}: the run ends after {stop + len(found):,} steps instead of going on."
        )
    if len(found) > len(expected):
        raise AssertionError(
            f"{where}: the run goes on after {stop + len(expected):,} steps instead of ending."
        )


def _compare_states(expected: list[Any], found: list[Any], stop: int, where: str) -> None:
    for number, (right, wrong) in enumerate(zip(expected, found, strict=True)):
        if right != wrong:
            raise AssertionError(f"{where}: the state after {stop + number:,} steps differs.")
