"""`build`: turn raw text into a finished store.

A build may be killed at any moment; the same call resumes it. The bytes of the store depend on
the inputs and the settings alone, not on threads, timing or interruptions.
"""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Unpack

from penstock.disk import locked, remove_temporary, room_for
from penstock.errors import (
    RemoteError,
    SourceError,
    StoreError,
    TokenizerError,
)
from penstock.options import BuildKeywords, BuildOptions, made_of, takes
from penstock.paths import StoreUrl, store_path
from penstock.store.commit import commit
from penstock.store.existing import (
    accept_touched,
    discard,
    earlier_build,
    killed_at_the_end,
)
from penstock.store.inputs import read_stamps, remember_stamps
from penstock.store.job import Inputs, Job, Report, prepare
from penstock.store.journal import Journal, SealedSlice
from penstock.store.manifest import read_manifest
from penstock.store.overwrite import replacement
from penstock.store.part import parse_split
from penstock.store.reader import TokenStore
from penstock.store.refusals import (
    refuse_empty_side,
    refuse_lost_bytes,
    refuse_nothing,
)
from penstock.store.remake import damaged_files, remake
from penstock.store.resume import target_of
from penstock.store.upload import Destination
from penstock.store.workers import Workers


@takes(BuildOptions)
def build(
    inputs: Inputs,
    store: str | os.PathLike[str] | StoreUrl,
    *,
    append: bool = False,
    overwrite: bool = False,
    progress: Report | bool | None = None,
    **options: Unpack[BuildKeywords],
) -> TokenStore:
    """Tokenize `inputs` into a store in the directory `store`, and open it.

    The same call resumes a build that was killed, and returns at once if the store is finished. If
    files of a finished store are missing or cut off, it makes these again.
    With `split` it writes two stores, `store/train` and `store/val`, and opens the first.

    Args:
        inputs: Paths, globs, directories or URLs, or `Texts` in memory. Files may be plain,
            .gz, .zst, .bz2 or .xz, and are read in the order of their names. In a directory, links
            are followed, and each directory is read once. Hidden files are not read; the log and
            the manifest count them. A pipe, a broken link or an unknown suffix is an error.
        store: The directory to write, or the URL of a store in object storage: `s3://…`, `gs://…`
            or `az://…`.
        append: Add `inputs` to a finished store as new parts. Existing parts do not change.
        overwrite: Replace the store, or the unfinished build, that is in the directory. The old
            store stays until the new one is complete, so there must be room for both. A directory
            that holds other files too is refused.
        progress: True shows a progress bar on stderr, as the command does; without a terminal, a
            line every ten seconds. A function is called about ten times a second with a
            `BuildProgress`, from the calling thread. In its last call, just before the store is
            finished, `done_bytes` equals `total_bytes`. Not called if the store is finished
            already.
        **options: Those of `BuildOptions`.

    Raises:
        SourceError: an input cannot be read as asked, or too many records were rejected.
        TokenizerError: the tokenizer cannot be loaded, or its two libraries disagree.
        StoreError: the directory holds other files, or a store that was built differently.
        DiskFullError: the disk is full; make room and run the same call again.

    >>> import tempfile
    >>> from penstock import Texts
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     store = build(Texts(["To be,", "or not to be."]), f"{folder}/store")
    ...     print(len(store), store.num_tokens, store.decode(1))
    2 10 or not to be.
    """
    given = made_of(BuildOptions, {**options}, "penstock.build")
    if append and overwrite:
        raise StoreError(
            "append=True (--append) adds to a store and overwrite=True (--overwrite) replaces it: "
            "leave one of them out of penstock.build."
        )
    place = store_path(store)
    if not isinstance(place, StoreUrl):
        with room_for(place):
            job = prepare(inputs, place, given, append=append)
        _build(job, overwrite, progress)
        return TokenStore(job.directory / job.sides[0])
    remote = Destination(place)
    # The parts are made on this machine, and sent from there.
    with remote.naming_it(), room_for(remote.staging):
        remote.staging.mkdir(parents=True, exist_ok=True)
        job = replace(prepare(inputs, remote.staging, given, append=append), remote=remote)
        _build(job, overwrite, progress)
    return TokenStore(place / job.sides[0])


