"""Work done ahead, on one thread.

A thread is enough: putting a batch together is a few NumPy calls that work without the
interpreter lock. It holds nothing that a checkpoint would need, ends when its reader is
done with it or gone, and an error in it is raised where the batch was wanted, with the
traceback of where it happened.
"""

import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

__all__ = ["Ahead"]

Item = TypeVar("Item")


class _Failed:
    """An error on its way to the reader."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


class _Ended:
    """Nothing follows."""


class Ahead(Generic[Item]):
    """The items of an iterator, at most `depth` of them made before they are wanted."""

    def __init__(self, items: Callable[[], Iterator[Item]], depth: int) -> None:
        self._queue: queue.Queue[Item | _Failed | type[_Ended]] = queue.Queue(depth)
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=_fill, args=(items, self._queue, self._stop), name="penstock-ahead", daemon=True
        )
        self._thread.start()
        # A reader that is dropped without close() must not leave the thread waiting for ever.
        self._finalizer = weakref.finalize(self, _end, self._queue, self._stop)

    def __iter__(self) -> "Ahead[Item]":
        return self

    def __next__(self) -> Item:
        while True:
            try:
                item = self._queue.get(timeout=1.0)
            except queue.Empty:
                if not self._thread.is_alive() and self._queue.empty():
                    raise RuntimeError(
                        "The thread that reads ahead is gone, as threads are after a fork. Call "
                        "iter(loader) again in this process."
                    ) from None
                continue
            if isinstance(item, _Failed):
                self.close()
                raise item.error
            if item is _Ended:
                self.close()
                raise StopIteration
            return item  # type: ignore[return-value]

    def close(self) -> None:
        """End the thread and wait for it."""
        self._finalizer()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=10.0)


def _fill(
    items: Callable[[], Iterator[Item]],
    filled: "queue.Queue[Item | _Failed | type[_Ended]]",
    stop: threading.Event,
) -> None:
    last: Item | _Failed | type[_Ended] = _Ended
    try:
        for item in items():
            if not _offer(filled, item, stop):
                return
    except BaseException as error:  # noqa: BLE001  (raised again by the reader)
        last = _Failed(error)
    _offer(filled, last, stop)


def _offer(filled: "queue.Queue[Item]", item: Item, stop: threading.Event) -> bool:
    """Put `item` where the reader finds it; False if the reader is gone."""
    while not stop.is_set():
        try:
            filled.put(item, timeout=0.2)
        except queue.Full:
            continue
        return True
    return False


def _end(filled: "queue.Queue[Item]", stop: threading.Event) -> None:
    stop.set()
    try:
        while True:
            filled.get_nowait()
    except queue.Empty:
        pass
