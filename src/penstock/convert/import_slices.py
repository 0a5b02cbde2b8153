"""Slices of token files, each of which becomes one part of a store."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import xxhash

from penstock.convert.source import TokenSource
from penstock.formats.member import Array, Integers
from penstock.sources.batch import Tally
from penstock.store.files import HEADER_BYTES, array_layout, sync_directory
from penstock.store.job import Job
from penstock.store.journal import SealedSlice
from penstock.store.manifest import PartRecord, part_file
from penstock.store.part import PartBuilder

# As many ids as 64 MB of text have, which is a slice of a build.
_SLICE_IDS = 1 << 24


class ImportSlice(NamedTuple):
    """The documents of one part."""

    start: int
    ends: Integers
    """Where its documents end, as offsets in the source; of a piece, where the piece ends."""
    continues: bool
    """Whether its last document continues in the next part."""
    first: int
    """The number of its first document in the source."""


def import_slices(source: TokenSource, most: int = _SLICE_IDS) -> Iterator[ImportSlice]:
    """Cut a source into slices of at most `most` ids; only a longer document is divided."""
    start = first = 0
    for ends in source.groups(most, 1, 1):
        stop = int(ends[-1])
        while stop - start > most:  # a single document
            start += most
            yield ImportSlice(start - most, np.array([start]), True, first)
        yield ImportSlice(start, ends, False, first)
        start, first = stop, first + len(ends)


def make_slice(job: Job, source: TokenSource, number: int, piece: ImportSlice) -> SealedSlice:
    """Write the part of one slice, synced to disk."""
    builder = PartBuilder(job.tokenizer, None, None)
    stop, dtype = int(piece.ends[-1]), job.tokenizer.dtype
    digest, tokens = xxhash.xxh3_128(), []
    for array in source.ids(piece.start, stop, dtype.name):
        digest.update(array.data)
        tokens.append(array)
    masks = source.masks(piece.start, stop) if source.member.has_loss else None
    numbers = piece.first + np.arange(len(piece.ends))
    origins = np.stack((np.zeros_like(numbers), numbers), axis=1).astype(np.uint64)
    builder.append(
        (
            _joined(tokens, dtype),
            piece.ends - piece.start,
            origins,
            None if masks is None else _joined([*masks], np.dtype(np.uint8)),
            int(piece.continues),
        )
    )
    part = builder.seal(job.directory, number)
    sync_directory(job.directory)
    size = (stop - piece.start) * source.member.dtype.itemsize
    documents = builder.num_documents - builder.num_continued
    skipped = len(piece.ends) - builder.num_documents
    tally = Tally(documents, skipped, document_bytes=size, continued=builder.num_continued)
    return SealedSlice(number, tally, {"": part}, pieces=[(0, digest.hexdigest())])


def _joined(pieces: list[Array], dtype: "np.dtype[np.generic]") -> Array:
    return np.concatenate([np.zeros(0, dtype), *pieces])


def is_equal(job: Job, part: PartRecord, source: TokenSource, piece: ImportSlice) -> bool:
    """Whether a part on disk has the tokens, documents and loss mask of its slice."""
    stop = int(piece.ends[-1])
    bounds = np.unique(piece.ends - piece.start)  # without documents that have no tokens
    bounds = bounds[bounds > 0]
    if (part.num_tokens, part.num_documents) != (stop - piece.start, len(bounds)):
        return False
    if not part.num_documents:
        return True
    if not np.array_equal(_stored(job, part, "bounds"), bounds):
        return False
    kinds = [("tokens", source.ids(piece.start, stop, job.tokenizer.dtype.name))]
    if source.member.has_loss:
        kinds.append(("loss", source.masks(piece.start, stop)))
    for kind, arrays in kinds:
        stored, at = _stored(job, part, kind), 0
        for array in arrays:
            if not np.array_equal(stored[at : at + len(array)], array):
                return False
            at += len(array)
    return True


def _stored(job: Job, part: PartRecord, kind: str) -> Array:
    """One array of a part, mapped from its file."""
    path = job.directory / part_file(part.number, kind)
    dtype, shape = array_layout(kind, job.tokenizer.dtype, part.num_documents, part.num_tokens)
    return np.memmap(path, dtype, "r", HEADER_BYTES, shape)
