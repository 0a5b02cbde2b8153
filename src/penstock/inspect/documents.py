"""When a document is seen: from an input file and a record to the steps of a run.

    FILE:RECORD ── origins of the store ──► document ── bounds ──► tokens of the stream
                ── rows that hold them ──► samples ── plan ──► positions ──► steps

Nothing is scanned. A build stores documents in the order of its inputs, so the origin of a document
is found by bisection, first over the parts of the store and then inside one part.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from difflib import get_close_matches
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
from penstock.inspect.runs import RunSteps
from penstock.order.budget import Budget
from penstock.order.integers import END
from penstock.order.plan import Plan
from penstock.paths import expand_user
from penstock.rows.protocol import Integers, Rows
from penstock.store.reader import TokenStore, record_unit

Json = dict[str, Any]
Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class FoundDocument:
    """Some tokens of a document of a source."""

    source: str
    store: str
    """The path of the store, or of the token files."""
    document: int | None
    """Its number in the store; of its first piece, if it is stored in several. None for token files
    that do not record documents."""
    file: str
    """The input file; of token files, their path."""
    record: int
    """The record of the input file; of token files, the offset of the first token in the files."""
    span: tuple[int, int]
    """Its tokens `[start, stop)` in the stream of the source."""

    def __str__(self) -> str:
        document = "" if self.document is None else f"document {self.document:,} of {self.store}"
        if self.file == self.store:
            return document or f"token {self.record:,} of {self.store}"
        return f"{self.file}:{self.record}, {document}"


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
    excluded: bool = False
    """Whether an amendment excludes them all from the targets at this position."""

    def to_json(self) -> Json:
        """Return the sighting as JSON."""
        return asdict(self)


def find_documents(
    plan: Plan | Budget, file: str, record: int, source: str | None = None
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
        matching, other = _matching(store, file, size)
        resized += other
        for index in matching:
            first, stop = _search(store, index, record)
            found += [
                found_at(name, plan.sources[name], number, store, each)
                for each in _begins(store, first, stop)
            ]
            if first == stop:
                nearest += _neighbours(store, index, first)
    if not found:
        raise _not_found(file, record, names, nearest, resized, not_searched(plan, source))
    return found


def find_numbered(
    plan: Plan | Budget, document: int, source: str | None = None
) -> list[FoundDocument]:
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


def found_at(
    source: str, rows: Rows, member: int, store: Searched, document: int, some: Span | None = None
) -> FoundDocument:
    """Return a document of a member of a source, or some of its tokens.

    Args:
        source: The name of the source.
        rows: Its rows.
        member: The number of the store among the members of their stream.
        store: The store, or the documents of token files.
        document: The number of the document, or of one piece of it.
        some: The tokens, counted from the start of the document; by default, all.
    """
    span = document_span(rows, member, store, document)
    if some is not None:
        span = span[0] + some[0], span[0] + some[1]
    if isinstance(store, TokenStore):
        origin = store.origin(document)
        return FoundDocument(source, str(store.path), document, origin.file, origin.offset, span)
    first = document_span(rows, member, store, 0)[0]
    number = document if store.has_documents else None
    return FoundDocument(source, str(store.path), number, str(store.path), span[0] - first, span)


def _matching(store: TokenStore, file: str, size: int | None) -> tuple[list[int], list[str]]:
    """Return the numbers of the inputs that have this name, or end with it, or end it.

    Args:
        store: The store.
        file: What the user named.
        size: The size of that file, if there is one.

    Returns:
        The numbers; and the names of inputs that end the name, but have another size.
    """
    inputs = store.manifest.inputs
    names = [each["name"] for each in inputs]
    if exact := [number for number, name in enumerate(names) if name == file]:
        return exact, []
    plain = file.replace(os.sep, "/").removeprefix("./")
    found = [number for number, name in enumerate(names) if f"/{name}".endswith(f"/{plain}")]
    # A store records names below the common directory, and a user may name a path. Inputs of two
    # stores may have one name, so the size decides.
    below = [number for number, name in enumerate(names) if f"/{plain}".endswith(f"/{name}")]
    other = [
        each
        for each in below
        if size is not None
        and inputs[each]["bytes"] != size
        # The manifest of an import has the bytes of the ids, without the headers of the files.
        and record_unit(store, names[each]) != "document"
    ]
    matching = [*found, *(each for each in below if each not in {*found, *other})]
    return matching, [f"{names[each]} ({inputs[each]['bytes']:,} bytes)" for each in other]


def _search(store: TokenStore, file: int, record: int) -> tuple[int, int]:
    """Return the documents `[first, stop)` of a record of an input, by its number."""
    # The origins of all documents ascend, by input and then by record.
    low, high = 0, len(store.manifest.parts)
    while low < high:  # the first part whose last document is not before the record
        middle = (low + high) // 2
        origin = store.part_array(middle, "origin")
        if len(origin) and tuple(origin[-1].tolist()) >= (file, record):
            high = middle
        else:
            low = middle + 1
    first = stop = -1
    for part in range(low, len(store.manifest.parts)):
        # Files and records are two columns; one search in each is a search for the pair.
        origin = store.part_array(part, "origin")
        begin, end = _equal(origin[:, 0], file, 0, len(origin))
        begin, end = _equal(origin[:, 1], record, begin, end)
        if first < 0:
            first = store.first_document(part) + begin
        if begin < end:
            stop = store.first_document(part) + end
        # The record may continue in the next part, as a document in pieces does.
        if end < len(origin) or begin == end:
            break
    return first, max(first, stop)


def _equal(column: Any, value: int, begin: int, end: int) -> tuple[int, int]:
    low, high = (
        begin + int(np.searchsorted(column[begin:end], np.uint64(value), side=side))
        for side in ("left", "right")
    )
    return low, high


def _begins(store: TokenStore, first: int, stop: int) -> list[int]:
    """Return the documents among these that begin, without later pieces of a document."""
    found = [each for each in range(first, stop) if store.edges(each)[0]]
    return found or list(range(first, min(first + 1, stop)))


def _neighbours(store: TokenStore, file: int, at: int) -> list[int]:
    """Return the records of an input before and after the document `at`."""
    found = []
    for each in (at - 1, at):
        if 0 <= each < len(store):
            origin = store.origin(each)
            if origin.file == store.manifest.inputs[file]["name"]:
                found.append(origin.offset)
    return found


def _not_found(
    file: str,
    record: int,
    names: set[str],
    nearest: list[int],
    resized: list[str],
    others: list[str],
) -> StoreError:
    unknown = (
        f" Token files do not record inputs; not searched: {', '.join(others)}." if others else ""
    )
    if nearest:
        near = " and ".join(f"{each:,}" for each in sorted(set(nearest)))
        return StoreError(
            f"No document begins at record {record:,} of {file}; the nearest begin at {near}. A "
            "record is the number that penstock inspect and penstock decode show: the byte offset "
            "in the decompressed file, the row of a Parquet or Arrow file, the item of a JSON "
            "array of conversations, or the document of token files that were imported, counted "
            "from 0. It may also have been rejected: see rejects.jsonl in the store."
            f"{unknown}"
        )
    if resized:
        return StoreError(
            f"No store of this run was built from {file} as it is now; inputs of that name have "
            f"another size: {', '.join(resized[:5])}. Give the name as the store records it."
            f"{unknown}"
        )
    close = get_close_matches(file, sorted(names), 3)
    shown = ", ".join(close or sorted(names)[:5]) or "none, only token files"
    advice = f"Did you mean {shown}?" if close else f"Their inputs are: {shown}."
    more = "" if close or len(names) <= 5 else f" There are {len(names):,} inputs."
    return StoreError(f"No store of this run was built from {file}. {advice}{more}{unknown}")


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
    plan: Plan | Budget, steps: RunSteps, found: FoundDocument, end: int | None = None
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
    excluded = _excluded_from(plan, found)
    return [
        replace(each, excluded=True) if each.position >= excluded else each
        for each in _sightings(steps, found.source, positions, epochs, numbers, sizes)
    ]


def _excluded_from(plan: Plan | Budget, found: FoundDocument) -> int:
    """Return the position from which on an amendment excludes tokens; END if none does."""
    for each in plan.amendments if isinstance(plan, Plan) else ():
        for start, stop in each.exclude.get(found.source, ()):
            if start <= found.span[0] and found.span[1] <= stop:
                return each.position
    return END


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
