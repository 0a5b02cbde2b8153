"""Compares what two runs have read, by the fingerprints that they logged.

    run A     ├── 1 ──┼── 2 ──┼── 3 ──┼── 4 ──┤              steps
    run B     ├────── 1 ──────┼────── 2 ──────┤              with twice as many rows
    compared                  ▲               ▲              positions that end a step in both

A fingerprint is a sum over rows. So the sums up to a position are compared, and runs with
different batch sizes can be compared where both end a step. If the runs differ, the rows of the
first interval that differs are read again from the stores, and compared token by token.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from penstock.errors import PenstockError, TrainError
from penstock.inspect.runs import OpenedRun, open_run
from penstock.inspect.steps import RowDocument, StepRow, read_rows
from penstock.loader.explain import RowTokenizers
from penstock.loader.fingerprints import FILE_NAME, LoggedStep, RowReader, read_fingerprints
from penstock.paths import expand_user
from penstock.store.reader import TokenStore
from penstock.train.record import read_record

_MODULUS = 2**64
_MOST_ROWS = 5
_CONTEXT_TOKENS = 8

Json = dict[str, Any]
Kind = Literal["rows", "tokens"]


@dataclass(frozen=True, slots=True)
class RowSide:
    """A row in one of two runs, and its first token that differs."""

    source: str
    epoch: int
    sample: int
    token: int | None
    """None if the row of the other run is longer, or if only the loss mask differs."""
    text: str | None
    """The text around the token; None if the tokenizer is not known."""
    document: RowDocument | None
    """The document of the token."""


@dataclass(frozen=True, slots=True)
class RowDifference:
    """A row that differs between two runs."""

    position: int
    row: int
    """The number of the row in the step of the first run."""
    column: int
    """The column of the first token that differs."""
    sides: tuple[RowSide, RowSide]


@dataclass(frozen=True, slots=True)
class DocumentDifference:
    """A document that differs between the stores of two runs."""

    source: str
    document: int
    """Its number in both stores."""
    places: tuple[str, str]
    """Its input file and record in each, as FILE:RECORD."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The first interval in which two runs differ."""

    kind: Kind
    """"rows" if the runs read other rows, "tokens" if the same rows have other tokens."""
    positions: tuple[int, int]
    steps: tuple[tuple[int, int], tuple[int, int]]
    """The first and the last step of the interval, in each run."""
    num_rows: int | None
    """How many rows differ; None if they could not be read."""
    rows: tuple[RowDifference, ...]
    """The first ones."""
    documents: tuple[DocumentDifference, ...]
    """The first document that differs in the stores of each source. If it has another number of
    tokens, all rows after it are moved, and differ too."""
    note: str | None
    """Why rows could not be read, or are not those that were read."""


