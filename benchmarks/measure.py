"""Alternating repetitions, medians with their spread, and peak anonymous memory."""

import statistics
import threading
import time
from pathlib import Path


def alternate(cases, repetitions=5):
    """Seconds of each case, measured in turns so that a noisy minute hits all of them."""
    seconds = {name: [] for name in cases}
    for _ in range(repetitions):
        for name, case in cases.items():
            start = time.perf_counter()
            took = case()
            seconds[name].append(took if took is not None else time.perf_counter() - start)
    return seconds


def spread(values):
    """`median (lowest to highest)`."""
    return f"{statistics.median(values):10,.1f} ({min(values):,.1f} to {max(values):,.1f})"


class AnonymousMemory:
    """The peak of this process's anonymous memory (mapped files do not count), in bytes."""

    def __enter__(self):
        self.before = self.peak = anonymous_bytes()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self):
        while not self._stop.wait(0.005):
            self.peak = max(self.peak, anonymous_bytes())

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()
        self.peak = max(self.peak, anonymous_bytes())


def anonymous_bytes():
    """Anonymous resident memory now."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("this kernel does not report RssAnon")


def machine():
    """One line about where the figures were taken."""
    import os
    import platform

    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    return f"{os.cpu_count()} cores ({model}), Python {platform.python_version()}"
