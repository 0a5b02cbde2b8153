"""The work on one slice: read it, tokenize it, choose a sample, write its parts and sync them.

    Order ── tokenize ──► TokenizedSlice ── write_parts ── sync_parts ──► MadeSlice

Nothing here knows who runs it: a thread of the build, a thread of another process, or another
machine. The result depends on the job and on the slice alone. The parts are on disk when the work
ends, but the journal does not know them yet: the build writes the record of the slice (see
`penstock.store.workers`).
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from penstock.disk import sync_directory
from penstock.sources.batch import Batch, Tally
from penstock.sources.read import SpanDigests
from penstock.sources.slices import Slice
from penstock.store.inputs import Pieces, piece_digests
from penstock.store.job import Job
from penstock.store.journal import SealedSlice
from penstock.store.part import PartBuilder
from penstock.tokenize.compare import EncodedSample, SliceSample, compare

if TYPE_CHECKING:
    from penstock.chat.chat import TurnReport
    from penstock.store.chats import ChatStage


class Stopped(Exception):  # noqa: N818  (not an error: another worker failed, or Ctrl-C)
    """Ends the work on a slice, because the build has to stop."""


@dataclass(frozen=True, slots=True)
class Order:
    """A slice to make."""

    piece: Slice
    is_first: bool
    """Whether the slice holds the first documents of the build, which are all compared with the
    reference tokenizer."""


@dataclass(frozen=True, slots=True)
class Advance:
    """What the work on a slice has read and tokenized since its last report."""

    disk_bytes: int
    tally: Tally
    num_tokens: int
    rules: list[tuple[int, str]]
    """The number of a file that begins here, and the rule that "auto" found for it."""


@dataclass(frozen=True, slots=True)
class Watch:
    """How the work on a slice reports its progress, and learns that the build has to stop."""

    report: Callable[[Advance], None]
    stopped: Callable[[], bool]


@dataclass(frozen=True, slots=True)
class MadeSlice:
    """A slice whose parts are on disk, and not in the journal yet."""

    record: SealedSlice
    turns: "TurnReport | None"
    """Counts of turns that are not trained on; None if the build has no chat template."""
    sample: EncodedSample
    """Texts of the slice that the build compares with the reference before it records the slice."""


@dataclass(slots=True)
class TokenizedSlice:
    """One slice as tokens, before its parts are written."""

    job: Job
    piece: Slice
    builders: dict[str, PartBuilder]
    sample: SliceSample
    record: SealedSlice
    chat: "ChatStage | None"
    """The chat stage of the job, with turn counts of this slice alone."""
    digests: SpanDigests = field(default_factory=SpanDigests)
    encoded: EncodedSample | None = None
    """The sample, when the slice is tokenized."""
    first: Batch | None = None
    """The first documents of the build, if this slice holds them and they are not compared yet."""

    @property
    def num_tokens(self) -> int:
        """The tokens of all sides so far."""
        return sum(builder.num_tokens for builder in self.builders.values())

    @property
    def made(self) -> MadeSlice:
        """The result, when all parts are on disk."""
        assert self.encoded is not None  # since `tokenize` has ended
        return MadeSlice(self.record, self.chat.report if self.chat else None, self.encoded)

    def input_digests(self) -> Pieces:
        """The digests of the pieces of the inputs that the slice covers."""
        # What is read again here is still in the page cache, so this costs no read from the disk.
        return piece_digests(self.job.files, self.piece.spans, self.digests)

    def compare_first(self) -> None:
        """Compare the first documents of the build with the reference, if they are here."""
        batch, self.first = self.first, None
        if batch is not None:
            input_bytes = sum(file.size for file in self.job.files)
            compare(self.job.tokenizer, batch.texts, input_bytes)
            if self.chat is not None:
                self.chat.compare(batch)


def tokenize(
    job: Job,
    order: Order,
    watch: Watch,
) -> TokenizedSlice:
    """Read one slice and tokenize it.

    Args:
        job: The build.
        order: The slice.
        watch: Where progress is reported.

    Raises:
        Stopped: the build has to stop.
    """
    piece, awaits_first = order.piece, order.is_first
    done = _begin(job, piece)
    record, left = done.record, piece.disk_bytes
    for batch in job.batches(piece, done.digests):
        if watch.stopped():
            raise Stopped
        num_tokens = done.num_tokens
        done.sample.add(batch)
        if awaits_first and len(batch):
            done.first, awaits_first = batch, False
            # A live build does this when the part can be read, because loading the reference takes
            # longer than making the first part.
            if not job.live:
                done.compare_first()
        _fill(batch, done)
        record.tally = Tally.total((record.tally, batch.tally))
        record.rejects += batch.rejects
        for _, rule in batch.rules:
            record.rules[rule] = record.rules.get(rule, 0) + 1
        # A compressed file has more bytes of text than bytes on disk.
        on_disk = min(left, batch.tally.total_bytes)
        left -= on_disk
        watch.report(Advance(on_disk, batch.tally, done.num_tokens - num_tokens, batch.rules))
    watch.report(Advance(left, Tally(), 0, []))
    # Here and not later: one more call at the same time would load another tokenizer.
    done.encoded = done.sample.encoded()
    return done


def _begin(job: Job, piece: Slice) -> TokenizedSlice:
    """A slice of which nothing is read yet."""
    builders = {
        side: PartBuilder(job.tokenizer, job.recorded["eos_id"], job.recorded["bos_id"])
        for side in job.sides
    }
    names = [file.name for file in job.files]
    sample = SliceSample(job.tokenizer, piece.index, names, job.first_file)
    # Turns are counted for each slice separately: it may be made in another process.
    chat = replace(job.chat, report=job.chat.chat.report()) if job.chat else None
    return TokenizedSlice(job, piece, builders, sample, SealedSlice(piece.index), chat)


def _fill(batch: Batch, done: TokenizedSlice) -> None:
    """Tokenize a batch into the parts of its sides."""
    job = done.job
    for side, share in job.split.sides(batch) if job.split else [("", batch)]:
        if done.chat is None:
            done.builders[side].append(done.builders[side].encode(share))
        else:
            done.record.rejects += done.chat.fill(done.builders[side], share, job.first_file)


def write_parts(done: TokenizedSlice) -> None:
    """Write the parts of one slice."""
    job, record = done.job, done.record
    number = job.first_part + record.number
    for side, builder in done.builders.items():
        record.parts[side] = builder.seal(job.directory / side, number)
    done.builders.clear()  # frees half a slice of memory before the slow fsyncs


def sync_parts(done: TokenizedSlice) -> MadeSlice:
    """Sync the names of the parts of one slice, and digest what they were made of."""
    job, record = done.job, done.record
    record.pieces = done.input_digests()
    # The names of the parts are synced before the record is written: a record that survives a
    # power cut must not name files that did not survive it.
    for side in record.parts:
        sync_directory(job.directory / side)
    return done.made
