"""The rows of a step, token by token: text, documents, and what is trained on.

    row          To  be ,  or  not │ The  end .  │            │ borders of documents
    trained      -   +  +  +   +     -    +   +               + the token is a target

The rows are read as a loader reads them, so these are the tokens that a run consumes. A row of
`Windows` has one token more than its inputs: its last token is only a target.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from html import escape
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.errors import MissingTokenizerError, PlanError
from penstock.inspect.runs import RunSteps
from penstock.loader.explain import RowTokenizers
from penstock.loader.fingerprints import RowReader
from penstock.loader.run import AnyPlan
from penstock.order.steps import PADDING, rows_per_rank
from penstock.rows.origins import RowOrigin
from penstock.rows.protocol import Array, Fields, Integers, token_spans

if TYPE_CHECKING:
    from penstock.tokenize.definition import Decoder

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RowDocument:
    """A document in a row, or a piece of one."""

    store: str
    document: int
    """Its number in the store."""
    file: str
    """The input file, as it was given to the build."""
    record: int
    """Byte offset in the decompressed file; the number of the row in Parquet and Arrow files, of
    the item in JSON arrays and texts from memory, or of the document in imported token files."""
    first_token: int
    """The first token of the document that the row holds."""
    num_tokens: int
    """How many of its tokens the row holds."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive tokens of a row that are of one document, and all trained on or all not."""

    column: int
    """The column of its first token in the row."""
    tokens: tuple[int, ...]
    trained: bool
    """Whether these tokens are targets."""
    document: int | None
    """The index of its document in `documents` of the row; None if it is not recorded."""
    text: str | None
    """None if the tokenizer is not known."""


@dataclass(frozen=True, slots=True)
class StepRow:
    """One row of a step."""

    number: int
    """Its number in the step, on all ranks together."""
    position: int
    source: str
    epoch: int
    sample: int
    """The number of the row in its source."""
    documents: tuple[RowDocument, ...]
    segments: tuple[Segment, ...]

    @property
    def tokens(self) -> list[int]:
        """The tokens of the row, without padding."""
        return [token for each in self.segments for token in each.tokens]

    @property
    def num_trained(self) -> int:
        """The number of targets."""
        return sum(len(each.tokens) for each in self.segments if each.trained)


@dataclass(frozen=True, slots=True)
class InspectedStep:
    """The rows of a step."""

    step: int
    positions: tuple[int, int]
    """Its first position, and the position after its last."""
    rows: tuple[StepRow, ...]

    def to_json(self) -> Json:
        """Return the step as JSON."""
        return asdict(self)

    def _repr_html_(self) -> str:
        """Return the text of the rows, for notebooks; text that is only read is underlined."""
        rows = "".join(map(_row_html, self.rows))
        start, stop = self.positions
        return f"<p>step {self.step:,}, positions {start:,} to {stop - 1:,}</p>{rows}"


_ONLY_READ = "opacity: 0.6; text-decoration: underline dotted"


def _row_html(row: StepRow) -> str:
    where = f"{row.source}, epoch {row.epoch:,}, row {row.sample:,}, position {row.position:,}"
    pieces, document = [], None
    for each in row.segments:
        if each.document is not None and each.document != document:
            document = each.document
            origin = row.documents[document]
            pieces.append(f"<hr><small>{escape(f'{origin.file}:{origin.record}')}</small><br>")
        text = escape(" ".join(map(str, each.tokens)) if each.text is None else each.text)
        # Underlined too, as in a report, because colours are not visible to everyone.
        pieces.append(text if each.trained else f'<span style="{_ONLY_READ}">{text}</span>')
    body = "".join(pieces)
    return f'<p>{escape(where)}</p><div style="white-space: pre-wrap">{body}</div>'


