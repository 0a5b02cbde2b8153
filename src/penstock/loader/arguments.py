"""Checks of a loader's arguments, and what they default to."""

from collections.abc import Mapping
from operator import index

import torch

from penstock.errors import PlanError
from penstock.order.budget import Budget
from penstock.order.plan import Plan
from penstock.order.shuffle import Block as ShuffleBlock
from penstock.order.shuffle import Mode
from penstock.rows.protocol import RowsLike, as_rows
from penstock.streaming.plan import StreamedPlan
from penstock.streaming.snapshots import Snapshot

__all__ = ["AnyPlan", "batch_sizes", "plan_of", "topology"]

AnyPlan = Plan | Budget | StreamedPlan


def plan_of(
    rows: AnyPlan | RowsLike, seed: int | None, shuffle: Mode | ShuffleBlock | None
) -> AnyPlan:
    """Return the given plan, or a plan over the given rows."""
    if isinstance(rows, Plan | Budget | StreamedPlan):
        for name, value in (("seed", seed), ("shuffle", shuffle)):
            if value is not None:
                raise PlanError(
                    f"{name}={value!r} is set on the plan; pass it to Plan(…), not to the loader."
                )
        return rows
    rows = as_rows(rows)
    if rows.stream is not None and isinstance(rows.stream.members[0], Snapshot):
        if shuffle not in (None, "part"):
            raise PlanError(
                f"shuffle={shuffle!r} needs all rows, and these are of a store that is still being "
                'written. Leave it out, or use shuffle="part"; or build the store first.'
            )
        # Also after the store is finished: the order must not depend on when it was.
        return StreamedPlan(rows, seed=seed or 0)
    return Plan(rows, seed=seed or 0, shuffle=shuffle or "full")


def topology(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Return rank and world size: as given, from torch.distributed, or those of one process."""
    if (rank is None) != (world_size is None):
        raise PlanError(f"rank={rank} and world_size={world_size}: give both or neither.")
    if rank is not None and world_size is not None:
        return index(rank), index(world_size)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1


def batch_sizes(
    plan: AnyPlan,
    batch_size: int | None,
    global_batch_size: int | Mapping[int, int] | None,
    world_size: int,
) -> dict[int, int]:
    """Return the rows of a step on all ranks, by position; nothing for a budget of tokens."""
    given = f"batch_size={batch_size} and global_batch_size={global_batch_size}"
    if isinstance(plan, Budget):
        if batch_size is not None or global_batch_size is not None:
            raise PlanError(
                f"{given}: a budget of tokens decides how many rows a batch has. Leave both out."
            )
        return {}
    if batch_size is not None and global_batch_size is None:
        # Steps count the rows of all ranks, so that a position means the same on each.
        return {0: index(batch_size) * world_size}
    if global_batch_size is None or batch_size is not None:
        raise PlanError(
            f"{given}: give one of them, the rows of a step on this rank or on all ranks together."
        )
    if isinstance(global_batch_size, Mapping):
        return {index(position): index(rows) for position, rows in global_batch_size.items()}
    return {0: index(global_batch_size)}
