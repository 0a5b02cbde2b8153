"""gigatoken, the fast engine, used only where its ids are those of `tokenizers`.

gigatoken is about 100 times as fast as `tokenizers` on the same documents. penstock does not trust
it to give the same ids:

- `GigatokenEngine` refuses definitions that are not among those that were compared (`supported`).
- `tokenizers` encodes the documents with one of the characters in code_points.txt.
- A build compares both engines on its first documents, and on samples of every slice (`compare`).
"""

import itertools
import json
import logging
import math
import multiprocessing
import os
import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, cached_property, partial
from typing import Literal

import gigatoken
import numpy as np
from numpy.typing import NDArray

from penstock.errors import TokenizerError
from penstock.tokenize.definition import Definition
from penstock.tokenize.engines import (
    ArrowTexts,
    Encoded,
    TokenizersEngine,
    as_texts,
    offsets_of,
    text_buffers,
)
from penstock.tokenize.supported import cut, find, knows_symbols, may_cut, refusal

EngineChoice = Literal["auto", "gigatoken", "tokenizers"]

_log = logging.getLogger("penstock")
_MAX_LOADED = 4
# The reference encodes about this many bytes around a listed character.
_PIECE_BYTES = 1 << 9


def choose_engine(
    definition: Definition, engine: EngineChoice, *, parse: bool
) -> "GigatokenEngine | TokenizersEngine":
    """The engine for `definition`; logs the reason if "auto" does not choose gigatoken.

    Raises:
        TokenizerError: no engine can load the definition, or the requested engine cannot.
    """
    if engine not in ("auto", "gigatoken", "tokenizers"):
        raise TokenizerError(f'engine={engine!r} is not "auto", "gigatoken" or "tokenizers".')
    reason = ""
    if engine != "tokenizers":
        try:
            return _loaded(definition, parse=parse)
        except Exception as error:  # noqa: BLE001  (gigatoken raises several types)
            # Only the first line is kept: the others name a location in gigatoken's source.
            reason = str(error).partition("\n")[0]
    if engine == "gigatoken":
        raise TokenizerError(
            f'gigatoken is not used for {definition.name}: {reason}. Use engine="auto" '
            "of penstock.load_tokenizer, which encodes with tokenizers here."
        )
    slow = TokenizersEngine(definition, parse=parse)
    slow.load()
    if engine == "auto":
        _log_slow(definition.name, reason)
    return slow


@cache  # the same tokenizer is logged once
def _log_slow(name: str, reason: str) -> None:
    # Worker processes load the same tokenizer again; only the parent logs it.
    if multiprocessing.parent_process() is None:
        _log.warning(
            f"gigatoken is not used for {name}: {reason}. tokenizers encodes instead, which gives "
            'the right ids and takes about 100 times as long. engine="tokenizers" of '
            "penstock.load_tokenizer chooses it without this message."
        )