def inspect_step(
    plan: AnyPlan,
    steps: RunSteps,
    step: int,
    *,
    rank: int = 0,
    world_size: int = 1,
    most: int | None = None,
    tokenizer: object = None,
) -> InspectedStep:
    """Return the rows of a step; only those of one rank if `world_size` is more than 1.

    Args:
        plan: The order of the rows.
        steps: The steps of the run.
        step: The number of the step, as `steps` counts.
        rank: The rank whose rows are returned.
        world_size: The number of ranks.
        most: The largest number of rows that are read; all if None.
        tokenizer: The tokenizer, of token files or of a store whose tokenizer is not known here.

    Raises:
        PlanError: the run has no such step, or the step does not divide over the ranks.
    """
    start, stop = steps.span(step)
    if not 0 <= rank < world_size:
        raise PlanError(
            f"rank={rank} does not exist: with world_size={world_size}, the last is "
            f"{world_size - 1}."
        )
    share = rows_per_rank(stop - start, world_size)
    first = start + rank * share
    positions = np.arange(first, first + share, dtype=np.int64)[:most]
    rows = read_rows(plan, positions, start, tokenizer)
    return InspectedStep(step, (start, stop), tuple(rows))


def read_rows(
    plan: AnyPlan, positions: Integers, start: int, tokenizer: object = None
) -> list[StepRow]:
    """Return the rows at some positions of the step that begins at `start`."""
    reader = RowReader(plan)
    located = reader.locate(positions[positions != PADDING])
    tokens, targets, fields = reader.assembler.read(located)
    tokenizers = RowTokenizers(plan, tokenizer)
    rows = []
    for number in range(located.shape[1]):
        source, epoch, sample, position = located[:, number].tolist()
        name = plan.names[source]
        # The row alone, because rows of several sources are merged into the fields of a batch.
        single = plan.sources[name].read_epochs(
            located[2, number : number + 1], located[1, [number]]
        )
        (begin,), (end,) = token_spans(single)
        trained = _trained(tokens[number], targets, fields, number)
        place = number + int(positions[0]) - start, position, name, epoch, sample
        origins = plan.sources[name].origins(sample)
        ids = tokens[number, begin:end]
        cut = _segments(ids, trained[begin:end], int(begin), origins, _known(tokenizers, name))
        rows.append(StepRow(*place, tuple(map(_document, origins)), cut))
    return rows


def _known(tokenizers: RowTokenizers, name: str) -> "Decoder | None":
    try:
        return tokenizers.of(name)
    except MissingTokenizerError:  # ids can be shown without their text
        return None


def _trained(
    tokens: Array, targets: Array | None, fields: Fields, number: int
) -> "np.ndarray[Any, np.dtype[np.bool_]]":
    """Return whether each token of a row is a target."""
    counted = np.ones(len(tokens) - 1, bool) if targets is None else targets[number]
    # A label of masked language modelling belongs to its own column. Otherwise target i is token
    # i + 1, and the first token is predicted from nothing.
    nothing = np.zeros(1, bool)
    return np.concatenate([counted, nothing] if "labels" in fields else [nothing, counted])


def _segments(
    ids: Array,
    trained: Array,
    begin: int,
    origins: Sequence[RowOrigin],
    tokenizer: "Decoder | None",
) -> tuple[Segment, ...]:
    """Cut a row where a document begins, and where tokens begin or cease to be trained on."""
    edges = np.cumsum([0] + [stop - start for *_, (start, stop), _, _ in origins])
    documents = np.searchsorted(edges[1:], np.arange(len(ids)), side="right")
    changes = np.flatnonzero((np.diff(documents) != 0) | (np.diff(trained.astype(np.int8)) != 0))
    found = []
    for start, stop in pairwise([0, *(changes + 1).tolist(), len(ids)]):
        if stop == start:
            continue
        known = int(documents[start]) if documents[start] < len(origins) else None
        some = ids[start:stop]
        text = None if tokenizer is None else tokenizer.decode(some)
        cut = begin + start, tuple(some.tolist()), bool(trained[start]), known, text
        found.append(Segment(*cut))
    return tuple(found)


def _document(origin: RowOrigin) -> RowDocument:
    start, stop = origin.span
    place = str(origin.store.path), origin.document, origin.file, origin.offset
    return RowDocument(*place, start, stop - start)


def source_counts(plan: AnyPlan, steps: RunSteps, first: int, last: int) -> list[dict[str, int]]:
    """Return how many rows of each source the steps from `first` to `last` read, step by step.

    The rows are counted one by one, in about 0.1 µs each.
    """
    found = []
    for step in range(first, last + 1):
        sources, _, _ = plan.locate(np.arange(*steps.span(step), dtype=np.int64))
        counts = np.bincount(sources, minlength=len(plan.names)).tolist()
        found.append(dict(zip(plan.names, counts, strict=True)))
    return found
