"""The processes of a run: one alone, or those that torchrun started.

torchrun --nproc-per-node 8 -m penstock.train recipe.toml

gloo between CPUs, nccl between GPUs; torchrun's variables say which process this is.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed

from penstock.errors import PlanError

__all__ = ["World", "device_of", "launched_rank", "signed", "world"]


@dataclass(frozen=True, slots=True)
class World:
    """Which process this is, and where it computes."""

    rank: int
    size: int
    device: torch.device

    @property
    def leads(self) -> bool:
        """Whether this is the process that writes files and speaks."""
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all processes, in place; at once where there is one."""
        if self.size > 1:
            distributed.all_reduce(values)
        return values

    def put(self, values: list[int]) -> Tensor:
        """Whole numbers on the device, without waiting for what it computes."""
        here = torch.tensor(values)
        if self.device.type == "cuda":
            return here.pin_memory().to(self.device, non_blocking=True)
        return here.to(self.device)

    def agreed(self, value: int) -> int:
        """The first process's value, on every one."""
        held = torch.tensor(value if self.leads else 0, device=self.device)
        return int(self.sum(held))

    def wait(self) -> None:
        """Return when all processes are here."""
        if self.size > 1:
            self.agreed(0)

    def spread(self, model: torch.nn.Module) -> Any:
        """The model with gradients averaged over all processes."""
        if self.size == 1:
            return model
        from torch.nn.parallel import DistributedDataParallel

        ids = [self.device] if self.device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=ids)


def signed(number: int) -> int:
    """64 bits as torch counts them; sums over processes wrap alike.

    >>> signed(2**64 - 1), signed(7)
    (-1, 7)
    """
    return number - 2**64 if number >= 2**63 else number


def launched_rank() -> int | None:
    """Which process this is of those that torchrun started; None where it did not."""
    return int(os.environ["RANK"]) if "TORCHELASTIC_RUN_ID" in os.environ else None


def device_of(device: str | None) -> torch.device:
    """The device of a name, if there is one; without a name, the GPU where there is one.

    Raises:
        PlanError: there is none of that name.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise PlanError(f"There is no device {device!r}; use cpu, cuda or cuda:1.") from error
    if place.type not in ("cpu", "cuda"):
        raise PlanError(f"device={device!r} is not supported; use cpu, cuda or cuda:1.")
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        found = torch.cuda.device_count()
        raise PlanError(f"device={device!r} is not here: torch finds {found} GPUs. Use cpu.")
    return place


@contextmanager
def world(device: str | None = None) -> Iterator[World]:
    """Join the others, where torchrun started several; leave them at the end."""
    joined = distributed.is_available() and distributed.is_initialized()
    launched = not joined and launched_rank() is not None
    place = device_of(device)
    if place.type == "cuda":
        number = int(os.environ.get("LOCAL_RANK", "0")) if launched else place.index
        if number is not None:
            torch.cuda.set_device(number)
        place = torch.device("cuda", torch.cuda.current_device())
    if launched:
        distributed.init_process_group("nccl" if place.type == "cuda" else "gloo")
    try:
        if joined or launched:
            yield World(distributed.get_rank(), distributed.get_world_size(), place)
        else:
            yield World(0, 1, place)
    finally:
        if launched:
            distributed.destroy_process_group()
