r"""Characters that gigatoken and `tokenizers` treat differently.

Both libraries split text by Unicode's classes (letter, number, mark), and one tokenizer definition
in five also normalizes the text. But each library has its own version of the Unicode tables. A code
point that was assigned between the two versions is a letter to one library and unassigned to the
other: "\\U000323b0's" is two tokens or three. `tokenizers` encodes the documents that contain such
a code point.

The ranges come from a comparison of all 1.1 million code points:

    python benchmarks/code_points.py

These code points belong to rare scripts and recent additions, so ordinary text has none of them,
and the search for them must be fast: `find` reads English at about 15 GB/s, gigatoken at 0.2 GB/s.
"""

import re
from functools import cache

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

# fmt: off
RANGES = (
    (0x07FD, 0x07FD), (0x088F, 0x088F), (0x0897, 0x089F), (0x08CA, 0x08D3),
    (0x09FE, 0x09FE), (0x0C3C, 0x0C3C), (0x0C5C, 0x0C5C), (0x0CDC, 0x0CDC),
    (0x0CF3, 0x0CF3), (0x0D3B, 0x0D3C), (0x0EBA, 0x0EBA), (0x0ECE, 0x0ECE),
    (0x1715, 0x1715), (0x1ABF, 0x1ADD), (0x1AE0, 0x1AEB), (0x1C89, 0x1C8A),
    (0x1DF6, 0x1DFA), (0xA7CB, 0xA7CF), (0xA7D2, 0xA7D2), (0xA7D4, 0xA7D4),
    (0xA7DA, 0xA7DC), (0xA7F1, 0xA7F1), (0xA82C, 0xA82C), (0x105C0, 0x105F3),
    (0x10940, 0x10959), (0x10D24, 0x10D27), (0x10D40, 0x10D65), (0x10D69, 0x10D6D),
    (0x10D6F, 0x10D85), (0x10EAB, 0x10EAC), (0x10EC2, 0x10EC7), (0x10EFA, 0x10EFF),
    (0x10F46, 0x10F50), (0x10F82, 0x10F85), (0x11070, 0x11070), (0x1123F, 0x11241),
    (0x1133B, 0x1133B), (0x11380, 0x11389), (0x1138B, 0x1138B), (0x1138E, 0x1138E),
    (0x11390, 0x113B5), (0x113B7, 0x113C0), (0x113C2, 0x113C2), (0x113C5, 0x113C5),
    (0x113C7, 0x113CA), (0x113CC, 0x113D3), (0x113E1, 0x113E2), (0x1145E, 0x1145E),
    (0x116D0, 0x116E3), (0x11839, 0x1183A), (0x11930, 0x11930), (0x11935, 0x11935),
    (0x1193D, 0x1193E), (0x11943, 0x11943), (0x119E0, 0x119E0), (0x11A34, 0x11A34),
    (0x11A47, 0x11A47), (0x11A99, 0x11A99), (0x11B60, 0x11B67), (0x11BC0, 0x11BE0),
    (0x11BF0, 0x11BF9), (0x11D42, 0x11D42), (0x11D44, 0x11D45), (0x11D97, 0x11D97),
    (0x11DB0, 0x11DDB), (0x11DE0, 0x11DE9), (0x11F00, 0x11F10), (0x11F12, 0x11F3A),
    (0x11F3E, 0x11F42), (0x11F50, 0x11F5A), (0x1342F, 0x1342F), (0x13440, 0x13455),
    (0x13460, 0x143FA), (0x16100, 0x16139), (0x16D40, 0x16D6C), (0x16D70, 0x16D79),
    (0x16EA0, 0x16EB8), (0x16EBB, 0x16ED3), (0x16FF0, 0x16FF6), (0x187F8, 0x187FF),
    (0x18CFF, 0x18CFF), (0x18D09, 0x18D1E), (0x18D80, 0x18DF2), (0x1B132, 0x1B132),
    (0x1B155, 0x1B155), (0x1CCF0, 0x1CCF9), (0x1D2C0, 0x1D2D3), (0x1DF25, 0x1DF2A),
    (0x1E030, 0x1E06D), (0x1E08F, 0x1E08F), (0x1E130, 0x1E136), (0x1E2AE, 0x1E2AE),
    (0x1E2EC, 0x1E2EF), (0x1E4D0, 0x1E4F9), (0x1E5D0, 0x1E5FA), (0x1E6C0, 0x1E6DE),
    (0x1E6E0, 0x1E6F5), (0x1E6FE, 0x1E6FF), (0x2B739, 0x2B73F), (0x2CEA2, 0x2CEAD),
    (0x2EBF0, 0x2EE5D), (0x31350, 0x33479),
)
"""The code points that only one of the libraries knows as letters, numbers or marks.

Each range is (first, last)."""
SYMBOLS = (
    (0x20C1, 0x20C1), (0x2B96, 0x2B96), (0xFBC3, 0xFBD2), (0xFD90, 0xFD91),
    (0xFDC8, 0xFDCE), (0x10ED0, 0x10ED8), (0x1CCFA, 0x1CCFC), (0x1CEBA, 0x1CED0),
    (0x1CEE0, 0x1CEF0), (0x1F6D8, 0x1F6D8), (0x1F777, 0x1F77A), (0x1F8D0, 0x1F8D8),
    (0x1FA54, 0x1FA57), (0x1FA8A, 0x1FA8A), (0x1FA8E, 0x1FA8E), (0x1FAC8, 0x1FAC8),
    (0x1FACD, 0x1FACD), (0x1FAEA, 0x1FAEA), (0x1FAEF, 0x1FAEF), (0x1FBFA, 0x1FBFA),
)
"""The code points that only one of the libraries knows as symbols or punctuation.

One pattern in `supported` has classes for symbols and punctuation; for the others, these code
points make no difference."""
# fmt: on

