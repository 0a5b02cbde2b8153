"""What PyTorch's workers can be asked for, checked before it says so in its own words."""

import os
import warnings
from typing import Any, NamedTuple

from penstock.errors import PlanError

__all__ = ["Workers"]


class Workers(NamedTuple):
    """The worker processes of a DataLoader, and what only they can do."""

    num_workers: int
    prefetch_factor: int | None
    persistent_workers: bool
    timeout: float
    worker_init_fn: Any
    multiprocessing_context: Any

    def checked(self) -> "Workers":
        """The same, if PyTorch can do it; without workers on Windows, and a warning.

        Raises:
            PlanError: it cannot; the message says what to change.
        """
        if self.num_workers < 0 or self.timeout < 0:
            raise PlanError(
                f"num_workers={self.num_workers} and timeout={self.timeout} must be 0 or more."
            )
        if self.prefetch_factor is not None and self.prefetch_factor < 1:
            raise PlanError(f"prefetch_factor={self.prefetch_factor} must be 1 or more.")
        if self.num_workers == 0:
            self._refuse_without_workers()
        elif os.name == "nt":
            warnings.warn(
                f"num_workers={self.num_workers} is taken as 0 on Windows, where starting workers "
                "costs more than they give. Batches are the same.",
                stacklevel=3,
            )
            return Workers(0, None, False, 0, None, None)
        return self

    def _refuse_without_workers(self) -> None:
        asked = {
            f"prefetch_factor is not valid with num_workers=0: prefetch_factor="
            f"{self.prefetch_factor} is how many batches each worker makes ahead": (
                self.prefetch_factor is not None
            ),
            "persistent_workers=True is not valid with num_workers=0: there are no workers to "
            "keep between epochs": self.persistent_workers,
            f"timeout={self.timeout} is not valid with num_workers=0: it is how long to wait for "
            "a worker": self.timeout > 0,
            f"multiprocessing_context={self.multiprocessing_context!r} is not valid with "
            "num_workers=0: it is how workers are started": (
                self.multiprocessing_context is not None
            ),
        }
        for told, given in asked.items():
            if given:
                name = told.partition(" ")[0].partition("=")[0]
                raise PlanError(f"{told}. Set num_workers=1 or more, or leave {name} out.")
