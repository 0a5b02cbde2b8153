"""The row index: which pieces of documents each row is made of, cached on disk.

    ~/.cache/penstock/rows/packs-2048-5f0c9a….npy       (or $PENSTOCK_CACHE/rows)

    32 bytes   digest of the store, of the kind of rows and of their length
    32 bytes   SHA-256 of everything that follows
     8 words   parts, rows, pieces, empty and long documents, tokens cut off, two unused
     parts     rows of each part
     rows + 1  the first piece of each row, and the number of pieces
     pieces    the offset of each in its part (40 bits) and its size (24 bits)

The file is a plain `.npy` of 64-bit words that is mapped into memory: 8 bytes per piece and 8 per
row. It never has to be invalidated, because its name and its first words are computed from what
was packed. A file that is truncated, damaged or of another store is ignored and written again. It
is written under a temporary name and renamed, so several processes may write it at once.

The index decides which tokens are trained on, and nothing in the store vouches for it. So it is
kept in the cache of the user, and never read from the directory of a store, which may come from
somebody else. The digest of rows needs no digest of their index: the index is computed from the
bounds, which the digest of the store covers, and from settings that the digest of rows covers.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np

from penstock.digest import digest_json
from penstock.disk import (
    HEADER_BYTES,
    cache_directory,
    header,
    map_file,
    sync_directory,
    write_file,
)
from penstock.errors import PlanError
from penstock.formats.token_files import Member
from penstock.rows.packing import PACKING_FORMAT, WORD, RowIndex, joined, offsets_of, sizes_of
from penstock.rows.protocol import Array, Integers

_MOST_TOKENS = 1 << 40  # of a part, because an offset has 40 bits
_ROWS_AT_ONCE = 1 << 16
_HEAD = 16  # words: two digests and the counts


def index_of(
    store: Member, kind: str, length: int, lay_out: Callable[[Array], RowIndex]
) -> RowIndex:
    """Return the index of a store: cached, or computed and cached if the cache is writable.

    Args:
        store: The store.
        kind: A name for what `lay_out` does.
        length: The largest number of tokens in a row.
        lay_out: Computes the rows of a part from the offsets where its documents end.
    """
    key = digest_json(["rows", PACKING_FORMAT, kind, length, store.digest])
    name = f"{kind}-{length}-{key[:16]}.npy"
    path = cache_directory() / "rows" / name
    part_tokens = store.part_tokens
    if (found := _read(path, key, part_tokens, length)) is not None:
        return found
    if int(part_tokens.max(initial=0)) >= _MOST_TOKENS:
        raise PlanError(f"{store.path} has a part of 2^40 tokens or more.")
    numbers = range(len(part_tokens))
    made = joined([lay_out(store.part_bounds(number)) for number in numbers])
    # Mapped, so that the memory of the computed index can be freed.
    is_kept = _written(path, key, made)
    return (_read(path, key, part_tokens, length) if is_kept else None) or made


def _written(path: Path, key: str, made: RowIndex) -> bool:
    """Write an index; return False if it cannot be written there, which is no error."""
    counts = [len(made.part_rows), made.num_rows, len(made.pieces)]
    counts += [made.num_empty, made.num_long, made.num_cut, 0, 0]
    sections = [np.array(counts, WORD), made.part_rows, made.edges, made.pieces]
    body = [np.ascontiguousarray(section) for section in sections]
    # Section by section: a copy of the whole file would double the memory of a large index.
    digest = hashlib.sha256()
    for section in body:
        digest.update(section.data)
    size = 8 + sum(map(len, body))
    head = header(WORD, (size,)) + bytes.fromhex(key) + digest.digest()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, [head, *body])
        sync_directory(path.parent)
    except OSError:
        return False
    return True


def _read(path: Path, key: str, part_tokens: Integers, length: int) -> RowIndex | None:
    """Return the index in a file; None if it is missing, damaged or of another store."""
    try:
        with path.open("rb") as stream:
            mapping = map_file(stream)
    except (OSError, ValueError):
        return None
    size, rest = divmod(len(mapping) - HEADER_BYTES, WORD.itemsize)
    if size < _HEAD or rest or mapping[:HEADER_BYTES] != header(WORD, (size,)):
        return None
    words = np.frombuffer(mapping, WORD, offset=HEADER_BYTES)
    digests = words[:8].tobytes()
    if digests[:32].hex() != key or digests[32:] != hashlib.sha256(words[8:].data).digest():
        return None
    # The sizes of the sections must add up to the size of the file before they are used.
    num_parts, num_rows, num_pieces, empty, long, cut = (int(word) for word in words[8:14])
    if [num_parts, _HEAD + num_parts + num_rows + 1 + num_pieces] != [len(part_tokens), size]:
        return None
    part_rows, edges, pieces = np.split(words[_HEAD:], [num_parts, num_parts + num_rows + 1])
    found = RowIndex(part_rows, edges, pieces, empty, long, cut, (path, mapping))
    return found if _sound(found, part_tokens, length) else None


def _sound(index: RowIndex, part_tokens: Integers, length: int) -> bool:
    """Return whether every piece is inside its part, and no row has more than `length` tokens.

    The checksum does not protect against a file that was written by a faulty program. A piece
    outside of its part would be read from other memory.
    """
    edges, pieces = index.edges, index.pieces
    if int(index.part_rows.sum()) != index.num_rows or int(edges[0]) or edges[-1] != len(pieces):
        return False
    # Larger numbers could add up to the right sum modulo 2^64.
    if int(index.part_rows.max(initial=0)) > index.num_rows or (edges[1:] <= edges[:-1]).any():
        return False
    # Some thousands of rows at a time: a loop over 10^6 parts takes a minute, and an index may be
    # larger than the memory.
    row_ends = np.cumsum(index.part_rows.astype(np.int64))
    for low in range(0, index.num_rows, _ROWS_AT_ONCE):
        rows = edges[low : low + _ROWS_AT_ONCE + 1].astype(np.int64)
        words = pieces[rows[0] : rows[-1]]
        sizes = sizes_of(words)
        stops = offsets_of(words) + sizes
        if int(sizes.min()) < 1 or int(np.add.reduceat(sizes, rows[:-1] - rows[0]).max()) > length:
            return False
        parts = np.searchsorted(row_ends, np.arange(low, low + len(rows) - 1), side="right")
        if (stops > np.repeat(part_tokens[parts], np.diff(rows))).any():
            return False
    return True
