"""Learns the merges of byte-pair encoding from counts of words.

The merges are those that `tokenizers` learns from the same words, in the same order. Its trainer
takes texts and no counts.

All words are concatenated in one array. The number of a token is at its first byte and at its last
byte, so the neighbours of a token are found without links:

    bytes       ▏ t   h   e   r   e ▏       a word of the tokens "th", "e" and "re"
    tokens      ▏th  th   e  re  re ▏
    the token after "th" begins at its first byte + its length; the one before "re" ends before it

Each pair of tokens has a list of the places where it occurs, made when the pair came into being.
Later merges take tokens away from some of these places. They do not change the counts of other
pairs: the count of a list can only become smaller, and it is computed again when it seems to be the
highest of all. Pairs whose count is far below the highest are kept together in a few arrays.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.ranges import ranges
from penstock.sources.document import text_offsets
from penstock.tokenize.words import WordCounts

Pair = tuple[int, int]
Places = NDArray[np.signedinteger]

_END = -1  # before, between and after words
_INSIDE = -2  # a byte inside a token, at which another token began before
# Pairs are kept as Python objects if their count is at least the highest divided by this.
_RARE = 8


def learn_merges(
    words: WordCounts,
    tokens: list[str],
    alphabet: Sequence[str],
    vocab_size: int,
    *,
    min_count: int,
    progress: Callable[[int], None] | None = None,
) -> list[Pair]:
    """Learn merges until there are `vocab_size` tokens, or no pair occurs `min_count` times.

    Args:
        words: The words and their counts.
        tokens: The tokens before any merge: special tokens, and those of `alphabet`. New tokens are
            appended.
        alphabet: The character that stands for each byte, from byte 0 to 255.
        vocab_size: How many tokens to stop at.
        min_count: The least count of a pair to merge.
        progress: Called with the number of tokens after each merge.

    Returns:
        Pairs of token numbers, in the order of their merges.
    """
    learner = _Learner(words, tokens, alphabet, vocab_size, min_count)
    while len(tokens) < vocab_size and learner.merge_next():
        if progress:
            progress(len(tokens))
    return learner.merges


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
        self,
        words: WordCounts,
        tokens: list[str],
        alphabet: Sequence[str],
        vocab_size: int,
        min_count: int,
    ) -> None:
        self.merges: list[Pair] = []
        self._tokens = tokens
        self._ids = {token: number for number, token in enumerate(tokens)}
        self._lengths = np.ones(vocab_size, np.int32)  # in bytes
        self._min_count = min_count
        self._counts = words.counts
        # Minus the count, the pair, and its places. A pair is here once at most, so places are
        # never compared.
        self._heap: list[tuple[int, int, int, Places]] = []
        self._rare: list[_Groups] = []
        first = self._lay_out(words, np.array([self._ids[char] for char in alphabet], np.int32))
        self._floor = max(min_count, int(first.counts.max(initial=0)) // _RARE)
        self._add(first)

    def _lay_out(self, words: WordCounts, ids: NDArray[np.int32]) -> _Groups:
        """Concatenate the words; returns the pairs of bytes."""
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

    def merge_next(self) -> bool:
        """Merge the most frequent pair; False if none is frequent enough.

        Among equally frequent pairs, the one with the lower token numbers is merged.
        """
        while True:
            while self._rare and (not self._heap or -self._heap[0][0] < self._floor):
                self._lower_floor()
            if not self._heap or -self._heap[0][0] < self._min_count:
                return False
            known, first, second, places = self._heap[0]
            places = places[self._flat[places] == first]
            places = places[self._flat[places + self._lengths[first]] == second]
            count = int(self._weights(places).sum())
            if count == -known:
                heapq.heappop(self._heap)
                self._merge((first, second), places)
                return True
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
        self.merges.append(pair)
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
