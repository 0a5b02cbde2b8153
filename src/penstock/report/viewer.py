"""The rows of steps and the tokens of documents, as the viewer of the page takes them.

    {"label": "step 12, loss 3.41", "num_rows": 8, "row": {
        "title": "row 0, position 88: …", "note": "",
        "documents": ["web.jsonl:90210, document 17 of …"],
        "ids": [15496, 995, …],
        "pieces": [[1, "Hello", 0, 0], [1, " world", 1, 0], …]}}

A piece is one or more tokens that are text together: their number, the text (null if the tokenizer
is not known), 1 if they are targets, and the index of their document (-1 if it is not recorded).
"""

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.cli.terminal import visible
from penstock.errors import PlanError
from penstock.report.corpus import Ids, document_ids, find_tokenizer, piece_texts, spread_documents
from penstock.report.subject import Subject
from penstock.store.reader import TokenStore
from penstock.tokenize.tokenizer import Tokenizer

if TYPE_CHECKING:
    from penstock.inspect.steps import RowDocument, StepRow

Json = dict[str, Any]
EMBEDDED_TOKENS = 1_024  # of a row in a file
SERVED_TOKENS = 16_384
_EMBEDDED_ROWS = 4
_EMBEDDED_DOCUMENTS = 8
_SPREAD_STEPS = 6
_SPIKES = 2


def step_row(subject: Subject, step: int, row: int, most: int = SERVED_TOKENS) -> Json:
    """Return one row of a step.

    Raises:
        PlanError: the run has no such step, or the step has no such row.
    """
    from penstock.inspect.steps import read_rows

    run = subject.run
    if run is None:
        raise PlanError(f"{subject.name} is not a recipe or a run, so it has no steps.")
    start, stop = subject.steps.span(step)
    if not 0 <= row < stop - start:
        raise PlanError(f"Step {step:,} has no row {row:,}; its {stop - start:,} rows begin at 0.")
    (found,) = read_rows(run.plan, np.array([start + row]), start, subject.tokenizer)
    loss = run.metrics.get(step, {}).get("loss")
    label = f"step {step:,}" + (f", loss {loss:.4f}" if isinstance(loss, int | float) else "")
    tokenizer = _tokenizer_of(subject, found)
    return {"label": label, "num_rows": stop - start, "row": _step_row(found, tokenizer, most)}


def document_row(subject: Subject, corpus: int, number: int, most: int = SERVED_TOKENS) -> Json:
    """Return the tokens of a document.

    Raises:
        IndexError: there is no such document.
    """
    name, member = list(subject.corpora.items())[corpus]
    ids, mask = document_ids(member, number)
    tokenizer = find_tokenizer(member, subject.tokenizer)
    where = ""
    if isinstance(member, TokenStore):
        origin = member.origin(number)
        where = f", {origin.file}:{origin.offset}"
    some = ids[:most]
    pieces: list[list[object]] = []
    trained = np.ones(len(some), bool) if mask is None else mask[:most] != 0
    # Cut where tokens begin or cease to be trained on: a piece has one colour.
    edges = [0, *(np.flatnonzero(np.diff(trained)) + 1).tolist(), len(some)]
    for start, stop in pairwise(edges):
        pieces += _pieces(some[start:stop], tokenizer, trained=bool(trained[start:stop].any()))
    row = {
        "title": _plain(f"document {number:,} of {member.path}{where}"),
        "note": _note(len(some), len(ids)),
        "documents": [_plain(f"document {number:,} of {name}")],
        "ids": some.tolist(),
        "pieces": [[*each, 0] for each in pieces],
    }
    return {"label": _plain(f"{name}: document {number:,}"), "num_rows": 1, "row": row}


