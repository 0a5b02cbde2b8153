"""`export_tokens`: write tokens in the format of another tool.

    stores/.owt-bin.export/    the files while they are written; a killed export starts again
    stores/owt-bin/            all files, by one rename

    megatron    train.bin, train.idx         the layout is described in `penstock.formats.megatron`
    nanogpt     train.bin                    uint16, without a header
    llmc        tokens_train_000000.bin …    a header of 256 int32, and 100 million ids
    parquet     train.parquet                a row for each document: `input_ids`, and `loss_mask`

`.penstock-export.json` lists the files of an export, so that `overwrite=True` deletes nothing else.
"""

import json
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np

from penstock.disk import (
    empty_directory,
    locked,
    make_tree,
    remove_tree,
    room_for,
    sync_directory,
    sync_file,
    write_file,
)
from penstock.errors import StoreBusyError, StoreError
from penstock.formats.mapped import Array, Integers
from penstock.formats.open import token_files_at
from penstock.formats.token_files import TokenFiles, check_all, check_mask
from penstock.paths import StoreUrl
from penstock.store.beside import made_beside
from penstock.store.copy import on_this_machine
from penstock.store.reader import TokenStore
from penstock.store.sides import open_stores, stores_at

ExportFormat = Literal["megatron", "nanogpt", "llmc", "parquet"]
Exported = str | os.PathLike[str] | StoreUrl | TokenStore | TokenFiles
Report = Callable[[int, int], None]
"""Called with the number of tokens that are done, and the number of all tokens."""

RECORD = ".penstock-export.json"
_SHOWN = 5
_PIECE = 1 << 22
# As in llm.c's scripts. The header counts ids as int32, so a file has at most 2,147,483,647.
_SHARD_IDS = 100_000_000
# Lengths in Megatron's index and offsets in a list column of Parquet are int32.
_LONGEST = 2**31 - 1
# Bytes of ids in a row group of Parquet, which is assembled in memory.
_GROUP_BYTES = 1 << 24


