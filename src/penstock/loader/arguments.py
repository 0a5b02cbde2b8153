"""The arguments of a loader: their types, and the plan, ranks and batch sizes that they give."""

import os
import warnings
from collections.abc import Mapping
from operator import index
from typing import SupportsIndex, TypedDict

import torch
from torch.distributed.device_mesh import DeviceMesh

from penstock.errors import PlanError
from penstock.loader.mesh import rank_in
from penstock.loader.run import AnyPlan
from penstock.order.plan import Plan
from penstock.order.shuffle import Block as ShuffleBlock
from penstock.order.shuffle import Mode
from penstock.ranges import whole_number
from penstock.rows.protocol import RowsLike, as_rows
from penstock.streaming.plan import StreamedPlan
from penstock.streaming.snapshots import Snapshot

ShuffleMode = Mode | ShuffleBlock


class LoaderOptions(TypedDict, total=False):
    """The keyword arguments of `Loader` that do not change the type of its batches."""

    global_batch_size: int | Mapping[int, int] | None
    rank: int | None
    world_size: int | None
    mesh: DeviceMesh | None
    seed: int | None
    shuffle: ShuffleMode | None
    epochs: int | None
    steps: int | None
    drop_last: bool
    device: str | torch.device | None
    prefetch: int


def plan_of(rows: AnyPlan | RowsLike, seed: int | None, shuffle: ShuffleMode | None) -> AnyPlan:
    """Return the given plan, or a plan over the given rows."""
    if isinstance(rows, Plan | StreamedPlan):
        for name, value in (("seed", seed), ("shuffle", shuffle)):
            if value is not None:
                raise PlanError(
                    f"{name}={value!r} was passed to the loader together with a plan. Pass it to "
                    "Plan(…) instead."
                )
        return rows
    rows = as_rows(rows)
    if rows.stream is not None and isinstance(rows.stream.members[0], Snapshot):
        if shuffle not in (None, "part"):
            raise PlanError(
                f"shuffle={shuffle!r} needs all rows, and these are of a store that is still being "
                'written. Leave it out, or use shuffle="part"; or build the store first.'
            )
        # Also if the store is finished: the order must not depend on when the build finished.
        return StreamedPlan(rows, seed=seed or 0)
    return Plan(rows, seed=seed or 0, shuffle=shuffle)


def rank_of(rank: int | None, world_size: int | None, mesh: DeviceMesh | None) -> tuple[int, int]:
    """Return the rank of this process and the number of ranks."""
    if mesh is not None:
        return rank_in(mesh, rank, world_size)
    return topology(rank, world_size, stacklevel=4)


def topology(rank: int | None, world_size: int | None, *, stacklevel: int = 3) -> tuple[int, int]:
    """Return rank and world size: as given, from torch.distributed, or 0 and 1.

    Every API that takes them calls this function, so defaults and errors are the same in all.
    `stacklevel` says how many calls above a warning the user's line is.
    """
    if (rank is None) != (world_size is None):
        raise PlanError(f"rank={rank} and world_size={world_size}: give both or neither.")
    if rank is not None and world_size is not None:
        for name, value in (("rank", rank), ("world_size", world_size)):
            if not isinstance(value, SupportsIndex):
                raise PlanError(f"{name}={value!r} is not a whole number.")
        if world_size < 1:
            raise PlanError(f"world_size={world_size} must be at least 1.")
        if not 0 <= rank < world_size:
            raise PlanError(
                f"rank={rank} must be from 0 to {world_size - 1}: world_size is {world_size}."
            )
        return index(rank), index(world_size)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    if (started := os.environ.get("WORLD_SIZE", "1")) not in ("", "1"):
        warnings.warn(
            f"This process is one of {started} (the variable WORLD_SIZE), but rank and world size "
            "were not given, and torch.distributed is not initialised: each process reads all "
            "rows. Call torch.distributed.init_process_group() first, or give both.",
            stacklevel=stacklevel,
        )
    return 0, 1


def batch_sizes(
    batch_size: int | None,
    global_batch_size: int | Mapping[int, int] | None,
    world_size: int,
) -> dict[int, int]:
    """Return the rows of a step on all ranks, by position."""
    given = f"batch_size={batch_size} and global_batch_size={global_batch_size}"
    if batch_size is not None and global_batch_size is None:
        # Steps count the rows of all ranks, so that a position means the same on each.
        return {0: whole_number("batch_size", batch_size) * world_size}
    if global_batch_size is None or batch_size is not None:
        raise PlanError(
            f"{given}: give one of them, the rows of a step on this rank or on all ranks together."
        )
    if isinstance(global_batch_size, Mapping):
        return {
            whole_number("position in global_batch_size", at): whole_number("rows of a step", rows)
            for at, rows in global_batch_size.items()
        }
    return {0: whole_number("global_batch_size", global_batch_size)}
