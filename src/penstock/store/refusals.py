"""Checks of the result of a build, before it becomes a store.

A build that stored nothing, or rejected more than was allowed, is a failure. The advice in these
messages is to change a setting or an input. So the build is recorded as failed, and the next one
in the same directory may have other settings (see `Journal.fail`).
"""

from collections.abc import Mapping, Sequence

from penstock.errors import SourceError, StoreError
from penstock.sources.batch import Reject, Tally, allowed_rejects
from penstock.store import manifest as manifests
from penstock.store.job import Job
from penstock.store.journal import SealedSlice

_SHOWN = 5


class BadRecords:
    """Counts the rejected records of the leading sealed slices, and raises if they are too many.

    Only slices before the first gap count, so that it does not matter which worker is faster. Each
    slice is counted once, so a build of many slices does not count them all again and again.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._next = 0  # the first slice that is not counted
        self._first: list[Reject] = []
        self._num_bad = 0
        self._num_records = 0

    def refuse_bad(self, sealed: Mapping[int, SealedSlice], *, ended: bool = False) -> None:
        """Count new slices; raise if more records were rejected than `max_bad` allows.

        Args:
            sealed: The records of all sealed slices, by number.
            ended: Whether these are all slices.
        """
        while (record := sealed.get(self._next)) is not None:
            self._next += 1
            self._first += record.rejects[: _SHOWN - len(self._first)]
            self._num_bad += len(record.rejects)
            self._num_records += record.tally.documents + record.tally.rejected
            self._refuse_more(ended=False)
        # The first slice may have few records and the next ones many, so whether the input is
        # small is known only here. If every record is rejected, `refuse_nothing` says more.
        if ended and self._num_bad < self._num_records:
            self._refuse_more(ended=True)

    def _refuse_more(self, *, ended: bool) -> None:
        max_bad = self._job.options.max_bad
        limit = allowed_rejects(max_bad, self._num_records, ended=ended)
        if self._num_bad <= limit:
            return
        shown = "\n".join(f"  {self._job.located(each)}" for each in self._first)
        # The limit of the records so far, even if others may follow: ten are too many for both.
        allowed = int(allowed_rejects(max_bad, self._num_records, ended=True))
        is_small = 0 < max_bad < 1 and self._num_records < 1_000
        raise SourceError(
            f"{self._num_bad:,} of {self._num_records:,} records were rejected, more than the "
            f"{allowed:,} that max_bad={max_bad:g} allows{' of fewer than 1,000' * is_small}. The "
            f"first:\n{shown}\n"
            f"{_chat_advice(self._first)}"
            "Repair the input, set the field, format or errors that fit it, or raise max_bad= "
            "(--max-bad) of penstock.build. With a higher limit the build resumes where it "
            "stopped; after any other change it begins again."
        )


def _chat_advice(rejects: Sequence[Reject]) -> str:
    """Return advice if records without the text field have the fields of conversations."""
    fields = ('"messages"', '"conversations"', '"instruction"', '"prompt"')
    for each in rejects[:_SHOWN]:
        found = each.detail.partition("; it has ")[2]
        if each.reason == "missing_field" and any(name in found for name in fields):
            return (
                "These records look like conversations: penstock.build takes them with chat= "
                '(--chat), for example chat="chatml". '
            )
    return ""


_READ_DIFFERENTLY = (
    "Repair the input, or change how it is read. With penstock.build, field= (--field) names the "
    'field that holds the text, errors="replace" (--errors replace) puts U+FFFD where bytes are '
    'not UTF-8, and documents="lines" (--documents lines) rejects single lines.'
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
        number = len(rejects)
        everything = "its only record was" if number == 1 else f"all {number:,} records were"
        raise SourceError(
            f"No document is left to store: {everything} rejected. The first: "
            f"{job.located(rejects[0])}. {_chat_advice(rejects)}"
            f"{_READ_DIFFERENTLY if job.chat is None else 'Repair the input.'}"
        )
    raise SourceError(
        f"The inputs hold no document, so there is nothing to build: {len(job.files):,} "
        f"file{'s' * (len(job.files) != 1)} ({names}), {size:,} bytes, {tally.skipped:,} blank "
        f"record{'s' * (tally.skipped != 1)}. Name files that hold text."
    )


def refuse_lost_bytes(job: Job, done: Sequence[SealedSlice]) -> None:
    """Raise if the counts do not cover every byte of the plain text files."""
    by_bytes = ("text", "jsonl", "json", "csv", "tsv")
    if any(f.compression or f.format not in by_bytes for f in job.files):
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
