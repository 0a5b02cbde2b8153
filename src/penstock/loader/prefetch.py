"""Prefetching: a thread makes batches ahead of time, and the kernel loads rows from the disk.

One thread is enough: making a batch is a few NumPy calls that release the GIL. The thread holds
nothing that a checkpoint would need. It ends when its reader stops or is garbage collected. An
error on the thread is raised by the reader, with the traceback of where it happened.

A process may fork at any time. A lock that the thread holds at that moment, such as the lock of a
store that opens a part, would stay locked in the child for ever. So a fork waits until no thread
is in the middle of its work, which takes milliseconds.

Reading a row that is not in memory takes 0.1 ms on NVMe and 10 ms on a rotating disk. Random rows
are loaded one after the other, but the kernel loads hundreds at the same time if they are requested
in advance. A request costs about a microsecond per row, also if the row is in memory. So rows are
requested only after a block in which this thread had to wait for pages. Then the rows of the next
blocks are requested: the more waits, the more blocks. Rows that are read for the first time cause
no waits, because their blocks are requested when they are checked (`penstock.store.parts`).

Parts of stores at URLs are downloaded by other threads, before the steps that need them: see
`PartsAhead`. If a step needs a part that is not here yet, the thread waits.
"""

import os
import queue
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

from penstock.order.steps import PADDING, Shard
from penstock.ranges import group_rows
from penstock.streaming.waits import use_for_waits

if TYPE_CHECKING:
    from penstock.loader.run import Run
    from penstock.rows.protocol import Rows

_MOST_BLOCKS = 64
_BLOCKS_PER_WAIT = 4
# At 1 GB/s, a quarter of a second. Twice this and the parts of a group are needed on the disk.
_AHEAD_BYTES = 256 << 20
# Rows that are located at once, and how often for one block: the arithmetic of a block of steps
# must not wait long for that of later steps.
_ROWS_AT_ONCE = 8_192
_LOOKS = 4

Item = TypeVar("Item")


# One lock per thread. A thread holds its lock while it works, and a fork takes all of them.
_working: "weakref.WeakSet[threading.RLock]" = weakref.WeakSet()


class _Forking(threading.local):
    """The locks that the current thread holds while it forks."""

    held: "tuple[threading.RLock, ...]" = ()


_forking = _Forking()


def _before_fork() -> None:
    # A copy, because other threads may create or drop locks during the fork. Only this copy is
    # released afterwards.
    _forking.held = tuple(_working)
    for lock in _forking.held:
        lock.acquire()


def _after_fork() -> None:
    for lock in _forking.held:
        lock.release()
    _forking.held = ()


if os.name == "posix":  # Windows has no fork
    os.register_at_fork(
        before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork
    )


class Ahead(Generic[Item]):
    """An iterator whose items a thread makes before they are needed, at most `depth` of them."""

    def __init__(self, items: Callable[[], Iterator[Item]], depth: int) -> None:
        self._made: queue.SimpleQueue[Item | BaseException] = queue.SimpleQueue()
        self._permits = threading.Semaphore(depth)
        self._stop = threading.Event()
        self._process = os.getpid()
        working = threading.RLock()
        _working.add(working)
        self._thread = threading.Thread(
            target=_fill,
            args=(items, self._made, self._permits, self._stop, working),
            name="penstock-ahead",
            daemon=True,
        )
        self._thread.start()
        # The thread must end if its reader is garbage collected without close(). It must also end
        # before the interpreter: a thread inside torch at that moment crashes the process.
        self._finalizer = weakref.finalize(
            self, _end, self._permits, self._stop, self._thread, self._process
        )

    def __iter__(self) -> "Ahead[Item]":
        return self

    def __next__(self) -> Item:
        # A fork does not copy threads, so in a child process the queue would stay empty forever.
        if os.getpid() != self._process:
            raise RuntimeError(
                "This iterator prefetches on a thread of the parent process, which a fork does not "
                "copy. Call iter(loader) again in this process."
            )
        if self._stop.is_set():
            raise StopIteration
        item = self._made.get()
        if isinstance(item, BaseException):  # a StopIteration after the last item
            self.close()
            try:
                raise item
            finally:
                del item  # the error refers to this frame, and the frame to it: a cycle
        return item

    def taken(self) -> None:
        """Allow the thread to make the next item.

        The reader calls this after it has finished the last batch. A thread that starts to work
        at the same moment competes with the reader for the GIL and the CUDA driver, which made
        finishing a batch ten times slower.
        """
        self._permits.release()

    def close(self) -> None:
        """Stop the thread and wait until it has ended."""
        self._finalizer()


