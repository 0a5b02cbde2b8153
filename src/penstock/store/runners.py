"""Who makes the slices of a build: threads of this process, or other processes.

A runner has a number of slots. The build calls `make_next` for each slot from a separate thread,
again and again, until it returns None. So a runner never needs a queue: it takes a slice when it
can begin with it, and returns when the parts of the slice are on disk. The parts of a store have
the same bytes whoever makes them.
"""

from typing import Protocol

from penstock.store.job import Job
from penstock.store.slice_work import MadeSlice, Watch
from penstock.store.threads import LiveRunner, Take, ThreadRunner


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
    if job.live:
        return LiveRunner(job, job.num_threads)
    return ThreadRunner(job, job.num_threads)
