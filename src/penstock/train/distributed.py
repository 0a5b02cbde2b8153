"""The processes of a run: a single one, or those that torchrun started.

    torchrun --nproc-per-node 8 -m penstock.train recipe.toml

Processes communicate through gloo on CPUs and through nccl on GPUs. torchrun sets environment
variables that say which process this is.
"""

import math
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed
from torch.nn.parallel import DistributedDataParallel

from penstock.errors import PlanError
from penstock.loader.batch import checked_device

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket

_SECOND_CTRL_C_SECONDS = 1.0
_STOPPING = (
    b"stopping: the run saves a checkpoint after this step; another Ctrl-C ends it at once, "
    b"without saving\n"
)


@dataclass(frozen=True, slots=True)
class World:
    """The rank of this process, the number of processes, and the device of this one."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Whether this process writes the files and the log."""
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """`values`, summed over all processes in place."""
        if self.size > 1:
            distributed.all_reduce(values)
        return values

    def put(self, values: list[int]) -> Tensor:
        """Integers on the device, copied without waiting for work that is queued there."""
        # Only a copy from pinned memory is asynchronous. torch keeps the buffer until it is done.
        host = torch.tensor(values)
        if self.device.type == "cuda":
            return host.pin_memory().to(self.device, non_blocking=True)
        return host.to(self.device)

    def from_main(self, value: int) -> int:
        """The main process's value, on every process."""
        # A sum of one value and zeros: all_reduce works alike on gloo and nccl.
        return int(self.sum(torch.tensor(value if self.is_main else 0, device=self.device)))

    def barrier(self) -> None:
        """Wait until all processes have called this."""
        if self.size > 1:
            self.from_main(0)

    def data_parallel(self, model: torch.nn.Module) -> torch.nn.Module:
        """`model`, with its gradients averaged over all processes."""
        if self.size == 1:
            return model
        if self.device.type == "cuda":
            return DistributedDataParallel(model, device_ids=[self.device])
        parallel = DistributedDataParallel(model)
        # A lambda, because torch refuses functions whose annotation of `bucket` is a text.
        parallel.register_comm_hook(self.size, lambda size, bucket: _mean_in_order(size, bucket))
        return parallel

    def no_exchange(self, model: torch.nn.Module) -> AbstractContextManager[object]:
        """A context in which a backward pass adds gradients without averaging them."""
        return model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()


def _mean_in_order(size: int, bucket: "GradBucket") -> torch.futures.Future[Tensor]:
    """The mean of some gradients over all processes, added up in the order of their ranks.

    gloo adds in an order that depends on the place of a gradient in its bucket, and DDP makes other
    buckets after the first step. With three processes or more, a resumed run would then round its
    first step in another way than the run that was not stopped.
    """
    own = bucket.buffer()
    found = [torch.empty_like(own) for _ in range(size)]
    distributed.all_gather(found, own)
    total = found[0]
    for each in found[1:]:
        total += each
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(total / size)
    return done


class HostCopy:
    """A few numbers that are being copied from the device to the host.

    The copy starts at once and does not block. The loop can queue the next step before it
    calls `read`, so that the GPU is never idle.
    """

    def __init__(self, values: Tensor) -> None:
        # Without the event, `tolist` could read the host buffer before the copy has filled it.
        self._values = values.to("cpu", non_blocking=True)
        self._copied: torch.cuda.Event | None = None
        if values.is_cuda:
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def read(self) -> list[Any]:
        """Wait for the copy to end, and return the numbers."""
        if self._copied is not None:
            self._copied.synchronize()
        return list(self._values.tolist())


def torchrun_rank() -> int | None:
    """The rank that torchrun gave to this process; None if torchrun did not start it."""
    # RANK alone proves nothing: other launchers set it too.
    return int(os.environ["RANK"]) if "TORCHELASTIC_RUN_ID" in os.environ else None


def select_device(name: str | None) -> torch.device:
    """The device with this name; without a name, the GPU if there is one, otherwise the CPU.

    Raises:
        PlanError: there is no such device.
    """
    # torch reports a wrong device only when a tensor is moved to it, after text was tokenized.
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = checked_device(name)
    except RuntimeError as error:
        raise PlanError(f"There is no device {name!r}. Use cpu, cuda or cuda:1.") from error
    if device.type not in ("cpu", "cuda"):
        raise PlanError(f"device={name!r} is not supported. Use cpu, cuda or cuda:1.")
    return device


@contextmanager
def join_processes(device: str | None = None) -> Iterator[World]:
    """Join the process group if torchrun started this process; leave it at the end.

    A process group that the caller has already joined is used, and is not left.
    """
    joined = distributed.is_available() and distributed.is_initialized()
    launched = not joined and torchrun_rank() is not None
    chosen = select_device(device)
    if chosen.type == "cuda":
        # Each process of a node uses one GPU. nccl uses torch's current GPU, so it is set first.
        number = int(os.environ.get("LOCAL_RANK", "0")) if launched else chosen.index
        if number is not None:
            torch.cuda.set_device(number)
        chosen = torch.device("cuda", torch.cuda.current_device())
    if launched:
        distributed.init_process_group("nccl" if chosen.type == "cuda" else "gloo")
    try:
        if joined or launched:
            yield World(distributed.get_rank(), distributed.get_world_size(), chosen)
        else:
            yield World(0, 1, chosen)
    finally:
        if launched:
            distributed.destroy_process_group()


@contextmanager
def stop_signals(world: World | None = None) -> Iterator[threading.Event]:
    """An event that SIGTERM and Ctrl-C set, instead of ending the process.

    The main process acknowledges the first signal on stderr at once. A step can take long or wait
    for data, so a second Ctrl-C raises KeyboardInterrupt at once.
    """
    requested = threading.Event()
    first = math.inf

    def handle(number: int, _: object) -> None:
        nonlocal first
        # torchrun forwards a Ctrl-C to processes that already received it from the terminal.
        # A Ctrl-C counts as a second request only if it comes later than a second after the first.
        if number == signal.SIGINT and time.monotonic() > first + _SECOND_CTRL_C_SECONDS:
            raise KeyboardInterrupt
        first = min(first, time.monotonic())
        if not requested.is_set() and (world is None or world.is_main):
            # Not `sys.stderr.write`: the signal may have interrupted a write to it.
            with suppress(OSError):
                # In a terminal, the line of the display has no newline yet.
                os.write(2, b"\n" * os.isatty(2) + _STOPPING)
        requested.set()

    if threading.current_thread() is not threading.main_thread():
        yield requested  # only the main thread may set signal handlers
        return
    # Schedulers such as Slurm send SIGTERM some seconds before they kill a job.
    before = {each: signal.signal(each, handle) for each in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield requested
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