def _fill(
    items: Callable[[], Iterator[Item]],
    made: "queue.SimpleQueue[Item | BaseException]",
    permits: threading.Semaphore,
    stop: threading.Event,
    working: "threading.RLock",
) -> None:
    try:
        use_for_waits(stop, working)
        iterator = items()
        while permits.acquire() and not stop.is_set():
            with working:
                item = next(iterator)
            made.put(item)
            del item  # the reader may free it while this thread waits
    except BaseException as error:  # noqa: BLE001  (raised again by the reader)
        made.put(error)


def _end(
    permits: threading.Semaphore, stop: threading.Event, thread: threading.Thread, process: int
) -> None:
    if os.getpid() != process:
        return
    # In this order: the thread must see `stop` when the permit wakes it.
    stop.set()
    permits.release()
    # The last reference to a reader may be dropped on its own thread, which cannot join itself.
    if thread is not threading.current_thread():
        thread.join(timeout=10.0)


class ReadAhead:
    """Counts waits for the disk, and decides whether to request the rows of the next block."""

    def __init__(self) -> None:
        self._left = 0  # how many of the next blocks to request
        self._waits = self._loaded = 0

    def begin(self) -> bool:
        """Return whether to request the next block; call it before a block is read."""
        self._waits, self._loaded = _disk_use()
        return self._left > 0

    def end(self) -> None:
        """Count the waits of a block; call it after the block, on the same thread as `begin`."""
        waits, loaded = _disk_use()
        waits, loaded = waits - self._waits, loaded - self._loaded
        if waits or loaded:
            # Requested rows cause no waits, so a block without waits reduces the number by one.
            self._left = max(min(_MOST_BLOCKS, _BLOCKS_PER_WAIT * waits), self._left - 1, 0)
        else:
            # Rows are in memory, so requests only take time. Not 0 at once: network file systems
            # may count nothing as loaded.
            self._left //= 2


def _disk_use() -> tuple[int, int]:
    """Return how often this thread waited for a page from a disk, and how much it loaded."""
    if sys.platform == "win32":  # which does not count page faults, so no row is requested there
        return 0, 0
    import resource

    # macOS counts page faults by process only.
    whose = resource.RUSAGE_THREAD if sys.platform == "linux" else resource.RUSAGE_SELF
    used = resource.getrusage(whose)
    # Loaded are also the pages that this thread requests and does not wait for.
    return used.ru_majflt, used.ru_inblock


class PartsAhead:
    """Downloads the parts of stores at URLs before the steps that need them.

        step        │ now │                                     │ cursor
        parts used  │ 7 2 9 4 │ 7 2 9 4 │ … │ 1 5 8 3 │ …
                                                ahead: asked for, and not used yet

    The plan says which rows come next, and the rows say which parts they need. After each block of
    steps, the rows of later steps are asked for, until the files that were asked for and are not
    used yet have `_AHEAD_BYTES`. With blocks of whole parts, these are the parts of the next group.

    Args:
        rows: The rows of each source.
    """

    def __init__(self, rows: "Sequence[Rows]") -> None:
        self._rows = rows
        self._is_needed = any(each.fetches_parts for each in rows)
        self._shard: Shard | None = None
        self._cursor = 0  # the step up to which rows were asked for
        self._asked: deque[tuple[int, int]] = deque()  # the first step, and the bytes, of files

    def __reduce__(self) -> "tuple[type[PartsAhead], tuple[Sequence[Rows]]]":
        return type(self), (self._rows,)  # another process has asked for nothing

    def ask(self, run: "Run", step: int) -> None:
        """Ask for the parts that the steps of `run` from `step` on need; return without waiting."""
        if not self._is_needed:
            return
        shard, last = run.shard, run.num_steps or 2**62
        if shard is not self._shard or self._cursor < step:
            self._shard, self._cursor = shard, step
            self._asked.clear()
        while self._asked and self._asked[0][0] < step:
            self._asked.popleft()
        for _ in range(_LOOKS):
            if self._cursor >= last:
                return
            rows = max(1, int(shard.rows(self._cursor, self._cursor + 1)[0]))
            stop = min(last, self._cursor + max(1, _ROWS_AT_ONCE // rows))
            positions = shard.positions(self._cursor, stop, end=run.end)
            sources, _, samples = run.plan.locate(positions[positions != PADDING])
            for number, chosen in group_rows(sources):
                if sum(size for _, size in self._asked) >= _AHEAD_BYTES:
                    return  # the next call looks at these steps again
                source = self._rows[number]
                if source.fetches_parts and (asked := source.read_ahead(samples[chosen])):
                    self._asked.append((self._cursor, asked))
            self._cursor = stop
