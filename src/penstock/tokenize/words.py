r"""Counts the words of texts, which are what BPE merges are learned from.

Words are the pieces of GPT-2's pattern: a run of letters, digits or other characters, with a space
before it. `tokenizers` finds them exactly, at about 2 MB/s. So the text is first cut, by array
operations, at places where every text has a border between two words. Arrow counts the equal
pieces. Then `tokenizers` finds the words of each different piece once:

    "don't stop, it's 'fine'"                             text
    "don" "'t" " stop" "," " it" "'s" " 'fine" "'"        pieces
    "don" "'t" " stop" "," " it" "'s" " '" "fine" "'"     words

A table of counts has one row for each different word, so its size does not grow with the number of
equal words.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from tokenizers import pre_tokenizers

from penstock.sources.document import ArrowArray, binary_array, bool_array, text_offsets

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

    def where(self, keep: NDArray[np.bool_]) -> "WordCounts":
        """The rows selected by `keep`."""
        return WordCounts(self.words.filter(bool_array(keep)), self.counts[keep])


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
    return add_counts([total.where(is_word), _split(total.where(~is_word))])


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
