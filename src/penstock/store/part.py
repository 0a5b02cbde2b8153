"""One part of a store, made from one slice of the input.

    tokens   the quick fox <eos> jumps <eos> …      uint16 or uint32, documents concatenated
    bounds                    4             6       the end of each document
    origin       (file, offset)  (file, offset)     the origin of each document
    loss       0    1    1     1      0     0       only in chat stores: is the token trained on?

A part is assembled in memory (64 MB of text become about 30 MB of tokens), because the header of
an array file contains its length.
"""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.sources.document import Batch, Edges
from penstock.store.files import array_layout, header, write_file
from penstock.store.manifest import PartRecord, part_file
from penstock.tokenize.tokenizer import Tokenizer

__all__ = ["Encoded", "PartBuilder", "encode_ahead", "join_documents"]

TokenArray = NDArray[Any]
"""Token ids, as uint16 or uint32."""
Encoded = tuple[TokenArray, NDArray[np.int64], NDArray[np.uint64], NDArray[np.uint8] | None, int]
"""The arguments of `PartBuilder.append`."""


@dataclass(slots=True)
class PartBuilder:
    """Collects the documents of one part and writes its files."""

    tokenizer: Tokenizer
    eos_id: int | None
    """The token after each document, or None."""
    bos_id: int | None
    num_tokens: int = 0
    num_documents: int = 0
    """Documents, or pieces of documents: entries of the bounds."""
    num_continued: int = 0
    """How many of these are continued in the next part."""
    _bound: int = 0
    _tokens: list[TokenArray] = field(default_factory=list)
    _bounds: list[NDArray[Any]] = field(default_factory=list)
    _origins: list[NDArray[Any]] = field(default_factory=list)
    _losses: list[NDArray[Any]] = field(default_factory=list)

    def add(self, batch: Batch) -> None:
        """Tokenize a batch and append it; documents without a token are skipped."""
        self.append(*self.encode(batch))

    def encode(self, batch: Batch) -> Encoded:
        """The arguments of `append` for a batch; several threads may encode at a time."""
        ids, offsets = self.tokenizer.encode_batch(batch)
        origins, edges = np.stack((batch.files, batch.offsets), axis=1), batch.edges
        # A tokenizer may drop a whole text, by normalising its characters away. The reader has
        # counted it as a document already.
        full = np.diff(offsets) > 0
        if edges is None and not full.all():
            batch.tally.documents -= int((~full).sum())
            batch.tally.skipped += int((~full).sum())
            origins = origins[full]
            offsets = np.concatenate((offsets[:1], offsets[1:][full]))
        tokens, ends = join_documents(
            ids, offsets, self.tokenizer.dtype, eos_id=self.eos_id, bos_id=self.bos_id, edges=edges
        )
        if edges is None:
            return tokens, ends, origins, None, 0
        # Texts that are not all whole documents: only one that closes a piece has a bound.
        continued = int((edges.closes & ~edges.ends).sum())
        return tokens, ends[edges.closes], origins[edges.closes], None, continued

    def append(
        self,
        tokens: TokenArray,
        ends: NDArray[np.int64],
        origins: NDArray[np.uint64],
        loss: NDArray[np.uint8] | None = None,
        num_continued: int = 0,
    ) -> None:
        """Append tokenized documents.

        Args:
            tokens: The ids of all documents, concatenated.
            ends: The end of each document or piece in `tokens`.
            origins: The file and offset of each.
            loss: Whether each token is trained on; given for all documents of a part or for none.
            num_continued: How many pieces the next part continues.
        """
        # `ends` count from the beginning of this batch, bounds from the beginning of the part.
        bounds = ends.astype(np.uint64) + np.uint64(self.num_tokens)
        full = np.diff(bounds, prepend=np.uint64(self._bound)) > 0
        if not full.all():  # a piece without tokens gets no bound
            bounds, origins = bounds[full], origins[full]
            num_continued = num_continued if full[-1] else 0
        # Kept in pieces and not joined: a joined copy would need the memory of the part again.
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
        """Write the files of the part and return its record.

        Each file is synced to disk, unless `live`; the caller syncs the directory. A part without
        documents has no files, because the manifest does not list it.
        """
        if not self.num_documents:
            return PartRecord(number, 0, 0, {})
        arrays = {"tokens": self._tokens, "bounds": self._bounds, "origin": self._origins}
        if self._losses:
            arrays["loss"] = self._losses
        counts = {"num_documents": self.num_documents, "num_tokens": self.num_tokens}
        files = {}
        for kind, pieces in arrays.items():
            layout = array_layout(kind, self.tokenizer.dtype, **counts)
            path = directory / part_file(number, kind)
            files[kind] = write_file(path, [header(*layout), *pieces], live=live)
        return PartRecord(number, **counts, files=files, num_continued=self.num_continued)


