"""Laws that users can hold their own set-up to.

`assert_resumable` stops a run at every step of two loops over it, restores it into a fresh
loader through JSON, on other numbers of ranks and threads, and compares everything that follows
with the run that was never stopped. If it passes for your loader, your checkpoints are exact.
"""

import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from inspect import Parameter, signature
from itertools import product
from typing import Any, Protocol

import numpy as np

__all__ = ["Resumable", "assert_resumable", "global_rows"]

_ENDED = object()
_LOOPS = 2  # what the second reads follows from how the first ends

Topology = dict[str, int]
Step = dict[str, Any]


class Resumable(Protocol):
    """A `penstock.Loader`, or another one with a state; a `fingerprint` is compared if there."""

    def __iter__(self) -> Iterator[Any]:
        """Batches."""

    def state_dict(self) -> dict[str, Any]:
        """Where it is."""

    def load_state_dict(self, state: Any) -> None:
        """Continue where a state was taken."""


@dataclass
class _Trace:
    """What some loops over a run gave."""

    loops: list[list[Step]] = field(default_factory=list)
    states: list[Any] = field(default_factory=list)
    """Before the first step, and after each step."""
    between: list[Any] = field(default_factory=list)
    """After the end of each loop that has ended."""

    @property
    def num_steps(self) -> int:
        return sum(map(len, self.loops))

    @property
    def is_over(self) -> bool:
        """Whether nothing came after the end of the first loop."""
        return len(self.between) > 1 and not self.loops[1]


def assert_resumable(
    make_loader: Callable[..., Resumable],
    *,
    world_sizes: Sequence[int] = (1, 2, 4),
    prefetch: Sequence[int] = (0, 2),
    steps: int = 32,
    stops: Iterable[int] | None = None,
) -> None:
    """Raise unless a run that is stopped at any step continues exactly.

    The rows of all ranks together must be the same at every step, in order, and so must the
    state, whichever rank and topology it is taken from. As states are equal, one resume from
    each into every topology stands for all pairs of topologies, and for chains of resumes.
    A run that ends is iterated twice, and also stopped between the two loops.

    Args:
        make_loader: Makes a fresh loader, the same every time. If it takes `rank` and
            `world_size`, the run is also resumed on each of `world_sizes`; its global batch
            size must then divide by all of them and stay the same. If it takes `prefetch`,
            likewise.
        world_sizes: Numbers of ranks to go from and to.
        prefetch: Numbers of blocks made ahead, to go from and to.
        steps: How many steps of the run to compare, at most. Give twice its length to cover
            the second loop over a run that ends.
        stops: Where to stop, in steps of both loops; after every step where not given.

    Raises:
        AssertionError: something differs; the message names what, the step and the topology.
    """
    topologies = _topologies(make_loader, world_sizes, prefetch)
    expected = _run(_ranks(make_loader, topologies[0]), steps, _spelled(topologies[0]))
    for topology in topologies[1:]:
        where = _spelled(topology)
        found = _run(_ranks(make_loader, topology), steps, where)
        _compare(expected, found, 0, where)
    # A run that ended here must end there too: one step more is asked for.
    more = len(expected.between) == _LOOPS
    for stop in range(expected.num_steps + 1) if stops is None else stops:
        for state, rest in _resumes(expected, stop):
            for topology in topologies:
                where = f"stopped after {stop:,} steps and resumed on {_spelled(topology)}"
                ranks = _ranks(make_loader, topology)
                for loader in ranks:
                    loader.load_state_dict(json.loads(json.dumps(state)))
                most, loops = rest.num_steps + more, _LOOPS - _ended(expected, stop)
                found, right = _run(ranks, most, where, loops), rest
                if _ends_first(expected, stop, state, found):
                    found = _run(ranks, most, where, loops)
                    right = replace(rest, states=[expected.between[0], *rest.states[1:]])
                _compare(right, found, stop, where)


def _ends_first(expected: _Trace, stop: int, state: Any, found: _Trace) -> bool:
    """Whether a loader was resumed after a loop's last step, and ended that loop without a batch.

    A DataLoader that counts epochs may do so: the epoch that the state names is then over.
    """
    is_last = bool(expected.between) and stop == len(expected.loops[0])
    return is_last and state != expected.between[0] and not found.loops[0] and not expected.is_over


def _ended(expected: _Trace, stop: int) -> int:
    """How many loops had ended after so many steps, of those that another one follows."""
    return int(bool(expected.between) and stop >= len(expected.loops[0]))


