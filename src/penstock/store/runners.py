"""Who makes the slices of a build: threads of this process, other processes, or a Ray cluster.

A runner has a number of slots. The build calls `make_next` for each slot from a separate thread,
again and again, until it returns None. So a runner never needs a queue: it takes a slice when it
can begin with it, and returns when the parts of the slice are on disk. The parts of a store have
the same bytes whoever makes them.
"""

import logging
from typing import Protocol

from penstock.errors import StoreError
from penstock.options import parse_workers
from penstock.sources.slices import NOMINAL_EXPANSION
from penstock.store.job import Job
from penstock.store.processes import ProcessRunner
from penstock.store.ray_tasks import RayRunner
from penstock.store.slice_work import MadeSlice, Watch
from penstock.store.threads import LiveRunner, Take, ThreadRunner

_log = logging.getLogger("penstock")

# Up to four threads of one process are as fast as processes, and use less memory.
_FEW_THREADS = 4
# Other processes need about a second to start, and so does a build of this much text on 16 cores.
_MUCH_TEXT = 1_000_000_000


class Runner(Protocol):
    """Makes slices somewhere."""

    num_slots: int
    """How many slices are in flight at most; the build has a thread for each."""

    def make_next(self, slot: int, take: Take, watch: Watch) -> MadeSlice | None:
        """Take the next slice and make its parts; None if no slice is left.

        When it returns, the parts are on disk; the caller then records them in the journal. Each
        slot is used by one thread, and several slots are used at the same time.

        Args:
            slot: The number of the slot.
            take: Returns the next slice, or None if no slice is left. Called once at most. A runner
                calls it when a worker is free, because a slice may hold 64 MB of text.
            watch: Receives the progress of the slice, and says whether the build has to stop.
        """

    def tick(self) -> None:
        """Called about ten times a second, from the thread that called `build`."""

    def close(self) -> None:
        """Stop: all slots return soon, or raise. Called at the end of every build."""


def runner_for(job: Job) -> Runner:
    """The runner that the settings of a build ask for."""
    (workers, _), num_threads = parse_workers(job.options.workers), job.num_threads
    if job.live:
        return LiveRunner(job, num_threads)
    if workers.startswith("ray"):
        return RayRunner(job, None if workers == "ray" else workers)
    if workers == "processes":
        return ProcessRunner(job, num_threads)
    if workers == "auto" and num_threads > _FEW_THREADS and _text_bytes(job) >= _MUCH_TEXT:
        try:
            return ProcessRunner(job, num_threads)
        except (StoreError, OSError) as error:  # OSError: the system allows no more processes
            _log.info("%s Threads are used.", error)
    return ThreadRunner(job, num_threads)


def _text_bytes(job: Job) -> float:
    """About how many bytes of text can be read by other processes."""
    # Texts in memory would be copied to each process.
    return sum(
        file.size * (NOMINAL_EXPANSION if file.compression else 1)
        for file in job.files
        if file.texts is None
    )
