"""Laws that users can hold their own set-up to.

`assert_resumable` stops a run at every step, restores it into a fresh loader through JSON,
on other numbers of ranks, and compares everything that follows with the run that was never
stopped. If it passes for your loader, your checkpoints are exact.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from inspect import signature
from itertools import islice
from typing import Any

import numpy as np

from penstock.loader.loader import Loader

__all__ = ["assert_resumable", "global_rows"]


def assert_resumable(
    make_loader: Callable[..., Loader],
    *,
    world_sizes: Sequence[int] = (1, 2, 4),
    steps: int = 32,
    stops: Iterable[int] | None = None,
) -> None:
    """Raise unless a run that is stopped at any step goes on exactly.

    Args:
        make_loader: Makes a fresh loader, the same every time. If it takes `rank` and
            `world_size`, every run is also resumed on each of `world_sizes`; its global batch
            size must then divide by all of them and stay the same.
        world_sizes: Numbers of ranks to go from and to.
        steps: How many steps of the run to compare, at most.
        stops: Where to stop; after every step where not given.

    Raises:
        AssertionError: a row differs; the message names the step and the topologies.
    """
    elastic = {"rank", "world_size"} <= set(signature(make_loader).parameters)
    sizes = tuple(world_sizes) if elastic else (None,)
    expected = global_rows(_ranks(make_loader, sizes[0]), steps)
    length = len(expected)
    for before in sizes:
        states = _states(make_loader, before, length)
        for stop in range(length + 1) if stops is None else stops:
            for after in sizes:
                ranks = _ranks(make_loader, after)
                for loader in ranks:
                    loader.load_state_dict(json.loads(json.dumps(states[stop])))
                found = global_rows(ranks, length - stop)
                _compare(expected[stop:], found, stop, before, after)


def global_rows(ranks: Sequence[Loader], steps: int) -> list[dict[str, Any]]:
    """The next steps of a run, each with the rows of all ranks in order."""
    iterators = [iter(loader) for loader in ranks]
    found = []
    for batches in islice(zip(*iterators, strict=True), steps):
        fields = [_fields(batch) for batch in batches]
        joined = {
            name: np.concatenate([each[name] for each in fields])
            for name in fields[0]
            if name != "cu_seqlens"  # counted within a rank
        }
        total = sum(loader.fingerprint or 0 for loader in ranks) % 2**64
        found.append({**joined, "fingerprint": total})
    return found


def _fields(batch: Any) -> dict[str, Any]:
    named = batch if isinstance(batch, dict) else dict(enumerate(batch))
    return {str(name): values.cpu().numpy() for name, values in named.items()}


def _ranks(make_loader: Callable[..., Loader], world_size: int | None) -> list[Loader]:
    if world_size is None:
        return [make_loader()]
    return [make_loader(rank=rank, world_size=world_size) for rank in range(world_size)]


def _states(make_loader: Callable[..., Loader], world_size: int | None, steps: int) -> list[Any]:
    """The state before each step and after the last, from the highest rank."""
    loader = _ranks(make_loader, world_size)[-1]
    states = [loader.state_dict()]
    for _ in islice(loader, steps):
        states.append(loader.state_dict())  # noqa: PERF401  (the state changes as it goes)
    return states


def _compare(
    expected: list[dict[str, Any]],
    found: list[dict[str, Any]],
    stop: int,
    before: int | None,
    after: int | None,
) -> None:
    where = f"stopped after {stop} steps on {before or 1} ranks, resumed on {after or 1}"
    if len(expected) != len(found):
        raise AssertionError(f"{where}: {len(found)} steps follow instead of {len(expected)}.")
    for number, (right, wrong) in enumerate(zip(expected, found, strict=True)):
        for name in right:
            if not np.array_equal(right[name], wrong[name]):
                raise AssertionError(f"{where}: {name!r} differs at step {stop + number}.")