# In no listed pattern does a token contain a space after a character that is not blank, or a
# newline after a letter or digit (some have newlines after punctuation). The patterns look ahead
# only after blanks, and never back. So a piece is split as in the whole text, whatever follows.
# Wide characters in UTF-8: 0xE4 to 0xE9 begin the ideographs, E3 80 82 is the full stop, and EF BC
# begins wide punctuation.
_CUT = re.compile(
    rb"[!-~](?= )|[0-9A-Za-z](?=\n)"
    rb"|(?:[\xe4-\xe9][\x80-\xbf]{2}|\xe3\x80\x82|\xef\xbc[\x80-\xbf])\n(?=[\xe4-\xe9])"
)
_BLOCK = 1 << 12
_ROWS = 64  # blocks handled together; temporary arrays of 256 kB stay in the cache
_DENSE = 50  # if more than one byte in 50 is a candidate, all bytes are compared instead
_NOWHERE = np.zeros(0, np.int64)


def find(data: NDArray[np.uint8], *, symbols: bool) -> NDArray[np.int64]:
    """The positions of code points that gigatoken and `tokenizers` treat differently.

    Args:
        data: Texts in UTF-8, concatenated.
        symbols: Whether to include code points that only one library knows as symbol or
            punctuation (`SYMBOLS`), such as the one at byte 2 in the example.

    >>> find(np.frombuffer("a ﷎ \U000323b0's".encode(), np.uint8), symbols=False)
    array([6])
    """
    rows = np.flatnonzero(_has_lead(data, symbols=symbols)) if len(data) else _NOWHERE
    if not len(rows):
        return _NOWHERE
    # Each row has one byte more than a block: the second byte of a code point at the block's end.
    num_whole = (len(data) - 1) // _BLOCK
    blocks = as_strided(data, (num_whole, _BLOCK + 1), (_BLOCK, 1), writeable=False)
    found = []
    for low in range(0, len(rows), _ROWS):
        some = rows[low : low + _ROWS]
        some = some[some < num_whole]
        position = _candidates(blocks[some], symbols=symbols)
        found.append(some[position // _BLOCK] * _BLOCK + position % _BLOCK)
    if rows[-1] == num_whole:
        last = num_whole * _BLOCK
        found.append(last + _candidates(data[None, last:], symbols=symbols))
    positions: NDArray[np.int64] = np.sort(np.concatenate(found))
    # `bounds` alternates the first code point of a range and the one after its last. So a code
    # point is inside a range if an odd number of bounds are at or below it.
    inside = np.searchsorted(_tables(symbols)[1], _decoded(data, positions), side="right") % 2
    listed: NDArray[np.int64] = positions[inside == 1]
    return listed


def cut(text: bytes, size: int) -> list[bytes]:
    """`text` in pieces of about `size` bytes whose ids, concatenated, are the ids of the text.

    A cut is before a space that follows an ASCII character other than a blank, before a newline
    that follows an ASCII letter or digit, or after a newline between an ideograph (or a full stop,
    or other wide punctuation) and an ideograph. The ids stay the same only for tokenizers for which
    `penstock.tokenize.supported.may_cut` is true. A text without such positions is one piece.

    >>> cut(b"It is 5 o'clock now, no more.", 3)
    [b'It is', b" 5 o'clock", b' now,', b' no more.']
    """
    pieces = []
    start = 0
    while start < len(text):
        found = _CUT.search(text, start + size)
        stop = found.end() if found else len(text)
        pieces.append(text[start:stop])
        start = stop
    return pieces


def _has_lead(data: NDArray[np.uint8], *, symbols: bool) -> NDArray[np.bool_]:
    """Whether each block contains a byte that may begin a listed code point."""
    starts = np.arange(0, len(data), _BLOCK)
    if symbols:
        found: NDArray[np.bool_] = np.maximum.reduceat(data, starts) >= 0xDF
        return found
    # The first bytes are 0xDF to 0xE1, 0xEA and 0xF0. A maximum of at least 0xEA finds the last
    # two, and a block whose maximum is below 0xDF has none of them. In other blocks, subtracting
    # 0xE2 modulo 256 turns 0xDF to 0xE1 into 0xFD to 0xFF, so a second maximum finds them, and does
    # not find 0xE2, which begins the curly quotes and dashes of English text.
    highest = np.maximum.reduceat(data, starts)
    found = highest >= 0xEA
    for row in np.flatnonzero((highest >= 0xDF) & ~found).tolist():
        block = data[row * _BLOCK : (row + 1) * _BLOCK]
        found[row] = (block - np.uint8(0xE2)).max() >= 0xFD
    return found


def _candidates(blocks: NDArray[np.uint8], *, symbols: bool) -> NDArray[np.int64]:
    """The positions at which a listed code point may begin, counted without the last column.

    The last column only has the second bytes of code points that begin in the column before it.
    """
    here, after = blocks[:, :-1], blocks[:, 1:]
    found = []
    for lead, spans in _tables(symbols)[0].items():
        is_lead = here == lead
        if np.count_nonzero(is_lead) * _DENSE > is_lead.size:
            # Every third byte of Hindi is such a first byte. Comparing all second bytes with each
            # range is then faster than decoding every candidate.
            listed = np.zeros(after.shape, bool)
            for first, last in spans:
                listed |= after - np.uint8(first) <= last - first
            is_lead &= listed
        found.append(np.flatnonzero(is_lead))
    return np.concatenate(found)


def _decoded(data: NDArray[np.uint8], positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """The code points that begin at `positions`."""
    # Four bytes are read from each position on. At the end of the data, the last byte is repeated.
    ends = np.minimum(positions[:, None] + np.arange(4), len(data) - 1)
    lead, *tail = data[ends].astype(np.int64).T
    tail = [byte & 0x3F for byte in tail]
    two = (lead & 0x1F) << 6 | tail[0]
    three = (lead & 0x0F) << 12 | tail[0] << 6 | tail[1]
    four = (lead & 0x07) << 18 | tail[0] << 12 | tail[1] << 6 | tail[2]
    decoded: NDArray[np.int64] = np.where(lead < 0xE0, two, np.where(lead < 0xF0, three, four))
    return decoded


@cache
def _tables(symbols: bool) -> tuple[dict[int, list[tuple[int, int]]], NDArray[np.int64]]:
    """Two tables of the listed code points.

    The first table maps the first byte of a code point in UTF-8 to the ranges of its second byte
    that contain listed code points. The second table has the bounds of all ranges.
    """
    chosen = sorted(RANGES + SYMBOLS if symbols else RANGES)
    seconds: dict[int, list[tuple[int, int]]] = {}
    for low, high in chosen:
        # The last byte of a code point has its lowest 6 bits, so the first two bytes change
        # only at multiples of 64.
        for point in sorted({low, high, *range((low | 0x3F) + 1, high, 0x40)}):
            lead, second = chr(point).encode()[:2]
            spans = seconds.setdefault(lead, [])
            if spans and second <= spans[-1][1] + 1:
                spans[-1] = (spans[-1][0], second)
            else:
                spans.append((second, second))
    return seconds, np.array([(low, high + 1) for low, high in chosen]).ravel()
