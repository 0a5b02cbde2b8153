"""The settings of a DataLoader's worker processes, checked before PyTorch sees them."""

import os
import warnings
from collections.abc import Callable
from multiprocessing.context import BaseContext
from typing import NamedTuple

from penstock.errors import PlanError

__all__ = ["WorkerOptions"]


class WorkerOptions(NamedTuple):
    """The worker processes of a DataLoader, and the settings that need workers."""

    num_workers: int
    prefetch_factor: int | None
    persistent_workers: bool
    timeout: float
    worker_init_fn: Callable[[int], None] | None
    multiprocessing_context: str | BaseContext | None

    def checked(self) -> "WorkerOptions":
        """The same settings if PyTorch accepts them; on Windows no workers, with a warning.

        Raises:
            PlanError: it does not accept them; the message says what to change.
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
            # Windows can only spawn workers, which import everything again. The warning names
            # the line that called the function that called this one: the user's.
            warnings.warn(
                f"num_workers={self.num_workers} is taken as 0 on Windows, where starting workers "
                "costs more than they save. Batches are the same.",
                stacklevel=3,
            )
            return WorkerOptions(0, None, False, 0, None, None)
        return self

    def _refuse_without_workers(self) -> None:
        """Raise for the first setting that has a meaning only with workers."""
        # PyTorch would ignore some of these, and raise for others without naming the cause.
        context = self.multiprocessing_context
        given = [
            (
                self.prefetch_factor is not None,
                f"prefetch_factor is not valid with num_workers=0: prefetch_factor="
                f"{self.prefetch_factor} is how many batches each worker makes ahead",
            ),
            (
                self.persistent_workers,
                "persistent_workers=True is not valid with num_workers=0: there are no workers to "
                "keep between epochs",
            ),
            (
                self.timeout > 0,
                f"timeout={self.timeout} is not valid with num_workers=0: it is how long to wait "
                "for a worker",
            ),
            (
                context is not None,
                f"multiprocessing_context={context!r} is not valid with num_workers=0: it is how "
                "workers are started",
            ),
        ]
        for is_given, message in given:
            if is_given:
                name = message.partition(" ")[0].partition("=")[0]
                raise PlanError(f"{message}. Set num_workers=1 or more, or leave {name} out.")
