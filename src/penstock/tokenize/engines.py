"""The programs that turn text into ids.

Every engine takes an Arrow array of documents and gives one flat array of ids with
`len + 1` offsets. gigatoken is about 100 times as fast as the reference on the same
documents; `tokenizers` is the reference and serves what gigatoken is not known to do right:
definitions that `supported` does not list, and documents with one of `code_points`.
Ids never depend on the engine: a build compares the two before it trusts one, and goes on
comparing some documents of every slice.
"""

import json
import math
import multiprocessing
import os
import queue
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from itertools import chain
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.errors import TokenizerError
from penstock.sources.arrow import binary_array
from penstock.tokenize.code_points import cut, find
from penstock.tokenize.definition import Definition
from penstock.tokenize.special_tokens import PlainText, load_reference
from penstock.tokenize.supported import is_byte_level, knows_symbols, may_cut

__all__ = ["ByteEngine", "Encoded", "Engine", "GigatokenEngine", "ObjectEngine", "TokenizersEngine"]

Encoded = tuple[NDArray[np.uint32], NDArray[np.int64]]
"""Ids of all documents end to end, and where each begins and ends."""
_MOST_LOADED = 4
_PIECE_BYTES = 1 << 13


class Engine(Protocol):
    """Something that encodes many documents at once; safe to call from several threads."""

    name: str

    @property
    def vocab_size(self) -> int | None:
        """One more than the largest id it can give, where that is known."""

    def encode(self, texts: Any) -> Encoded:
        """Ids of `texts`, a large_binary array of valid UTF-8."""

    def decode(self, ids: NDArray[np.uint32]) -> bytes:
        """The bytes that `ids` stand for."""


