"""Checks that users can run on their own loaders.

`assert_resumable` stops a run after every step, restores its state (through JSON) into a new loader
with other numbers of ranks and threads, and compares everything that follows with a run that was
never stopped. If it passes for your loader, your checkpoints are exact.
"""

import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from inspect import Parameter, signature
from itertools import accumulate, islice, product, takewhile
from typing import Any, NamedTuple, Protocol

import numpy as np

__all__ = ["Resumable", "assert_resumable", "global_rows"]

_ENDED = object()
_LOOPS = 2  # a second loop over the run shows whether the first one ended in the right state

Topology = dict[str, int]
"""The arguments that vary between two loaders of the same run: world_size and prefetch."""
Step = dict[str, Any]
"""The arrays of one global batch by name, and `fingerprint`."""


class Resumable(Protocol):
    """A `penstock.Loader`, or another loader with a state; a `fingerprint`, if any, is compared."""

    def __iter__(self) -> Iterator[Any]:
        """Yield batches."""

    def state_dict(self) -> dict[str, Any]:
        """Return the current state."""

    def load_state_dict(self, state: Any) -> None:
        """Continue from a state."""


class _Event(NamedTuple):
    """The start of a run, one of its steps, or the end of a loop over it."""

    step: Step | None
    """Empty for the start, None for the end of a loop."""
    state: Any
    """The state after this event."""


def assert_resumable(
    make_loader: Callable[..., Resumable],
    *,
    world_sizes: Sequence[int] = (1, 2, 4),
    prefetch: Sequence[int] = (0, 2),
    steps: int = 32,
    stops: Iterable[int] | None = None,
) -> None:
    """Raise AssertionError unless a run that is stopped at any step continues exactly.

    A topology is a number of ranks together with a number of prefetched blocks. At every step,
    the rows of all ranks together must be the same and in the same order in every topology. The
    state must be the same on every rank and in every topology. Because states are equal, resuming
    each state once in every topology covers all pairs of topologies, and chains of resumes. A run
    that ends is iterated twice, and also stopped between the two loops.

    Args:
        make_loader: Creates a new loader, equal every time. If it takes `rank` and `world_size`,
            the run is also resumed with each of `world_sizes`; then the global batch size must
            not depend on them, and all of them must divide it. If it takes `prefetch`, the run is
            also resumed with each value of `prefetch`.
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
    expected: list[_Event] = []
    for event in _events(_ranks(make_loader, topologies[0]), _describe(topologies[0])):
        expected.append(event)
        num_ends = sum(each.step is None for each in expected)
        if num_ends == _LOOPS or len(expected) - num_ends > steps:
            break
    for topology in topologies[1:]:
        found = _events(_ranks(make_loader, topology), _describe(topology))
        _compare(expected, list(islice(found, len(expected))), 0, _describe(topology))
    chosen = range(steps + 1) if stops is None else set(stops)
    stop = -1  # the start is not a step
    for number, event in enumerate(expected):
        is_step = event.step is not None
        stop += is_step
        # After the second loop a third one would follow, and `expected` has only two.
        follow = len(expected) - 1 - number
        if stop in chosen and not (expected[-1].step is None and follow <= is_step):
            for topology in topologies:
                where = f"stopped after {stop:,} steps and resumed on {_describe(topology)}"
                _check_resume(_ranks(make_loader, topology), expected[number:], stop, where)


def _check_resume(
    ranks: Sequence[Resumable], expected: list[_Event], stop: int, where: str
) -> None:
    """Resume from the state of the first event, and compare the next events with the others."""
    # Through JSON, as a checkpoint on disk: a tuple would come back as a list.
    for loader in ranks:
        loader.load_state_dict(json.loads(json.dumps(expected[0].state)))
    events = _events(ranks, where)
    (step, state), *rest = expected
    if step is None or not rest or rest[0].step is not None:
        found = list(islice(events, len(expected)))
    else:
        # A loader resumed after the last step of a loop begins the next loop. A DataLoader that
        # counts epochs may end the old loop first: the epoch in the state is over, so the first
        # loop yields no batch. After the end of a run, both kinds of loader yield no batch.
        found = list(islice(events, len(rest)))
        end, *rest = rest
        if found[1].step is None and state != end.state and rest[0].step is not None:
            found, rest = [*found, *islice(events, 1)], [end, *rest]
    _compare([_Event({}, state), *rest], found, stop, where)


def global_rows(ranks: Sequence[Resumable], steps: int) -> list[Step]:
    """Return the next steps of a run, each with the rows of all ranks in order.

    Every step is a dict of NumPy arrays, and `fingerprint`, the sum over all ranks.

    Raises:
        AssertionError: some ranks end before others.
    """
    events = islice(_events(ranks, "these loaders"), 1, steps + 1)
    found = takewhile(lambda step: step is not None, (event.step for event in events))
    return [step for step in found if step is not None]


def _events(ranks: Sequence[Resumable], where: str) -> Iterator[_Event]:
    """Yield an event for the start of the run, for each step and each end of a loop; endless.

    Raises:
        AssertionError: one rank ends before the others.
    """
    steps = 0
    yield _Event({}, _state(ranks, steps, where))
    while True:
        iterators = [iter(loader) for loader in ranks]
        while True:
            batches = [_next(iterator) for iterator in iterators]
            ended = [rank for rank, batch in enumerate(batches) if batch is _ENDED]
            if len(ended) == len(ranks):
                break
            if ended:
                raise AssertionError(
                    f"{where}: rank {ended[0]} ends after {steps:,} steps and others do not."
                )
            steps += 1
            step = _joined(ranks, [_fields(batch) for batch in batches])
            yield _Event(step, _state(ranks, steps, where))
        yield _Event(None, _state(ranks, steps, where))


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
    # "use_cache" of packed batches is no tensor: it holds no rows.
    tensors = ((name, each) for name, each in named.items() if hasattr(each, "cpu"))
    return {str(name): np.asarray(values.cpu()) for name, values in tensors}


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


def _compare(expected: list[_Event], found: list[_Event], steps: int, where: str) -> None:
    """Raise unless the events of two runs are equal; both runs have made `steps` steps before."""
    counts = list(accumulate((each.step is not None for each in expected[1:]), initial=steps))
    for (right, _), (wrong, _), count in zip(expected, found, [steps, *counts], strict=False):
        if right is not None and wrong is not None:
            _compare_step(right, wrong, count, where)
        elif right is not None:
            raise AssertionError(f"{where}: the run ends too early, after {count:,} steps.")
        elif wrong is not None:
            raise AssertionError(f"{where}: the run does not end after {count:,} steps.")
    # States are compared after all rows, because a different row says more than a different state.
    for (_, right), (_, wrong), count in zip(expected, found, counts, strict=True):
        if right != wrong:
            raise AssertionError(f"{where}: the state after {count:,} steps differs.")


def _compare_step(expected: Step, found: Step, step: int, where: str) -> None:
    if set(expected) != set(found):
        raise AssertionError(
            f"{where}: step {step:,} has {sorted(found)} instead of {sorted(expected)}."
        )
    for name in expected:
        if not np.array_equal(expected[name], found[name]):
            raise AssertionError(f"{where}: {name!r} differs at step {step:,}.")
