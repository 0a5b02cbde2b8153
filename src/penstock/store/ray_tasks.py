"""Tasks on a Ray cluster that make slices, each a whole slice.

    build ── the job, once, as a Ray object ──► each worker process, which keeps it
          ── a slice ─────────────────────────► a task on any node: writes and syncs the parts
          ◄─────────────────────── MadeSlice ──

Ray chooses the node of a task, and runs the task again if its process or its node dies. Only the
build itself writes the journal, so a build that was killed can be resumed by workers of any kind.

Two copies of a task may run at once: Ray gives up a node that does not answer, and the node may
only have lost its network. Both copies write the same bytes, under temporary names that differ, and
rename them. A task can also outlive its build: by 30 seconds if the build used Ray Client
(`ray://`) and was killed. So a task checks before it writes that the journal still belongs to its
build.
"""

import logging
import os
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from penstock import __version__
from penstock.disk import remove_temporary
from penstock.errors import MissingExtraError, MissingInputError, StoreError, WorkerError
from penstock.sources.files import InputFile
from penstock.store.job import Job
from penstock.store.journal import Journal
from penstock.store.memory import arrow_from_malloc, keep_freed_memory, num_slots
from penstock.store.processes import cannot_send
from penstock.store.slice_work import (
    Advance,
    MadeSlice,
    Order,
    Stopped,
    Watch,
    sync_parts,
    tokenize,
    write_parts,
)
from penstock.store.threads import Take
from penstock.tokenize.compare import EncodedSample

# A slice takes seconds, so the nodes that disappear rarely hit one slice twice. A slice whose
# worker dies this often is itself the reason: it needs too much memory, or crashes a library.
_RETRIES = 10
_COUNT_SECONDS = 5.0  # between two looks at the size of the cluster
_CANCEL_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class RemoteJob:
    """A job as other nodes need it: with absolute paths, and the digest of its build."""

    job: Job
    build: str


class RayRunner:
    """Makes each slice in a Ray task. The number of slots follows the cores of the cluster."""

    def __init__(self, job: Job, address: str | None = None) -> None:
        self._ray = _imported_ray()
        self._directories = [job.directory / side for side in job.sides]
        # Guards the rest. Notified when a slot has no task any more.
        self._idle = threading.Condition()
        self._tasks: dict[int, Any] = {}
        self._is_closed = False
        self._counted = -_COUNT_SECONDS
        self.num_slots = 0
        self._is_ours = _connect(self._ray, address)
        try:
            self._make = self._ray.remote(num_cpus=1, max_retries=_RETRIES)(make_slice)
            self._job = self._sent(job)
            self.tick()
        except BaseException:
            self.close()
            raise

    def _sent(self, job: Job) -> Any:
        """The job as a Ray object, which each worker process loads once."""
        try:
            # As bytes: of an object that it cannot pickle, Ray would print all contents, also
            # the signatures of URLs.
            data = self._ray.cloudpickle.dumps(remote_job(job))
        except Exception as error:  # an object of the user may raise anything
            raise cannot_send(str(error) or type(error).__name__) from error
        return self._ray.put(data)

    def make_next(self, slot: int, take: Take, watch: Watch) -> MadeSlice | None:
        """Take a slice and wait for its task; see `penstock.store.runners.Runner`."""
        order = take()
        if order is None:
            return None
        with self._idle:
            if self._is_closed:
                raise Stopped
            # In a list: Ray would load the job itself, again for every task.
            task = self._make.remote(__version__, [self._job], order)
            self._tasks[slot] = task
        try:
            made, advances = self._result(task, order)
        finally:
            with self._idle:
                del self._tasks[slot]
                self._idle.notify_all()
        # Only now: a task that Ray has run twice counts once.
        for advance in advances:
            watch.report(advance)
        return made

    def _result(self, task: Any, order: Order) -> "tuple[MadeSlice, list[Advance]]":
        errors = self._ray.exceptions
        try:
            result: tuple[MadeSlice, list[Advance]] = self._ray.get(task)
        except errors.RayTaskError as error:
            cause = error.cause
            # The task did not begin, because the node has no penstock, or another version of it.
            if isinstance(cause, errors.RayError) or "failed to import" in str(cause):
                raise WorkerError(
                    f"A Ray node cannot load its task. Install penstock {__version__} and what it "
                    f"requires on all nodes. The node and the reason:\n{error}"
                ) from error
            # As if the slice was made here. `error` shows the traceback of the task.
            raise cause from error
        except errors.RayError as error:
            if self._is_closed:
                raise Stopped from None
            raise WorkerError(
                f"Ray gave up slice {order.piece.index} after at most {_RETRIES + 1} attempts: "
                f"{error} Usual reasons are nodes with too little memory, and a cluster that was "
                "stopped. Finished parts are kept: run the same build again to resume it."
            ) from error
        return result

    def tick(self) -> None:
        """Have more slots if the cluster has more cores than before."""
        if self._is_closed or time.monotonic() < self._counted + _COUNT_SECONDS:
            return
        self._counted = time.monotonic()
        cores = max(int(self._ray.cluster_resources().get("CPU", 0)), 1)
        # The extra tasks wait until a core is free, so that no core waits for this process.
        slots = num_slots(cores)
        # Never fewer than before: the threads of these slots are there already.
        self.num_slots = max(self.num_slots, slots)

    def close(self) -> None:
        """Stop all tasks, and disconnect if this runner has connected."""
        with self._idle:
            if self._is_closed:
                return
            self._is_closed, is_complete = True, not self._tasks
            for task in self._tasks.values():
                # By force: a task that tokenizes would not notice an exception for seconds.
                self._ray.cancel(task, force=True)
            # Slots must not use Ray after the shutdown: it would start again.
            self._idle.wait_for(lambda: not self._tasks, _CANCEL_SECONDS)
        if self._is_ours:
            self._ray.shutdown()
        for directory in self._directories if is_complete else ():
            with suppress(OSError, StoreError):  # the build itself sees that the directory is gone
                remove_temporary(directory)  # files of nodes that died while they wrote


