"""`build`: turn raw text into a finished store.

A build may be killed at any moment; the same call resumes it. The bytes of the store depend on
the inputs and the settings alone, not on threads, timing or interruptions.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Literal

from penstock.errors import (
    RemoteError,
    SourceError,
    StoreError,
    TokenizerError,
)
from penstock.paths import StoreUrl, store_path
from penstock.sources.settings import Format
from penstock.store.commit import commit
from penstock.store.existing import (
    accept_touched,
    discard,
    earlier_build,
    killed_at_the_end,
)
from penstock.store.files import (
    make_directory,
    remove_temporary,
    room_for,
)
from penstock.store.inputs import read_stamps, remember_stamps
from penstock.store.job import BuildSettings, Inputs, Job, Report, WorkersName, prepare
from penstock.store.journal import Journal, SealedSlice
from penstock.store.lock import locked
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
from penstock.tokenize.tokenizer import SpecialTokens


def build(  # noqa: PLR0913  (the one call every user makes: flat keywords read best)
    inputs: Inputs,
    store: str | os.PathLike[str] | StoreUrl,
    *,
    tokenizer: object = "gpt2",
    format: Format = "auto",
    documents: str = "auto",
    field: str = "text",
    errors: Literal["strict", "replace"] = "strict",
    eos: bool | str = True,
    bos: bool | str = False,
    special_tokens: SpecialTokens = "text",
    add_tokens: Literal["auto"] | Sequence[str] | None = None,
    chat: object = None,
    split: str | None = None,
    append: bool = False,
    overwrite: bool = False,
    max_bad: float = 0.001,
    threads: int | None = None,
    workers: WorkersName | str = "auto",
    progress: Report | bool | None = None,
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
        tokenizer: A name, a path or an object; see `load_tokenizer`.
        format: "text", "jsonl", "json" (an array of records), "csv", "tsv", "parquet" or "arrow".
            "auto" decides by the file name's suffix; a .json file that begins with `[` is an array,
            and JSON Lines otherwise. The first line of .csv and .tsv files names their columns.
        documents: What a document is in text files. "auto" looks for `<|endoftext|>` and for the
            tokenizer's end token (except `</s>`) in the first 64 MB of a file. The first of these
            that is found separates the documents. A file with neither is one document, and all
            its bytes are kept. Other values: "lines", "paragraphs", "file", or "sep:SEPARATOR". A
            JSON line or a row of a table is always a document. A separator of letters and digits
            needs "sep:".
        field: The JSON field or table column that holds the text; `a.b` is the field `b` inside
            `a`. With `chat`, a column of prompts and one of completions: "question,answer".
        errors: "strict" rejects documents that are not UTF-8, "replace" puts U+FFFD where bytes
            are invalid.
        eos: Whether a document ends with the tokenizer's end token, or the name of the token.
        bos: Whether a document begins with the tokenizer's start token, or the name of the token.
            A token that is there already is not added a second time.
        special_tokens: How to read `<|endoftext|>` in a document: "text" as ordinary text,
            "parse" as the special token.
        add_tokens: Special tokens to add to the tokenizer. Their ids follow its vocabulary and
            are recorded in the store. "auto" adds the markers of the chat template that the
            tokenizer lacks.
        chat: A chat template, or a `Chat`. The inputs are then conversations (JSON Lines, JSON
            arrays, Parquet), and the store records for each token whether it is trained on. The
            template writes the tokens around each turn; `eos` is added, and trained on, only if
            the template writes no end token.
        split: "tail:0.1" holds out the documents that begin in the last tenth of the input; if the
            input is one document, the last tenth of its characters. "hash:0.1" holds out a tenth
            of the documents, chosen by a digest of their text. A split that leaves one side empty
            is an error.
        append: Add `inputs` to a finished store as new parts. Existing parts do not change.
        overwrite: Replace the store, or the unfinished build, that is in the directory. The old
            store stays until the new one is complete, so there must be room for both. A directory
            that holds other files too is refused.
        max_bad: How many rejected records to allow. Between 0 and 1: a share of all records, but
            ten if there are at least 1,000 records. Otherwise: a number of records.
        threads: How many slices are tokenized at once; by default one per core. Changes speed and
            memory only.
        workers: Who tokenizes: "threads" of this process, or "processes" that have two threads
            each. "auto" uses processes for more than four threads and 1 GB of text. "ray" uses a
            Ray cluster: the one that this process is connected to, or the one that `ray.init`
            finds or starts. "ray://HOST:PORT" connects to a cluster with Ray Client. All nodes
            need penstock, and the inputs and the store at the same paths. The bytes of the store
            are the same.
        progress: True shows a progress bar on stderr, as the command does; without a terminal, a
            line every ten seconds. A function is called about ten times a second with a
            `BuildProgress`, from the calling thread. In its last call, just before the store is
            finished, `done_bytes` equals `total_bytes`. Not called if the store is finished
            already.

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
    # `BuildSettings` has a field of the same name for each argument except these two.
    arguments = dict(locals())
    progress, overwrite = arguments.pop("progress"), arguments.pop("overwrite")
    if append and overwrite:
        raise StoreError(
            "append=True (--append) adds to a store and overwrite=True (--overwrite) replaces it: "
            "leave one of them out of penstock.build."
        )
    place = store_path(store)
    if not isinstance(place, StoreUrl):
        job = _build(BuildSettings(**arguments), None, overwrite, progress)
        return TokenStore(job.directory / job.sides[0])
    remote = Destination(place)
    with remote.naming_it():
        # The parts are made on this machine, and sent from there.
        settings = BuildSettings(**{**arguments, "store": remote.staging})
        job = _build(settings, remote, overwrite, progress)
    return TokenStore(place / job.sides[0])


def _build(
    settings: BuildSettings,
    remote: Destination | None,
    overwrite: bool,
    progress: Report | bool | None,
) -> Job:
    """Run a build; returns its job."""
    with room_for(Path(settings.store)):
        if remote is not None:
            remote.staging.mkdir(parents=True, exist_ok=True)
        job = replace(prepare(settings), remote=remote)
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
    return job


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
    job = replace(job, split=parse_split(job.settings.split, job.files, job.reading))
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
    if manifest is not None and not job.settings.append:
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
        make_directory(job.directory / side)
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
    if job.settings.append:
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
