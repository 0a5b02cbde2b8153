"""Which documents a step read, in words, for messages."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from penstock.order.plan import Plan
from penstock.store.reader import TokenStore

__all__ = ["documents_at"]

_SHOWN = 4


def documents_at(plan: Plan, start: int, stop: int) -> str:
    """The documents in the rows from position `start` to before `stop`, the first few by name."""
    told: list[str] = []
    for sample in plan.samples(start, stop):
        rows: Any = plan.sources[sample.source]
        for where in _documents(rows, sample.sample):
            named = where if len(plan.names) == 1 else f"{sample.source}: {where}"
            if named not in told:
                told.append(named)
        if len(told) > _SHOWN:
            break
    if not told:
        return "rows that do not say which documents they are of"
    return ", ".join(told[:_SHOWN]) + (" and more" if len(told) > _SHOWN else "")


def _documents(rows: Any, sample: int) -> Iterator[str]:
    """Where the documents of one row came from: of windows and packs over stores."""
    stream: Any = getattr(rows, "stream", None)
    stores = [] if stream is None else stream.members
    if not stores or not all(isinstance(each, TokenStore) for each in stores):
        return  # files do not record documents
    if hasattr(rows, "stride"):
        spans = [(sample * rows.stride, rows.length)]
    elif hasattr(rows, "spans"):
        spans = rows.spans(sample)
    else:
        return
    for start, length in spans:
        yield from _between(stream, start, start + length)


def _between(stream: Any, start: int, stop: int) -> Iterator[str]:
    number = int(np.searchsorted(stream.ends, start, side="right"))
    while number < len(stream.ends) and stream.starts[number] < stop:
        bounds = stream.bounds(number)
        begin = max(0, start - int(stream.starts[number]))
        document = int(np.searchsorted(bounds, np.uint64(begin), side="right"))
        while (
            document < len(bounds)
            and (bounds[document - 1] if document else 0) + int(stream.starts[number]) < stop
        ):
            yield _origin(stream, number, document)
            document += 1
        number += 1


def _origin(stream: Any, piece: int, within: int) -> str:
    for store in stream.members:
        parts = store.manifest.parts
        if piece < len(parts):
            document = sum(part.num_documents for part in parts[:piece]) + within
            origin = store.origin(document)
            return (
                f"document {document:,} of {store.path} ({origin.file}, offset {origin.offset:,})"
            )
        piece -= len(parts)
    raise IndexError(f"piece {piece} is in no store")
