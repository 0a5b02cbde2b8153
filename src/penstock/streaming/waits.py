"""Waits of threads that read a store while it is being written.

A thread that prefetches batches may have to wait for the next part. It sleeps for a few
milliseconds at a time, and checks in between whether its reader has stopped. A fork waits until
such threads are between two steps of work (see `penstock.loader.prefetch`), but not for a thread
that sleeps here, because that thread holds no lock.
"""

import threading
import time


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
    """Sleep for some seconds; raise WaitCancelled if the reader of this thread has stopped."""
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

    At most one second is counted between two calls: a process that was suspended did not wait.
    """

    def __init__(self) -> None:
        self._last_call = time.monotonic()
        self._progress = -1
        self._waited = 0.0

    def seconds(self, progress: int) -> float:
        """Return the seconds waited since `progress` last changed."""
        now = time.monotonic()
        self._waited += min(now - self._last_call, 1.0)
        self._last_call = now
        if progress != self._progress:
            self._progress, self._waited = progress, 0.0
        return self._waited
