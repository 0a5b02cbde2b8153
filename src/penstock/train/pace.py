"""Small parts of the loop: its clock, numbers from the device, and being asked to stop."""

import math
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

__all__ = ["TIMED_STEPS", "Pace", "Reading", "device_memory", "signals"]

TIMED_STEPS = 20
"""After so many steps a process knows how long one takes; the first ten may compile."""
_AGAIN_SECONDS = 1.0


class Pace:
    """How fast the last steps were, pauses left out."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.pause = 0.0  # seconds of the last one
        self._away = 0.0
        self._last: deque[tuple[float, int, float]] = deque(maxlen=TIMED_STEPS // 2 + 1)

    def add(self, num_tokens: int, waited: float) -> None:
        """A step has ended now."""
        self.num_steps += 1
        self._last.append((time.perf_counter() - self._away, num_tokens, waited))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time in here is not counted."""
        begun = time.perf_counter()
        yield
        took = time.perf_counter() - begun
        self._away += took
        self.pause = took

    @property
    def _span(self) -> float:
        return max(1e-9, self._last[-1][0] - self._last[0][0]) if len(self._last) > 1 else math.inf

    @property
    def seconds_per_step(self) -> float:
        """The mean over the last ten steps."""
        return self._span / max(1, len(self._last) - 1)

    @property
    def tokens_per_second(self) -> float:
        """Likewise."""
        return sum(tokens for _, tokens, _ in list(self._last)[1:]) / self._span

    @property
    def waiting(self) -> float:
        """The share of the time that was spent waiting for data."""
        return sum(waited for *_, waited in list(self._last)[1:]) / self._span


class Reading:
    """A few numbers on their way from the device to here."""

    def __init__(self, values: Tensor) -> None:
        self._here = values.to("cpu", non_blocking=True)
        self._copied: Any = None
        if values.is_cuda:
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def read(self) -> list[Any]:
        """The numbers, when they have arrived."""
        if self._copied is not None:
            self._copied.synchronize()
        return list(self._here.tolist())


@contextmanager
def signals() -> Iterator[threading.Event]:
    """An event that SIGTERM and Ctrl-C set, in place of ending the process.

    The step under way may be long, or wait for data: a second Ctrl-C ends it at once. It counts
    from a second after the first on, because torchrun passes on the one that all have got.
    """
    asked = threading.Event()
    first = math.inf

    def hear(number: int, _: Any) -> None:
        nonlocal first
        if number == signal.SIGINT and time.monotonic() > first + _AGAIN_SECONDS:
            raise KeyboardInterrupt
        first = min(first, time.monotonic())
        asked.set()

    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(number, hear) for number in numbers]
    try:
        yield asked
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def device_memory(device: torch.device) -> int:
    """The most bytes in use so far: of the GPU, or of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
