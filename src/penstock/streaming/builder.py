"""The thread that builds a store in the background.

Every process that streams into one directory runs such a thread. The first one to get the lock of
the store builds. The others try to get the lock four times a second, so that one of them continues
the build if the builder dies or closes its stream. Only the builder writes parts, so processes
share nothing but the directory.

An error ends the thread and is kept; the reader raises it at the next batch.
"""

import os
import threading

from penstock.errors import StoreBusyError
from penstock.store.build import begin, execute
from penstock.store.job import BuildProgress, Job
from penstock.store.lock import locked

__all__ = ["Builder"]

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
