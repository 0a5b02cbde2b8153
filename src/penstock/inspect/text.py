"""Finds a text in the documents of stores and token files, by their decoded bytes.

    parts         ├────── 0 ──────┼────── 1 ──────┤      one task each, on several threads
    blocks        ├── 256k ──┼────┤                      decoded at once, and searched
    documents     │ a │ b │ c …           … c │ d │      a long one continues in the next part

A search for token ids would miss text: how a word is cut into tokens depends on the words around
it. So documents are decoded. A text that crosses a border of blocks or of the pieces of a document
is found, because each piece is decoded with the beginning of the next one. A text that is partly in
one document and partly in another is not a match.
"""

import os
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.errors import PlanError
from penstock.inspect.documents import FoundDocument, found_at
from penstock.inspect.members import FileDocuments, Searched, members
from penstock.order.plan import Plan
from penstock.store.reader import TokenStore
from penstock.tokenize.engines import TokenizersEngine
from penstock.tokenize.tokenizer import Tokenizer

_BLOCK_TOKENS = 1 << 18
Ids = NDArray[Any]
_PIECE_TOKENS = 256  # a piece of a document whose decoder is not exact token by token
_CONTEXT_TOKENS = 32  # before a piece: a decoder decides about spaces by the token before
_QUEUED = 4  # tasks of each thread that wait, so that no thread is idle

Progress = Callable[[int, int], None]
"""Called with the number of tokens that were searched, and the number of all."""


class TextMatch(NamedTuple):
    """A place in a store at which a text was found."""

    document: int
    """The number of the document; of the piece in which the text begins."""
    span: tuple[int, int]
    """The tokens of the document that hold the text, counted from the start of this piece."""


def find_texts(
    plan: Plan,
    text: str,
    source: str | None = None,
    tokenizer: object = None,
    progress: Progress | None = None,
) -> Iterator[FoundDocument]:
    """Yield the tokens of every place at which a text occurs in the documents of a plan.

    Args:
        plan: The plan, whose stores and token files are searched one after the other, each by
            several threads.
        text: The text.
        source: Search this source only.
        tokenizer: The tokenizer, of stores and token files whose tokenizer is not known here.
        progress: Called with the tokens that were searched, and all tokens.

    Raises:
        MissingTokenizerError: the tokenizer of a store or of token files is not known.
        PlanError: a source cannot be searched, because its rows have no stream.
    """
    found = list(members(plan, source))
    for name in plan.names if source is None else (source,):
        if plan.sources[name].stream is None:
            raise PlanError(
                f"The rows of source {name} are not cut from stores or token files, so their text "
                "cannot be searched. Search the other sources."
            )
    # All before the first search: a source that cannot be searched is never left out.
    tokenizers = [member.load_tokenizer(tokenizer) for _, _, member in found]
    total = sum(int(member.num_tokens) for _, _, member in found)
    before = 0
    for (name, number, member), known in zip(found, tokenizers, strict=True):

        def report(done: int, _: int, before: int = before) -> None:
            if progress is not None:
                progress(before + done, total)

        store = member if isinstance(member, TokenStore) else FileDocuments(member, known.eos_id)
        for match in find_text(store, text, known, progress=report):
            place = name, plan.sources[name], number, store, match.document
            yield found_at(*place, match.span)
        before += int(member.num_tokens)