def _resumes(expected: _Trace, stop: int) -> Iterator[tuple[Any, _Trace]]:
    """The states to resume from after so many steps, and what must follow each."""
    ended = _ended(expected, stop)
    if ended and stop == expected.num_steps and len(expected.between) > 1 and not expected.is_over:
        return  # what a third loop reads is not known here
    loops = list(expected.loops[ended:])
    if loops:
        loops[0] = loops[0][stop - (len(expected.loops[0]) if ended else 0) :]
    rest = _Trace(loops, expected.states[stop:], expected.between[ended:])
    yield expected.states[stop], rest
    if ended and stop == len(expected.loops[0]):
        between = expected.between[0]
        yield between, _Trace(loops, [between, *expected.states[stop + 1 :]], rest.between)


def global_rows(ranks: Sequence[Resumable], steps: int) -> list[Step]:
    """The next steps of a loop over a run, each with the rows of all ranks in order.

    Every step is a dict of NumPy arrays, and `fingerprint`, the sum over ranks.

    Raises:
        AssertionError: some ranks end before others.
    """
    return _run(ranks, steps, "these loaders", 1).loops[0]


def _run(ranks: Sequence[Resumable], steps: int, where: str, loops: int = _LOOPS) -> _Trace:
    """The next steps of so many loops; states are equal on all ranks."""
    trace = _Trace(states=[_state(ranks, 0, where)])
    while not trace.loops or (trace.num_steps < steps and len(trace.loops) < loops):
        found: list[Step] = []
        trace.loops.append(found)
        iterators = [iter(loader) for loader in ranks]
        while trace.num_steps < steps:
            batches = [_next(iterator) for iterator in iterators]
            ended = [rank for rank, batch in enumerate(batches) if batch is _ENDED]
            if len(ended) == len(ranks):
                trace.between.append(_state(ranks, trace.num_steps, where))
                break
            if ended:
                raise AssertionError(
                    f"{where}: rank {ended[0]} ends after {trace.num_steps:,} steps and others "
                    "do not."
                )
            found.append(_joined(ranks, [_fields(batch) for batch in batches]))
            trace.states.append(_state(ranks, trace.num_steps, where))
    return trace


def _next(iterator: Iterator[Any]) -> Any:
    with warnings.catch_warnings():
        # That a run is over is what is found out here.
        warnings.filterwarnings("ignore", message="This run is over")
        return next(iterator, _ENDED)


def _joined(ranks: Sequence[Any], fields: list[dict[str, Any]]) -> Step:
    joined = {
        name: np.concatenate([each[name] for each in fields])
        for name in fields[0]
        if name != "cu_seqlens"  # counted within a rank
    }
    total = sum(getattr(loader, "fingerprint", 0) or 0 for loader in ranks) % 2**64
    return {**joined, "fingerprint": total}


def _state(ranks: Sequence[Resumable], step: int, where: str) -> Any:
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
    make_loader: Callable[..., Resumable], world_sizes: Sequence[int], prefetch: Sequence[int]
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


def _ranks(make_loader: Callable[..., Resumable], topology: Topology) -> list[Resumable]:
    if "world_size" not in topology:
        return [make_loader(**topology)]
    return [make_loader(rank=rank, **topology) for rank in range(topology["world_size"])]


def _spelled(topology: Topology) -> str:
    return ", ".join(f"{name}={value}" for name, value in topology.items()) or "one loader"


def _compare(expected: _Trace, found: _Trace, stop: int, where: str) -> None:
    step = stop
    for number, loop in enumerate(expected.loops):
        again = found.loops[number] if number < len(found.loops) else []
        for right, wrong in zip(loop, again, strict=False):
            _compare_step(right, wrong, step, where)
            step += 1
        if len(again) < len(loop):
            raise AssertionError(f"{where}: the run ends after {step:,} steps, not later.")
        if len(again) > len(loop):
            raise AssertionError(f"{where}: the run continues after {step:,} steps, not ending.")
    for number, (right, wrong) in enumerate(zip(expected.states, found.states, strict=True)):
        if right != wrong:
            raise AssertionError(f"{where}: the state after {stop + number:,} steps differs.")
    if expected.between != found.between:
        raise AssertionError(f"{where}: the state after the end of a loop differs.")


def _compare_step(expected: Step, found: Step, step: int, where: str) -> None:
    if set(expected) != set(found):
        raise AssertionError(
            f"{where}: step {step:,} has {sorted(found)} instead of {sorted(expected)}."
        )
    for name in expected:
        if not np.array_equal(expected[name], found[name]):
            raise AssertionError(f"{where}: {name!r} differs at step {step:,}.")
