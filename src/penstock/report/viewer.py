"""The rows of some steps and the tokens of some documents, as templates/viewer.html takes them.

    {"label": "step 12, loss 3.41", "rows": [{
        "title": "row 0, position 88: …", "note": "",
        "documents": ["web.jsonl:90210, document 17 of …"],
        "pieces": [([15496], "Hello", True, 0), ([995], " world", True, 0), …]}]}

A piece is one or more tokens that are text together: their ids, the text (None if the tokenizer is
not known), whether they are targets, and the index of their document (-1 if it is not recorded).
"""

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.cli.terminal import visible
from penstock.report.corpus import Ids, document_ids, find_tokenizer, piece_texts, spread_documents
from penstock.report.subject import Subject
from penstock.store.reader import TokenStore
from penstock.tokenize.tokenizer import Tokenizer

if TYPE_CHECKING:
    from penstock.inspect.steps import RowDocument, StepRow

Item = dict[str, Any]
"""A step or a document."""
Piece = tuple[list[int], str | None, bool, int]
_TOKENS = 1_024  # of a row
_ROWS = 4  # of a step
_DOCUMENTS = 8
_SPREAD_STEPS = 6
_SPIKES = 2


def shown_steps(subject: Subject) -> list[Item]:
    """Return some steps of a run with their first rows."""
    from penstock.inspect.steps import read_rows

    run = subject.run
    assert run is not None
    found = []
    for step in _chosen_steps(subject):
        start, stop = subject.steps.span(step)
        rows = read_rows(
            run.plan, np.arange(start, min(start + _ROWS, stop)), start, subject.tokenizer
        )
        loss = run.metrics.get(step, {}).get("loss")
        label = f"step {step:,}" + (f", loss {loss:.4f}" if isinstance(loss, int | float) else "")
        found.append({"label": label, "rows": [_step_row(subject, each) for each in rows]})
    return found


def shown_document(subject: Subject, corpus: int, number: int) -> Item:
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
    some = ids[:_TOKENS]
    pieces: list[Piece] = []
    trained = np.ones(len(some), bool) if mask is None else mask[:_TOKENS] != 0
    # Cut where tokens begin or cease to be trained on: a piece has one colour.
    edges = [0, *(np.flatnonzero(np.diff(trained)) + 1).tolist(), len(some)]
    for start, stop in pairwise(edges):
        is_target = bool(trained[start:stop].any())
        pieces += _pieces(some[start:stop], tokenizer, trained=is_target, document=0)
    row = {
        "title": _plain(f"document {number:,} of {member.path}{where}"),
        "note": _note(len(some), len(ids)),
        "documents": [_plain(f"document {number:,} of {name}")],
        "pieces": pieces,
    }
    return {"label": _plain(f"{name}: document {number:,}"), "rows": [row]}


def shown_documents(subject: Subject) -> list[Item]:
    """Return some documents of each store."""
    return [shown_document(subject, *each) for each in chosen_documents(subject)]


def _chosen_steps(subject: Subject) -> list[int]:
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
    each = max(1, _DOCUMENTS // max(1, len(subject.corpora)))
    return [
        (corpus, number)
        for corpus, member in enumerate(list(subject.corpora.values())[:_DOCUMENTS])
        if member.has_documents
        for number in spread_documents(member, each)
    ]


def _tokenizer_of(subject: Subject, row: "StepRow") -> Tokenizer | None:
    assert subject.run is not None
    stream = subject.run.plan.sources[row.source].stream
    return None if stream is None else find_tokenizer(stream.members[0], subject.tokenizer)


def _step_row(subject: Subject, row: "StepRow") -> Item:
    tokenizer = _tokenizer_of(subject, row)
    pieces: list[Piece] = []
    left = _TOKENS
    for segment in row.segments:
        ids = np.array(segment.tokens[:left], np.int64)
        left -= len(ids)
        document = -1 if segment.document is None else segment.document
        pieces += _pieces(ids, tokenizer, trained=segment.trained, document=document)
    num_tokens = len(row.tokens)
    place = f"row {row.number:,}, position {row.position:,}: row {row.sample:,} of {row.source}"
    counts = f"{row.num_trained:,} of {num_tokens:,} tokens trained on"
    return {
        "title": _plain(f"{place}, epoch {row.epoch:,}; {counts}"),
        "note": _note(min(_TOKENS, num_tokens), num_tokens),
        "documents": [_document_text(each) for each in row.documents],
        "pieces": pieces,
    }


def _document_text(each: "RowDocument") -> str:
    last = each.first_token + each.num_tokens
    place = f"{each.file}:{each.record}, document {each.document:,} of {each.store}"
    return _plain(f"{place}, its tokens {each.first_token:,} to {last:,}")


def _pieces(ids: Ids, tokenizer: Tokenizer | None, *, trained: bool, document: int) -> list[Piece]:
    if tokenizer is None:
        return [([each], None, trained, document) for each in ids.tolist()]
    pieces: list[Piece] = []
    start = 0
    for count, text in piece_texts(ids, tokenizer):
        # Control characters could reverse or hide the text beside them.
        pieces.append((ids[start : start + count].tolist(), visible(text), trained, document))
        start += count
    return pieces


def _plain(text: str) -> str:
    return visible(text, lines=False)


def _note(shown: int, total: int) -> str:
    return "" if shown == total else f"the first {shown:,} of {total:,} tokens"
