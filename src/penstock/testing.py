"""Checks that users can run on their own loaders.

`assert_resumable` stops a run after every step, restores its state (through JSON) into a new loader
with other numbers of ranks and threads, and compares everything that follows with a run that was
never stopped. If it passes for your loader, your checkpoints are exact.
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
_LOOPS = 2  # a second loop over the run shows whether the first one ended in the right state

Topology = dict[str, int]
"""The arguments that vary between two loaders of the same run: world_size and prefetch."""
Step = dict[str, Any]
"""The arrays of one global batch by name, and `fingerprint`."""


class Resumable(Protocol):
    """A `penstock.Loader`, or another loader with a state; a `fingerprint` is compared too."""

    def __iter__(self) -> Iterator[Any]:
        """Yield batches."""

    def state_dict(self) -> dict[str, Any]:
        """Return the current state."""

    def load_state_dict(self, state: Any) -> None:
        """Continue from a state."""


@dataclass
class _Trace:
    """Everything that one or two loops over a run returned."""

    loops: list[list[Step]] = field(default_factory=list)
    states: list[Any] = field(default_factory=list)
    """The state before the first step, and after each step."""
    between: list[Any] = field(default_factory=list)
    """The state after the end of each loop that has ended."""

    @property
    def num_steps(self) -> int:
        return sum(map(len, self.loops))

    @property
    def is_over(self) -> bool:
        """Whether the run ended with the first loop: the second one was empty."""
        return len(self.between) > 1 and not self.loops[1]


def assert_resumable(
    make_loader: Callable[..., Resumable],
    *,
    world_sizes: Sequence[int] = (1, 2, 4),
    prefetch: Sequence[int] = (0, 2),
    steps: int = 32,
    stops: Iterable[int] | None = None,
) -> None:
    """Raise AssertionError unless a run that is stopped at any step continues exactly.

    At every step, the rows of all ranks together must be equal and in the same order, and so must
    the state, whichever rank and topology it comes from. Because states are equal, it is enough
    to resume each state once in every topology: this covers all pairs of topologies, and chains
    of resumes. A run that ends is iterated twice, and also stopped between the two loops.

    Args:
        make_loader: Creates a new loader, equal every time. If it takes `rank` and `world_size`,
            the run is also resumed with each of `world_sizes`; then the global batch size must
            not depend on them, and all of them must divide it. If it takes `prefetch`, likewise.
        world_sizes: The numbers of ranks to combine.
        prefetch: The numbers of prefetched blocks to combine.
        steps: How many steps of the run to compare, at most. To include the second loop over a
            run that ends, give twice its length.
        stops: Where to stop, in steps of both loops; by default after every step.

    Raises:
        AssertionError: something differs; the message says what, at which step and topology.
    """
    # All topologies are compared with the first one, so they are also equal to each other.
    topologies = _topologies(make_loader, world_sizes, prefetch)
    expected = _run(_ranks(make_loader, topologies[0]), steps, _describe(topologies[0]))
    for topology in topologies[1:]:
        where = _describe(topology)
        found = _run(_ranks(make_loader, topology), steps, where)
        _compare(expected, found, 0, where)
    # If the first run ended, the resumed run must end too: it is asked for one step more.
    more = len(expected.between) == _LOOPS
    for stop in range(expected.num_steps + 1) if stops is None else stops:
        for state, rest in _resumes(expected, stop):
            for topology in topologies:
                where = f"stopped after {stop:,} steps and resumed on {_describe(topology)}"
                ranks = _ranks(make_loader, topology)
                # Through JSON, as a checkpoint on disk: a tuple would come back as a list.
                for loader in ranks:
                    loader.load_state_dict(json.loads(json.dumps(state)))
                most, loops = rest.num_steps + more, _LOOPS - _num_ended(expected, stop)
                found, right = _run(ranks, most, where, loops), rest
                if _ends_first(expected, stop, state, found):
                    found = _run(ranks, most, where, loops)
                    right = replace(rest, states=[expected.between[0], *rest.states[1:]])
                _compare(right, found, stop, where)


def _ends_first(expected: _Trace, stop: int, state: Any, found: _Trace) -> bool:
    """Return whether a loader, resumed after a loop's last step, first ended that loop.

    A DataLoader that counts epochs may do so: the epoch in the state is then over, and its first
    loop after the resume yields no batch.
    """
    is_last = bool(expected.between) and stop == len(expected.loops[0])
    return is_last and state != expected.between[0] and not found.loops[0] and not expected.is_over


def _num_ended(expected: _Trace, stop: int) -> int:
    """Return how many loops had ended after `stop` steps: 0 or 1."""
    return int(bool(expected.between) and stop >= len(expected.loops[0]))


def _resumes(expected: _Trace, stop: int) -> Iterator[tuple[Any, _Trace]]:
    """Yield each state to resume from after `stop` steps, and what must follow it."""
    ended = _num_ended(expected, stop)
    if ended and stop == expected.num_steps and len(expected.between) > 1 and not expected.is_over:
        return  # a third loop would follow, and `expected` has only two
    loops = list(expected.loops[ended:])
    if loops:
        loops[0] = loops[0][stop - (len(expected.loops[0]) if ended else 0) :]
    rest = _Trace(loops, expected.states[stop:], expected.between[ended:])
    yield expected.states[stop], rest
    if ended and stop == len(expected.loops[0]):
        between = expected.between[0]
        yield between, _Trace(loops, [between, *expected.states[stop + 1 :]], rest.between)


def global_rows(ranks: Sequence[Resumable], steps: int) -> list[Step]:
    """Return the next steps of a run, each with the rows of all ranks in order.

    Every step is a dict of NumPy arrays, and `fingerprint`, the sum over all ranks.

    Raises:
        AssertionError: some ranks end before others.
    """
    return _run(ranks, steps, "these loaders", 1).loops[0]


def _run(ranks: Sequence[Resumable], steps: int, where: str, loops: int = _LOOPS) -> _Trace:
    """Return the next `steps` steps of at most `loops` loops, and their states."""
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
        # Loops over a run that is over are expected here, so the warning is not shown.
        warnings.filterwarnings("ignore", message="This run is over")
        return next(iterator, _ENDED)


def _joined(ranks: Sequence[Any], fields: list[dict[str, Any]]) -> Step:
    joined = {
        name: np.concatenate([each[name] for each in fields])
        for name in fields[0]
        if name != "cu_seqlens"  # offsets within one rank, which differ by topology
    }
    # Fingerprints of ranks are added modulo 2**64, so their sum does not depend on the ranks.
    total = sum(getattr(loader, "fingerprint", 0) or 0 for loader in ranks) % 2**64
    return {**joined, "fingerprint": total}


def _state(ranks: Sequence[Resumable], step: int, where: str) -> Any:
    # One rank writes the checkpoint for all, so the states of all ranks must be equal.
    states = [json.loads(json.dumps(loader.state_dict())) for loader in ranks]
    for rank, state in enumerate(states):
        if state != states[0]:
            raise AssertionError(
                f"{where}: after {step:,} steps, the states of ranks {rank} and 0 differ."
            )
    return states[0]


def _fields(batch: Any) -> dict[str, Any]:
    # A batch may also be a tuple (format="tuple"); its fields are then named by their number.
    named = batch if isinstance(batch, dict) else dict(enumerate(batch))
    return {str(name): np.asarray(values.cpu()) for name, values in named.items()}


def _topologies(
    make_loader: Callable[..., Resumable], world_sizes: Sequence[int], prefetch: Sequence[int]
) -> list[Topology]:
    """Return every combination of the arguments that `make_loader` takes."""
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


def _describe(topology: Topology) -> str:
    return ", ".join(f"{name}={value}" for name, value in topology.items()) or "one loader"


def _compare(expected: _Trace, found: _Trace, stop: int, where: str) -> None:
    step = stop
    for number, loop in enumerate(expected.loops):
        again = found.loops[number] if number < len(found.loops) else []
        for right, wrong in zip(loop, again, strict=False):
            _compare_step(right, wrong, step, where)
            step += 1
        if len(again) < len(loop):
            raise AssertionError(f"{where}: the run ends too early, after {step:,} steps.")
        if len(again) > len(loop):
            raise AssertionError(f"{where}: the run does not end after {step:,} steps.")
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
