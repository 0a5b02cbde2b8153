"""The batches of a run: how many rows a step reads, and how many are computed at once.

    a step of all processes    ├───────── global_batch_size ─────────┤
    this process               ├─ its share ─┤
    at once                    ├─────┼───────┤        parts of batch_size rows

The step is the loader's batch, so what a step reads does not depend on how many rows fit on a
device or on how many devices there are.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from penstock.digest import digest_json
from penstock.errors import PlanError
from penstock.loader.loader import Loader
from penstock.order.growing import GrowingPlan
from penstock.rows.supervised import supervised
from penstock.train.job import Job
from penstock.train.world import World

__all__ = ["Feed", "Spaced"]

_FIELDS = ("inputs", "targets", "position_ids", "document_ids")


class Spaced:
    """So many of some rows, evenly spaced: the same ones whatever the batch size is."""

    def __init__(self, rows: Any, num_rows: int) -> None:
        self._rows = rows
        self._num_rows = min(num_rows, len(rows))

    def __len__(self) -> int:
        return self._num_rows

    def __getattr__(self, name: str) -> Any:
        if name in ("_rows", "parts_of", "part_rows", "num_tokens"):
            raise AttributeError(name)  # they speak of all rows, and in their own order
        found = getattr(self._rows, name)
        if name in ("read_ahead", "read_epochs", "widths"):
            return lambda samples, *rest: found(self._chosen(samples), *rest)
        return found

    @property
    def digest(self) -> str:
        """A digest of the rows and of how many are read."""
        return digest_json(["spaced", self._rows.digest, len(self)])

    def read(self, samples: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        """The rows `samples` of the chosen ones."""
        read: dict[str, NDArray[Any]] = self._rows.read(self._chosen(samples))
        return read

    def _chosen(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.asarray(samples, np.int64) * len(self._rows) // len(self)


class Feed:
    """The loaders of one process.

    Args:
        job: What to read.
        here: For which process.
        rows: How many are computed at once.
    """

    def __init__(self, job: Job, here: World, rows: int) -> None:
        self.rows = rows
        self.whole = job.training.global_batch_size or rows * here.size
        """Rows of a step on all processes."""
        if self.whole % (rows * here.size):
            raise PlanError(
                f"global_batch_size={self.whole} is not a whole number of parts of batch_size="
                f"{rows} on {here.size} processes. Use a multiple of {rows * here.size}."
            )
        where: dict[str, Any] = {"rank": here.rank, "world_size": here.size, "device": here.device}
        ahead = job.training.prefetch
        plan: Any = job.plan
        order: dict[str, Any] = {}
        if isinstance(plan, GrowingPlan):  # a loader makes its own, of the rows
            plan, order = plan.sources["data"], {"seed": plan.seed}
        size = self.whole
        self.loader = Loader(plan, global_batch_size=size, prefetch=ahead, **order, **where)
        self.val: Loader | None = None
        """The same rows at every validation."""
        if job.val is not None:
            some: Any = Spaced(supervised("validation", job.val), job.training.val_rows)
            size = min(rows, -(-len(some) // here.size)) * here.size
            where |= {"epochs": 1, "drop_last": False, "shuffle": "none"}
            self.val = Loader(some, global_batch_size=size, prefetch=min(1, ahead), **where)

    def parts(self, batch: dict[str, Tensor]) -> Iterator[list[Tensor | None]]:
        """The batch in pieces of as many rows as are computed at once, as the model takes them."""
        fields = [batch.get(name) for name in _FIELDS]
        for start in range(0, len(batch["inputs"]), self.rows):
            rows = slice(start, start + self.rows)
            # Compiled code asks how tensors lie, and views of one buffer lie differently.
            yield [None if each is None else each[rows].contiguous() for each in fields]
