"""What a build has to do, and how far it is."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import SourceError
from penstock.sources.document import Batch
from penstock.sources.listing import InputFile
from penstock.sources.read import read_slice
from penstock.sources.settings import Reading
from penstock.sources.slices import Slice, cut
from penstock.store.cuts import cut_safety
from penstock.store.holdout import Split
from penstock.store.journal import SealedSlice
from penstock.tokenize.tokenizer import Tokenizer

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


if TYPE_CHECKING:
    from penstock.store.chats import ChatStage

__all__ = ["Job", "Progress"]


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a build is; what a progress callback is given."""

    done_bytes: int
    total_bytes: int
    """On disk, so for compressed inputs less than the text they hold."""
    text_bytes: int
    num_documents: int
    num_tokens: int
    num_rejects: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Everything a worker needs to know."""

    directory: Path
    files: list[InputFile]
    first_file: int
    """How many input files earlier builds of the same store have."""
    reading: Reading
    tokenizer: Tokenizer
    eos_id: int | None
    bos_id: int | None
    split: Split | None
    first_part: int
    """How many slices earlier builds of the same store have."""
    max_bad: float
    """A share of all records if below 1, else a number of them."""
    chat: "ChatStage | None" = None
    """Renders documents that are conversations."""
    live: bool = False
    """Whether parts are read while others are made. The first slice is then made by all threads
    together and the others by one, as long as nobody waits; parts are announced before they are on
    disk, and the comparison with the reference waits until the first of them is sealed."""
    stop: threading.Event = field(default_factory=threading.Event)
    """Set when the run ends, also by an error: for slices that are waited for."""
    rules_seen: set[str] = field(default_factory=set)
    """The rules that "auto" found and that were logged."""

    def slices(self) -> Iterator[Slice]:
        """The inputs, cut into what becomes one part each."""
        return cut(
            self.files,
            self.reading,
            # By the reference, so that slices are the same whichever engine tokenizes.
            is_cut_safe=cut_safety(self.tokenizer.reference or self.tokenizer.engine),
            border=self.split.cut_at if self.split else None,
        )

    def batches(self, piece: Slice) -> Iterator[Batch]:
        """The documents of a slice, with the file numbers of the store."""
        # A split by digest needs the whole text of a document at once.
        is_whole = self.split is not None and self.split.kind == "hash"
        tokenizer = self.tokenizer
        is_cut_safe = None if is_whole else cut_safety(tokenizer.engine, tokenizer.reference)
        for batch in read_slice(self.files, piece, self.reading, is_cut_safe):
            batch.files += self.first_file
            yield batch

    def side_directory(self, side: str) -> Path:
        """Where the parts of one side of the split go."""
        return self.directory / side if side else self.directory
