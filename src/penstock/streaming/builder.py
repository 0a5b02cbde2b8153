"""The thread that builds, or stands by.

All processes that stream into one directory run such a thread. The first to get the store's
lock builds; the others try again a few times a second, so that when the builder dies or
leaves, one of them goes on where it was. Only a thread of the process that builds ever
writes parts, so nothing else is shared between processes than the directory.

An error ends the thread and is kept; the reader raises it at the next batch.
"""

import os
import threading
from collections.abc import Callable

from penstock.errors import StoreBusyError
from penstock.store.build import begin, execute
from penstock.store.job import BuildProgress, Job
from penstock.store.lock import locked
from penstock.streaming.dropping import serve

__all__ = ["Builder"]

_RETRY_SECONDS = 0.25
_LEAVE_SECONDS = 5.0


class Builder:
    """One process's part in a build.

    Args:
        job: The build.
        ahead: With a number, parts are dropped behind the readers, and made at most so many
            slices ahead of them; None keeps all.
    """

    def __init__(self, job: Job, *, ahead: int | None) -> None:
        self._job = job
        self._ahead = ahead
        self._stop = threading.Event()
        self._process = os.getpid()
        self.error: BaseException | None = None
        self.building = False
        """Whether this process is the one that builds."""
        self.progress: BuildProgress | None = None
        """How far it is, where it is this process that builds."""
        self._thread = threading.Thread(target=self._run, name="penstock-stream", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop building; what is sealed stays, and another process may go on."""
        if os.getpid() != self._process:
            return  # the thread did not come along with a fork
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=_LEAVE_SECONDS)

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
        """Build if nobody else does; whether the store is finished."""
        try:
            with locked(self._job.directory):
                self.building = True
                job = begin(self._job, live=True)
                if job is None:
                    return True
                if self._ahead is None:
                    execute(job, self._tell)
                    return True
                serve(job, self._ahead, self._stop, self._tell)
                return True
        except StoreBusyError:
            self.building = False
            return False

    @property
    def _tell(self) -> Callable[[BuildProgress], None]:
        def tell(progress: BuildProgress) -> None:
            self.progress = progress
            if self._stop.is_set():
                raise _Closed

        return tell


class _Closed(Exception):  # noqa: N818  (not an error: nobody reads any more)
    """The build was told to stop."""