class GigatokenEngine:
    """Encodes with gigatoken, and with the reference where the ids of the two could differ.

    A gigatoken tokenizer serves one call at a time: it holds a lock, and two threads reached
    270 MB/s with one tokenizer and 480 MB/s with one each. So each call borrows a tokenizer.
    Loading one takes 0.1 s and holds the GIL, so a process loads at most four. If more calls run
    at the same time, each is spread over gigatoken's own thread pool, which is a seventh slower on
    two cores. That pool hangs in a forked child, so worker processes load one tokenizer for each
    simultaneous call instead.

    Raises:
        TokenizerError: gigatoken is not known to give the right ids for the definition.
    """

    name = "gigatoken"

    def __init__(self, definition: Definition, *, parse: bool) -> None:
        self.reference = TokenizersEngine(definition, parse=parse)
        """Encodes the documents that contain one of the characters in code_points.txt."""
        plain = self.reference.plain
        # If special tokens are text, gigatoken gets a changed definition, which must be supported.
        config = definition.config if plain is None else plain.config()
        if part := refusal(config, parse=parse):
            raise TokenizerError(f"{part} is not among those that were compared with tokenizers")
        self._text = definition.text if plain is None else json.dumps(plain.gigatoken_config())
        self._definition = definition
        self._may_cut = may_cut(definition, parse=parse)
        # Unicode tables matter to split patterns and NFC; BPE with byte fallback has neither.
        self._has_listed = not definition.config["model"].get("byte_fallback")
        self._has_symbols = knows_symbols(definition)
        # One is loaded now, so that a definition that gigatoken cannot load raises here.
        first = _load_gigatoken(self._text)
        self.vocab_size = int(first.vocab_size)
        self._hold([first], is_forked=False)
        _engines.add(self)

    def __reduce__(self) -> tuple[Callable[[], "GigatokenEngine"], tuple[()]]:
        # Loaded tokenizers and the lock cannot be copied; the copy loads its own.
        is_parsed = self.reference.plain is None
        return partial(GigatokenEngine, self._definition, parse=is_parsed), ()

    def _hold(self, tokenizers: list[gigatoken.Tokenizer], *, is_forked: bool) -> None:
        """Set the loaded tokenizers; none of them is borrowed."""
        self._is_forked = is_forked
        self._lock = threading.Lock()  # of the number of loaded ones; the queue has its own
        self._num_loaded = len(tokenizers)
        self._idle: queue.SimpleQueue[gigatoken.Tokenizer] = queue.SimpleQueue()
        for each in tokenizers:
            self._idle.put(each)

    @property
    def _max_loaded(self) -> float:
        # This is checked at each call and not once: while a worker process unpickles its arguments,
        # which may include this engine, multiprocessing has not yet set its parent_process().
        is_worker = self._is_forked or multiprocessing.parent_process() is not None
        return math.inf if is_worker else _MAX_LOADED

    @cached_property
    def _decoder(self) -> gigatoken.Tokenizer:
        return _load_gigatoken(self._definition.text)

    def encode_separated(self, data: bytes, separator: bytes) -> Encoded:
        """Ids of the non-empty pieces of `data` between separators, without a copy of the text."""
        # If there is a listed character, `encode` finds out which documents contain one. That needs
        # the offsets of the documents, which a block of text does not have.
        if len(self._listed_in(np.frombuffer(data, np.uint8))):
            return self.encode(as_texts([piece for piece in data.split(separator) if piece]))
        return self._encode(gigatoken.BytesSource(data, separator))

    def encode(self, texts: ArrowTexts) -> Encoded:
        """Ids of `texts`; the Arrow buffers are not copied."""
        data, edges = text_buffers(texts)
        if not len(texts):
            return np.zeros(0, np.uint32), edges
        # Everything is encoded first, because most batches contain no listed character.
        encoded = self.encode_raw(texts)
        positions = self._listed_in(data)
        if not len(positions):
            return encoded
        documents = np.unique(np.searchsorted(edges, positions, side="right") - 1).tolist()
        exact = self._exact([data[edges[row] : edges[row + 1]].tobytes() for row in documents])
        return _replaced(encoded, documents, exact)

    def encode_raw(self, texts: ArrowTexts) -> Encoded:
        """Ids of `texts` as gigatoken returns them, not corrected by the reference."""
        import awkward as ak

        return self._encode(ak.from_arrow(texts))

    def _listed_in(self, data: NDArray[np.uint8]) -> NDArray[np.int64]:
        """The positions of code points that gigatoken treats differently from the reference."""
        has_listed = self._has_listed
        return find(data, symbols=self._has_symbols) if has_listed else np.zeros(0, np.int64)

    def _exact(self, texts: list[bytes]) -> list[NDArray[np.uint32]]:
        """The ids of each text, equal to those of the reference.

        A long text is cut into pieces whose ids do not depend on each other, so that one unusual
        letter does not send 64 MB to the slow reference. gigatoken encodes the other pieces.
        """
        cuts = [cut(text, _PIECE_BYTES) if self._may_cut else [text] for text in texts]
        pieces = as_texts(list(itertools.chain(*cuts)))
        # If a text was cut, `encode` gives the pieces with a listed character to this method again.
        # Pieces cannot be cut further, so the recursion ends.
        engine = self if len(pieces) > len(texts) else self.reference
        ids, offsets = engine.encode(pieces)
        edges = offsets[offsets_of([len(each) for each in cuts])].tolist()
        return [ids[start:stop] for start, stop in itertools.pairwise(edges)]

    def _encode(self, source: object) -> Encoded:
        # `parallel` spreads the call over gigatoken's thread pool.
        with self._borrowed() as (tokenizer, is_crowded):
            layout = tokenizer.encode_batch(source, parallel=is_crowded).layout
        # Views of gigatoken's result, not copies.
        return np.asarray(layout.content.data), np.asarray(layout.offsets.data)

    @contextmanager
    def _borrowed(self) -> Iterator[tuple[gigatoken.Tokenizer, bool]]:
        """A tokenizer for one call, and whether more calls run than tokenizers are allowed."""
        is_crowded = False
        try:
            tokenizer = self._idle.get_nowait()
        except queue.Empty:
            with self._lock:
                is_crowded = self._num_loaded >= self._max_loaded
                self._num_loaded += not is_crowded
            # Loading and waiting happen outside the lock, so that other calls need not wait for it.
            tokenizer = self._idle.get() if is_crowded else _load_gigatoken(self._text)
        try:
            yield tokenizer, is_crowded
        finally:
            self._idle.put(tokenizer)

    def decode(self, ids: NDArray[np.uint32]) -> bytes:
        """The bytes that `ids` stand for."""
        return bytes(self._decoder.decode(ids))


# Weak, so that an engine nobody uses is freed with its tokenizers.
_engines: "weakref.WeakSet[GigatokenEngine]" = weakref.WeakSet()
# An engine holds its definition, so the id of a definition is not used again before its entry goes.
_by_definition: "weakref.WeakValueDictionary[tuple[int, bool], GigatokenEngine]" = (
    weakref.WeakValueDictionary()
)


def _loaded(definition: Definition, *, parse: bool) -> GigatokenEngine:
    """The engine of `definition`; loaded anew only if nobody uses one.

    For GPT-2 that takes 0.3 s, and the datasets of a run mostly have one tokenizer.
    """
    key = id(definition), parse
    engine = _by_definition.get(key)
    if engine is None:
        engine = _by_definition[key] = GigatokenEngine(definition, parse=parse)
    return engine


def _after_fork() -> None:
    """Reset every engine in a forked child.

    Tokenizers that other threads had borrowed at the fork never come back, since those threads do
    not exist in the child, and a lock that they held stays locked.
    """
    for engine in _engines:
        idle = []
        with suppress(queue.Empty):
            while True:
                idle.append(engine._idle.get_nowait())
        engine._hold(idle, is_forked=True)


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_after_fork)


def _load_gigatoken(text: str) -> gigatoken.Tokenizer:
    return gigatoken.Tokenizer.from_json(text)


def _replaced(encoded: Encoded, documents: list[int], ids: list[NDArray[np.uint32]]) -> Encoded:
    """`encoded` with new ids for some documents, whose numbers are in ascending order."""
    old, offsets = encoded
    lengths = np.diff(offsets)
    pieces, done = [], int(offsets[0])
    for row, new in zip(documents, ids, strict=True):
        pieces += [old[done : offsets[row]], new]
        done = int(offsets[row + 1])
        lengths[row] = len(new)
    pieces.append(old[done : offsets[-1]])
    return np.concatenate(pieces), offsets_of(lengths)
