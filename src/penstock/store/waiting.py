"""Keeps a live build from slowing the training loop that reads its parts."""

import math
import os
import sys
import threading
import time
from contextlib import suppress

from penstock.store.journal import Journal

_HURRY_SECONDS = 0.5  # how long all workers continue after a reader has waited
_NICENESS = 10


class WaitingReaders:
    """Detects readers that wait for parts. If there are any, one worker is not enough."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        journal.await_readers()
        self._seen = journal.asked()
        self._asked = -math.inf

    def hurry(self) -> bool:
        """Whether a reader waited in the last half second."""
        now = time.monotonic()
        seen, self._seen = self._seen, self._journal.asked()
        if seen != self._seen:
            self._asked = now
        return now < self._asked + _HURRY_SECONDS


def lower_priority() -> None:
    """Let this thread run only when no reader of the parts needs its core.

    On one core, a loop that launches kernels took 2.1 times as long beside a build. With the lower
    priority it took 1.2 times as long.
    """
    if sys.platform == "linux":  # elsewhere, priorities belong to processes and not to threads
        thread = threading.get_native_id()
        with suppress(OSError):
            # The user may have started the process at an even lower priority.
            niceness = max(_NICENESS, os.getpriority(os.PRIO_PROCESS, thread))
            os.setpriority(os.PRIO_PROCESS, thread, niceness)