class TokenSource:
    """The tokens of a store or of token files, read from first to last.

    Every id is checked when its part is first read: against the checksums of a store, and against
    the vocabulary. Memory holds the ends of all documents, and one piece of 4 million ids.
    """

    def __init__(self, member: TokenStore | TokenFiles, report: Report | None = None) -> None:
        self.member = member
        self._report = report
        self._starts: Integers = np.append(0, np.cumsum(member.part_tokens)).astype(np.int64)
        self.num_tokens = int(self._starts[-1])
        self._checked = -1  # the part whose ids were all checked

    @property
    def is_narrow(self) -> bool:
        """Whether all ids fit uint16: by the vocabulary, or by the dtype if that is not known."""
        if self.member.vocab_size is None:
            return self.member.dtype.itemsize <= 2  # negative ids are refused
        return self.member.vocab_size <= 1 << 16

    @cached_property
    def ends(self) -> Integers:
        """The offsets at which documents end; a document that is stored in pieces is one.

        Token files without documents count as one document for each file.
        """
        if not self.member.has_documents:
            return self._starts[1:]
        found = [np.zeros(0, np.int64)]
        for number, first in enumerate(self._starts[:-1].tolist()):
            bounds = self.member.part_bounds(number).astype(np.int64) + first
            # The last piece is not the end of a document that continues in the next part.
            found.append(bounds[:-1] if self.member.part_continues(number) else bounds)
        return np.concatenate(found)

    def groups(self, room: int, id_bytes: int, per_document: int) -> Iterator[Integers]:
        """Yield the ends of consecutive documents that fit `room` bytes together.

        A document that does not fit alone is a group of its own.

        Args:
            room: The most bytes of a group.
            id_bytes: The bytes of an id.
            per_document: The bytes that a document needs besides its ids.
        """
        costs = self.ends * id_bytes + np.arange(1, len(self.ends) + 1) * per_document
        start = paid = 0
        while start < len(costs):
            # Up to the first document whose end is beyond the room.
            stop = max(start + 1, int(np.searchsorted(costs, paid + room, side="right")))
            yield self.ends[start:stop]
            start, paid = stop, int(costs[stop - 1])

    def ids(self, start: int, stop: int, dtype: str) -> Iterator[Array]:
        """Yield the ids `[start, stop)` of all documents concatenated, in pieces.

        Raises:
            StoreError: an id does not fit `dtype`, or is damaged.
        """
        wanted = np.dtype(dtype).newbyteorder("<")
        for number, begin, end in self._spans(start, stop):
            ids = self._part(number, "tokens")
            if self._checked != number:
                self._checked = number
                if isinstance(self.member, TokenFiles):
                    self.member.check_part(number)
                # Also of a store: its checksums say that these ids were written, and not that a
                # model has rows for them.
                check_all(ids, self.member.path, self.member.vocab_size)
            piece = ids[begin:end]
            is_wider = np.iinfo(piece.dtype).max > np.iinfo(wanted).max
            if is_wider and (highest := int(piece.max())) > np.iinfo(wanted).max:
                raise StoreError(
                    f"{self.member.path} has the token id {highest:,}, which does not fit the "
                    f"{wanted.name} ids of this format. Choose another format."
                )
            yield np.ascontiguousarray(piece, wanted)
            if self._report is not None:
                self._report(int(self._starts[number]) + end, self.num_tokens)

    def masks(self, start: int, stop: int) -> Iterator[Array]:
        """Yield the loss mask of the tokens `[start, stop)`, in pieces: 1 if it is trained on."""
        for number, begin, end in self._spans(start, stop):
            if self.member.part_loss(number) is None:
                yield np.ones(end - begin, np.uint8)
                continue
            piece = np.ascontiguousarray(self._part(number, "loss")[begin:end], np.uint8)
            check_mask(piece, self.member.path)
            yield piece

    def _spans(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield the parts that hold the tokens `[start, stop)`, and pieces of each as ranges."""
        # "right": the offset at which a part ends is that of the first token of the next part.
        number = int(np.searchsorted(self._starts, start, side="right")) - 1
        while start < stop:
            first, last = self._starts[number : number + 2].tolist()
            upto = min(stop, last, start + _PIECE)
            if upto > start:  # a part may have no tokens
                yield number, start - first, upto - first
            start, number = max(start, upto), number + (upto == last)

    def _part(self, number: int, kind: Literal["tokens", "loss"]) -> Any:
        if isinstance(self.member, TokenStore):
            return self.member.part_array(number, kind)  # compared with its checksums
        is_ids = kind == "tokens"
        return self.member.part_ids(number) if is_ids else self.member.part_loss(number)


def export_tokens(
    source: Exported,
    directory: str | os.PathLike[str],
    *,
    to: ExportFormat,
    overwrite: bool = False,
    drop_loss_mask: bool = False,
    progress: Report | None = None,
) -> list[Path]:
    """Write the tokens of a store, or of token files, in the format of another tool.

    The tokens are written as they are: documents of a store contain their end tokens. Every id is
    checked. The same source gives the same bytes, and the directory appears when all files are on
    disk. Of a store with a split, both sides are written. docs/formats.md lists the files.

    Args:
        source: A store or token files: a path, or an open `TokenStore` or `TokenFiles`. Files
            without a header are opened with `open_tokens` first.
        directory: The directory to write, which must be empty or not exist.
        to: The format.
        overwrite: Replace an earlier export in the directory.
        drop_loss_mask: Write the tokens without their loss mask. Only the format "parquet"
            has one; to export a store of chats to the others, this must be set.
        progress: Called with the number of tokens that are done, and the number of all tokens.

    Returns:
        The files, in the order of their names.

    Raises:
        StoreError: the format cannot hold these tokens, or the directory holds something else.

    >>> import tempfile
    >>> from penstock import Texts, build, open_tokens
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     store = build(Texts(["To be,", "or not to be."]), f"{folder}/store")
    ...     files = export_tokens(store, f"{folder}/megatron", to="megatron")
    ...     print([path.name for path in files], open_tokens(files[0]).num_tokens)
    ['train.bin', 'train.idx'] 10
    """
    if to not in _WRITERS:
        raise StoreError(f"to={to!r} (--to) is not one of {', '.join(_WRITERS)}.")
    members = _members(source)
    for member in members.values():
        _refuse_unfit(member, to, drop_loss_mask)
    target = on_this_machine(directory)
    with room_for(target), _directory(target):
        _refuse_other(target, overwrite)
        with made_beside(target, "export") as new, _removed_on_failure(new):
            empty_directory(new)  # an export was killed
            files = _write(new, members, to, progress)
            # A kill from here on leaves an incomplete old export, which may be replaced.
            _empty(target)
    return [target / each for each in files]


@contextmanager
def _directory(target: Path) -> Iterator[None]:
    """Make and lock the directory for a `with` block, and remove it again if the block fails."""
    existed = target.exists()
    make_tree(target)
    with ExitStack() as held:
        try:
            held.enter_context(locked(target))
            yield
        except StoreBusyError:  # another process exports to it, and may have made it
            raise
        except BaseException:  # also Ctrl-C
            if not existed:
                # Before the lock is released: later, it may be the directory of another export.
                with suppress(OSError):  # it is not empty
                    target.rmdir()
            raise


@contextmanager
def _removed_on_failure(directory: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:  # also Ctrl-C
        remove_tree(directory)
        raise


def _members(source: Exported) -> Mapping[str, TokenStore | TokenFiles]:
    """Return what is exported, by side of the split; the only side of the others is "train"."""
    if isinstance(source, TokenFiles):
        return {"train": source}
    if isinstance(source, TokenStore):
        return {source.manifest.contents["side"] or "train": source}
    if (files := token_files_at(source)) is not None:
        return {"train": files}
    stores = open_stores([*stores_at(source).values()])
    return {each.manifest.contents["side"] or "train": each for each in stores}


def _refuse_unfit(member: TokenStore | TokenFiles, to: str, drop_loss_mask: bool) -> None:
    if not member.num_tokens:
        raise StoreError(f"{member.path} holds no tokens, so there is nothing to export.")
    masks = TokenSource(member).masks(0, member.num_tokens)
    is_lost = member.has_loss and to != "parquet" and not drop_loss_mask
    if is_lost and not all(mask.all() for mask in masks):
        raise StoreError(
            f"{member.path} has a loss mask, and files of the format {to!r} have none: a model "
            "would be trained on all tokens. Choose parquet, or pass "
            "drop_loss_mask=True (--drop-loss-mask)."
        )


def _refuse_other(target: Path, overwrite: bool) -> None:
    """Raise if a directory is neither empty nor an earlier export that may be replaced."""
    names = {each.name for each in target.iterdir()} - {".lock"}
    if not names:
        return
    try:
        ours = {RECORD, *json.loads((target / RECORD).read_bytes())["files"]}
    except (OSError, ValueError, KeyError, TypeError):
        ours = set()
    if others := sorted(names - ours):
        raise StoreError(
            f"{target} is not empty, and holds more than an export: "
            f"{', '.join(others[:_SHOWN])}. Choose another directory."
        )
    if not overwrite:
        raise StoreError(
            f"{target} holds an export already. Choose another directory, or replace it with "
            "overwrite=True (--overwrite)."
        )


def _empty(target: Path) -> None:
    """Delete an earlier export; its list of files last, which says that it is one."""
    for path in sorted(target.iterdir(), key=lambda path: path.name == RECORD):
        if path.name != ".lock":
            path.unlink()


def _write(
    new: Path,
    members: Mapping[str, TokenStore | TokenFiles],
    to: str,
    progress: Report | None,
) -> Sequence[str]:
    """Write all files and their list; returns their names."""
    total = sum(member.num_tokens for member in members.values())
    done = 0
    for side, member in members.items():

        def report(now: int, _: int, before: int = done) -> None:
            if progress is not None:
                progress(before + now, total)

        _WRITERS[to](new, side, TokenSource(member, report))
        done += member.num_tokens
    names = sorted(each.name for each in new.iterdir())
    contents = {"format": to, "files": names}
    write_file(new / RECORD, [json.dumps(contents, indent=1).encode() + b"\n"])
    sync_directory(new)
    return names


def write_nanogpt(directory: Path, side: str, source: TokenSource) -> None:
    """Write all ids to one file."""
    size = source.member.vocab_size
    if size is not None and not source.is_narrow:
        raise StoreError(
            f"{source.member.path} has a vocabulary of {size:,} ids, and nanoGPT's files hold "
            "uint16 ids, below 65,536. Choose another format, such as llmc."
        )
    write_file(directory / f"{side}.bin", source.ids(0, source.num_tokens, "uint16"))


def write_llmc(
    directory: Path, side: str, source: TokenSource, shard_ids: int = _SHARD_IDS
) -> None:
    """Write all ids to files of at most `shard_ids` ids."""
    # uint32 ids have version 7 in llm.c, which its reader of Llama 3 expects.
    magic, version, dtype = (20240520, 1, "uint16") if source.is_narrow else (20240801, 7, "uint32")
    for number, start in enumerate(range(0, source.num_tokens, shard_ids)):
        stop = min(start + shard_ids, source.num_tokens)
        header = np.zeros(256, "<i4")
        header[:3] = magic, version, stop - start
        path = directory / f"tokens_{side}_{number:06d}.bin"
        write_file(path, chain([header], source.ids(start, stop, dtype)))


def _refuse_long(source: TokenSource, lengths: Integers, place: str) -> None:
    longest = int(lengths.max(initial=0))
    if longest > _LONGEST:
        raise StoreError(
            f"{source.member.path} has a document of {longest:,} tokens, and {place} has at most "
            f"{_LONGEST:,}. Choose another format."
        )


def write_megatron(directory: Path, side: str, source: TokenSource) -> None:
    """Write a pair of files, in which each document is one sequence; the index last."""
    # Megatron has no uint32.
    dtype, code = ("uint16", 8) if source.is_narrow else ("int32", 4)
    ends = source.ends
    lengths = np.diff(ends, prepend=0)
    _refuse_long(source, lengths, "a sequence of Megatron")  # before anything is written
    write_file(directory / f"{side}.bin", source.ids(0, source.num_tokens, dtype))
    head = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, code, len(ends), len(ends) + 1)
    offsets = (ends - lengths) * np.dtype(dtype).itemsize
    documents = np.arange(len(ends) + 1)  # document k begins with sequence k
    index = [head, lengths.astype("<i4"), offsets.astype("<i8"), documents.astype("<i8")]
    write_file(directory / f"{side}.idx", index)


def write_parquet(
    directory: Path, side: str, source: TokenSource, group_bytes: int = _GROUP_BYTES
) -> None:
    """Write one file with row groups of about `group_bytes`.

    Hugging Face datasets reads it with `load_dataset("parquet", data_files=…)`.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    def rows(offsets: Integers, pieces: Iterator[Array], dtype: str) -> pa.ListArray:
        values = np.concatenate([np.zeros(0, dtype), *pieces])
        return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(values))

    columns = {"input_ids": pa.list_(pa.int32())}
    if source.member.has_loss:
        columns["loss_mask"] = pa.list_(pa.uint8())
    schema = pa.schema(columns)
    _refuse_long(source, np.diff(source.ends, prepend=0), "a row of Parquet")
    start = 0
    path = directory / f"{side}.parquet"
    with path.open("xb") as stream, pq.ParquetWriter(stream, schema) as writer:
        for ends in source.groups(group_bytes, 4, 4):
            stop, offsets = int(ends[-1]), np.append(start, ends) - start
            lists = [rows(offsets, source.ids(start, stop, "int32"), "int32")]
            if source.member.has_loss:
                lists.append(rows(offsets, source.masks(start, stop), "uint8"))
            writer.write_table(pa.table(lists, schema=schema))
            start = stop
    sync_file(path)


_WRITERS: dict[str, Callable[[Path, str, TokenSource], None]] = {
    "megatron": write_megatron,
    "nanogpt": write_nanogpt,
    "llmc": write_llmc,
    "parquet": write_parquet,
}
