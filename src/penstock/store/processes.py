"""Process workers: other processes of this machine make slices, with a few threads each.

One process uses four cores well and sixteen badly: its threads share the GIL and gigatoken's
thread pool. Measured on 16 cores, 16 threads made 0.52 GB/s, and 8 processes of 2 threads 1.29. So
a build on many cores starts processes of two threads. This process makes slices too. Its threads
begin at once, while the other processes import and load for about a second.

The processes are started with `subprocess`, and not with `multiprocessing.Process` or a pool:

- `multiprocessing` runs the user's script again in each process, unless the script guards itself
  with `if __name__ == "__main__"`. These processes import penstock alone.
- A process of a pool takes one task at a time, and this one has several threads.
- The queues of a pool have locks that a killed process may hold, and the processes of a pool stay
  if their parent is killed.
"""

import json
import logging
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection, Pipe
from multiprocessing.reduction import ForkingPickler
from types import FunctionType
from typing import Any

from penstock.disk import remove_temporary
from penstock.errors import StoreError, WorkerError
from penstock.store.job import Job
from penstock.store.memory import num_slots
from penstock.store.process_worker import WorkerSetup
from penstock.store.slice_work import Advance, MadeSlice, Order, Watch
from penstock.store.threads import Take, ThreadRunner

_log = logging.getLogger("penstock")

