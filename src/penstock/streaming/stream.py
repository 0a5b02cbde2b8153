"""`stream`: builds a store in the background, so that training can begin at once.

Every process that calls `stream` for a directory runs a background thread. The first thread to
get the lock of the store builds it. The others try to get the lock four times a second, so that
one of them continues the build if the builder dies or closes its stream. Only the builder writes
parts, so processes share nothing but the directory.

An error ends the thread and is kept; the reader raises it at the next batch.
"""

import os
import threading
from contextlib import suppress
from typing import Unpack

from penstock.disk import lock_path, locked, room_for
from penstock.errors import StoreBusyError, StoreError
from penstock.options import BuildKeywords, BuildOptions, made_of, takes
from penstock.paths import StoreUrl, store_path
from penstock.store.build import begin, execute
from penstock.store.job import BuildProgress, Inputs, Job, prepare
from penstock.store.journal import Journal
from penstock.store.manifest import FILE_NAME
from penstock.store.part import SIDES
from penstock.streaming.snapshots import StreamedStore

_RETRY_SECONDS = 0.25
_CLOSE_SECONDS = 5.0


@takes(BuildOptions)
def stream(
    inputs: Inputs,
    store: str | os.PathLike[str],
    *,
    timeout: float = 600.0,
    **options: Unpack[BuildKeywords],
) -> StreamedStore:
    """Start to build a store in the background, and return it while it is being written.

    `stream` writes the same bytes as `build`. Pass the result to `Windows`, `Packs` or `Documents`.
    A `Loader` over them yields the rows of the finished store in the order of `shuffle="part"`.
    The first batch comes after about a second.

    If several processes call `stream` for one directory, one of them builds and all read. If the
    builder dies, another process continues. Machines without a shared disk each build the same
    store.

    Args:
        inputs: The files to read, as for `build`.
        store: The directory to write.
        timeout: A reader raises an error if no slice is sealed for this many seconds.
        **options: Those of `BuildOptions`, without `chat` and `split`. `workers` is a number of
            threads: how many slices are tokenized at once while a reader waits.

    Raises:
        SourceError: an input cannot be read as asked.
        TokenizerError: the tokenizer cannot be loaded.
        StoreError: the directory holds other files, or a store that was built differently.

    >>> import tempfile
    >>> from penstock import Texts
    >>> folder = tempfile.TemporaryDirectory()
    >>> with stream(Texts(["To be,", "or not to be."]), f"{folder.name}/store") as streamed:
    ...     [tokens.tolist() for tokens in streamed]
    [[2514, 307, 11, 50256], [273, 407, 284, 307, 13, 50256]]
    >>> folder.cleanup()
    """
    given = made_of(BuildOptions, {**options}, "penstock.stream")
    place = store_path(store)
    if isinstance(place, StoreUrl):
        raise StoreError(
            f"{place} is in object storage, and training reads a stream while it is written. "
            "Stream to a directory of this machine, and copy the store with `penstock copy` (in "
            "Python, penstock.copy) when it is finished."
        )
    if given.chat is not None or given.split is not None:
        raise StoreError(
            "penstock.stream takes no chat= and no split=: build such a store with penstock.build."
        )
    if not timeout > 0:
        raise StoreError(f"timeout={timeout} must be more than 0 seconds.")
    # The build continues in the background, perhaps after a change of the working directory.
    job = prepare(inputs, place.absolute(), given)
    is_finished = any((job.directory / side / FILE_NAME).exists() for side in ("", *SIDES))
    is_read_only = not os.access(lock_path(job.directory).parent, os.W_OK)
    if is_finished and is_read_only and Journal(job.directory).begun() is None:
        # There is nothing to build and nothing to lock: without a journal, `begin` only compares
        # the settings and the inputs with those of the store.
        begin(job)
        builder = None
    else:
        if is_finished or Journal(job.directory).failed(job.stamped):
            # A finished store with other settings is refused here, and not at the first batch.
            # What is left of a build that failed is removed before a reader sees it.
            with suppress(StoreBusyError), locked(job.directory):
                begin(job)
        builder = Builder(job)
    return StreamedStore(job.directory, job.stamped, job.tokenizer.dtype.name, timeout, builder)


class Builder:
    """A thread that builds a store, or waits until it can continue another process's build."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._stop = threading.Event()
        self._process = os.getpid()
        self.error: BaseException | None = None
        self.progress: BuildProgress | None = None
        """The progress of the build, if this process builds."""
        self._thread = threading.Thread(target=self._run, name="penstock-stream", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop building; sealed parts stay, and another process may continue."""
        if os.getpid() != self._process:
            return  # a fork does not copy threads
        # The build checks `_stop` at each progress report, several times a second. The join has a
        # timeout, because a tokenizer may need a long time for one document.
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

    def _build(self) -> bool:
        """Build unless another process does; return whether the store is finished."""
        try:
            with room_for(self._job.directory), locked(self._job.directory):
                # Under the lock, because the process that held it before may have sealed slices
                # or finished the store.
                job = begin(self._job, live=True)
                if job is not None:
                    execute(job, self._report)
                return True
        except StoreBusyError:
            return False

    def _report(self, progress: BuildProgress) -> None:
        """Keep the progress; called by the build several times a second."""
        self.progress = progress
        if self._stop.is_set():
            raise _Closed


class _Closed(Exception):  # noqa: N818  (not an error: the stream was closed)
    """Ends a build whose stream was closed."""
