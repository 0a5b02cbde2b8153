"""What the arguments of a loader come to."""

from collections.abc import Mapping
from operator import index
from typing import Any, cast

import torch

from penstock.errors import PlanError
from penstock.order.budget import Budget
from penstock.order.growing import GrowingPlan, GrowingRows
from penstock.order.integers import END
from penstock.order.plan import Plan, Rows
from penstock.order.shuffle import Block as ShuffleBlock
from penstock.order.shuffle import Mode
from penstock.order.steps import Steps

__all__ = ["batch_sizes", "budgeted", "plan_of", "run_end", "steps_of", "topology"]


def plan_of(
    rows: Plan | Budget | Rows, seed: int | None, shuffle: Mode | ShuffleBlock | None
) -> Plan:
    """The plan that was given, or one over the rows alone."""
    if isinstance(rows, Plan | Budget):
        given = [
            name for name, value in (("seed", seed), ("shuffle", shuffle)) if value is not None
        ]
        if given:
            raise PlanError(
                f"{' and '.join(given)} belong to the plan, which was given. Pass them to Plan()."
            )
        return cast(Plan, rows)
    if getattr(getattr(rows, "stream", None), "growing", False):
        if shuffle not in (None, "part"):
            raise PlanError(
                f"shuffle={shuffle!r} needs all rows, and these are of a store that is still being "
                'written. Leave it out, or say shuffle="part"; or build the store first.'
            )
        return cast(Plan, GrowingPlan(cast(GrowingRows, rows), seed=seed or 0))
    return Plan(rows, seed=seed or 0, shuffle=shuffle or "full")


def topology(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Rank and number of ranks: as given, as torch.distributed says, or one alone."""
    if (rank is None) != (world_size is None):
        raise PlanError(
            f"rank={rank} and world_size={world_size} are given together or not at all."
        )
    if rank is not None and world_size is not None:
        return index(rank), index(world_size)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1


def steps_of(plan: Any, sizes: dict[int, int], start: int = 0, position: int = 0) -> Steps:
    """The steps of a pass: counted from its start, or from `position` where only a budget says."""
    if isinstance(plan, Budget):
        return cast(Steps, plan.steps(position))
    return Steps(sizes, start=start)


def budgeted(
    batch_size: int | None, global_batch_size: int | Mapping[int, int] | None, world_size: int
) -> dict[int, int]:
    """No sizes by position: a budget says them, so none may be given."""
    if batch_size is not None or global_batch_size is not None:
        raise PlanError(
            f"batch_size={batch_size} and global_batch_size={global_batch_size}: a budget of "
            "tokens says how many rows a batch has. Leave both out."
        )
    return {}


def batch_sizes(
    batch_size: int | None, global_batch_size: int | Mapping[int, int] | None, world_size: int
) -> dict[int, int]:
    """Rows a step on all ranks together, by the position from which on."""
    if (batch_size is None) == (global_batch_size is None):
        raise PlanError(
            f"batch_size={batch_size} and global_batch_size={global_batch_size}: give one of them, "
            "the rows a step on this rank or on all ranks together."
        )
    if batch_size is not None:
        return {0: index(batch_size) * world_size}
    if isinstance(global_batch_size, Mapping):
        return {index(position): index(rows) for position, rows in global_batch_size.items()}
    return {0: index(cast(int, global_batch_size))}


def run_end(plan: Any, sizes: dict[int, int], epochs: int | None, steps: int | None) -> int | None:
    """The position after the last row of the first pass, or None for a run without end."""
    if epochs is not None and steps is not None:
        raise PlanError(f"epochs={epochs} and steps={steps} both end the run; give one.")
    for name, value in (("epochs", epochs), ("steps", steps)):
        if value is not None and value < 1:
            raise PlanError(f"{name}={value} is not a run; use at least 1.")
    if epochs is not None:
        if plan.epoch_rows is None and isinstance(plan, GrowingPlan):
            return None  # there is one, but nobody knows yet where
        if plan.epoch_rows is None:
            raise PlanError(
                f"epochs={epochs} has no meaning in a mixture: each source has epochs of its own. "
                "Give steps= instead."
            )
        return index(epochs) * int(plan.epoch_rows)
    if steps is not None:
        end = steps_of(plan, sizes).span(index(steps) - 1)[1]
        if end > plan.end:
            raise PlanError(
                f"{steps:,} steps need {end:,} rows, and the plan ends after {plan.end:,}."
            )
        return end
    return plan.end if plan.end < END else None
