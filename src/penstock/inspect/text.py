"""Finds a text in the documents of stores, by their decoded bytes.

    parts         ├────── 0 ──────┼────── 1 ──────┤      one task each, on several threads
    blocks        ├── 256k ──┼────┤                      decoded at once, and searched
    documents     │ a │ b │ c …           … c │ d │      a long one continues in the next part

A search for token ids would miss text: how a word is cut into tokens depends on the words around
it. So documents are decoded. A text that crosses a border of blocks or of the pieces of a document
is found, because each piece is decoded with the beginning of the next one. A text that is partly in
one document and partly in another is not a match.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.errors import PlanError
from penstock.store.reader import TokenStore
from penstock.tokenize.engines import TokenizersEngine
from penstock.tokenize.tokenizer import Tokenizer

_BLOCK_TOKENS = 1 << 18
Ids = NDArray[Any]
_QUEUED = 4  # tasks of each thread that wait, so that no thread is idle

Progress = Callable[[int, int], None]
"""Called with the number of tokens that were searched, and the number of all."""


class TextMatch(NamedTuple):
    """A place in a store at which a text was found."""

    document: int
    """The number of the document; of the piece in which the text begins."""
    span: tuple[int, int]
    """The tokens of the document that hold the text, counted from the start of this piece."""


def find_text(
    store: TokenStore,
    text: str,
    tokenizer: Tokenizer,
    *,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Iterator[TextMatch]:
    """Yield every place of a store at which a text occurs, in order; places may overlap.

    Args:
        store: The store.
        text: The text, which must be found byte by byte.
        tokenizer: The tokenizer of the store.
        threads: How many threads decode; by default, one for each core.
        progress: Called after each part.

    Raises:
        PlanError: the text is empty.
    """
    needle = text.encode()
    if not needle:
        raise PlanError("The text to find is empty. Give at least one character.")
    search = _Search(store, needle, tokenizer)
    parts = range(len(store.manifest.parts))
    workers = threads or os.cpu_count() or 1
    done = 0
    with ThreadPoolExecutor(workers, thread_name_prefix="find-text") as pool:
        # Only a few tasks at a time: the matches of all parts need not fit into memory.
        waiting = iter(parts)
        running = [pool.submit(search.part, each) for each in islice(waiting, workers * _QUEUED)]
        for part in parts:
            matches = running.pop(0).result()
            running += [pool.submit(search.part, each) for each in islice(waiting, 1)]
            done += store.manifest.parts[part].num_tokens
            if progress is not None:
                progress(done, store.num_tokens)
            yield from matches


class _Search:
    """The search for a text in the parts of one store. Safe to use from several threads."""

    def __init__(self, store: TokenStore, needle: bytes, tokenizer: Tokenizer) -> None:
        self._store, self._needle, self._tokenizer = store, needle, tokenizer
        contents = store.manifest.contents
        self._eos, self._bos = contents["eos_id"], contents["bos_id"]
        # Whether the bytes of some tokens are those of each token, concatenated. A decoder of
        # Hugging Face may add or remove spaces between tokens, so it gets whole documents.
        self._joins = not isinstance(tokenizer.engine, TokenizersEngine)
        self._sizes: dict[int, int] = {}  # bytes of a token, as far as they were needed

    def part(self, part: int) -> list[TextMatch]:
        """Return the matches that begin in one part."""
        tokens = self._store.part_array(part, "tokens")
        bounds = self._store.part_array(part, "bounds").astype(np.int64)
        first = self._store.first_document(part)
        found: list[TextMatch] = []
        document = 0
        while document < len(bounds):
            begin = int(bounds[document - 1]) if document else 0
            # At least one document, and all that end within the next block.
            stop = int(np.searchsorted(bounds, begin + _BLOCK_TOKENS, side="right"))
            stop = max(document + 1, stop)
            whole = range(document, stop)
            # Most blocks do not have the text, and then their documents need not be looked at.
            if self._joins and len(whole) > 1:
                end = int(bounds[stop - 1])
                if self._needle not in self._tokenizer.decode_bytes(tokens[begin:end]):
                    # Only the last document of a part can continue in the next part.
                    whole = whole[-1:] if stop == len(bounds) else whole[:0]
            for each in whole:
                found += self._document(first + each)
            document = stop
        return found

    def _document(self, number: int) -> Iterator[TextMatch]:
        """Yield the matches that begin in a document, or in one piece of it."""
        ids, start = self._text_ids(number)
        size = len(ids)
        if not self._store.edges(number)[1]:
            ids = np.concatenate([ids, self._following(number)])
        # A token has at least one byte, so this many more tokens hold the rest of a match.
        more, block = len(self._needle), _BLOCK_TOKENS if self._joins else len(ids)
        for first in range(0, size, block or 1):
            some = ids[first : first + block + more]
            data = self._tokenizer.decode_bytes(some)
            at = data.find(self._needle)
            if at < 0:
                continue
            edges = self._edges(some)
            while at >= 0:
                low, high = np.searchsorted(
                    edges, [at, at + len(self._needle) - 1], side="right"
                ).tolist()
                if low < min(block, size - first):  # others begin in the next block or piece
                    span = start + first + low, start + first + high + 1
                    yield TextMatch(number, span)
                at = data.find(self._needle, at + 1)

    def _text_ids(self, number: int) -> tuple[Ids, int]:
        """Return the tokens of a document that are text, and how many come before them."""
        ids = self._store.document(number)
        begins, ends = self._store.edges(number)
        if ends and ids[-1:].tolist() == [self._eos]:
            ids = ids[:-1]
        if begins and ids[:1].tolist() == [self._bos]:
            return ids[1:], 1
        return ids, 0

    def _following(self, number: int) -> Ids:
        """Return the tokens after a piece that may hold the rest of a match."""
        found: list[Ids] = []
        while sum(map(len, found)) < len(self._needle) and not self._store.edges(number)[1]:
            number += 1
            found.append(self._text_ids(number)[0][: len(self._needle)])
        return np.concatenate(found)[: len(self._needle)]

    def _edges(self, ids: Ids) -> NDArray[np.int64]:
        """Return the byte at which each token ends."""
        if not self._joins:
            ends = [
                len(self._tokenizer.decode_bytes(ids[:stop])) for stop in range(1, len(ids) + 1)
            ]
            return np.array(ends, np.int64)
        distinct, which = np.unique(ids, return_inverse=True)
        for each in distinct.tolist():
            if each not in self._sizes:
                self._sizes[each] = len(self._tokenizer.decode_bytes([each]))
        sizes = np.array([self._sizes[each] for each in distinct.tolist()], np.int64)
        return np.cumsum(sizes[which])
