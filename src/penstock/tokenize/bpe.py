r"""Byte-pair encoding: counts the words of texts, and learns merges from the counts.

The merges are those that the trainer of `tokenizers` learns from the same texts, in the same order.
This module exists because it takes a fourteenth of the processor time of that trainer for 1 GB.

**Words** are the pieces of GPT-2's pattern: a run of letters, digits or other characters, with a
space before it. `tokenizers` finds them exactly, at about 2 MB/s. So the text is first cut, by
array operations, at places where every text has a border between two words. Arrow counts the equal
pieces. Then `tokenizers` finds the words of each different piece once:

    "don't stop, it's 'fine'"                             text
    "don" "'t" " stop" "," " it" "'s" " 'fine" "'"        pieces
    "don" "'t" " stop" "," " it" "'s" " '" "fine" "'"     words

A table of counts has one row for each different word, so its size does not grow with the number of
equal words.

**Merges.** All words are concatenated in one array. The number of a token is at its first byte and
at its last byte, so the neighbours of a token are found without links:

    bytes       ▏ t   h   e   r   e ▏       a word of the tokens "th", "e" and "re"
    tokens      ▏th  th   e  re  re ▏
    the token after "th" begins at its first byte + its length; the one before "re" ends before it

Each pair of tokens has a list of the places where it occurs, made when the pair came into being.
Later merges take tokens away from some of these places. They do not change the counts of other
pairs: the count of a list can only become smaller, and it is computed again when it seems to be the
highest of all. Pairs whose count is far below the highest are kept together in a few arrays.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from tokenizers import pre_tokenizers

from penstock.ranges import ranges
from penstock.sources.batch import ArrowArray, binary_array, bool_array, text_offsets
from penstock.tokenize.definition import byte_alphabet

_LETTER, _DIGIT, _MARK, _APOSTROPHE, _BLANK, _NOT_SPACE = (1 << bit for bit in range(6))
_PRINTED = _LETTER | _DIGIT | _MARK | _APOSTROPHE
_PATTERN = pre_tokenizers.ByteLevel(add_prefix_space=False)
# A piece that is one word: no apostrophe, and no blank but a space at its beginning.
_ONE_WORD = r"^ ?([A-Za-z]+|[0-9]+|[!-&(-/:-@\[-`{-~]+)$"


def _tables() -> tuple[bytes, bytes]:
    """For each byte, its class, and the classes before which a text may be cut after it.

    A cut is safe if both sides have the same words without the other side:

    - before a blank that follows a character that is not blank. The pattern looks ahead only after
      blanks.
    - between letters, digits and other characters of ASCII. But an apostrophe and the letters after
      it may be one word, such as "'ll".

    Control characters, and bytes of characters that are not ASCII, have no class.
    """
    kinds, after = np.zeros(256, np.uint8), np.zeros(256, np.uint8)
    everything = np.arange(256)
    for first, last, kind, cut_before in (
        ("!", "~", _MARK, _BLANK | _LETTER | _DIGIT),
        ("A", "Z", _LETTER, _BLANK | _DIGIT | _MARK | _APOSTROPHE),
        ("a", "z", _LETTER, _BLANK | _DIGIT | _MARK | _APOSTROPHE),
        ("0", "9", _DIGIT, _BLANK | _LETTER | _MARK | _APOSTROPHE),
        ("'", "'", _APOSTROPHE, _BLANK | _DIGIT),
        ("\t", "\r", _BLANK | _NOT_SPACE, 0),
        (" ", " ", _BLANK, 0),
    ):
        chosen = (everything >= ord(first)) & (everything <= ord(last))
        kinds[chosen], after[chosen] = kind, cut_before
    after[0x80:] = _BLANK
    return kinds.tobytes(), after.tobytes()


_KINDS, _CUT_BEFORE = _tables()
# The last bytes of blanks that are not ASCII (such as U+00A0, U+2003 and U+3000), and the bytes
# before those. Some letters have the same two bytes; texts are not cut after these either.
_LAST = np.isin(np.arange(256), [*range(0x80, 0x8B), 0x9F, 0xA0, 0xA8, 0xA9, 0xAF])
_LAST_BUT_ONE = np.isin(np.arange(256), [0xC2, 0x9A, 0x80, 0x81])


@dataclass(frozen=True, slots=True)
class WordCounts:
    """Different words or pieces, and how often each occurs."""

    words: ArrowArray
    """A large_binary array without gaps and nulls."""
    counts: NDArray[np.int64]


def count_pieces(texts: ArrowArray) -> WordCounts:
    """The different pieces of `texts`, in any order; `count_words` finds their words.

    Args:
        texts: A large_binary array of valid UTF-8. A word does not continue in the next text.
    """
    counted = pc.value_counts(_pieces(texts))
    counts = counted.field("counts").buffers()[1]
    return WordCounts(counted.field("values"), np.frombuffer(counts, np.int64, len(counted)))


def count_words(pieces: Sequence[WordCounts]) -> WordCounts:
    """The different words of `pieces`, in any order."""
    total = add_counts(pieces)
    bits = pc.match_substring_regex(total.words, _ONE_WORD).buffers()[1]
    is_word = np.unpackbits(
        np.frombuffer(bits, np.uint8), count=len(total.counts), bitorder="little"
    ).astype(bool)
    return add_counts([_where(total, is_word), _split(_where(total, ~is_word))])


def _where(table: WordCounts, keep: NDArray[np.bool_]) -> WordCounts:
    return WordCounts(table.words.filter(bool_array(keep)), table.counts[keep])


def add_counts(tables: Sequence[WordCounts]) -> WordCounts:
    """All words of `tables`, with the sum of the counts of each."""
    # Faster than Arrow's group_by, which takes a second for a million rows.
    joined = pa.concat_arrays([binary_array([]), *(table.words for table in tables)])
    coded = joined.dictionary_encode()
    rows = np.frombuffer(coded.indices.buffers()[1], np.int32, len(joined))
    counts = np.concatenate([np.zeros(0, np.int64), *(table.counts for table in tables)])
    # Sums of float64 are exact below 2**53.
    sums = np.bincount(rows, counts, len(coded.dictionary)).astype(np.int64)
    return WordCounts(coded.dictionary, sums)


def _pieces(texts: ArrowArray) -> ArrowArray:
    """The texts cut into pieces; they share the buffer of the texts."""
    edges = text_offsets(texts)
    if edges[0] == edges[-1]:
        return binary_array([])
    buffer = texts.buffers()[2]
    data = np.frombuffer(buffer, np.uint8)[: edges[-1]]
    # bytes.translate is ten times as fast as an index into an array.
    raw = data.tobytes()
    kinds = np.frombuffer(raw.translate(_KINDS), np.uint8)
    cut_before = np.frombuffer(raw.translate(_CUT_BEFORE), np.uint8)
    is_start = np.zeros(len(data) + 1, bool)
    np.not_equal(cut_before[:-1] & kinds[1:], 0, out=is_start[1:-1])
    _keep_wide_blanks(data, is_start)
    # An empty text has no piece, and its edges are equal.
    is_start[edges] = True
    _cut_blanks(kinds, is_start, edges[:-1])
    starts = np.flatnonzero(is_start[edges[0] :]) + edges[0]
    buffers = [None, pa.py_buffer(starts), buffer]
    return pa.Array.from_buffers(pa.large_binary(), len(starts) - 1, buffers)


def _keep_wide_blanks(data: NDArray[np.uint8], is_start: NDArray[np.bool_]) -> None:
    """Remove the cuts that may be between a blank that is not ASCII and one that is."""
    wide = np.flatnonzero(is_start[1:-1] & (data[:-1] >= 0x80)) + 1
    is_blank = _LAST[data[wide - 1]] & _LAST_BUT_ONE[data[wide - 2]]
    is_start[wide[is_blank]] = False


def _cut_blanks(
    kinds: NDArray[np.uint8], is_start: NDArray[np.bool_], begins: NDArray[np.int64]
) -> None:
    r"""Cut blanks from the word that follows them, unless the only blank is a space.

    All blanks but the last are one word. The last blank belongs to the word after it if it is a
    space, and is a word if it is not: "\n\n  word" has the words "\n\n ", " word".

    Args:
        kinds: The class of each byte.
        is_start: Whether a piece starts at each byte.
        begins: Where the texts begin. Blanks at the end of a text are one word.
    """
    is_blank = (kinds & _BLANK) != 0
    ends_blanks = (kinds & _PRINTED) != 0
    ends_blanks[begins[begins < len(kinds)]] = False
    is_start[1:-2] |= is_blank[:-2] & is_blank[1:-1] & ends_blanks[2:]
    # If a cut is before the last blank, the blank is a piece. Otherwise it may follow a blank that
    # is not ASCII.
    is_start[1:-1] |= is_start[:-2] & ((kinds[:-1] & _NOT_SPACE) != 0) & ends_blanks[1:]


def is_cut_safe(left: str, right: str) -> bool:
    """Whether a text may be cut into `left` and `right` without a change of its words."""
    return _words(left) + _words(right) == _words(left + right)


def _words(text: str) -> list[str]:
    """The words of a text, by the pattern of GPT-2."""
    return [text[start:stop] for _, (start, stop) in _PATTERN.pre_tokenize_str(text)]


def _split(pieces: WordCounts) -> WordCounts:
    """The words of `pieces`, each with the count of its piece."""
    words: list[bytes] = []
    rows: list[int] = []
    for row, piece in enumerate(pieces.words.to_pylist()):
        found = _words(piece.decode())
        words += map(str.encode, found)
        rows += [row] * len(found)
    return WordCounts(binary_array(words), pieces.counts[np.array(rows, np.int64)])


Pair = tuple[int, int]
Places = NDArray[np.signedinteger]

_END = -1  # before, between and after words
_INSIDE = -2  # a byte inside a token, at which another token began before
# Pairs are kept as Python objects if their count is at least the highest divided by this.
_RARE = 8


def learn_merges(
    words: WordCounts, tokens: list[str], vocab_size: int, *, min_count: int
) -> Iterator[Pair]:
    """Merge pairs until there are `vocab_size` tokens, or no pair occurs `min_count` times.

    Args:
        words: The words and their counts.
        tokens: The tokens before any merge: special tokens, and the characters of the byte
            alphabet. New tokens are appended.
        vocab_size: How many tokens to stop at.
        min_count: The least count of a pair to merge.

    Yields:
        The numbers of the two tokens of each pair, in the order of their merges.
    """
    learner = _Learner(words, tokens, vocab_size, min_count)
    while len(tokens) < vocab_size and (pair := learner.merge_next()):
        yield pair


@dataclass(slots=True)
class _Groups:
    """Pairs and their places: the places of pair `i` are `places[starts[i]:starts[i + 1]]`."""

    keys: NDArray[np.int64]
    """The first token of each pair in the high 32 bits, the second one in the others."""
    counts: NDArray[np.int64]
    starts: NDArray[np.int64]
    places: Places

    def where(self, keep: NDArray[np.bool_]) -> "_Groups":
        """The pairs selected by `keep`."""
        lengths = np.diff(self.starts)[keep]
        starts = np.concatenate([[0], np.cumsum(lengths)])
        places = self.places[ranges(self.starts[:-1][keep], lengths)]
        return _Groups(self.keys[keep], self.counts[keep], starts, places)


def _joined(groups: list[_Groups]) -> _Groups:
    ends = np.cumsum([0, *(len(each.places) for each in groups)])
    starts = [each.starts[:-1] + end for each, end in zip(groups, ends[:-1], strict=True)]
    return _Groups(
        np.concatenate([each.keys for each in groups]),
        np.concatenate([each.counts for each in groups]),
        np.concatenate([*starts, ends[-1:]]),
        np.concatenate([each.places for each in groups]),
    )


def _grouped(keys: NDArray[np.int64], counts: NDArray[np.int64], places: Places) -> _Groups:
    """One row for each different key, with the sum of its counts and all its places."""
    order = np.argsort(keys)
    ordered = keys[order]
    firsts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
    sums = np.add.reduceat(counts[order], firsts)
    return _Groups(ordered[firsts], sums, np.append(firsts, len(keys)), places[order])


class _Learner:
    """The words as tokens, and the pairs that may be merged."""

    def __init__(
        self, words: WordCounts, tokens: list[str], vocab_size: int, min_count: int
    ) -> None:
        self._tokens = tokens
        self._ids = {token: number for number, token in enumerate(tokens)}
        self._lengths = np.ones(vocab_size, np.int32)  # in bytes
        self._min_count = min_count
        self._counts = words.counts
        # Minus the count, the pair, and its places. A pair is here once at most, so places are
        # never compared.
        self._heap: list[tuple[int, int, int, Places]] = []
        self._rare: list[_Groups] = []
        first = self._lay_out(words)
        self._floor = max(min_count, int(first.counts.max(initial=0)) // _RARE)
        self._add(first)

    def _lay_out(self, words: WordCounts) -> _Groups:
        """Concatenate the words; returns the pairs of bytes."""
        ids = np.zeros(256, np.int32)
        for char, byte in byte_alphabet().items():
            ids[byte] = self._ids[char]
        edges = text_offsets(words.words)
        data = np.frombuffer(words.words.buffers()[2] or b"", np.uint8)[edges[0] : edges[-1]]
        lengths = np.diff(edges)
        # A border is before each word and after the last one.
        size = len(data) + len(lengths) + 1
        kind: type[np.signedinteger] = np.int32 if size < 2**31 else np.int64
        is_border = np.zeros(size, bool)
        is_border[edges - edges[0] + np.arange(len(edges))] = True
        spread = np.zeros(size, np.uint8)
        spread[~is_border] = data
        self._flat = np.where(is_border, np.int32(_END), ids[spread])
        self._words = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths + 1)
        both = np.flatnonzero(~(is_border[:-1] | is_border[1:])).astype(kind)
        # 16 bits, because NumPy sorts them by radix sort.
        pairs = spread[both].astype(np.uint16) << 8 | spread[both + 1]
        places = both[np.argsort(pairs, kind="stable")]
        sizes = np.bincount(pairs, minlength=1 << 16)
        sums = np.bincount(pairs, self._weights(both), 1 << 16).astype(np.int64)
        found = np.flatnonzero(sizes)
        keys = _keys(ids[found >> 8], ids[found & 0xFF])
        return _Groups(keys, sums[found], np.cumsum([0, *sizes[found]]), places)

    def _weights(self, places: Places) -> NDArray[np.int64]:
        """The count of the word at each place."""
        return self._counts[self._words[places]]

    def _add(self, groups: _Groups) -> None:
        """Add frequent pairs to the heap, and the others to `_rare`."""
        is_rare = groups.counts < self._floor
        if is_rare.any():
            self._rare.append(groups.where(is_rare))
            groups = groups.where(~is_rare)
        edges = groups.starts.tolist()
        rows = zip(groups.keys.tolist(), groups.counts.tolist(), edges, edges[1:], strict=False)
        for key, count, start, stop in rows:
            # Copied, because a view would keep the places of all other pairs in memory.
            places = groups.places[start:stop].copy()
            heapq.heappush(self._heap, (-count, key >> 32, key & 0xFFFFFFFF, places))

    def merge_next(self) -> Pair | None:
        """Merge the most frequent pair, and return it; None if none is frequent enough.

        Among equally frequent pairs, the one with the lower token numbers is merged.
        """
        while True:
            while self._rare and (not self._heap or -self._heap[0][0] < self._floor):
                self._lower_floor()
            if not self._heap or -self._heap[0][0] < self._min_count:
                return None
            known, first, second, places = self._heap[0]
            places = places[self._flat[places] == first]
            places = places[self._flat[places + self._lengths[first]] == second]
            count = int(self._weights(places).sum())
            if count == -known:
                heapq.heappop(self._heap)
                self._merge((first, second), places)
                return first, second
            heapq.heapreplace(self._heap, (-count, first, second, places))

    def _lower_floor(self) -> None:
        """Move the most frequent of the rare pairs to the heap."""
        rare = _joined(self._rare)
        self._rare = []
        highest = int(rare.counts.max())
        self._floor = max(self._min_count, min(self._floor, highest) // _RARE)
        # Those below `_min_count` can never be merged.
        self._add(rare.where(rare.counts >= self._min_count))

    def _merge(self, pair: Pair, places: Places) -> None:
        """Make one token of the two tokens of a pair, at all its places."""
        places = np.sort(places)
        if pair[0] == pair[1]:
            places = self._without_overlaps(places, self._lengths[pair[0]])
        # No other pair makes the same token. A merge that does not cross the ends of a piece of
        # text changes it in the same way wherever it occurs, so the piece becomes this token
        # everywhere at once. But a special token may have the same text.
        token = self._tokens[pair[0]] + self._tokens[pair[1]]
        number = self._ids.setdefault(token, len(self._tokens))
        if number == len(self._tokens):
            self._tokens.append(token)
        size = self._lengths[pair[0]] + self._lengths[pair[1]]
        self._lengths[number] = size
        groups = self._neighbours(places, number, size)
        self._flat[places + self._lengths[pair[0]]] = _INSIDE
        self._flat[places] = self._flat[places + (size - 1)] = number
        if groups is not None:
            self._add(groups)

    @staticmethod
    def _without_overlaps(places: Places, length: int) -> Places:
        """The places at which a pair of equal tokens is merged.

        "aaa" has the pair ("a", "a") twice, and the first one is merged. In a run of places, each
        one token after the one before, every second one is merged.
        """
        numbers = np.arange(len(places))
        is_first = np.ones(len(places), bool)
        is_first[1:] = np.diff(places) != length
        in_run = numbers - np.maximum.accumulate(np.where(is_first, numbers, 0))
        kept: Places = places[in_run % 2 == 0]
        return kept

    def _neighbours(self, places: Places, number: int, size: int) -> _Groups | None:
        """The pairs of the new token and its neighbours; None if there are none."""
        # Whether another new token follows at once: "abab" becomes two tokens.
        is_followed = np.zeros(len(places), bool)
        is_followed[:-1] = places[1:] == places[:-1] + size
        follows = np.concatenate([[False], is_followed[:-1]])
        left, right = self._flat[places - 1], self._flat[places + size]
        has_left, has_right = (left != _END) & ~follows, (right != _END) & ~is_followed
        left, right = left[has_left], right[has_right]
        keys = np.concatenate(
            [
                _keys(left, number),
                _keys(number, right),
                np.full(int(is_followed.sum()), number << 32 | number, np.int64),
            ]
        )
        if not len(keys):
            return None
        weights = self._weights(places)
        chosen = has_left, has_right, is_followed
        starts = [places[has_left] - self._lengths[left], places[has_right], places[is_followed]]
        counts = np.concatenate([weights[each] for each in chosen])
        return _grouped(keys, counts, np.concatenate(starts))


def _keys(first: NDArray[np.int32] | int, second: NDArray[np.int32] | int) -> NDArray[np.int64]:
    return np.asarray(first, np.int64) << 32 | np.asarray(second, np.int64)
