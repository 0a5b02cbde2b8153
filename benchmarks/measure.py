"""Helpers for benchmarks: alternating repetitions, memory and processor time, new processes."""

import atexit
import json
import os
import resource
import statistics
import sys
import threading
import time
import traceback
from pathlib import Path


class Stopwatch:
    """Measures elapsed and processor seconds from its creation on."""

    def __init__(self):
        self._elapsed, self._processor = time.perf_counter(), _own_processor_seconds()

    def stop(self):
        """The elapsed seconds, with the processor seconds as an attribute."""
        took = Seconds(time.perf_counter() - self._elapsed)
        took.processor = _own_processor_seconds() - self._processor
        return took


class Seconds(float):
    """Elapsed seconds, and the processor seconds of the same time."""

    processor = 0.0


def _own_processor_seconds():
    """Processor seconds of this process, and of its workers that have ended."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime


def alternate(cases, repetitions=5):
    """Seconds of each case. Repetitions alternate, so that noise affects all cases alike."""
    seconds = {name: [] for name in cases}
    for _ in range(repetitions):
        for name, case in cases.items():
            watch = Stopwatch()
            took = case()
            seconds[name].append(took if took is not None else watch.stop())
    return seconds


def ratios(seconds, reference):
    """For each case, how many times as fast as the case `reference` it was in each repetition."""
    first = seconds[reference]
    return {
        name: [one / each for one, each in zip(first, took, strict=True)]
        for name, took in seconds.items()
    }


def show_ratios(seconds, reference, gigabytes):
    """Print the ratios of each repetition, by elapsed and by processor time."""
    processor = {name: [each.processor for each in took] for name, took in seconds.items()}
    print(f"relative to {reference} in the same repetition; median (spread)")
    print(f"{'':32} {'elapsed':>26} {'processor time':>26} {'processor s per GB':>28}")
    both = ratios(seconds, reference), ratios(processor, reference)
    for name in seconds:
        per_gb = [each / gigabytes[name] for each in processor[name]]
        # A case with less text than the reference is compared per byte.
        share = gigabytes[name] / gigabytes[reference]
        columns = [_short([share * each for each in kind[name]]) for kind in both]
        print(f"{name:32} {columns[0]:>26} {columns[1]:>26} {_short(per_gb):>28}")


def _short(values):
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def spread(values):
    """`median (lowest to highest)`."""
    return f"{statistics.median(values):10,.1f} ({min(values):,.1f} to {max(values):,.1f})"


class AnonymousMemory:
    """The peak of this process's anonymous memory (mapped files do not count), in bytes.

    With `workers`, the private memory of its worker processes is added. Pages that they share
    with this process count once.
    """

    def __init__(self, *, workers=False):
        self._read = anonymous_bytes_with_workers if workers else anonymous_bytes
        self._seconds = 0.025 if workers else 0.005

    def __enter__(self):
        self.before = self.peak = self._read()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    @property
    def growth(self):
        """The peak minus the memory at the beginning."""
        return self.peak - self.before

    def _watch(self):
        while not self._stop.wait(self._seconds):
            self.peak = max(self.peak, self._read())

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()
        self.peak = max(self.peak, self._read())


def anonymous_bytes(process="self"):
    """The current anonymous resident memory of this process, or of another one by its number."""
    return _field(f"/proc/{process}/status", "RssAnon")


def anonymous_bytes_with_workers():
    """The same, plus the private memory of all processes that this one has started."""
    total = anonymous_bytes()
    for process in descendants():
        try:
            total += _field(f"/proc/{process}/smaps_rollup", "Private_Dirty")
        except (OSError, RuntimeError):
            continue  # the process ended after it was listed
    return total


def descendants():
    """The numbers of all processes that this one has started, directly or not."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                # `_stat` skips the name, which is in parentheses and may contain anything.
                parents[int(entry.name)] = int(_stat(entry.name)[1])
            except (OSError, IndexError):
                continue
    found, before = {os.getpid()}, 0
    while len(found) > before:
        before = len(found)
        found |= {process for process, parent in parents.items() if parent in found}
    return sorted(found - {os.getpid()})


def processor_seconds():
    """Processor seconds so far of this process and its workers, also of ended ones."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    total = time.process_time() + ended.ru_utime + ended.ru_stime
    for process in descendants():
        try:
            user, system = _stat(process)[11:13]
            total += (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
        except OSError:
            continue
    return total


def disk_bytes():
    """Bytes read from disk so far by this process and its workers."""
    total = 0
    for process in ["self", *descendants()]:
        try:
            total += int(_line(f"/proc/{process}/io", "read_bytes"))
        except OSError:
            continue
    return total


def _stat(process):
    return Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2].split()


def _line(path, name):
    for line in Path(path).read_text().splitlines():
        if line.startswith(f"{name}:"):
            return line.split()[1]
    raise RuntimeError(f"this kernel does not report {name}")


def _field(path, name):
    return int(_line(path, name)) * 1024


def drop_page_cache(folder):
    """Remove all files under `folder` from the page cache."""
    for path in Path(folder).rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            os.fsync(handle)  # pages that are not on disk yet cannot be removed
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


def read_all(folder):
    """Read all files under `folder`, so that they are in the page cache."""
    for path in Path(folder).rglob("*"):
        if path.is_file():
            with path.open("rb", buffering=0) as stream:
                while stream.read(1 << 24):
                    pass


def forked(work):
    """The result of `work()` in a forked process, passed as JSON.

    The process has all imports of this one, so imports are not measured, and no earlier work
    changes its memory.
    """
    reader, writer = os.pipe()
    sys.stdout.flush()
    process = os.fork()
    if process == 0:
        os.close(reader)
        try:
            with os.fdopen(writer, "w") as stream:
                json.dump(work(), stream)
            atexit._run_exitfuncs()  # ends worker processes, removes shared memory
        except BaseException:  # noqa: BLE001  (the parent's handlers must not run here)
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as stream:
        result = stream.read()
    os.waitpid(process, 0)
    if not result:
        raise RuntimeError("the process ended without a result")
    return json.loads(result)


def machine():
    """One line that describes the machine."""
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
