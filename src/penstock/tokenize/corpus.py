"""Counts the words of a whole corpus, with one thread for each core.

A corpus is cut into the slices of a build. Each thread reads a slice and counts its words; the
arrays of NumPy and Arrow do nearly all of that without the GIL. The counts of slices are added up
in order, so the documents that are counted do not depend on the number of threads.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from penstock.errors import SourceError
from penstock.sources.document import Batch, Reject, allowed_rejects, text_offsets
from penstock.sources.files import InputFile
from penstock.sources.read import read_slice
from penstock.sources.settings import ReadSettings
from penstock.sources.slices import Slice, cut
from penstock.tokenize.words import (
    WordCounts,
    add_counts,
    count_pieces,
    count_words,
    is_cut_safe,
)

# Counts of slices are added to those of the corpus when they have this many words, or as many as
# the corpus. Adding takes a pass over all words of the corpus.
_MANY_WORDS = 2_000_000


@dataclass(slots=True)
class _Counted:
    """The words of some documents, and how many documents and rejected records there were."""

    words: list[WordCounts] = field(default_factory=list)
    num_documents: int = 0
    num_bytes: int = 0
    num_rejects: int = 0
    first_rejects: list[Reject] = field(default_factory=list)

    def add(self, other: "_Counted") -> None:
        self.words += other.words
        self.num_documents += other.num_documents
        self.num_bytes += other.num_bytes
        self.num_rejects += other.num_rejects
        self.first_rejects = [*self.first_rejects, *other.first_rejects][:5]

    def add_batch(self, batch: Batch, limit: float) -> None:
        """Add the documents of a batch that begin before `limit` bytes of text are counted."""
        texts = batch.texts
        edges = text_offsets(texts) - text_offsets(texts)[0]
        num_texts = int(np.searchsorted(edges[:-1] + self.num_bytes, limit))
        self.words.append(count_pieces(texts.slice(0, num_texts)))
        # If `batch.edges` is set, the last document of the batch may continue in the next batch.
        # The tally counts each document once.
        self.num_documents += num_texts if batch.edges is None else batch.tally.documents
        self.num_bytes += int(edges[num_texts])
        self.num_rejects += len(batch.rejects)
        self.first_rejects = [*self.first_rejects, *batch.rejects][:5]


@dataclass(slots=True)
class Corpus:
    """The documents to count."""

    files: list[InputFile]
    reading: ReadSettings
    max_bytes: int | None
    max_bad: float
    num_threads: int
    progress: Callable[[int, int], None]
    """Called with the bytes of text counted so far, and the bytes to count."""
    total: _Counted = field(default_factory=_Counted)
    _stop: threading.Event = field(default_factory=threading.Event)

    def count(self) -> WordCounts:
        """The different words of the corpus; the counts of documents are then in `total`.

        Raises:
            SourceError: there are no documents, or more rejected records than allowed.
        """
        size = sum(file.size for file in self.files)
        size, limit = min(size, self.max_bytes or size), self.max_bytes or np.inf
        for piece, counted in self._counted():
            if self.total.num_bytes + counted.num_bytes > limit:
                # The slice holds more than the rest. This happens once, to the last slice.
                counted = self._count_slice(piece, limit - self.total.num_bytes)
            self.total.add(counted)
            self._add_up(ended=False)
            self._refuse_bad(ended=False)
            self.progress(self.total.num_bytes, size)
            if self.total.num_bytes >= limit:
                break
        if not self.total.num_documents:
            raise SourceError(f"The inputs hold no document to learn from.{self._shown()}")
        if self.total.num_bytes < limit:
            self._refuse_bad(ended=True)
        self._add_up(ended=True)
        return self.total.words[0]

    def _add_up(self, *, ended: bool) -> None:
        """Make one table of the counts, unless it would have to be made again soon."""
        known, *new = (len(table.counts) for table in self.total.words)
        if ended or sum(new) >= max(_MANY_WORDS, known):
            self.total.words = [add_counts(self.total.words)]

    def _counted(self) -> Iterator[tuple[Slice, _Counted]]:
        """Each slice and its counts, in order; as many slices as threads are counted at once."""
        slices = cut(self.files, self.reading, is_cut_safe=is_cut_safe)
        running: deque[tuple[Slice, Future[_Counted]]] = deque()
        pool = ThreadPoolExecutor(self.num_threads, "count-words")
        try:
            # One more than threads: none of them waits until this one has added up counts.
            for piece in islice(slices, self.num_threads + 1):
                running.append((piece, pool.submit(self._count_slice, piece)))
            while running:
                piece, future = running.popleft()
                counted = future.result()
                for following in islice(slices, 1):
                    running.append((following, pool.submit(self._count_slice, following)))
                yield piece, counted
        finally:
            self._stop.set()
            pool.shutdown(cancel_futures=True)
            self._stop.clear()

    def _count_slice(self, piece: Slice, limit: float = np.inf) -> _Counted:
        """The counts of a slice, up to the document in which `limit` bytes of text are reached."""
        found = _Counted()
        for batch in read_slice(self.files, piece, self.reading, is_cut_safe):
            if self._stop.is_set() or found.num_bytes >= limit:
                break
            found.add_batch(batch, limit)
        found.words = [count_words(found.words)]
        return found

    def _refuse_bad(self, *, ended: bool) -> None:
        records = self.total.num_documents + self.total.num_rejects
        limit = allowed_rejects(self.max_bad, records, ended=ended)
        if self.total.num_rejects > limit:
            raise SourceError(
                f"{self.total.num_rejects:,} of {records:,} records were rejected, more than the "
                f"{int(limit):,} that max_bad={self.max_bad:g} allows. Repair the input, set the "
                "right field or format, or raise max_bad (--max-bad). The first rejected records:"
                f"{self._shown()}"
            )

    def _shown(self) -> str:
        return "".join(
            f"\n  {self.files[each.file].name}, offset {each.offset:,}: {each.reason}, "
            f"{each.detail}"
            for each in self.total.first_rejects
        )
