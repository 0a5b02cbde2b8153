"""Builds that are shared by the tasks of a job array, on machines with a shared file system.

    penstock build … -o STORE --task 0/64 … --task 63/64     on any machines, at any times
    penstock build … -o STORE --commit                       once, when all tasks have ended

Task I of N makes the slices I, I + N, I + 2N and so on. Slices and their parts depend on the inputs
and the settings alone, so no task needs to know another one. Any task may be killed and repeated,
and one task may run twice at the same time: both write the same bytes, each under a temporary name
of its own, and rename them to the same name.

The tasks share the lock of the store, so nobody else writes it while a task runs. The first task
needs the whole lock for a moment, to begin the journal. The commit needs the whole lock as well.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import inf
from pathlib import Path

from penstock.errors import StoreBusyError, StoreError
from penstock.remote.address import StoreUrl, store_path
from penstock.store.build import begin, build, clean_up, finish
from penstock.store.files import create_file, remove_file, room_for
from penstock.store.job import BuildSettings, Inputs, Job, Report, prepare
from penstock.store.journal import Journal, SealedSlice
from penstock.store.lock import locked, locked_by_task
from penstock.store.reader import TokenStore
from penstock.store.refusals import BadRecords
from penstock.store.resume import intact_slices
from penstock.store.workers import Workers

# Beginning a build takes milliseconds, unless a split has to read compressed inputs first.
_WAIT_SECONDS = 300.0
_POLL_SECONDS = 0.05
_SHOWN = 20


def build_task(
    inputs: Inputs,
    store: str | Path | StoreUrl,
    *,
    task: int,
    num_tasks: int,
    progress: Report | None = None,
    **settings: object,
) -> list[SealedSlice]:
    """Make one task's share of a build; returns the records of its slices.

    The call with the same arguments repeats a task that was killed, and returns at once if nothing
    is left to do. When all tasks have ended, `commit_tasks` finishes the store.

    Args:
        inputs: As for `build`. All tasks must see the same files, with the same modification times.
        store: The directory to write, which all tasks share.
        task: The number of this task, from 0.
        num_tasks: How many tasks there are.
        progress: As for `build`.
        settings: Other arguments of `build`, the same for all tasks. `max_bad` counts at the
            commit, and `overwrite` is not allowed.

    Raises:
        StoreError: the directory holds other files, or a build with other settings or tasks.
        StoreBusyError: another process, which is not a task of this build, writes the store.
    """
    if not 0 <= task < num_tasks:
        raise StoreError(
            f"task={task} of num_tasks={num_tasks} (--task {task}/{num_tasks}) does not exist: "
            "tasks are numbered from 0, so that the last one is num_tasks - 1."
        )
    job = _prepared(inputs, store, settings)
    if any(file.is_stdin for file in job.files):
        raise StoreError(
            "Standard input (-) can be read only once, and every task reads the inputs. Write it "
            "to a file that all tasks can read."
        )
    with room_for(job.directory):
        if not _begin_together(job, num_tasks):
            return []
        with locked_by_task(job.directory):
            begun = begin(job)
            return [] if begun is None else _make_share(begun, task, num_tasks, progress)


def _prepared(inputs: Inputs, store: str | Path | StoreUrl, settings: dict[str, object]) -> Job:
    """The job of a build; `settings` are arguments of `build`."""
    arguments = {**(build.__kwdefaults__ or {}), **settings}
    if arguments.pop("overwrite"):
        raise StoreError(
            "Several tasks cannot replace a store: overwrite=True (--overwrite) deletes it. Delete "
            "the store before you start the tasks, or choose another directory."
        )
    arguments.pop("progress")
    if isinstance(place := store_path(store), StoreUrl):
        raise StoreError(
            f"{place} is in object storage, and tasks share a directory. Give them "
            "a directory that all machines see, and copy the finished store with `penstock copy` "
            "(in Python, penstock.copy)."
        )
    return prepare(BuildSettings(inputs=inputs, store=place, **arguments))


def _begin_together(job: Job, num_tasks: int) -> bool:
    """Begin the journal of the build, unless another task has; False if the store is finished.

    Raises:
        StoreError: the unfinished build has other settings, or another number of tasks.
    """
    journal, until = Journal(job.directory), time.monotonic() + _WAIT_SECONDS
    while journal.begun(job.stamped) is None:
        try:
            with locked(job.directory):
                _refresh(job.directory)
                begun = begin(job)
                if begun is None:
                    return False
                journal.begin(begun.stamped, begun.first_build, num_tasks)
                clean_up(begun)
        except StoreBusyError:
            # Most likely another task, which does the same.
            if time.monotonic() > until:
                raise
            time.sleep(_POLL_SECONDS)
    if journal.num_tasks not in (None, num_tasks):
        raise StoreError(
            f"{job.directory} holds a build of {journal.num_tasks} tasks, and this is one of "
            f"{num_tasks} (num_tasks=, or the number after / of --task). Use the same number, or "
            "delete the directory to start again."
        )
    return True


def _refresh(directory: Path) -> None:
    """Make a client of a network file system see what other machines wrote to `directory`.

    A client may remember for a minute that a file does not exist. When it changes the directory
    itself, it learns that others have changed it too.
    """
    path = directory / ".task-000000.json.0.000000000000.tmp"  # a name that is removed anyway
    create_file(path)
    remove_file(path)


def _make_share(job: Job, task: int, num_tasks: int, progress: Report | None) -> list[SealedSlice]:
    """Make all slices of a task; the caller holds a share of the lock."""
    journal = Journal(job.directory)
    # Whether too many records are rejected depends on the records of all tasks.
    settings = replace(job.settings, max_bad=inf)
    share = replace(job, settings=settings, share=(task, num_tasks))
    # Damaged records stay until the commit: `Journal.sealed` says who may remove them.
    sealed = [each for each in journal.sealed() if each.number % num_tasks == task]
    workers = Workers(share, intact_slices(share, journal, sealed))
    made = workers.run(progress)
    journal.end_task(task, workers.num_slices)
    return made


def commit_tasks(inputs: Inputs, store: str | Path | StoreUrl, **settings: object) -> TokenStore:
    """Finish a store whose slices were made by tasks, and open it; see `build_task`.

    The parts are not read again: `verify` does that. Returns at once if the store is finished.

    Args:
        inputs: The inputs of all tasks.
        store: The directory of the store.
        settings: The other arguments of `build` that all tasks had.

    Raises:
        StoreError: some tasks have not made all their slices. The message names them.
        SourceError: more records were rejected than `max_bad` allows.
        StoreBusyError: a task is running.
    """
    job = _prepared(inputs, store, settings)
    with room_for(job.directory), _whole_lock(job.directory):
        _refresh(job.directory)
        begun = begin(job)
        if begun is not None:
            journal = Journal(job.directory)
            if journal.begun(begun.stamped) is None:
                raise StoreError(
                    f"{job.directory} holds no build to commit: no task has begun one. Run all "
                    "tasks first, with --task I/N (build_task of penstock.store)."
                )
            sealed = journal.begin(begun.stamped, begun.first_build)
            clean_up(begun)
            _refuse_missing(begun, journal, sealed)
            BadRecords(begun).refuse_bad({each.number: each for each in sealed}, ended=True)
            finish(begun, sealed)
    return TokenStore(job.directory / job.sides[0])


@contextmanager
def _whole_lock(directory: Path) -> Iterator[None]:
    try:
        with locked(directory):
            yield
    except StoreBusyError as error:
        error.add_note("A task of this build may still be running. Commit when all have ended.")
        raise


def _refuse_missing(job: Job, journal: Journal, sealed: list[SealedSlice]) -> None:
    """Raise if slices are missing."""
    num_tasks, ended = journal.num_tasks or 1, journal.ended_tasks()
    num_slices = max(ended.values(), default=0)
    found = {each.number for each in sealed}
    missing = {number % num_tasks for number in range(num_slices) if number not in found}
    if not ended:
        missing = set(range(num_tasks))
    if missing:
        first = ", ".join(f"{task}/{num_tasks}" for task in sorted(missing)[:_SHOWN])
        more = f" and {len(missing) - _SHOWN:,} more" if len(missing) > _SHOWN else ""
        raise StoreError(
            f"{job.directory} cannot be committed: {len(missing):,} of {num_tasks:,} tasks have "
            f"not made all their slices. Run them (again) with --task (build_task of "
            f"penstock.store), and then commit: {first}{more}."
        )
