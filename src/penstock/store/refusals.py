"""Checks of the result of a build, before it becomes a store.

A build that stored nothing, or rejected more than was allowed, is a failure. The advice in these
messages is to change a setting or an input. So the build is recorded as failed, and the next one
in the same directory may have other settings (see `Journal.fail`).
"""

import itertools
from collections.abc import Mapping, Sequence

from penstock.errors import SourceError, StoreError
from penstock.sources.document import Reject, Tally, allowed_rejects
from penstock.store import manifest as manifests
from penstock.store.folders import claim_of
from penstock.store.job import Job
from penstock.store.journal import SealedSlice

_SHOWN = 5


def refuse_bad(job: Job, sealed: Mapping[int, SealedSlice], *, ended: bool = False) -> None:
    """Raise if the leading sealed slices have more rejected records than `max_bad` allows.

    Args:
        job: The build.
        sealed: The records of the sealed slices, by number.
        ended: Whether these are all slices.
    """
    found: list[Reject] = []
    num_records = 0
    # Only slices before the first gap count, so that it does not matter which worker is faster.
    for number in itertools.takewhile(sealed.__contains__, itertools.count()):
        tally = sealed[number].tally
        found += sealed[number].rejects
        num_records += tally.documents + tally.rejected
        _refuse_more(job, found, num_records, ended=False)
    # The first slice may have few records and the next ones many, so whether the input is small
    # is known only here. If every record is rejected, `refuse_nothing` says more.
    if ended and len(found) < num_records:
        _refuse_more(job, found, num_records, ended=True)


def _refuse_more(job: Job, found: Sequence[Reject], num_records: int, *, ended: bool) -> None:
    max_bad, num_bad = job.settings.max_bad, len(found)
    limit = allowed_rejects(max_bad, num_records, ended=ended)
    if num_bad <= limit:
        return
    shown = "\n".join(f"  {job.located(each)}" for each in found[:_SHOWN])
    raise SourceError(
        f"{num_bad:,} of {num_records:,} records were rejected, more than the {int(limit):,} that "
        f"max_bad={max_bad:g} allows. The first:\n{shown}\n"
        "Repair the input, set the field, format or errors that fit it, or raise max_bad= "
        "(--max-bad) of penstock.build. With a higher limit the build resumes where it stopped; "
        "after any other change it begins again."
    )


def refuse_nothing(job: Job, done: Sequence[SealedSlice]) -> None:
    """Raise if the inputs hold no document that can be stored."""
    tally = Tally.total([Tally(), *(record.tally for record in done)])
    if any(part.num_documents for record in done for part in record.parts.values()):
        return
    if any(file.texts is not None and file.texts.may_be_empty for file in job.files):
        return
    rejects = [reject for record in done for reject in record.rejects]
    size = sum(file.size for file in job.files)
    names = ", ".join(file.name for file in job.files[:_SHOWN])
    if rejects:
        raise SourceError(
            f"No document is left to store: all {len(rejects):,} records were rejected. The first: "
            f"{job.located(rejects[0])}. Repair the input, or change how it is read. With "
            "penstock.build, field= (--field) names the field that holds the text, "
            'errors="replace" (--errors replace) puts U+FFFD where bytes are not UTF-8, and '
            'documents="lines" (--documents lines) rejects single lines.'
        )
    raise SourceError(
        f"The inputs hold no document, so there is nothing to build: {len(job.files):,} "
        f"file{'s' * (len(job.files) != 1)} ({names}), {size:,} bytes, {tally.skipped:,} blank "
        "records. Name files that hold text."
    )


def refuse_lost_bytes(job: Job, done: Sequence[SealedSlice]) -> None:
    """Raise if the counts do not cover every byte of the plain text files."""
    by_bytes = ("text", "jsonl", "json", "csv", "tsv")
    if any(f.compression or f.is_stdin or f.format not in by_bytes for f in job.files):
        return  # how many bytes of text they hold is not known beforehand
    # If a byte is missing, two slices were cut at different borders. Then a document is lost or
    # cut in two, and no later check would find it.
    counted = sum(record.tally.total_bytes for record in done)
    size = sum(file.size for file in job.files)
    if counted != size:
        raise StoreError(
            f"The inputs have {size:,} bytes, but the build read {counted:,}. This is a bug in "
            "penstock: please report it. The store was not finished."
        )


def refuse_deleted(job: Job, done: Sequence[SealedSlice]) -> None:
    """Raise if a file of a sealed part was deleted or cut off while other parts were made."""
    for record in done:
        for side, part in record.parts.items():
            for kind, (size, _) in part.files.items():
                path = job.directory / side / manifests.part_file(part.number, kind)
                if not path.exists() or path.stat().st_size != size:
                    if (claim := claim_of(job.directory)) is not None:
                        claim.check()  # raises if the whole directory was deleted
                    raise StoreError(
                        f"{path} was deleted or changed during the build, so the store would not "
                        "be complete. Run this again: only the missing parts are made again."
                    )


def refuse_empty_side(job: Job, done: Sequence[SealedSlice]) -> None:
    """Raise if the split leaves one side without documents."""
    for side in job.sides if job.split else ():
        directory = job.directory / side
        num_documents = sum(record.parts[side].num_documents for record in done)
        if not num_documents and not (directory / manifests.FILE_NAME).exists():
            others = sum(part.num_documents for record in done for part in record.parts.values())
            raise StoreError(
                f"The split leaves {directory} empty: the inputs have {others:,} documents, and "
                "none begins on that side. Hold out another share, use more documents, or build "
                "the two sides from separate files."
            )