def _build(job: Job, overwrite: bool, progress: Report | bool | None) -> None:
    """Run a build whose inputs are listed."""
    remote = job.remote
    # So far only the directory was created, so a wrong argument leaves no file behind.
    with room_for(job.directory), locked(job.directory), ExitStack() as bars:
        if remote is not None:
            remote.pull()
        # The new store takes the place of the old one when this block ends without an error.
        made = bars.enter_context(replacement(job)) if overwrite else job
        begun = begin(made)
        if begun is None and remote is not None:
            remote.end()  # of a build that was killed after it was complete
        if begun is not None:
            report: Report | None = None if isinstance(progress, bool) else progress
            if progress is True:
                from penstock.cli.progress import build_bar  # needs rich, in a terminal

                report = bars.enter_context(build_bar())[1]
            execute(begun, report)
        if remote is not None:
            remote.empty_staging()


def begin(job: Job, *, live: bool = False) -> Job | None:
    """The job that `execute` has to run; None if the store is finished already and whole.

    The caller holds the store's lock.

    Args:
        job: The build.
        live: Whether its parts are read while others are built; see `Job`.
    """
    if killed_at_the_end(job):
        return None
    if Journal(job.directory).failed(job.stamped):
        discard(job.directory)
    # How the inputs are cut depends on the split, and their contents are compared in pieces.
    job = replace(job, split=parse_split(job.options.split, job.files, job.options))
    accept_touched(job)
    earlier = earlier_build(job)
    manifest, number = earlier or (None, 0)
    before = manifest.builds[:number] if manifest else []
    job = replace(
        job,
        # Numbers continue where the earlier builds ended: origins and parts that exist stay valid.
        first_build=number,
        first_file=sum(len(done["inputs"]) for done in before),
        first_part=sum(done["slices"] for done in before),
        live=live,
    )
    # `earlier_build` raises if the finished store is another one.
    if manifest is not None and not job.append:
        return None if live or not (files := damaged_files(job)) else replace(job, damaged=files)
    return job


def execute(job: Job, progress: Report | None = None) -> None:
    """Begin or resume the journal, make all parts and write the manifest.

    Of a finished store, only damaged files are made again. The caller holds the store's lock.
    """
    if job.damaged:
        remake(job, job.damaged, progress)
        return
    journal, target = Journal(job.directory), target_of(job)
    begun = journal.begin(job.stamped, job.first_build)
    clean_up(job)
    target.claim()
    sealed = target.intact(begun)
    with _failures_recorded(job):
        done = Workers(job, sealed).run(progress)
    finish(job, done)


def clean_up(job: Job) -> None:
    """Make the directories of the sides, and remove the files of killed writers.

    The caller holds the store's lock.
    """
    for side in filter(None, job.sides):
        (job.directory / side).mkdir(exist_ok=True)
    for each in {job.directory, *(job.directory / side for side in job.sides)}:
        # The caller holds the lock, so these temporary files belong to writers that were killed.
        remove_temporary(each)


def finish(job: Job, done: list[SealedSlice]) -> None:
    """Check the result of a build whose slices are all made, and write the manifest.

    The caller holds the store's lock.
    """
    journal, first_side = Journal(job.directory), job.directory / job.sides[0]
    target = target_of(job)
    with _failures_recorded(job):
        refuse_lost_bytes(job, done)
        refuse_nothing(job, done)
        refuse_empty_side(job, done)
    # Not a failure of these settings: the same build will make the missing parts.
    target.refuse_deleted(done)
    if job.chat is not None:
        job.chat.report.log()
    earlier: dict[str, str] = {}
    if job.append:
        earlier = read_stamps(job.directory, read_manifest(first_side).digest)
    commit(job, done)
    target.commit(job.sides)
    remember_stamps(job.directory, read_manifest(first_side).digest, job.files, earlier)
    # A kill before this line leaves a journal that `killed_at_the_end` recognises.
    journal.end()
    target.end()


@contextmanager
def _failures_recorded(job: Job) -> Iterator[None]:
    """Record in the journal that a build cannot succeed, if the `with` block says so."""
    try:
        yield
    except RemoteError:
        raise  # the same settings will succeed, with a better network
    except (SourceError, StoreError, TokenizerError) as error:
        # Not after Ctrl-C or on a full disk: then the same settings will succeed.
        Journal(job.directory).fail()
        target_of(job).fail(error)
        raise
