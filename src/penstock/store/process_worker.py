"""A worker process of a build: its threads make slices that the build sends them.

    build                        worker process
    thread for slot 5  ◄─ pipe ─►  thread that makes slices      "next", Advance, MadeSlice
    thread for logs    ◄─ pipe ─►  main thread                   WorkerSetup, log records

Each thread has a pipe that nobody else uses, so there is no lock that a killed process could hold
for ever. A pipe ends when the process at its other end ends, for any reason: then a worker process
exits at once, and a build knows that it has lost a worker.
"""

import logging
import os
import sys
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from logging.handlers import QueueHandler
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from queue import SimpleQueue

from penstock.errors import PenstockError, WorkerError
from penstock.store.job import Job
from penstock.store.memory import arrow_from_malloc, keep_freed_memory
from penstock.store.slice_work import Order, Watch
from penstock.store.threads import ThreadRunner

NEXT = "next"
"""What a worker sends when it is ready for the next slice."""


@dataclass(frozen=True, slots=True)
class WorkerSetup:
    """What a worker process needs to make slices, besides the job."""

    num_threads: int
    """How many slices it tokenizes at once."""
    log_level: int


def main(descriptors: Sequence[str]) -> None:
    """Make slices until the build has no more; the descriptors are the worker's ends of pipes."""
    control, *slots = (Connection(int(each)) for each in descriptors)
    try:
        setup: WorkerSetup = control.recv()
        job: Job = control.recv()
    except EOFError:
        return  # the build has ended
    except Exception as error:  # noqa: BLE001  (a tokenizer of the user may raise anything)
        for slot in slots:
            slot.send(
                WorkerError(
                    f"A worker process cannot load the build ({type(error).__name__}: {error}). "
                    'Use workers="threads" (--workers threads) of penstock.build.'
                )
            )
        return
    # The lock of the store is lost when the build ends, so nothing is written here after that.
    threading.Thread(target=_exit_with_build, args=(control,), daemon=True).start()
    _send_logs(control, setup.log_level)
    keep_freed_memory()
    with arrow_from_malloc():
        runner = ThreadRunner(job, setup.num_threads)
        threads = [
            threading.Thread(target=_serve, args=(slot, number, runner), daemon=True)
            for number, slot in enumerate(slots)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # faster than freeing all memory


def _exit_with_build(control: Connection) -> None:
    """End this process when the build ends, whatever the other threads are doing."""
    with suppress(EOFError, OSError):
        control.recv()  # nothing more is sent
    os._exit(1)


def _serve(connection: Connection, number: int, runner: ThreadRunner) -> None:
    """Make slices on one thread, until the build has no more."""

    def take() -> Order | None:
        connection.send(NEXT)
        order: Order | None = connection.recv()
        return order

    try:
        watch = Watch(connection.send, lambda: False)
        while (made := runner.make_next(number, take, watch)) is not None:
            connection.send(made)
    except BaseException as error:  # noqa: BLE001  (raised again in the build)
        with suppress(OSError):  # the build has ended
            connection.send(_portable(error))


def _portable(error: BaseException) -> BaseException:
    """The error as another process can raise it."""
    where = f"In a worker process:\n{''.join(traceback.format_exception(error))}"
    if not isinstance(error, PenstockError | OSError):
        error.add_note(where)
    try:
        ForkingPickler.loads(ForkingPickler.dumps(error))
    except Exception:  # noqa: BLE001  (an error of another library may fail in any way)
        return RuntimeError(f"{type(error).__name__}: {error}\n{where}")
    return error


class _LogSender(QueueHandler):
    """Sends log records to the build."""

    def __init__(self, control: Connection) -> None:
        super().__init__(SimpleQueue())  # not used: `enqueue` sends the record
        self._control = control

    def enqueue(self, record: logging.LogRecord) -> None:
        """Send one record; the handler holds its lock, so two threads do not mix theirs."""
        with suppress(OSError):  # the build has ended
            self._control.send(record)


def _send_logs(control: Connection, level: int) -> None:
    """Send warnings and log records of this process to the build."""
    root = logging.getLogger()
    root.setLevel(level)
    root.addHandler(_LogSender(control))
    logging.captureWarnings(True)
