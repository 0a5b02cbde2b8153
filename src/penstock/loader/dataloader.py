"""A loader as a `torch.utils.data.DataLoader`, for tools that accept nothing else.

The dataset behind it returns a finished batch from `__getitems__`. With workers, a DataLoader
yields the same batches in the same order. The loader advances as batches are yielded, so its state
is exact: batches that workers have made ahead of time are not counted. `log_fingerprints` writes
the fingerprints of the batches to a log, to compare runs.

`WorkerOptions` are the settings of any DataLoader's worker processes.
"""

import json
import os
import warnings
from collections.abc import Callable, Iterator
from itertools import count
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.utils.data as data

from penstock.errors import PlanError
from penstock.loader.batch_format import Batch

if TYPE_CHECKING:
    from penstock.loader.loader import Loader


class StepsOfRun(data.Dataset[Batch]):
    """The steps of a run as a map-style dataset: item i is the batch of step i.

    The copy of a loader in a worker does not know where the loader was moved to. So each request
    contains a step, and the position from which steps are counted.
    """

    def __init__(self, loader: "Loader[Any]") -> None:
        self._loader = loader.copy()  # a copy, so that the user's loader is not moved

    def __len__(self) -> int:
        return len(self._loader)

    def __getitem__(self, step: int) -> Batch:
        return self._loader[step]

    def __getitems__(self, requests: list[tuple[int, int]]) -> tuple[Batch, int]:
        """Return the batch of the one step that the batch sampler asks for, and its fingerprint."""
        step, counted_from = requests[0]
        # Requests of one pass have the same origin, so this happens once per pass and worker.
        if self._loader.run.steps.start != counted_from:
            self._loader.seek(counted_from)
        made = self._loader.make(step)
        self._loader._assembler.ask_ahead(step + 1)
        return made.batch, made.fingerprint


class _Rest(data.Sampler[list[tuple[int, int]]]):
    """The steps from the loader's position to the end of its pass."""

    def __init__(self, loader: "Loader[Any]") -> None:
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        run = self._loader.run
        counted_from = run.steps.start
        for step in count(run.step):
            # Asked for each step, because a streamed store may not know its end yet.
            if not run.has_step(step):
                return
            yield [(step, counted_from)]


class LoaderBatches(data.DataLoader[Batch]):
    """A loader's batches from its position to the end of its pass, each time it is iterated.

    `len()` is that of a whole pass, like the loader's.
    """

    def __init__(self, loader: "Loader[Any]", **options: Any) -> None:
        super().__init__(
            StepsOfRun(loader), batch_sampler=_Rest(loader), collate_fn=_same, **options
        )
        self.loader = loader

    def __repr__(self) -> str:
        return f"LoaderBatches({self.loader!r})"

    def __bool__(self) -> bool:
        return True  # without this, bool() would ask for the length

    def __iter__(self) -> Any:
        self.loader.run.begin_pass()  # before the sampler reads the loader's step
        return self.loader.follow(super().__iter__())


def as_dataloader(loader: "Loader[Any]", *, num_workers: int, **options: Any) -> LoaderBatches:
    """Return a DataLoader over the rest of `loader`'s pass; each batch is one of its steps."""
    if num_workers and loader.device.type != "cpu":
        raise PlanError(
            f"num_workers={num_workers} would make batches on {loader.device} in several "
            "processes. Make the Loader without device= and move batches to it in the training "
            "loop, or use num_workers=0."
        )
    return LoaderBatches(loader, num_workers=num_workers, **options)


def _same(sent: Batch) -> Batch:
    return sent


# The settings that PyTorch would ignore without workers, or refuse without naming the cause.
_NEED_WORKERS = {
    "prefetch_factor": "how many batches each worker makes ahead",
    "persistent_workers": "whether workers are kept between epochs",
    "timeout": "how long to wait for a worker",
    "multiprocessing_context": "how workers are started",
}


class WorkerOptions(NamedTuple):
    """The worker processes of a DataLoader, and the settings that need workers."""

    num_workers: int
    prefetch_factor: int | None
    persistent_workers: bool
    timeout: float
    worker_init_fn: Callable[[int], None] | None
    multiprocessing_context: str | BaseContext | None

    def checked(self, stacklevel: int = 3) -> "WorkerOptions":
        """Return these settings if PyTorch accepts them; on Windows, warn and return no workers.

        Args:
            stacklevel: How many calls above the warning the user's line is, which the warning
                shows. By default, the user's line calls the function that calls this method.

        Raises:
            PlanError: PyTorch does not accept them; the message says what to change.
        """
        if self.num_workers < 0:
            raise PlanError(f"num_workers={self.num_workers} must be 0 or more.")
        if self.timeout < 0:
            raise PlanError(f"timeout={self.timeout} must be 0 or more.")
        if self.prefetch_factor is not None and self.prefetch_factor < 1:
            raise PlanError(f"prefetch_factor={self.prefetch_factor} must be 1 or more.")
        if self.num_workers and os.name == "nt":
            # Windows can only spawn workers, which import everything again.
            warnings.warn(
                f"num_workers={self.num_workers} is taken as 0 on Windows, where starting workers "
                "costs more than they save. Batches are the same.",
                stacklevel=stacklevel,
            )
            return WorkerOptions(0, None, False, 0, None, None)
        given = self._asdict()
        for name, meaning in _NEED_WORKERS.items():
            if given[name] and not self.num_workers:
                # People search for this text without a value, as PyTorch writes it.
                shown = name if name == "prefetch_factor" else f"{name}={given[name]!r}"
                raise PlanError(
                    f"{shown} is not valid with num_workers=0. It sets {meaning}. Set "
                    f"num_workers=1 or more, or leave {name} out."
                )
        return self


def log_fingerprints(batches: "Loader[Batch] | LoaderBatches", path: str | Path) -> Iterator[Batch]:
    """Yield the batches of a loader or its DataLoader, and append their fingerprints to a file.

    Each line is JSON: the step, the position after it, and the fingerprint on this rank. The line
    is written before the batch is yielded. Use one file per rank.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    loader = batches.loader if isinstance(batches, LoaderBatches) else batches
    for batch in batches:
        # The loader has advanced already, so this step is the one before its next step.
        step, position = loader.step - 1, loader.position
        line = {"step": step, "position": position, "fingerprint": f"{loader.fingerprint:016x}"}
        # Opened for each line, so that a crash loses no line that was written before.
        with path.open("a", encoding="ascii") as stream:
            stream.write(json.dumps(line) + "\n")
        yield batch


def read_log(path: str | Path) -> dict[int, str]:
    """Return the fingerprint of each step in a log, by the position after the step.

    If a step was repeated, its last fingerprint counts. The key is the position and not the step,
    because steps are counted anew after a resume with another batch size.
    """
    lines = Path(path).read_text(encoding="ascii").splitlines()
    entries = [json.loads(line) for line in lines]
    return {entry["position"]: entry["fingerprint"] for entry in entries}