def embedded_steps(subject: Subject) -> list[Json]:
    """Return some steps with their first rows, for a page in a file."""
    found = []
    for step in chosen_steps(subject):
        rows = [step_row(subject, step, 0, EMBEDDED_TOKENS)]
        count = min(_EMBEDDED_ROWS, rows[0]["num_rows"])
        rows += [step_row(subject, step, row, EMBEDDED_TOKENS) for row in range(1, count)]
        first = {name: rows[0][name] for name in ("label", "num_rows")}
        found.append({**first, "rows": [each["row"] for each in rows]})
    return found


def embedded_documents(subject: Subject) -> list[Json]:
    """Return some documents of each store, for a page in a file."""
    found = []
    for corpus, number in chosen_documents(subject):
        each = document_row(subject, corpus, number, EMBEDDED_TOKENS)
        found.append({"label": each["label"], "num_rows": 1, "rows": [each["row"]]})
    return found


def chosen_steps(subject: Subject) -> list[int]:
    """Return the steps that a page shows: some at equal distances, and the highest loss spikes."""
    steps = subject.steps
    if not steps.total:
        return []
    last = steps.total - 1
    spread = {steps.first + last * each // (_SPREAD_STEPS - 1) for each in range(_SPREAD_STEPS)}
    return sorted(spread | set(_spikes(subject)))


def _spikes(subject: Subject) -> list[int]:
    """Return the steps whose loss exceeds that of the step before by most."""
    metrics = {} if subject.run is None else subject.run.metrics
    losses = {
        step: line["loss"] for step, line in metrics.items() if isinstance(line.get("loss"), float)
    }
    rises = {step: losses[step] - losses[step - 1] for step in losses if step - 1 in losses}
    return sorted(rises, key=lambda step: -rises[step])[:_SPIKES]


def chosen_documents(subject: Subject) -> list[tuple[int, int]]:
    """Return the stores and numbers of the documents that a page shows."""
    each = max(1, _EMBEDDED_DOCUMENTS // max(1, len(subject.corpora)))
    return [
        (corpus, number)
        for corpus, member in enumerate(list(subject.corpora.values())[:_EMBEDDED_DOCUMENTS])
        if member.has_documents
        for number in spread_documents(member, each)
    ]


def _tokenizer_of(subject: Subject, row: "StepRow") -> Tokenizer | None:
    assert subject.run is not None
    stream = subject.run.plan.sources[row.source].stream
    return None if stream is None else find_tokenizer(stream.members[0], subject.tokenizer)


def _step_row(row: "StepRow", tokenizer: Tokenizer | None, most: int) -> Json:
    pieces: list[list[object]] = []
    left = most
    for segment in row.segments:
        ids = np.array(segment.tokens[:left], np.int64)
        left -= len(ids)
        document = -1 if segment.document is None else segment.document
        found = _pieces(ids, tokenizer, trained=segment.trained)
        pieces += [[*each, document] for each in found]
    tokens = row.tokens
    place = f"row {row.number:,}, position {row.position:,}: row {row.sample:,} of {row.source}"
    counts = f"{row.num_trained:,} of {len(tokens):,} tokens trained on"
    return {
        "title": _plain(f"{place}, epoch {row.epoch:,}; {counts}"),
        "note": _note(min(most, len(tokens)), len(tokens)),
        "documents": [_document_text(each) for each in row.documents],
        "ids": tokens[:most],
        "pieces": pieces,
    }


def _document_text(each: "RowDocument") -> str:
    last = each.first_token + each.num_tokens
    place = f"{each.file}:{each.record}, document {each.document:,} of {each.store}"
    return _plain(f"{place}, its tokens {each.first_token:,} to {last:,}")


def _pieces(ids: Ids, tokenizer: Tokenizer | None, *, trained: bool) -> list[list[object]]:
    if tokenizer is None:
        return [[1, None, int(trained)] for _ in range(len(ids))]
    # Control characters could reverse or hide the text beside them.
    return [[count, visible(text), int(trained)] for count, text in piece_texts(ids, tokenizer)]


def _plain(text: str) -> str:
    return visible(text, lines=False)


def _note(shown: int, total: int) -> str:
    return "" if shown == total else f"the first {shown:,} of {total:,} tokens"
