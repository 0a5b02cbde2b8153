"""How many bad records a build bears."""

from penstock.errors import SourceError
from penstock.sources.listing import InputFile
from penstock.store.journal import SealedSlice

__all__ = ["refuse_bad", "refuse_only_bad"]


def refuse_bad(files: list[InputFile], max_bad: float, sealed: dict[int, SealedSlice]) -> None:
    """Raise once the rejects of the leading sealed slices are past the limit.

    Judged on prefixes in the order of slices, so that the verdict does not depend on which
    worker was faster.
    """
    rejected = records = 0
    for number in range(len(sealed)):
        if number not in sealed:
            return
        tally = sealed[number].tally
        rejected += tally.rejected
        records += tally.documents + tally.rejected
        limit = max(10.0, max_bad * records) if max_bad < 1 else max_bad
        if rejected > limit:
            raise SourceError(_too_many(files, max_bad, sealed, number, rejected, records, limit))


def refuse_only_bad(files: list[InputFile], done: list[SealedSlice]) -> None:
    """Raise if there are rejects and no documents, as of one file that is not UTF-8."""
    rejects = [reject for record in done for reject in record.rejects]
    if rejects and not any(record.tally.documents for record in done):
        first = rejects[0]
        raise SourceError(
            f"Nothing is left to store: all {len(rejects):,} records were rejected. The first, "
            f"{files[first.file].name}, offset {first.offset:,}: {first.reason}, {first.detail}. "
            'Repair the input, or read it otherwise: errors="replace" puts U+FFFD where bytes are '
            'not UTF-8, and documents="lines" rejects single lines.'
        )


def _too_many(
    files: list[InputFile],
    max_bad: float,
    sealed: dict[int, SealedSlice],
    last: int,
    rejected: int,
    records: int,
    limit: float,
) -> str:
    found = [reject for number in range(last + 1) for reject in sealed[number].rejects]
    shown = "\n".join(
        f"  {files[each.file].name}, offset {each.offset:,}: {each.reason}, {each.detail}"
        for each in found[:5]
    )
    return (
        f"{rejected:,} of {records:,} records were rejected, more than the {limit:,.0f} that "
        f"max_bad={max_bad:g} allows. The first:\n{shown}\n"
        "Mend the input, name the right field or format, or raise max_bad; the build then goes on "
        "where it stopped."
    )