def remote_job(job: Job) -> RemoteJob:
    """The job as other nodes need it."""

    def absolute(file: InputFile) -> InputFile:
        if file.remote or file.texts is not None:
            return file
        return replace(file, path=str(Path(file.path).absolute()))

    files = [absolute(file) for file in job.files]
    # These arguments are used up: the job has the listed inputs and the loaded tokenizer.
    options = replace(job.options, tokenizer=None, chat=None)
    sent = replace(job, options=options, directory=job.directory.absolute(), files=files)
    return RemoteJob(sent, Journal(job.directory).identity)


def make_slice(version: str, job: "list[Any]", order: Order) -> "tuple[MadeSlice, list[Advance]]":
    """Make the parts of one slice, on a node of the cluster; also returns its progress.

    Args:
        version: The version of penstock that started the build.
        job: The Ray object with the `RemoteJob`, in a list.
        order: The slice.
    """
    try:
        if version != __version__:
            raise StoreError(
                f"This node has penstock {__version__}, and the build was started with "
                f"penstock {version}. Another version may write other bytes. Install the same "
                "version on all nodes."
            )
        return _make_here(_loaded(job[0]), order)
    except Exception as error:
        error.add_note(f"On the Ray node {_node()}.")
        raise


@lru_cache(maxsize=1)
def _loaded(job: Any) -> RemoteJob:
    """The job; kept for the next tasks of this process, because loading a tokenizer is slow."""
    # gigatoken would start a thread for each core of the node, in each of as many processes.
    os.environ.setdefault("RAYON_NUM_THREADS", "1")
    keep_freed_memory()
    ray = _imported_ray()
    loaded: RemoteJob = ray.cloudpickle.loads(ray.get(job))
    return loaded


def _make_here(remote: RemoteJob, order: Order) -> "tuple[MadeSlice, list[Advance]]":
    job, advances = remote.job, list["Advance"]()
    _refuse_unseen(remote, order)
    with arrow_from_malloc():
        done = tokenize(job, order, Watch(advances.append, lambda: False))
        _refuse_unseen(remote, order)  # the build may have ended since
        write_parts(done)
        made = sync_parts(done)
    # Here, because a driver with few cores would be too slow for the samples of all nodes.
    made.sample.compare(job.tokenizer)
    return replace(made, sample=EncodedSample([], [], [])), advances


def _refuse_unseen(remote: RemoteJob, order: Order) -> None:
    """Raise if this node does not see the files of the build."""
    job = remote.job
    is_seen = Journal(job.directory).identity == remote.build
    if not is_seen and job.remote is not None:
        raise StoreError(
            f"The Ray node {_node()} cannot build {job.remote.shown}: parts of a store in object "
            "storage are made in a directory of the machine that started the build. Build to a "
            "directory that all nodes have at the same path, and copy the store with `penstock "
            "copy` (in Python, penstock.copy)."
        )
    if not is_seen:
        raise StoreError(
            f"The Ray node {_node()} does not find the build in {job.directory}: the directory is "
            "not there, or holds something else. The nodes write the parts of the store "
            "themselves, so the store must be on storage that all nodes have at the same path."
        )
    for span in order.piece.spans:
        file = job.files[span.file]
        is_local = not (file.remote or file.texts is not None)
        if is_local and span.data is None and not Path(file.path).exists():
            raise MissingInputError(
                f"The Ray node {_node()} does not find {file.path}. The nodes read the inputs "
                "themselves, so the inputs must be on storage that all nodes have at the same "
                "path, or be URLs."
            )


def _node() -> str:
    """The host name and the address of this node."""
    return f"{socket.gethostname()} ({_imported_ray().util.get_node_ip_address()})"


def _imported_ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise MissingExtraError(
            'With workers="ray" (--workers ray), penstock.build needs Ray, which is not installed. '
            'Install it with: pip install "penstock[ray]"'
        ) from error
    return ray


def _connect(ray: Any, address: str | None) -> bool:
    """Connect this process to a cluster, or start one; False if it is connected already."""
    if ray.is_initialized():
        if address is not None:
            raise StoreError(
                f"penstock.build cannot connect to {address}: this process is connected to a Ray "
                'cluster already. To build there, use workers="ray" of penstock.build. To build at '
                "the other address, call ray.shutdown() first."
            )
        return False
    try:
        ray.init(address, logging_level=logging.WARNING)
    except ConnectionError as error:
        where = address or "the address in RAY_ADDRESS"
        raise WorkerError(
            f"No Ray cluster answers at {where}: {error}. Start the cluster with `ray start`, or "
            "correct the address."
        ) from error
    return True
