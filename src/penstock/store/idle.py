"""Threads without a slice, which do a part of the work on the slices of other threads.

    slice 7   thread 0   │ read, encode │ read, encode │ read, encode │ write │
    slice 8   thread 1   │ … │ write │
    none left thread 1                  │ encode        │ encode       │ hash  │

A thread makes a whole slice, so towards the end of a build some threads find no slice left. With
8 slices and 2 threads, one core would be idle for about a tenth of the build. The idle threads
encode batches of the slices that are still being made, and hash their input while they are written.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from penstock.sources.batch import Batch
from penstock.store.part import Encoded, PartBuilder

T = TypeVar("T")


class IdleThreads:
    """Work that any thread may do: the one that needs the result, or an idle one."""

    def __init__(self) -> None:
        # Guards all fields, and is notified when one of them changes.
        self._changed = threading.Condition()
        self._offered: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._num_idle = 0
        self._num_open = 0
        self._closed = False

    @contextmanager
    def open_slice(self) -> Iterator[None]:
        """Keep idle threads waiting for work while the `with` block makes a slice."""
        with self._changed:
            self._num_open += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_open -= 1
                self._changed.notify_all()

    def help(self) -> None:
        """Do offered work until no slice is open."""
        with self._changed:
            self._num_idle += 1
        try:
            while (task := self._next()) is not None:
                _run(*task)
        finally:
            with self._changed:
                self._num_idle -= 1

    def close(self) -> None:
        """Let all idle threads return, even if a slice is open."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _next(self) -> tuple[Future[Any], Callable[[], Any]] | None:
        with self._changed:
            while self._num_open and not self._closed:
                if self._offered:
                    return self._offered.popleft()
                self._changed.wait()
        return None

    def offer(self, work: Callable[[], T]) -> Future[T]:
        """Let an idle thread do `work`; `result` returns what it returns."""
        future: Future[T] = Future()
        with self._changed:
            self._offered.append((future, work))
            self._changed.notify()
        return future

    def result(self, future: Future[T]) -> T:
        """The result of offered work, which is done here if no idle thread has begun it."""
        if (task := self._withdrawn(future)) is not None:
            _run(*task)
        return future.result()

    def _withdrawn(self, future: Future[T]) -> tuple[Future[Any], Callable[[], Any]] | None:
        """Offered work that nobody has begun, which nobody else will begin now; else None."""
        with self._changed:
            for task in self._offered:
                if task[0] is future:
                    self._offered.remove(task)
                    return task
        return None

    def encode(
        self, builder: PartBuilder, batches: Iterator[Batch]
    ) -> Iterator[tuple[Batch, Encoded]]:
        """Each batch and its tokens, in order.

        Without idle threads, a batch is encoded here before the next one is read.
        """
        pending: deque[tuple[Batch, Future[Encoded]]] = deque()
        try:
            for batch in batches:
                pending.append((batch, self.offer(partial(builder.encode, batch))))
                # Two batches for each idle thread: one that it encodes, and one that it finds when
                # it has ended, while this thread encodes or reads another one.
                while len(pending) > 2 * self._num_idle:
                    yield self._first_of(pending)
            while pending:
                yield self._first_of(pending)
        finally:
            for _, future in pending:  # after an error, nobody needs the others
                self._withdrawn(future)

    def _first_of(self, pending: deque[tuple[Batch, Future[Encoded]]]) -> tuple[Batch, Encoded]:
        """The first batch and its tokens; encodes batches here until an idle thread has them."""
        batch, first = pending[0]
        for _, future in pending:
            if first.done():
                break
            if (task := self._withdrawn(future)) is not None:
                _run(*task)
        pending.popleft()
        return batch, first.result()


def encode_ahead(
    builder: PartBuilder, batches: Iterator[Batch], num_threads: int
) -> Iterator[tuple[Batch, Encoded]]:
    """Each batch and its tokens, in order; several threads encode the batches that follow."""
    helpers = ThreadPoolExecutor(num_threads, thread_name_prefix="build-help")
    try:
        # The helpers encode while the other batches are read. A slice is about 16 batches.
        pending = [(batch, helpers.submit(builder.encode, batch)) for batch in batches]
        for batch, encoded in pending:
            yield batch, encoded.result()
    finally:
        # A build that stops does not wait for batches that no thread has begun.
        helpers.shutdown(cancel_futures=True)


def _run(future: "Future[Any]", work: Callable[[], Any]) -> None:
    try:
        future.set_result(work())
    except BaseException as error:  # noqa: BLE001  (raised again where the result is needed)
        future.set_exception(error)
