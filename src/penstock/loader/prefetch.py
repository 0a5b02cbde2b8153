"""Work done ahead, on one thread.

A thread is enough: putting a batch together is a few NumPy calls that work without the
interpreter lock. It holds nothing that a checkpoint would need, ends when its reader is
done with it or gone, and an error in it is raised where the batch was wanted, with the
traceback of where it happened.

A process may fork at any time, and whatever lock the thread held then would stay locked in
the child for ever: that of a store which is opening a part, for one. So a fork waits until
no thread is in the middle of its work, which takes milliseconds.
"""

import os
import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from penstock.streaming.waiting import work_for

__all__ = ["Ahead"]

Item = TypeVar("Item")


# Held by each thread while it works, and by the one that forks.
_AT_WORK: "weakref.WeakSet[Any]" = weakref.WeakSet()
_FORKING = threading.local()


def _before_fork() -> None:
    _FORKING.held = list(_AT_WORK)
    for lock in _FORKING.held:
        lock.acquire()


def _after_fork() -> None:
    for lock in _FORKING.held:
        lock.release()
    _FORKING.held = []


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)


class _Failed:
    """An error on its way to the reader."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


class _Ended:
    """Nothing follows."""


class Ahead(Generic[Item]):
    """The items of an iterator, at most `depth` of them made before they are wanted."""

    def __init__(self, items: Callable[[], Iterator[Item]], depth: int) -> None:
        self._made: queue.SimpleQueue[Item | _Failed | type[_Ended]] = queue.SimpleQueue()
        self._permits = threading.Semaphore(depth)
        self._stop = threading.Event()
        self._process = os.getpid()
        at_work = threading.RLock()
        _AT_WORK.add(at_work)
        self._thread = threading.Thread(
            target=_fill,
            args=(items, self._made, self._permits, self._stop, at_work),
            name="penstock-ahead",
            daemon=True,
        )
        self._thread.start()
        # A reader that is dropped without close() must not leave the thread waiting for ever;
        # and a thread that is inside torch when the interpreter ends would bring it down.
        self._finalizer = weakref.finalize(
            self, _end, self._permits, self._stop, self._thread, self._process
        )

    def __iter__(self) -> "Ahead[Item]":
        return self

    def __next__(self) -> Item:
        # Threads do not live on in a fork, and what they held when it came stays held there.
        if os.getpid() != self._process:
            raise RuntimeError(
                "This iterator reads ahead on a thread of the process that was forked, which is "
                "not here. Call iter(loader) again in this process."
            )
        if self._stop.is_set():
            raise StopIteration
        item = self._made.get()
        if isinstance(item, _Failed):
            self.close()
            try:
                raise item.error
            finally:
                del item  # which would keep the error, and the error this frame
        if item is _Ended:
            self.close()
            raise StopIteration
        return item  # type: ignore[return-value]

    def taken(self) -> None:
        """Let the next item be made.

        Said by the reader once it is done with handing out the last one: a thread that begins
        its work while the reader is at it competes for the interpreter and the driver, and
        was seen to make handing out ten times as slow.
        """
        self._permits.release()

    def close(self) -> None:
        """End the thread and wait for it."""
        self._finalizer()


def _fill(
    items: Callable[[], Iterator[Item]],
    made: "queue.SimpleQueue[Item | _Failed | type[_Ended]]",
    permits: threading.Semaphore,
    stop: threading.Event,
    at_work: Any,
) -> None:
    try:
        work_for(stop, at_work)
        iterator = items()
        while permits.acquire() and not stop.is_set():
            with at_work:
                item = next(iterator, _Ended)
            made.put(item)
            del item  # not ours to keep while we wait
    except BaseException as error:  # noqa: BLE001  (raised again by the reader)
        made.put(_Failed(error))


def _end(
    permits: threading.Semaphore, stop: threading.Event, thread: threading.Thread, process: int
) -> None:
    if os.getpid() != process:
        return
    stop.set()
    permits.release()
    if thread is not threading.current_thread():
        thread.join(timeout=10.0)
