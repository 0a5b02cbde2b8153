"""When a document is seen: from an input file and a record to the steps of a run.

    FILE:RECORD ── origins of the store ──► document ── bounds ──► tokens of the stream
                ── rows that hold them ──► samples ── plan ──► positions ──► steps

Nothing is scanned: the origin of a document is found by bisection (`records`).
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from penstock.errors import PlanError, StoreError
from penstock.inspect.members import (
    FileDocuments,
    Searched,
    documents_of_parts,
    members,
    not_searched,
)
from penstock.inspect.records import (
    beginnings,
    documents_of,
    matching_inputs,
    neighbours,
    not_found,
)
from penstock.inspect.runs import RunSteps
from penstock.order.plan import Plan
from penstock.paths import expand_user
from penstock.rows.protocol import Integers, Rows
from penstock.store.reader import TokenStore

Json = dict[str, Any]
Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class FoundDocument:
    """Some tokens of a document of a source."""

    source: str
    store: str
    """The path of the store, or of the token files."""
    document: int
    """Its number in the store; of its first piece, if it is stored in several."""
    file: str
    """The input file; of token files, their path."""
    record: int
    """The record of the input file; of token files, the offset of the first token in the files."""
    span: tuple[int, int]
    """Its tokens `[start, stop)` in the stream of the source."""

    def __str__(self) -> str:
        document = f"document {self.document:,} of {self.store}"
        return document if self.file == self.store else f"{self.file}:{self.record}, {document}"


@dataclass(frozen=True, slots=True)
class Sighting:
    """A row of a run that holds tokens of a document."""

    step: int
    row: int
    """The number of the row in the step, on all ranks together."""
    position: int
    source: str
    epoch: int
    sample: int
    num_tokens: int
    """How many of the tokens that were looked for the row holds."""

    def to_json(self) -> Json:
        """Return the sighting as JSON."""
        return asdict(self)


def find_documents(
    plan: Plan, file: str, record: int, source: str | None = None
) -> list[FoundDocument]:
    """Return the documents of a plan that were read from a record of an input file.

    Args:
        plan: The plan, whose stores are searched.
        file: The name of the input as the store records it, the end of that name, or a path that
            ends with it; of a path that exists, the size must be that of the input.
        record: Byte offset of the record in the decompressed file; the row number in Parquet and
            Arrow files; the number of the item in a JSON array of conversations and in texts from
            memory; the number of the document in token files that were imported.
        source: Search this source only.

    Raises:
        StoreError: no store has such a document; the message names what it has.
    """
    found: list[FoundDocument] = []
    names: set[str] = set()
    nearest: list[int] = []
    resized: list[str] = []
    size = None
    with suppress(OSError):  # there is no such file, or its name is too long
        size = expand_user(file).stat().st_size
    for name, number, store in members(plan, source):
        if not isinstance(store, TokenStore):
            continue
        names.update(each["name"] for each in store.manifest.inputs)
        matching, other = matching_inputs(store, file, size)
        resized += other
        for index in matching:
            first, stop = documents_of(store, index, record)
            found += [
                found_at(name, plan.sources[name], number, store, each)
                for each in beginnings(store, first, stop)
            ]
            if first == stop:
                nearest += neighbours(store, index, first)
    if not found:
        raise not_found(file, record, names, nearest, resized, not_searched(plan, source))
    return found


def find_numbered(plan: Plan, document: int, source: str | None = None) -> list[FoundDocument]:
    """Return the document with a number in the store of each source.

    Args:
        plan: The plan.
        document: The number of the document, or of a piece of one, as `penstock decode` takes it.
        source: Search this source only.

    Raises:
        StoreError: no store has such a document.
    """
    found: list[FoundDocument] = []
    others = not_searched(plan, source, numbered=True)
    sizes: list[str] = []
    for name, number, member in members(plan, source):
        if not member.has_documents:
            continue
        store = member if isinstance(member, TokenStore) else FileDocuments(member)
        sizes.append(f"{store.path} has {len(store):,}")
        if document < len(store):  # it may be a later piece of a document
            first = next(each for each in range(document, -1, -1) if store.edges(each)[0])
            found.append(found_at(name, plan.sources[name], number, store, first))
    if not found:
        sizes += [f"{each} does not record where documents end" for each in others]
        raise StoreError(f"No store of this run has a document {document:,}: {'; '.join(sizes)}.")
    return found


def found_at(source: str, rows: Rows, member: int, store: Searched, document: int) -> FoundDocument:
    """Return a document of a member of a source.

    Args:
        source: The name of the source.
        rows: Its rows.
        member: The number of the store among the members of their stream.
        store: The store, or the documents of token files.
        document: The number of the document, or of one piece of it.
    """
    span = document_span(rows, member, store, document)
    if isinstance(store, TokenStore):
        origin = store.origin(document)
        return FoundDocument(source, str(store.path), document, origin.file, origin.offset, span)
    first = document_span(rows, member, store, 0)[0]
    return FoundDocument(source, str(store.path), document, str(store.path), span[0] - first, span)


def document_span(rows: Rows, member: int, store: Searched, document: int) -> Span:
    """Return the tokens of a document in the stream of rows, with all pieces of the document.

    Args:
        rows: The rows of a source.
        member: The number of the store among the members of the stream.
        store: The store.
        document: The number of the document, or of its first piece.
    """
    stream = rows.stream
    assert stream is not None  # the store is a member of it
    # Pieces of a stream are the parts of its members, one member after the other.
    before = sum(len(each.part_tokens) for each in stream.members[:member])
    counts = documents_of_parts(store)
    ends = np.cumsum(counts)
    part = int(np.searchsorted(ends, document, side="right"))
    within = document - int(ends[part] - counts[part])
    bounds = store.part_array(part, "bounds")
    start = int(stream.starts[before + part]) + (int(bounds[within - 1]) if within else 0)
    while not store.edges(document)[1]:  # only the last piece of a part can continue
        document, part, within = int(ends[part]), part + 1, 0
        bounds = store.part_array(part, "bounds")
    return start, int(stream.starts[before + part]) + int(bounds[within])


def when(
    plan: Plan, steps: RunSteps, found: FoundDocument, end: int | None = None
) -> list[Sighting]:
    """Return every row of a run that holds tokens of a document, in the order of the run.

    Args:
        plan: The order of the rows.
        steps: The steps of the run.
        found: The document, or some of its tokens.
        end: The position at which the search ends; by default, the end of the run.

    Raises:
        PlanError: the run has no known end, and none was given.
    """
    # Rows after the last step that is full are not read.
    end = steps.end if end is None else min(end, end if steps.end is None else steps.end)
    if end is None:
        raise PlanError(
            "The end of this run is not known, and a document occurs in every epoch. Give a number "
            "of steps: --set training.steps=1000."
        )
    rows = plan.sources[found.source]
    samples = rows.holding(*found.span)
    if not len(samples):
        return []
    positions = np.sort(plan.positions_of(found.source, samples, before=end))
    _, epochs, numbers = plan.locate(positions)
    sizes = {sample: _overlap(rows, sample, found.span) for sample in np.unique(numbers).tolist()}
    return [*_sightings(steps, found.source, positions, epochs, numbers, sizes)]


def _overlap(rows: Rows, sample: int, span: tuple[int, int]) -> int:
    """Return how many tokens of `span` a row holds."""
    return sum(
        max(0, min(span[1], start + size) - max(span[0], start))
        for start, size in rows.spans(sample)
    )


def _sightings(
    steps: RunSteps,
    source: str,
    positions: Integers,
    epochs: Integers,
    samples: Integers,
    sizes: dict[int, int],
) -> Iterator[Sighting]:
    located = zip(positions.tolist(), epochs.tolist(), samples.tolist(), strict=True)
    for position, epoch, sample in located:
        step = steps.at(position)
        row = position - steps.span(step)[0]
        yield Sighting(step, row, position, source, epoch, sample, sizes[sample])
