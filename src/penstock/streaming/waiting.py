"""Waiting that can be given up.

Whoever reads ahead on a thread may come to a part that is not there yet. It waits in short
naps, and between two of them it looks whether its reader is still interested. A fork waits
for such threads to finish what they are at (see `penstock.loader.prefetch`), but not for one
that naps: it holds nothing then.
"""

import threading
import time
from typing import Any

__all__ = ["GivenUp", "Patience", "nap", "work_for"]

_own = threading.local()


class GivenUp(Exception):  # noqa: N818  (nobody is told: the reader is gone)
    """What was waited for is not wanted any more."""


def work_for(stop: threading.Event, at_work: Any) -> None:
    """Say for this thread who ends its waiting, and what it holds while it is at work."""
    _own.stop, _own.at_work = stop, at_work


def nap(seconds: float) -> None:
    """Wait a moment.

    Raises:
        GivenUp: this thread's reader is gone.
    """
    stop: threading.Event | None = getattr(_own, "stop", None)
    if stop is None:
        time.sleep(seconds)
        return
    _own.at_work.release()
    try:
        stopped = stop.wait(seconds)
    finally:
        _own.at_work.acquire()
    if stopped:
        raise GivenUp


class Patience:
    """How long something was waited for since there was progress.

    A process that is stopped for a while, by a debugger or a scheduler, has not waited: of the
    time between two looks, no more than a second counts.
    """

    def __init__(self) -> None:
        self._looked = time.monotonic()
        self._progress = -1
        self._waited = 0.0

    def spend(self, progress: int) -> float:
        """The seconds waited, counted anew whenever `progress` is another number."""
        now = time.monotonic()
        self._waited += min(now - self._looked, 1.0)
        self._looked = now
        if progress != self._progress:
            self._progress, self._waited = progress, 0.0
        return self._waited