class GigatokenEngine:
    """gigatoken, on the calling thread where that is enough.

    One tokenizer serves one call at a time (a second waits for a lock inside: two threads
    reached 270 MB/s with one, 480 with one each), so each call borrows one. Loading one takes a
    tenth of a second in which no other thread gets on, so there are four at the most; with more
    calls at a time than that, each is spread over the process-wide pool of gigatoken. That is a
    seventh slower on two cores, and would hang in a forked child; so worker processes load as
    many as they have calls at a time.
    """

    name = "gigatoken"

    def __init__(self, definition: Definition, *, parse: bool) -> None:
        self.reference = TokenizersEngine(definition, parse=parse)
        """Encodes the documents that hold one of `code_points`."""
        plain = self.reference.plain
        self._text = definition.text if plain is None else json.dumps(plain.gigatoken_config())
        self._definition = definition
        self._may_cut = may_cut(definition, parse=parse)
        # BPE with byte fallback has neither patterns nor NFC, which are what differs.
        self._has_listed = is_byte_level(definition)
        self._has_symbols = knows_symbols(definition)
        self._begin()

    def __getstate__(self) -> dict[str, Any]:
        # Tokenizers and the lock stay behind; a copy loads its own.
        kept = ("_text", "_definition", "reference", "_may_cut", "_has_listed", "_has_symbols")
        return {key: self.__dict__[key] for key in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    def _begin(self) -> None:
        first = _load_gigatoken(self._text)
        self.vocab_size = int(first.vocab_size)
        self._hold([first], is_forked=False)
        _engines.add(self)

    def _hold(self, tokenizers: list[Any], *, is_forked: bool) -> None:
        """Begin with these, and none lent out."""
        self._is_forked = is_forked
        self._lock = threading.Lock()
        self._num_calls = 0
        self._num_loaded = len(tokenizers)
        self._idle: queue.SimpleQueue[Any] = queue.SimpleQueue()
        for each in tokenizers:
            self._idle.put(each)

    @property
    def _most_loaded(self) -> float:
        # What unpickles the arguments of a worker process does not know yet that it is one.
        is_worker = self._is_forked or multiprocessing.parent_process() is not None
        return math.inf if is_worker else _MOST_LOADED

    @cached_property
    def _decoder(self) -> Any:
        return _load_gigatoken(self._definition.text)

    def encode_separated(self, data: bytes, separator: bytes) -> Encoded:
        """Ids of the pieces of `data` between separators that are not empty, read in place."""
        import gigatoken

        if len(self._listed(np.frombuffer(data, np.uint8))):
            return self.encode(binary_array([piece for piece in data.split(separator) if piece]))
        return self._encode(gigatoken.BytesSource(data, separator))

    def encode(self, texts: Any) -> Encoded:
        """Ids of `texts`; the Arrow buffers are read in place."""
        if not len(texts):
            return _NOTHING
        edges = np.frombuffer(texts.buffers()[1], np.int64, count=len(texts) + 1)
        data = np.frombuffer(texts.buffers()[2] or b"", np.uint8, count=int(edges[-1]))
        encoded = self.encode_raw(texts)
        places = self._listed(data)
        if not len(places):
            return encoded
        documents = np.unique(np.searchsorted(edges, places, side="right") - 1).tolist()
        exact = [self._exact(data[edges[row] : edges[row + 1]].tobytes()) for row in documents]
        return _replaced(encoded, documents, exact)

    def encode_raw(self, texts: Any) -> Encoded:
        """Ids of `texts` as gigatoken gives them, right or wrong."""
        import awkward as ak

        return self._encode(ak.from_arrow(texts))

    def _listed(self, data: NDArray[np.uint8]) -> NDArray[np.int64]:
        """Where code points begin that gigatoken treats differently from the reference."""
        return find(data, symbols=self._has_symbols) if self._has_listed else _NOWHERE

    def _exact(self, text: bytes) -> NDArray[np.uint32]:
        """The reference's ids of one text, from gigatoken where both are known to agree.

        A long text is cut into pieces that have the same ids alone, so that one letter does not
        send 64 MB to the reference. A piece that has no such place inside is taken whole.
        """
        pieces = cut(text, _PIECE_BYTES) if self._may_cut else [text]
        engine = self if len(pieces) > 1 else self.reference
        return engine.encode(binary_array(pieces))[0]

    def _encode(self, source: Any) -> Encoded:
        with self._borrowed() as (tokenizer, is_crowded):
            layout = tokenizer.encode_batch(source, parallel=is_crowded).layout
        return np.asarray(layout.content.data), np.asarray(layout.offsets.data)

    @contextmanager
    def _borrowed(self) -> Iterator[tuple[Any, bool]]:
        """A tokenizer for one call, and whether more calls are under way than there may be."""
        with self._lock:
            self._num_calls += 1
            is_crowded = self._num_calls > self._most_loaded
        try:
            tokenizer = self._taken()
            try:
                yield tokenizer, is_crowded
            finally:
                self._idle.put(tokenizer)
        finally:
            with self._lock:
                self._num_calls -= 1

    def _taken(self) -> Any:
        try:
            return self._idle.get_nowait()
        except queue.Empty:
            with self._lock:
                is_room = self._num_loaded < self._most_loaded
                self._num_loaded += is_room
        return _load_gigatoken(self._text) if is_room else self._idle.get()

    def decode(self, ids: NDArray[np.uint32]) -> bytes:
        """The bytes that `ids` stand for."""
        return bytes(self._decoder.decode(ids))


_engines: "weakref.WeakSet[GigatokenEngine]" = weakref.WeakSet()


def _after_fork() -> None:
    """In a child, what was lent out then does not come back, and a lock may stay taken."""
    for engine in _engines:
        idle = []
        with suppress(queue.Empty):
            while True:
                idle.append(engine._idle.get_nowait())
        engine._hold(idle, is_forked=True)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _load_gigatoken(text: str) -> Any:
    import gigatoken

    return gigatoken.Tokenizer.from_json(text)


class TokenizersEngine:
    """Hugging Face `tokenizers`: slower, and the reference."""

    name = "tokenizers"
    vocab_size = None

    def __init__(self, definition: Definition, *, parse: bool) -> None:
        self._definition = definition
        self.plain = None if parse else PlainText(definition)

    def __getstate__(self) -> dict[str, Any]:
        # A pickled `tokenizers.Tokenizer` forgets that special tokens are text to it.
        plain = None if self.plain is None else PlainText(self._definition)
        return {"_definition": self._definition, "plain": plain}

    @cached_property
    def _tokenizer(self) -> Any:
        # Loaded on first use: decoding and short encodings never need the reference.
        if self.plain is not None and not self.plain.hidden:
            return self.plain.tokenizer(())  # the same vocabulary, loaded once
        return load_reference(self._definition.text, self._definition.name)

    def load(self) -> None:
        """Load the definition now, and not on first use.

        Raises:
            TokenizerError: it defines nothing that `tokenizers` knows.
        """
        assert self._tokenizer is not None  # the property raises or gives a tokenizer
        if self.plain:
            self.plain.tokenizer(())

    def encode(self, texts: Any) -> Encoded:
        """Ids of `texts`, without the tokens a model would add around them."""
        strings = [text.decode() for text in texts.to_pylist()]
        tokenizer = self.plain.tokenizer(strings) if self.plain else self._tokenizer
        encodings = tokenizer.encode_batch_fast(strings, add_special_tokens=False)
        ids, offsets = _flat([encoding.ids for encoding in encodings])
        if self.plain:
            self.plain.check(ids)
        return ids, offsets

    def splits(self, left: str, right: str) -> bool:
        """Whether two texts in one are split between them, before the model sees them.

        Also whether the ids of both are those of the one.
        """
        texts = [left, right, left + right]
        one, two, both = self._tokenizer.encode_batch(texts, add_special_tokens=False)
        if one.ids + two.ids != both.ids:
            return False
        words = both.word_ids[max(0, len(one.ids) - 1) : len(one.ids) + 1]
        return len(set(words)) == len(words)

    def decode(self, ids: NDArray[np.uint32]) -> bytes:
        """The text that `ids` stand for; exact only where the tokenizer is reversible."""
        return str(self._tokenizer.decode(ids.tolist(), skip_special_tokens=False)).encode()


class ByteEngine:
    """A token a byte; 256 ends a document, and added tokens follow."""

    name = "bytes"
    vocab_size = 256

    def __init__(self, added: Mapping[str, int] | None = None) -> None:
        self._added = {number: token.encode() for token, number in (added or {}).items()}

    def encode(self, texts: Any) -> Encoded:
        """The bytes themselves."""
        if not len(texts):
            return _NOTHING
        offsets = np.frombuffer(texts.buffers()[1], np.int64, count=len(texts) + 1)
        data = np.frombuffer(texts.buffers()[2] or b"", np.uint8, count=int(offsets[-1]))
        return data.astype(np.uint32), offsets

    def decode(self, ids: NDArray[np.uint32]) -> bytes:
        """The bytes and the added tokens; the end token is left out."""
        if not self._added or not (ids > 256).any():
            return bytes(ids[ids < 256].astype(np.uint8))
        words = [bytes((each,)) if each < 256 else self._added.get(each, b"") for each in ids]
        return b"".join(words)


class ObjectEngine:
    """Any object with `encode(str)`, which may return a list, an array or an Encoding."""

    name = "object"
    vocab_size = None

    def __init__(self, tokenizer: Any, special_ids: Iterable[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._special = np.array(sorted(special_ids), np.int64)
        # tiktoken raises on text that holds a special token; its "ordinary" call does not.
        self._encode = getattr(tokenizer, "encode_ordinary", tokenizer.encode)
        self.eos_token = getattr(tokenizer, "eos_token", None)
        self._options: dict[str, bool] = {}
        if any(each.__module__.startswith("transformers.") for each in type(tokenizer).__mro__):
            # It would parse special tokens in a text, and put others around it.
            self._options = {"add_special_tokens": False, "split_special_tokens": True}

    def encode(self, texts: Any) -> Encoded:
        """Ids of `texts`, one call a document.

        Raises:
            TokenizerError: one of them is a special token's.
        """
        strings = [text.decode() for text in texts.to_pylist()]
        ids, offsets = _flat([_ids(self._encode(each, **self._options)) for each in strings])
        found = np.flatnonzero(np.isin(ids, self._special))
        if len(found):
            text = strings[int(np.searchsorted(offsets, found[0], side="right")) - 1]
            raise TokenizerError(
                f"{type(self._tokenizer).__name__}.encode gave the special token {ids[found[0]]:,} "
                f"for {text[:60]!r}. Text must not write special tokens. Let encode() take them as "
                "text and add none, or use a tokenizer.json, with which penstock sees to that."
            )
        return ids, offsets

    def decode(self, ids: NDArray[np.uint32]) -> bytes:
        """What the object's own `decode` gives."""
        decode_bytes = getattr(self._tokenizer, "decode_bytes", None)
        if decode_bytes is not None:
            return bytes(decode_bytes(ids.tolist()))
        return str(self._tokenizer.decode(ids.tolist())).encode()


_NOWHERE = np.zeros(0, np.int64)
_NOTHING: Encoded = (np.zeros(0, np.uint32), np.zeros(1, np.int64))


def _ids(encoded: Any) -> Sequence[int]:
    """The ids in whatever an `encode` method returned."""
    encoded = getattr(encoded, "ids", encoded)
    return encoded.tolist() if hasattr(encoded, "tolist") else list(encoded)


def _flat(rows: list[Sequence[int]]) -> Encoded:
    offsets = np.zeros(len(rows) + 1, np.int64)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    ids = np.fromiter(chain.from_iterable(rows), np.int64, count=int(offsets[-1]))
    if len(ids) and (ids.min() < 0 or ids.max() > 0xFFFF_FFFF):
        raise TokenizerError(
            f"The tokenizer gave the id {ids.min()} or {ids.max()}; ids are 32 bits wide."
        )
    return ids.astype(np.uint32), offsets


def _replaced(encoded: Encoded, documents: list[int], ids: list[NDArray[np.uint32]]) -> Encoded:
    """`encoded` with other ids for some of its documents, which are in order."""
    old, offsets = encoded
    lengths = np.diff(offsets)
    pieces, place = [], int(offsets[0])
    for row, new in zip(documents, ids, strict=True):
        pieces += [old[place : offsets[row]], new]
        place = int(offsets[row + 1])
        lengths[row] = len(new)
    pieces.append(old[place : offsets[-1]])
    return np.concatenate(pieces), np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths)))