def find_text(
    store: Searched,
    text: str,
    tokenizer: Tokenizer,
    *,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Iterator[TextMatch]:
    """Yield every place of a store at which a text occurs, in order; places may overlap.

    Args:
        store: The store, or the documents of token files.
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
    parts = range(len(store.part_tokens))
    workers = threads or os.cpu_count() or 1
    done = 0
    with ThreadPoolExecutor(workers, thread_name_prefix="find-text") as pool:
        # Only a few tasks at a time: the matches of all parts need not fit into memory.
        waiting = iter(parts)
        running = [pool.submit(search.part, each) for each in islice(waiting, workers * _QUEUED)]
        for part in parts:
            matches = running.pop(0).result()
            running += [pool.submit(search.part, each) for each in islice(waiting, 1)]
            done += int(store.part_tokens[part])
            if progress is not None:
                progress(done, store.num_tokens)
            yield from matches


class _Search:
    """The search for a text in the parts of one store. Safe to use from several threads."""

    def __init__(self, store: Searched, needle: bytes, tokenizer: Tokenizer) -> None:
        self._store, self._needle, self._tokenizer = store, needle, tokenizer
        self._eos, self._bos = tokenizer.eos_id, tokenizer.bos_id
        if isinstance(store, TokenStore):
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
        if not self._joins:
            yield from self._found_in(number, ids, start, size)
            return
        # A token has at least one byte, so this many more tokens hold the rest of a match.
        more, block = len(self._needle), _BLOCK_TOKENS
        for first in range(0, size, block):
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

    def _found_in(self, number: int, ids: Ids, start: int, size: int) -> Iterator[TextMatch]:
        """Yield the matches that begin in the first `size` tokens of a document."""
        data = self._tokenizer.decode_bytes(ids)
        at = data.find(self._needle)
        tokens = None if at < 0 else _DecodedTokens(ids, data, self._tokenizer.decode_bytes)
        while tokens is not None and at >= 0:
            low, high = tokens.span(at, at + len(self._needle))
            if low < size:  # others begin in the next piece of the document
                yield TextMatch(number, (start + low, start + high))
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
        distinct, which = np.unique(ids, return_inverse=True)
        for each in distinct.tolist():
            if each not in self._sizes:
                self._sizes[each] = len(self._tokenizer.decode_bytes([each]))
        sizes = np.array([self._sizes[each] for each in distinct.tolist()], np.int64)
        return np.cumsum(sizes[which])


class _DecodedTokens:
    """Finds the tokens of a document that hold some bytes of its text, for any decoder.

        tokens    ├──── 256 ────┼──── 256 ────┼─ …      pieces
                         ├ 32 ┤├──── 256 ────┤           decoded together

    A decoder may add, remove or merge what neighbours stand for, so the text of the first n tokens
    must be decoded to know where token n ends. To decode all of them would take quadratic time.
    So the document is cut into pieces, which are decoded with a few tokens before them. A cut is
    made only where the text of the piece is what the text of the whole document has there.

    Args:
        ids: The tokens of the document.
        data: Their text.
        decode: The decoder.
    """

    def __init__(self, ids: Ids, data: bytes, decode: Callable[[Ids], bytes]) -> None:
        self._ids, self._data, self._decode = ids, data, decode
        self._firsts, self._starts = [0], [0]  # of each piece: its first token, and its first byte
        self._settled = cache(self._count_settled)
        while (cut := self._next_cut()) is not None:
            self._firsts.append(cut[0])
            self._starts.append(cut[1])

    def _next_cut(self) -> tuple[int, int] | None:
        """Return the token and the byte of the next cut; None if the rest is one piece."""
        first = self._firsts[-1] + _PIECE_TOKENS
        # A character may consist of several tokens, so a few places are tried.
        for each in range(first, min(first + _CONTEXT_TOKENS, len(self._ids))):
            text = self._text(len(self._firsts) - 1, each)
            if text and self._data.startswith(text, self._starts[-1]):
                return each, self._starts[-1] + len(text)
        return None

    def _text(self, piece: int, stop: int) -> bytes:
        """Return what the tokens from the first of a piece to `stop` add to the text."""
        first = self._firsts[piece]
        context = max(0, first - _CONTEXT_TOKENS)
        before = self._decode(self._ids[context:first]) if first else b""
        return self._decode(self._ids[context:stop])[len(before) :]

    def _count_settled(self, stop: int) -> int:
        """Return how many bytes of the text the first `stop` tokens determine."""
        piece = bisect_left(self._firsts, stop) - 1 if stop else 0
        text, start = self._text(piece, stop), self._starts[piece]
        # If the tokens end inside a character, its bytes are decoded as U+FFFD.
        pairs = enumerate(zip(text, self._data[start : start + len(text)], strict=False))
        return start + next((n for n, (one, two) in pairs if one != two), len(text))

    def span(self, start: int, stop: int) -> tuple[int, int]:
        """Return the tokens `[low, high)` that hold the bytes `[start, stop)`."""
        # A character may consist of several tokens, and the last of them settles it.
        near = self._before(after := self._tokens_until(start))
        settled = max(map(self._settled, near), default=0)
        low = next((each for each in near if self._settled(each) == settled), after - 1)
        return low, self._tokens_until(stop - 1)

    def _tokens_until(self, byte: int) -> int:
        """Return how many tokens from the start of the document determine a byte."""
        piece = bisect_right(self._starts, byte) - 1
        first = self._firsts[piece] + 1
        last = self._firsts[piece + 1] if piece + 1 < len(self._firsts) else len(self._ids)
        found = first + bisect_right(range(first, last + 1), byte, key=self._settled)
        # Not always the first such number: bytes of characters are merged only when their number
        # is right, so the next tokens may unsettle what was settled.
        return next((each for each in self._before(found) if self._settled(each) > byte), found)

    def _before(self, count: int) -> range:
        """Return some numbers of tokens below `count`, of the same piece."""
        first = self._firsts[bisect_left(self._firsts, count) - 1]
        return range(max(first, count - _CONTEXT_TOKENS), count)
