"""Downloads on background threads, several at a time.

Files that somebody waits for come first, and then those that are read ahead. If another process is
downloading a file that is read ahead, the thread takes the next one: so the processes of a machine
share the work. Threads end before the interpreter does: one that is inside of native code when the
interpreter ends would crash the process.
"""

import atexit
import os
import sys
import threading
from collections import deque
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

from penstock.remote.cache import FileCache, RemoteFile
from penstock.remote.failures import ending

_NUM_THREADS = 8
_END_SECONDS = 20.0


class MissingFile(NamedTuple):
    """A file of a remote store that is not on this machine."""

    cache: FileCache
    file: RemoteFile

    @property
    def key(self) -> tuple[Path, str]:
        """The same for equal files, of whatever store."""
        return self.cache.directory, self.file.digest


class _Job:
    """A download that was asked for."""

    def __init__(self, missing: MissingFile) -> None:
        self.missing = missing
        self.is_urgent = False
        self.done: Future[bool] = Future()


class _Downloads:
    """The threads of this process, and the files that they still have to download."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queue: deque[_Job] = deque()
        self._jobs: dict[tuple[Path, str], _Job] = {}
        self._threads: list[threading.Thread] = []
        self._num_idle = 0

    def begin(self, missing: MissingFile, *, is_urgent: bool) -> "Future[bool]":
        """Ask for a file; a file that is asked for twice is downloaded once."""
        with self._changed:
            job = self._jobs.get(missing.key)
            if job is None:
                job = self._jobs[missing.key] = _Job(missing)
                (self._queue.appendleft if is_urgent else self._queue.append)(job)
            elif is_urgent and not job.is_urgent and job in self._queue:
                self._queue.remove(job)
                self._queue.appendleft(job)
            job.is_urgent |= is_urgent
            # An idle thread takes one of the files: it may not have woken up for the last one yet.
            if len(self._queue) > self._num_idle and len(self._threads) < _NUM_THREADS:
                name = f"penstock-download-{len(self._threads)}"
                self._threads.append(threading.Thread(target=self._work, name=name, daemon=True))
                self._threads[-1].start()
            self._changed.notify()
            return job.done

    def _work(self) -> None:
        while True:
            with self._changed:
                self._num_idle += 1
                while not self._queue and not ending.is_set():
                    self._changed.wait()
                self._num_idle -= 1
                if ending.is_set():
                    return
                job = self._queue.popleft()
            try:
                cache, file = job.missing
                is_here: bool | BaseException = cache.fetch(file, wait=job.is_urgent)
            except Exception as error:  # noqa: BLE001  (raised where the file is needed)
                is_here = error
            with self._changed:
                del self._jobs[job.missing.key]
            if isinstance(is_here, BaseException):
                job.done.set_exception(is_here)
            else:
                job.done.set_result(is_here)

    def end(self) -> None:
        """Stop all threads, and wait for them."""
        ending.set()
        with self._changed:
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(_END_SECONDS / max(1, len(self._threads)))


_downloads = _Downloads()


def begin_download(missing: MissingFile, *, is_urgent: bool) -> "Future[bool]":
    """Download a file on a background thread.

    Returns:
        Whether the file is here now; False if it is not urgent and another process downloads it.
    """
    return _downloads.begin(missing, is_urgent=is_urgent)


def _after_fork() -> None:
    # A fork copies no threads, and perhaps a lock that one of them held.
    global _downloads
    _downloads = _Downloads()


@atexit.register
def _at_exit() -> None:
    _downloads.end()


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_after_fork)
