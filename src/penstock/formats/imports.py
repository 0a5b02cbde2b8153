"""`import_tokens`: make a store of the token files of another tool.

    source    [ documents                        ][ one long document            ][ … ]
    slices    [ 0: at most 16 million ids        ][ 1           ][ 2: its rest   ][ 3 ]

Each slice becomes one part, as in a build, and the journal, the lock and the commit are those of a
build (`penstock.store`). How the source is cut depends on its documents alone. So an import that
is killed at any moment is resumed by the same call, and the bytes of the store are the same.

A part is compared with the source after it was written. The parts of an earlier run are compared
too, because the source may have changed since then without a trace in its size and its times.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, NoReturn

import numpy as np
import xxhash

from penstock.digest import canonical_json
from penstock.disk import HEADER_BYTES, locked, make_tree, map_file, room_for, sync_directory
from penstock.errors import StoreError, TokenizerError
from penstock.formats.export import Report, TokenSource
from penstock.formats.mapped import Array, Integers
from penstock.formats.open import open_tokens
from penstock.formats.options import TokenFormat
from penstock.formats.token_files import TokenFiles
from penstock.options import BuildOptions
from penstock.sources.batch import Tally
from penstock.store.build import clean_up
from penstock.store.commit import commit
from penstock.store.copy import on_this_machine
from penstock.store.existing import killed_at_the_end, refuse_foreign
from penstock.store.job import Job
from penstock.store.journal import Journal, SealedSlice
from penstock.store.manifest import (
    FILE_NAME,
    JsonObject,
    PartRecord,
    array_layout,
    part_file,
    read_manifest,
)
from penstock.store.part import PartBuilder
from penstock.store.reader import TokenStore
from penstock.store.resume import target_of
from penstock.store.verify import differences
from penstock.tokenize.tokenizer import Tokenizer

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


def import_tokens(  # noqa: PLR0913  (the arguments of `open_tokens`, a store and a callback)
    source: str | os.PathLike[str] | TokenFiles,
    store: str | os.PathLike[str],
    *,
    format: TokenFormat | None = None,
    dtype: str | None = None,
    vocab_size: int | None = None,
    tokenizer: object = None,
    column: str | None = None,
    progress: Report | None = None,
) -> TokenStore:
    """Make a store of token files of another tool, and open it.

    The store has the tokens, the documents and the loss mask of the files. Every id is compared
    with the vocabulary, and every part with the source after it was written. Documents without
    tokens are left out, and counted as skipped. A file that records no documents becomes one
    document. The same call resumes an import that was killed, and returns at once if the store is
    finished.

    Args:
        source: The token files, or their path.
        store: The directory of the new store, which must be empty or not exist.
        format: As for `open_tokens`, like the next four; only with a path.
        dtype: The dtype of ids in files without a header.
        vocab_size: The number of ids of the vocabulary. This or `tokenizer` is needed.
        tokenizer: The tokenizer of the ids, which is recorded in the store.
        column: The column with the ids, if its name is not "input_ids" or "tokens".
        progress: Called with the number of tokens that are done, and the number of all tokens.

    Raises:
        StoreError: the files are damaged or an id is not in the vocabulary, or the directory holds
            something else.

    >>> import tempfile
    >>> import numpy as np
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.array([72, 105, 256], "<u2").tofile(f"{folder}/val.bin")
    ...     path, names = f"{folder}/val.bin", {"format": "nanogpt", "tokenizer": "bytes"}
    ...     imported = import_tokens(path, f"{folder}/store", **names)
    ...     print(imported.num_tokens, imported.decode(0))
    3 Hi
    """
    given = {"format": format, "dtype": dtype, "column": column}
    files = _opened(source, {**given, "vocab_size": vocab_size, "tokenizer": tokenizer})
    directory = on_this_machine(store)
    job = _job(files, directory)
    with room_for(directory):
        make_tree(directory)
    with room_for(directory), locked(directory):
        if not _is_done(job):
            _make(job, TokenSource(files), progress)
    return TokenStore(directory)


def _opened(source: str | os.PathLike[str] | TokenFiles, given: dict[str, object]) -> TokenFiles:
    if isinstance(source, TokenFiles):
        if known := [f"{name}=" for name, value in given.items() if value is not None]:
            raise StoreError(
                f"{source.path} is open already. Pass {', '.join(known)} to open_tokens."
            )
        files = source
    else:
        files = open_tokens(source, **given)  # type: ignore[arg-type]
    if files.vocab_size is None:
        raise StoreError(
            f"{files.path} does not record its vocabulary, so its ids cannot be checked. Pass "
            "tokenizer= (--tokenizer), or vocab_size= (--vocab-size)."
        )
    tokenizer = files.tokenizer
    if tokenizer is not None and tokenizer.vocab_size != files.vocab_size:
        raise StoreError(
            f"vocab_size={files.vocab_size:,} (--vocab-size) is not that of {tokenizer.name}, "
            f"which has {tokenizer.vocab_size:,} ids. Leave it out."
        )
    if files.vocab_size > 1 << 32:
        raise StoreError(f"vocab_size={files.vocab_size:,} does not fit the uint32 ids of a store.")
    if not files.num_tokens:
        raise StoreError(f"{files.path} holds no tokens, and a store has at least one document.")
    return files


class _UnknownTokenizer:
    """The engine of a tokenizer of which only the vocabulary size is known."""

    name = "unknown"
    vocab_size = None

    def encode(self, texts: object) -> NoReturn:
        raise TokenizerError("The tokenizer of the imported ids is not known.")

    def decode(self, ids: object) -> NoReturn:
        raise TokenizerError("The tokenizer of the imported ids is not known.")


def _job(files: TokenFiles, directory: Path) -> Job:
    """The build that the import is, without inputs of text."""
    assert files.vocab_size is not None  # `_opened` has checked it
    # A store of which nobody knows the tokenizer can be read, but not decoded.
    unknown = Tokenizer(
        "unknown", None, files.vocab_size, None, None, "text", _UnknownTokenizer(), None
    )
    used = files.tokenizer or unknown
    eos_id, bos_id = _edge_ids(files)
    name = Path(str(files.path)).name
    size = files.num_tokens * files.dtype.itemsize
    recorded: JsonObject = {
        "tokenizer": _unknown(files.vocab_size) if used is unknown else used.describe(),
        "eos_id": eos_id,
        "bos_id": bos_id,
        "split": None,
        "reading": {"imported": files.format, "digest": files.digest},
        "inputs": [{"name": name, "bytes": size, "format": files.format, "compression": None}],
        "append": False,
    }
    options = BuildOptions(tokenizer=used, eos=False, max_bad=0)
    return Job(options, directory, [], used, recorded)


def _unknown(vocab_size: int) -> JsonObject:
    """The entry of a tokenizer in the manifest if only its vocabulary size is known."""
    names = {"name": "unknown", "digest": None, "canary": "", "vocab_size": vocab_size}
    return {**names, "eos_id": None, "bos_id": None, "special_tokens": "text"}


def _edge_ids(files: TokenFiles) -> tuple[int | None, int | None]:
    """The end and start tokens of the tokenizer, if the first document has them."""
    source, known = TokenSource(files), files.tokenizer
    end = int(source.ends[source.ends > 0][0]) if source.num_tokens else 0
    if known is None or not end:
        return None, None
    (first,) = next(source.ids(0, 1, "int64"))
    (last,) = next(source.ids(end - 1, end, "int64"))
    eos_id = known.eos_id if int(last) == known.eos_id else None
    return eos_id, known.bos_id if int(first) == known.bos_id and end > 1 else None


def _is_done(job: Job) -> bool:
    """Whether the directory holds the finished store.

    Raises:
        StoreError: it holds something that this import cannot continue.
    """
    directory, journal = job.directory, Journal(job.directory)
    if killed_at_the_end(job):
        return True
    begun, expected = journal.begun(), job.stamped
    if begun is None and (directory / FILE_NAME).exists():
        begun, expected = read_manifest(directory).settings | {"append": False}, job.recorded
        if canonical_json(begun) == canonical_json(expected):
            return True
    if begun is None:
        refuse_foreign(directory)
    elif canonical_json(begun) != canonical_json(expected):
        raise StoreError(
            f"{directory} holds another store, or an unfinished one: "
            f"{differences(begun, expected)}. Choose another directory, or delete this one."
        )
    return False


def _make(job: Job, source: TokenSource, progress: Report | None) -> None:
    """Make all parts that an earlier run has not made, and write the manifest."""
    journal, target = Journal(job.directory), target_of(job)
    begun = journal.begin(job.stamped, 0)
    clean_up(job)
    sealed = {record.number: record for record in target.intact(begun)}
    done: list[SealedSlice] = []
    for number, piece in enumerate(import_slices(source)):
        record = sealed.get(number)
        if record is None or not is_equal(job, record.parts[""], source, piece):
            record = make_slice(job, source, number, piece)
            if not is_equal(job, record.parts[""], source, piece):
                raise StoreError(
                    f"Part {number} of {job.directory} is not equal to its source. "
                    f"{source.member.path} was changed while it was imported, or a disk is faulty. "
                    "Run this again when nothing writes to it."
                )
            journal.seal(record)
        done.append(record)
        if progress is not None:
            progress(int(piece.ends[-1]), source.num_tokens)
    target.refuse_deleted(done)
    commit(job, done)
    # A kill before this line leaves a journal that `killed_at_the_end` recognises.
    journal.end()


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
    with path.open("rb") as stream:
        mapping = map_file(stream)
    return np.frombuffer(mapping, dtype, offset=HEADER_BYTES).reshape(shape)