def encode_ahead(
    builder: PartBuilder, batches: Iterator[Batch], num_threads: int
) -> Iterator[tuple[Batch, Encoded]]:
    """Each batch and its tokens, in order; several threads encode the batches that follow."""
    with ThreadPoolExecutor(num_threads, thread_name_prefix="build-help") as helpers:
        pending: deque[tuple[Batch, Future[Encoded]]] = deque()
        for batch in batches:
            pending.append((batch, helpers.submit(builder.encode, batch)))
            # Two batches per thread keep all of them busy; more would only take memory.
            if len(pending) > 2 * num_threads:
                done, encoded = pending.popleft()
                yield done, encoded.result()
        for done, encoded in pending:
            yield done, encoded.result()


def join_documents(
    ids: NDArray[np.uint32],
    offsets: NDArray[np.int64],
    dtype: "np.dtype[Any]",
    *,
    eos_id: int | None = None,
    bos_id: int | None = None,
    edges: Edges | None = None,
) -> tuple[TokenArray, NDArray[np.int64]]:
    """The documents concatenated, with their first and last tokens, and the end of each.

    A token that is there already is not added a second time. Ids must fit into `dtype`. Texts
    that begin or end inside a document, according to `edges`, get no token there.

    >>> join_documents(np.array([5, 6, 7]), np.array([0, 2, 3]), np.dtype("<u2"), eos_id=9)
    (array([5, 6, 9, 7, 9], dtype=uint16), array([3, 5]))
    """
    if (eos_id is None and bos_id is None) or len(offsets) == 1:
        return ids[offsets[0] : offsets[-1]].astype(dtype), offsets[1:] - offsets[0]
    first = _absent(bos_id, ids, offsets[:-1], None if edges is None else edges.begins)
    last = _absent(eos_id, ids, offsets[1:] - 1, None if edges is None else edges.ends)
    # Example: ids 5 6 | 7 with eos 9 get the lengths 3 2, the ends 3 5, and 9 at places 2 and 4.
    lengths = np.diff(offsets) + first + last
    ends = np.cumsum(lengths)
    tokens = np.empty(ends[-1], dtype)
    is_own = np.ones(len(tokens), bool)
    for token, places in ((bos_id, (ends - lengths)[first]), (eos_id, ends[last] - 1)):
        if token is not None:
            tokens[places] = token
            is_own[places] = False
    # One pass that also narrows the ids; NumPy releases the GIL for it.
    tokens[is_own] = ids[offsets[0] : offsets[-1]]
    return tokens, ends


def _absent(
    token: int | None,
    ids: NDArray[np.uint32],
    places: NDArray[np.int64],
    wanted: NDArray[np.bool_] | None,
) -> NDArray[np.bool_]:
    """Which texts need `token`, because it is wanted and not at its place already."""
    if token is None:
        return np.zeros(len(places), bool)
    if wanted is None:
        return np.asarray(ids[places] != token)
    absent = wanted.copy()
    # Only a piece may be an empty text. Then its place holds a token of its neighbour, or is
    # outside the array.
    for text in np.flatnonzero(wanted):
        place = int(places[text])
        absent[text] = not 0 <= place < len(ids) or ids[place] != token
    return absent
