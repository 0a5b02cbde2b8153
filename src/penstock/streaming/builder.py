"""The thread that builds a store in the background, and the waits of threads that read it.

Every process that streams into one directory runs such a thread. The first one to get the lock of
the store builds. The others try to get the lock four times a second, so that one of them continues
the build if the builder dies or closes its stream. Only the builder writes parts, so processes
share nothing but the directory.

An error ends the thread and is kept; the reader raises it at the next batch.

A thread that prefetches batches may have to wait for a part that is not written yet. It sleeps
for a few milliseconds at a time. Between two sleeps it checks whether its reader has stopped. A
fork waits until such threads are between two steps of work (see `penstock.loader.prefetch`), but
it does not wait for a thread that sleeps here, because that thread holds no lock.
"""

import os
import threading
import time

from penstock.errors import StoreBusyError
from penstock.store.build import begin, execute
from penstock.store.job import BuildProgress, Job
from penstock.store.lock import locked

__all__ = ["Builder", "StallTimer", "WaitCancelled", "pause", "use_for_waits"]

_RETRY_SECONDS = 0.25
_CLOSE_SECONDS = 5.0


class Builder:
    """Builds a store on a thread, or waits to take over from another process."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._stop = threading.Event()
        self._process = os.getpid()
        self.error: BaseException | None = None
        self.building = False
        """Whether this process is the one that builds."""
        self.progress: BuildProgress | None = None
        """The progress of the build, if this process builds."""
        self._thread = threading.Thread(target=self._run, name="penstock-stream", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop building; sealed parts stay, and another process may continue."""
        if os.getpid() != self._process:
            return  # a fork does not copy threads
        # The build sees this at its next progress report, several times a second. The wait has a
        # limit, because a tokenizer may take longer than that for one document.
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=_CLOSE_SECONDS)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._stop.is_set()

    def _run(self) -> None:
        try:
            while not self._stop.is_set() and not self._build():
                self._stop.wait(_RETRY_SECONDS)
        except _Closed:
            pass
        except BaseException as error:  # noqa: BLE001  (raised again by the reader)
            self.error = error
        finally:
            self.building = False

    def _build(self) -> bool:
        """Build unless another process does; return whether the store is finished."""
        try:
            with locked(self._job.directory):
                self.building = True
                # Under the lock, because the process that held it before may have sealed slices
                # or finished the store.
                job = begin(self._job, live=True)
                if job is not None:
                    execute(job, self._report)
                return True
        except StoreBusyError:
            self.building = False
            return False

    def _report(self, progress: BuildProgress) -> None:
        """Keep the progress; called by the build several times a second."""
        self.progress = progress
        if self._stop.is_set():
            raise _Closed


class _Closed(Exception):  # noqa: N818  (not an error: the stream was closed)
    """Ends a build whose stream was closed."""


class _Waits(threading.local):
    """The event and the lock of the current thread; both None outside of prefetching threads."""

    stop: threading.Event | None = None
    working: "threading.RLock | None" = None


_own = _Waits()


class WaitCancelled(Exception):  # noqa: N818  (not an error: the reader has stopped)
    """The reader of this thread has stopped, so the wait ended."""


def use_for_waits(stop: threading.Event, working: "threading.RLock") -> None:
    """Make waits of this thread end when `stop` is set, and release `working` while they sleep."""
    _own.stop, _own.working = stop, working


def pause(seconds: float) -> None:
    """Sleep for some seconds.

    Raises:
        WaitCancelled: the reader of this thread has stopped.
    """
    stop, working = _own.stop, _own.working
    if stop is None or working is None:
        time.sleep(seconds)
        return
    # Another thread may fork only while this lock is free.
    working.release()
    try:
        stopped = stop.wait(seconds)
    finally:
        working.acquire()
    if stopped:
        raise WaitCancelled


class StallTimer:
    """Measures how long a wait has lasted without progress.

    A process that is suspended, by a debugger or a scheduler, has not waited. So at most one
    second is counted between two calls.
    """

    def __init__(self) -> None:
        self._last_call = time.monotonic()
        self._progress = -1
        self._waited = 0.0

    def seconds(self, progress: int) -> float:
        """Return the seconds waited since `progress` last changed."""
        now = time.monotonic()
        # Readers call this every few milliseconds, so after a longer gap it was suspended.
        self._waited += min(now - self._last_call, 1.0)
        self._last_call = now
        if progress != self._progress:
            self._progress, self._waited = progress, 0.0
        return self._waited