@dataclass(frozen=True, slots=True)
class SettingDifference:
    """A setting that differs between two runs."""

    name: str
    """As in a recipe and for `--set`: `data.seed`. Or `world_size`, the number of processes,
    `global_batch_size`, the rows of a step on all of them, or the weights before a position at
    which they were changed."""
    values: tuple[Any, Any]
    """The value in each run; None if it is not set."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """What two runs have in common."""

    runs: tuple[str, str]
    settings: tuple[SettingDifference, ...] | None
    """The settings that differ, except the output; None if one run has no run.json with them."""
    num_steps: tuple[int, int]
    """Steps that each run has logged."""
    identical_steps: tuple[int, int]
    """Steps of each run, from the first, that read the same."""
    identical_rows: int
    """The position up to which both read the same."""
    difference: Difference | None
    """None if the runs are identical as far as both go."""

    def to_json(self) -> Json:
        """Return it as JSON."""
        return asdict(self)


class _Logged(NamedTuple):
    """A log, and the sums of its fingerprints."""

    path: Path
    steps: list[LoggedStep]
    sums: dict[int, tuple[int, int | None]]
    """The sums of `rows` and `tokens` up to each position that ends a step."""

    def number_at(self, position: int) -> int:
        """Return how many steps end at or before a position."""
        return sum(each.position <= position for each in self.steps)


def compare_runs(first: str, second: str) -> Comparison:
    """Compare two runs, or two logs of fingerprints.

    Raises:
        TrainError: a run has no log, or the two have no position in common.
    """
    logs = _read(first), _read(second)
    common = sorted(set(logs[0].sums) & set(logs[1].sums))
    if not common:
        sizes = " and ".join(f"{each.path} to {each.steps[0].position:,}" for each in logs)
        raise TrainError(
            f"The runs cannot be compared: no step of one ends where a step of the other ends. "
            f"Their first steps read up to position {sizes}."
        )
    # Logs that begin with the first step begin at position 0, where both sums are 0.
    same = 0 if all(each.steps[0].step <= 1 for each in logs) else common[0]
    sums = [{0: (0, 0), **each.sums} for each in logs]
    difference = None
    for position in [each for each in common if each > same]:
        kind = _differs(*(_between(each, same, position) for each in sums))
        if kind is not None:
            difference = _difference(kind, logs, (same, position))
            break
        same = position
    names = (first, second)
    counts = (len(logs[0].steps), len(logs[1].steps))
    equal = (logs[0].number_at(same), logs[1].number_at(same))
    return Comparison(names, _settings(logs), counts, equal, same, difference)


def _settings(logs: tuple[_Logged, _Logged]) -> tuple[SettingDifference, ...] | None:
    """Return the settings that differ between two runs; None if those of one are not known."""
    found: list[Json] = []
    for log in logs:
        try:
            record = read_record(log.path)
        except (PenstockError, OSError):  # the logs of runs can be compared without their settings
            return None
        if record.recipe is None:
            return None
        settings = {name: each for name, each in record.recipe.items() if name != "output"}
        steps = {"global_batch_size": record.global_batch_size, "world_size": record.world_size}
        earlier = {
            f"weights before position {each['until']:,}": {
                name: source.get("weight") for name, source in each["sources"].items()
            }
            for each in record.earlier
        }
        found.append({**_flat(settings), **earlier, **steps})
    one, two = found
    return tuple(
        SettingDifference(name, (one.get(name), two.get(name)))
        for name in dict.fromkeys([*one, *two])
        if one.get(name) != two.get(name)
    )


def _flat(tables: Json, prefix: str = "") -> Json:
    """Return the values of nested tables by their dotted names.

    >>> _flat({"data": {"seed": 3, "sources": {"web": {"weight": 1}}}})
    {'data.seed': 3, 'data.sources.web.weight': 1}
    """
    found: Json = {}
    for name, value in tables.items():
        is_table = isinstance(value, dict) and value
        found |= _flat(value, f"{prefix}{name}.") if is_table else {f"{prefix}{name}": value}
    return found


def _read(run: str) -> _Logged:
    path = expand_user(run)
    log = path / FILE_NAME if path.is_dir() else path
    if not log.exists():
        if not path.exists():
            raise TrainError(f"{path} does not exist (working directory: {Path.cwd()}).")
        raise TrainError(
            f"{path} has no {FILE_NAME}, so it is not known what the run read. penstock train "
            "writes that file; in other loops, log_fingerprints or a callback does."
        )
    # A step that was repeated after a crash counts once, as it was read the last time.
    by_position = {each.position: each for each in read_fingerprints(log)}
    steps = [by_position[each] for each in sorted(by_position)]
    if not steps:
        raise TrainError(f"{log} has no steps: the run was stopped before its first step ended.")
    rows = accumulate(each.rows for each in steps)
    tokens: Sequence[int | None] = [None] * len(steps)
    if all(each.tokens is not None for each in steps):
        tokens = list(accumulate(each.tokens or 0 for each in steps))
    pairs = zip(steps, rows, tokens, strict=True)
    return _Logged(path, steps, {each.position: (one, two) for each, one, two in pairs})


def _between(
    sums: dict[int, tuple[int, int | None]], start: int, stop: int
) -> tuple[int, int | None]:
    """Return the fingerprints of the rows from one position to another."""
    (rows, tokens), (rows_before, tokens_before) = sums[stop], sums[start]
    known = tokens is not None and tokens_before is not None
    return (
        (rows - rows_before) % _MODULUS,
        ((tokens or 0) - (tokens_before or 0)) % _MODULUS if known else None,
    )


def _differs(one: tuple[int, int | None], two: tuple[int, int | None]) -> Kind | None:
    if one[0] != two[0]:
        return "rows"
    # A log without fingerprints of tokens says nothing about them.
    return "tokens" if None not in (one[1], two[1]) and one[1] != two[1] else None


def _difference(kind: Kind, logs: tuple[_Logged, _Logged], span: tuple[int, int]) -> Difference:
    steps = []
    for log in logs:
        inside = [each.step for each in log.steps if span[0] < each.position <= span[1]]
        steps.append((inside[0], inside[-1]))
    both = steps[0], steps[1]
    try:
        runs = [open_run(str(log.path)) for log in logs]
    except (PenstockError, OSError) as error:
        reason = f"The rows that differ cannot be named: {error}"
        return Difference(kind, span, both, None, (), (), reason)
    readers = [RowReader(run.plan) for run in runs]
    note: str | None = None
    for log, reader in zip(logs, readers, strict=True):
        if reader.fingerprints(*span) != _between({0: (0, 0), **log.sums}, *span):
            note = f"The stores of {log.path} are not those that the run has read."
    positions = np.arange(*span, dtype=np.int64)
    values = [reader.values(positions) for reader in readers]
    # Rows that differ have other tokens, or are other rows with equal tokens.
    unlike = (values[0][1] != values[1][1]) | (values[0][0] != values[1][0])
    differing = positions[unlike]
    rows = [_row_difference(runs, each) for each in differing[:_MOST_ROWS].tolist()]
    documents = tuple(_documents(*runs)) if kind == "tokens" else ()
    return Difference(kind, span, both, len(differing), tuple(rows), documents, note)


def _documents(one: OpenedRun, two: OpenedRun) -> Iterator[DocumentDifference]:
    """Yield the first document that differs in the stores of each source."""
    for name in [each for each in one.plan.names if each in two.plan.sources]:
        streams = [run.plan.sources[name].stream for run in (one, two)]
        if streams[0] is None or streams[1] is None:
            continue
        for stores in zip(streams[0].members, streams[1].members, strict=False):
            if isinstance(stores[0], TokenStore) and isinstance(stores[1], TokenStore):
                number = _first_unlike(stores[0], stores[1])
                if number is not None:
                    origins = [store.origin(number) for store in (stores[0], stores[1])]
                    first, second = (f"{each.file}:{each.offset}" for each in origins)
                    yield DocumentDifference(name, number, (first, second))
                    break


def _first_unlike(one: TokenStore, two: TokenStore) -> int | None:
    """Return the number of the first document whose tokens differ; None if there is none."""
    before = 0
    for part, pair in enumerate(zip(one.manifest.parts, two.manifest.parts, strict=False)):
        files = [[each.files[kind] for kind in ("tokens", "bounds")] for each in pair]
        if files[0] != files[1]:  # sizes and SHA-256
            documents = zip(one.part_documents(part), two.part_documents(part), strict=False)
            for number, (left, right) in enumerate(documents):
                if not np.array_equal(left, right):
                    return before + number
            break  # one part has more documents than the other
        before += pair[0].num_documents
    return None


def _row_difference(runs: Sequence[OpenedRun], position: int) -> RowDifference:
    start = runs[0].steps.span(runs[0].steps.at(position))[0]
    at = np.array([position], np.int64)
    one, two = (read_rows(run.plan, at, start, run.tokenizer)[0] for run in runs)
    ids = one.tokens, two.tokens
    pairs = zip(*ids, strict=False)
    # If one row begins with the other, the first token after the shorter one differs.
    column = next((i for i, (a, b) in enumerate(pairs) if a != b), min(map(len, ids)))
    sides = _side(one, column, runs[0]), _side(two, column, runs[1])
    return RowDifference(position, one.number, column, sides)


def _side(row: StepRow, column: int, run: OpenedRun) -> RowSide:
    token = document = text = None
    at = 0
    for segment in row.segments:
        if at <= column < at + len(segment.tokens):
            token = segment.tokens[column - at]
            if segment.document is not None:
                document = row.documents[segment.document]
        at += len(segment.tokens)
    around = row.tokens[max(0, column - _CONTEXT_TOKENS) : column + _CONTEXT_TOKENS + 1]
    decoded = [each.text for each in row.segments]
    if None not in decoded:
        known = RowTokenizers(run.plan, run.tokenizer).of(row.source)
        text = None if known is None else known.decode(around)
    return RowSide(row.source, row.epoch, row.sample, token, text, document)
