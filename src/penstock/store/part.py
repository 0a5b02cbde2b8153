"""One part of a store: what a slice of the input becomes.

    tokens   the quick fox <eos> jumps <eos> …      uint16 or uint32, documents end to end
    bounds                    4             6       where each document ends
    origin       (file, offset)  (file, offset)     where each document came from
    loss       0    1    1     1      0     0       only of chats: is the token trained on?

The parts are put together in memory (a slice is 64 MB of text, its tokens 30), because
the header of an array file says how long it is.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.sources.document import Batch, Edges
from penstock.store.files import write_file
from penstock.store.manifest import PartRecord, part_file
from penstock.store.npy import header
from penstock.tokenize.tokenizer import Tokenizer

__all__ = ["Encoded", "PartBuilder", "join_documents"]

Encoded = tuple[NDArray[Any], NDArray[np.int64], NDArray[np.uint64], NDArray[np.uint8] | None, int]
"""Tokens, where documents or pieces end, where they came from, loss, and how many continue."""


@dataclass(slots=True)
class PartBuilder:
    """Collects the documents of one part and seals it."""

    tokenizer: Tokenizer
    eos_id: int | None
    """Put after each document, where not None."""
    bos_id: int | None
    num_tokens: int = 0
    num_documents: int = 0
    """Documents, or pieces of documents: entries of the bounds."""
    num_continued: int = 0
    """Those of them that another part continues."""
    _bound: int = 0
    _tokens: list[NDArray[Any]] = field(default_factory=list)
    _bounds: list[NDArray[np.uint64]] = field(default_factory=list)
    _origins: list[NDArray[np.uint64]] = field(default_factory=list)
    _losses: list[NDArray[np.uint8]] = field(default_factory=list)

    def add(self, batch: Batch) -> None:
        """Tokenize a batch and append it; documents without a single token are skipped."""
        self.append(*self.encode(batch))

    def encode(self, batch: Batch) -> "Encoded":
        """What `append` takes, of a batch; several may be encoded at a time."""
        ids, offsets = self.tokenizer.encode_batch(batch)
        if batch.edges is not None:
            return self._joined(batch, batch.edges, ids, offsets)
        files, places = batch.files, batch.offsets
        lengths = np.diff(offsets)
        if len(lengths) and not lengths.all():
            full = lengths > 0
            batch.tally.documents -= int((~full).sum())
            batch.tally.skipped += int((~full).sum())
            files, places = files[full], places[full]
            offsets = np.concatenate((offsets[:1], offsets[1:][full]))
        tokens, ends = join_documents(
            ids, offsets, self.tokenizer.dtype, eos_id=self.eos_id, bos_id=self.bos_id
        )
        return tokens, ends, np.stack((files, places), axis=1), None, 0

    def _joined(
        self, batch: Batch, edges: Edges, ids: NDArray[np.uint32], offsets: NDArray[np.int64]
    ) -> "Encoded":
        """The same of texts that are not all whole documents; a bound stands where one closes."""
        tokens, ends = join_documents(
            ids, offsets, self.tokenizer.dtype, eos_id=self.eos_id, bos_id=self.bos_id, edges=edges
        )
        origins = np.stack((batch.files, batch.offsets), axis=1)
        continued = int((edges.closes & ~edges.ends).sum())
        return tokens, ends[edges.closes], origins[edges.closes], None, continued

    def append(
        self,
        tokens: NDArray[Any],
        ends: NDArray[np.int64],
        origins: NDArray[np.uint64],
        loss: NDArray[np.uint8] | None = None,
        num_continued: int = 0,
    ) -> None:
        """Append documents that are tokens already; `loss` for all of a part or for none."""
        bounds = ends.astype(np.uint64) + np.uint64(self.num_tokens)
        full = np.diff(bounds, prepend=np.uint64(self._bound)) > 0
        if not full.all():  # a piece without a token has no bound
            bounds, origins = bounds[full], origins[full]
            num_continued = num_continued if full[-1] else 0
        self._tokens.append(tokens)
        self._bounds.append(bounds)
        self._origins.append(origins)
        if loss is not None:
            self._losses.append(loss)
        self.num_tokens += len(tokens)
        self.num_documents += len(bounds)
        self.num_continued += num_continued
        self._bound = int(bounds[-1]) if len(bounds) else self._bound

    def seal(self, directory: Path, number: int, *, live: bool = False) -> PartRecord:
        """Write the files; each is forced to disk, the directory is left to the caller.

        A part without documents has no files: no manifest would list them. Those of one that
        is read at once are not forced to disk yet, if `live`.
        """
        if not self.num_documents:
            return PartRecord(number, 0, 0, {})
        dtype = self.tokenizer.dtype
        contents: dict[str, tuple[np.dtype[Any], tuple[int, ...], list[Any]]] = {
            "tokens": (dtype, (self.num_tokens,), self._tokens),
            "bounds": (np.dtype("<u8"), (self.num_documents,), self._bounds),
            "origin": (np.dtype("<u8"), (self.num_documents, 2), self._origins),
        }
        if self._losses:
            contents["loss"] = (np.dtype("u1"), (self.num_tokens,), self._losses)
        files = {
            kind: write_file(
                directory / part_file(number, kind), [header(kept, shape), *arrays], live=live
            )
            for kind, (kept, shape, arrays) in contents.items()
        }
        return PartRecord(number, self.num_documents, self.num_tokens, files, self.num_continued)


def join_documents(
    ids: NDArray[np.uint32],
    offsets: NDArray[np.int64],
    dtype: "np.dtype[Any]",
    *,
    eos_id: int | None = None,
    bos_id: int | None = None,
    edges: Edges | None = None,
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Documents end to end with their first and last tokens, and where each ends.

    A token that stands there already is not put a second time. Ids must fit into `dtype`. Texts
    that begin or end inside a document, as `edges` says, get no token there.

    >>> join_documents(np.array([5, 6, 7]), np.array([0, 2, 3]), np.dtype("<u2"), eos_id=9)
    (array([5, 6, 9, 7, 9], dtype=uint16), array([3, 5]))
    """
    if (eos_id is None and bos_id is None) or len(offsets) == 1:
        return ids[offsets[0] : offsets[-1]].astype(dtype), offsets[1:] - offsets[0]
    first = _absent(bos_id, ids, offsets[:-1], None if edges is None else edges.begins)
    last = _absent(eos_id, ids, offsets[1:] - 1, None if edges is None else edges.ends)
    lengths = np.diff(offsets) + first + last
    ends = np.cumsum(lengths)
    tokens = np.empty(ends[-1], dtype)
    is_own = np.ones(len(tokens), bool)
    for token, places in ((bos_id, (ends - lengths)[first]), (eos_id, ends[last] - 1)):
        if token is not None:
            tokens[places] = token
            is_own[places] = False
    # One pass, narrowed on the way, and other threads can run meanwhile.
    tokens[is_own] = ids[offsets[0] : offsets[-1]]
    return tokens, ends


def _absent(
    token: int | None,
    ids: NDArray[np.uint32],
    places: NDArray[np.int64],
    wanted: NDArray[np.bool_] | None,
) -> NDArray[np.bool_]:
    """For which texts `token` is wanted and does not stand at its place already."""
    if token is None:
        return np.zeros(len(places), bool)
    if wanted is None:
        return np.asarray(ids[places] != token)
    absent = wanted.copy()
    # An empty text, which only a piece may be, has no token at its place, and perhaps no place.
    for text in np.flatnonzero(wanted):
        place = int(places[text])
        absent[text] = not 0 <= place < len(ids) or ids[place] != token
    return absent
