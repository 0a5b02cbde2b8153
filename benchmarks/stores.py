"""Write stores of given tokens, or of zeros, with the files and manifest that `build` writes.

The token files of a sparse store have a header and a length, but take no space on disk; a reader
sees zeros. So a store of 10^12 tokens fits on a laptop.
"""

import json
import os
from itertools import pairwise

import numpy as np
import xxhash

from penstock.digest import digest_bytes
from penstock.disk import HEADER_BYTES, block_sums, header
from penstock.store.manifest import (
    VERSION,
    PartRecord,
    PartTable,
    counts,
    part_file,
    write_manifest,
)

VOCAB_SIZE = 50_257
_EMPTY = xxhash.xxh3_128(b"").hexdigest()
_PIECE = 1 << 24
_MOST_LINKS = 60_000  # ext4 allows a file 65,000 names


def write_store(folder, arrays):
    """Write a store with one part, and one document, for each array of uint16."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = []
    for number, array in enumerate(arrays):
        tokens = np.ascontiguousarray(array, "<u2")
        parts.append(_part(folder, number, len(tokens), tokens))
    _seal(folder, parts)


def write_documents(folder, parts):
    """Write a store of the given parts; each is an array of uint16 and the ends of documents."""
    folder.mkdir(parents=True, exist_ok=True)
    made = [
        _part(folder, number, len(tokens), np.ascontiguousarray(tokens, "<u2"), len(ends), ends)
        for number, (tokens, ends) in enumerate(parts)
    ]
    _seal(folder, made)


def write_array(path, tokens):
    """Write only the ids, as a `.npy` file."""
    tokens = np.ascontiguousarray(tokens, "<u2")
    with path.open("wb") as stream:
        _write(stream, header(tokens.dtype, tokens.shape), tokens, HEADER_BYTES + tokens.nbytes)


def write_sparse_store(folder, part_tokens, num_parts):
    """Write a store of zeros, in parts of one size, that takes no space on disk.

    The parts are hard links to a few sparse files of tokens. Their bounds, origins and checksums
    exist in the manifest only: rows of windows are read without the first two, and zeros that are
    not written have no checksums.
    """
    folder.mkdir(parents=True, exist_ok=True)
    head = header(np.dtype("<u2"), (part_tokens,))
    for number in range(num_parts):
        path = folder / part_file(number, "tokens")
        if number % _MOST_LINKS == 0:
            original = path
            with path.open("wb") as stream:
                _write(stream, head, None, HEADER_BYTES + part_tokens * 2)
        else:
            os.link(original, path)
    table = np.zeros((14, num_parts), "<u8")
    table[0], table[1], table[3] = np.arange(num_parts), 1, part_tokens
    table[4:10] = np.frombuffer(bytes.fromhex(_EMPTY) * 3, "<u8")[:, None]  # digests of nothing
    _seal(folder, PartTable(table, 2))


def write_sparse_documents(folder, num_tokens, num_parts, documents):
    """Write a store of `num_tokens` zeros in `num_parts` parts, whose tokens take no space.

    Each part has `documents` documents of equal size. The record of a document is its number.
    """
    folder.mkdir(parents=True, exist_ok=True)
    edges = [num_tokens * number // num_parts for number in range(num_parts + 1)]
    sizes = [stop - start for start, stop in pairwise(edges)]
    parts = [_part(folder, number, size, None, documents) for number, size in enumerate(sizes)]
    _seal(folder, parts)


def _part(folder, number, num_tokens, tokens, documents=1, ends=None):
    if ends is None:
        ends = [num_tokens * (each + 1) // documents for each in range(documents)]
    ends = np.asarray(ends, "<u8")
    origin = np.zeros((documents, 2), "<u8")
    if documents > 1:
        origin[:, 1] = np.arange(documents) + number * documents
    kinds = {
        "tokens": (np.dtype("<u2"), (num_tokens,), tokens),
        "bounds": (np.dtype("<u8"), (documents,), ends),
        "origin": (np.dtype("<u8"), (documents, 2), origin),
    }
    files = {}
    for kind, (dtype, shape, array) in kinds.items():
        size = HEADER_BYTES + int(np.prod(shape)) * dtype.itemsize
        with (folder / part_file(number, kind)).open("wb") as stream:
            files[kind] = (size, _write(stream, header(dtype, shape), array, size))
    if tokens is not None:  # zeros that are not written have no checksums either
        sums = [block_sums((folder / part_file(number, kind)).read_bytes()) for kind in kinds]
        table = np.concatenate(sums).astype("<u4")
        data = header(table.dtype, table.shape) + table.tobytes()
        (folder / part_file(number, "checks")).write_bytes(data)
        files["checks"] = (len(data), xxhash.xxh3_128(data).hexdigest())
    return PartRecord(number, documents, num_tokens, files)


def _write(stream, head, array, size):
    """Writes a file; returns its XXH3-128, or that of nothing where its zeros are not written."""
    stream.write(head)
    if array is None:
        stream.truncate(size)
        return _EMPTY
    digest = xxhash.xxh3_128(head)
    view = memoryview(array).cast("B")
    for start in range(0, len(view), _PIECE):
        digest.update(view[start : start + _PIECE])
        stream.write(view[start : start + _PIECE])
    # The cold figures drop the file from the page cache, which needs it to be on disk.
    if size > _PIECE:
        stream.flush()
        os.fsync(stream.fileno())
    return digest.hexdigest()


def _seal(folder, parts):
    parts = parts if isinstance(parts, PartTable) else PartTable.of(parts, 2)
    documents = counts(parts)["documents"]
    made = {
        "slices": len(parts),
        "counts": {"documents": documents},
        "rejects": {"bytes": 0, "xxh3_128": _EMPTY, "reasons": {}},
        "reading": {"format": "auto"},
        "inputs": [{"name": "made", "bytes": 0}],
    }
    contents = {
        "format": "penstock-store",
        "version": VERSION,
        "dtype": "uint16",
        "tokenizer": {
            "name": "made",
            "digest": None,
            "canary": digest_bytes(json.dumps(["made", VOCAB_SIZE]).encode()),
            "vocab_size": VOCAB_SIZE,
        },
        "eos_id": None,
        "bos_id": None,
        "split": None,
        "side": None,
        "counts": counts(parts),
        "builds": [made],
    }
    write_manifest(folder, contents, parts)
    (folder / "rejects.jsonl").write_bytes(b"")