THREADS_EACH = 2
"""How many slices a process tokenizes at once."""
_EXIT_SECONDS = 5.0
# The path comes first: the child finds the modules that this process has found.
_CODE = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from penstock.store.process_worker import main
main(sys.argv[2:])
"""


class ProcessRunner:
    """Makes slices in this process and in others.

    Raises:
        StoreError: the job cannot be sent to another process.
    """

    def __init__(self, job: Job, num_threads: int) -> None:
        data = pickled(job)
        starts = range(0, num_threads, THREADS_EACH)
        first, *others = (min(THREADS_EACH, num_threads - start) for start in starts)
        self._local = ThreadRunner(job, first)
        self._children: list[_Child] = []
        try:
            for count in others:
                self._children.append(_Child(job, data, count))
        except BaseException:  # too many processes or open files; also Ctrl-C
            self.close()
            raise
        # The slots of this process come first, then those of each child.
        slots = [(child, each) for child in self._children for each in child.connections]
        self._slots = dict(enumerate(slots, start=self._local.num_slots))
        self.num_slots = self._local.num_slots + len(slots)

    def make_next(self, slot: int, take: Take, watch: Watch) -> MadeSlice | None:
        """Have a slice made by the process of the slot; see `penstock.store.runners.Runner`."""

        def take_here() -> Order | None:
            order = take()
            if order is None:
                self._end_unready()
            return order

        if slot not in self._slots:
            return self._local.make_next(slot, take_here, watch)
        # Serve one thread of a child until it has made a slice.
        child, connection = self._slots[slot]
        while (message := child.receive(connection)) is not None:
            if isinstance(message, MadeSlice):
                return message
            if isinstance(message, Advance):
                watch.report(message)
            elif isinstance(message, BaseException):
                raise message
            elif not child.send(connection, take()):  # NEXT
                return None
        return None

    def _end_unready(self) -> None:
        """End the processes that are still loading: there is nothing left for them to do."""
        for child in self._children:
            if not child.is_ready:
                child.is_ended = True
                child.kill()

    def tick(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """End the processes; parts that they have not finished are made again later."""
        self._local.close()
        for child in self._children:
            child.close()


class _Child:
    """A worker process, and the ends of its pipes in this process."""

    def __init__(self, job: Job, data: bytes, num_threads: int) -> None:
        self._job = job
        self.num_threads = num_threads
        self.is_ready = self.is_ended = False
        self._ended: set[Connection] = set()  # of threads that have nothing left to do
        pipes = [Pipe() for _ in range(1 + num_slots(num_threads))]
        self._control, *self.connections = (ours for ours, _ in pipes)
        descriptors = [theirs.fileno() for _, theirs in pipes]
        # Its libraries would otherwise start a thread for each core of the machine. Variables that
        # the user has set count.
        limits = dict.fromkeys(("RAYON_NUM_THREADS", "OMP_NUM_THREADS"), str(num_threads))
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                _CODE,
                json.dumps([*map(str, sys.path)]),
                *map(str, descriptors),
            ],
            stdin=subprocess.DEVNULL,
            pass_fds=descriptors,
            env=limits | os.environ,
            # Ctrl-C in a terminal reaches this process alone, and this process ends the others.
            start_new_session=True,
        )
        for _, theirs in pipes:
            theirs.close()  # so that a pipe ends when the process ends
        self._talk = threading.Thread(target=self._set_up, args=(data,), daemon=True)
        self._talk.start()

    def _set_up(self, data: bytes) -> None:
        """Send the job, and then receive the log records of the process."""
        try:
            self._control.send(WorkerSetup(self.num_threads, _log.getEffectiveLevel()))
            self._control.send_bytes(data)
            while True:
                record: logging.LogRecord = self._control.recv()
                logger = logging.getLogger(record.name)
                if logger.isEnabledFor(record.levelno):
                    logger.handle(record)
        except (EOFError, OSError):
            pass  # the process has ended

    def receive(self, connection: Connection) -> object:
        """The next message of one of its threads; None if it was ended before it was ready."""
        try:
            message: object = connection.recv()
        except (EOFError, OSError):
            if self.is_ended:
                return None
            raise self._lost() from None
        self.is_ready = True
        return message

    def send(self, connection: Connection, order: Order | None) -> bool:
        """Send a slice to one of its threads, or that no slice is left; returns which."""
        try:
            connection.send(order)
        except OSError:
            if order is not None:
                raise self._lost() from None
        if order is None:
            self._ended.add(connection)
        return order is not None

    def _lost(self) -> Exception:
        try:
            status = self._process.wait(_EXIT_SECONDS)
        except subprocess.TimeoutExpired:  # it cannot be reached, so it is of no use
            self._process.kill()
            status = self._process.wait()
        how = f"ended with status {status}"
        if status < 0:
            how = f"was killed by {signal.Signals(-status).name}"
        return WorkerError(
            f"A worker process (pid {self._process.pid}) {how} before its part was finished. Linux "
            "kills processes when memory runs out. Finished parts are kept: run the same build "
            "again to resume it. To use less memory, lower the number in workers= (--workers) of "
            "penstock.build."
        )

    def kill(self) -> None:
        """End the process at once, and remove the files that it had begun."""
        self._process.kill()
        self._process.wait()
        for side in self._job.sides:
            remove_temporary(self._job.directory / side, process=self._process.pid)

    def close(self) -> None:
        """Wait for the process if it has nothing left to do, and kill it otherwise."""
        if len(self._ended) == len(self.connections):
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_EXIT_SECONDS)
        if self._process.poll() is None:
            self.kill()
        self._talk.join(_EXIT_SECONDS)  # the last log records


class _JobPickler(ForkingPickler):
    """Pickles a job, and refuses what other processes cannot load."""

    def reducer_override(self, value: object) -> Any:
        """Called for each class, function and object that a job refers to."""
        if isinstance(value, type | FunctionType) and value.__module__ == "__main__":
            raise TypeError(
                f"{value.__qualname__} is defined in the script itself, which other processes do "
                "not run. Move it to a module of its own"
            )
        return NotImplemented


def pickled(job: Job) -> bytes:
    """The job for another process, without the arguments that were used up to prepare it.

    Raises:
        StoreError: it cannot be sent to another process.
    """
    if not sys.executable or os.name != "posix":
        raise cannot_send("this Python cannot start processes with pipes")
    options = replace(job.options, tokenizer=None, chat=None)
    job = replace(job, options=options, directory=job.directory.absolute())
    try:
        return bytes(_JobPickler.dumps(job))
    except Exception as error:  # an object of the user may raise anything
        raise cannot_send(str(error) or type(error).__name__) from error


def cannot_send(reason: str) -> StoreError:
    """The error for a job that cannot be pickled."""
    return StoreError(
        "The build cannot be sent to worker processes, because its tokenizer, chat template or "
        f'texts cannot be pickled: {reason}. Use workers="threads" (--workers threads) of '
        "penstock.build."
    )
