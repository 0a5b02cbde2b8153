"""The files of a store's parts: mapped into memory, and checked when they are read.

A file is mapped when it is first used, after its size and header were compared with the manifest.
The number of files that are mapped at once is limited (`penstock.disk`), so a store of
10,000 parts can be read with 32 file descriptors, and faster with more.

Damage is noticed where it is read. Tokens and loss masks are checked in blocks of 64 KiB
(`penstock.store.blocks`), each once per process, before it is first used: its checksum, and that
its ids are in the vocabulary. Bounds and origins are checked as a whole. `PENSTOCK_CHECKSUMS=0`
turns the checks of blocks off.

Of a store at a URL, a file is downloaded when it is first used (`penstock.store.remote`), and
checked in the same way. If it is damaged on this machine, it is downloaded once more. Only the
files that are needed are downloaded: tokens with the checksums of their blocks, bounds where
documents are read, and origins if they are asked for.

Reading a page that a file no longer has ends the process (SIGBUS). So the size of a file is
compared again each time that its array is asked for, which readers do for every batch.
"""

import mmap
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray

from penstock.disk import (
    BLOCK_BYTES,
    HEADER_BYTES,
    MappedFile,
    Maps,
    NamedFile,
    crc32,
    explained,
    files_at_once,
    header,
    map_file,
    naming,
)
from penstock.errors import MissingStoreError, StoreError
from penstock.paths import StorePath
from penstock.ranges import Integers, group_rows
from penstock.store.block_reads import Run, check_runs, request_runs, runs_of
from penstock.store.blocks import (
    are_marked,
    bounds_problem,
    checks_wanted,
    damaged_block,
    mark,
    num_blocks,
)
from penstock.store.manifest import (
    CHECKED_KINDS,
    Manifest,
    PartRecord,
    array_layout,
    exact_sum,
    part_file,
)

if TYPE_CHECKING:
    from penstock.store.remote import FileCache, RemoteFile

REPAIR_ADVICE = (
    "Run the same penstock.build again (penstock build), which makes missing files again from the "
    "inputs; delete a damaged file first. Or copy the file from a good store."
)
# Runs that are checked while the next ones are loaded.
_RUNS_AT_ONCE = 64
# The parts of any store whose manifest lists them, in 50 MB.
_MOST_KEPT = 16_384

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


@dataclass(slots=True)
class _State:
    """What is known of the files. Snapshots of a store share it: a part keeps its index.

    It has about 3 KB for each part, so only the parts that were first read last are kept. A reader
    of a part that was forgotten reads its checksums again.
    """

    maps: Maps = field(default_factory=Maps)
    # Used without a lock. Two threads may check the same block or read the same checksums, which
    # does no harm: an entry is set after its check, and never cleared.
    done: dict[tuple[int, str], NDArray[np.uint8]] = field(default_factory=dict)
    """A bit for each block of a file: whether it was checked. A part of 2 GB has 30,000 blocks."""
    whole: dict[tuple[int, str], bool] = field(default_factory=dict)
    """The arrays that were checked as a whole."""
    sums: dict[int, NDArray[np.uint32]] = field(default_factory=dict)
    """The checksums of each part that was used."""
    fetched_again: set[tuple[int, str]] = field(default_factory=set)
    """The damaged files that were downloaded a second time."""


class PartFiles:
    """The files of the parts of one store. Safe to use from several threads and after a fork.

    Args:
        path: The directory of the store, or its URL.
        manifest: Its manifest.
        cache: Where files are downloaded to, if the store is at a URL.
    """

    def __init__(
        self, path: StorePath, manifest: Manifest, cache: "FileCache | None" = None
    ) -> None:
        self._path, self._parts, self._cache = path, manifest.parts, cache
        # Relative paths would name other files after a change of the working directory.
        self._directory = path.absolute()
        self._dtype = np.dtype(manifest.contents["dtype"]).newbyteorder("<")
        self._vocab_size = int(manifest.contents["tokenizer"]["vocab_size"])
        self._state = _State()
        self.is_checked = checks_wanted()
        """Whether blocks are checked before they are used."""
        self.read_in_order = False
        """Whether parts are read one after the other, so that pages beside a row are used soon."""

    def share(self, earlier: "PartFiles") -> None:
        """Use the maps and checks of an earlier snapshot of the same store."""
        self._state = earlier._state

    def open(self, part: int, kind: str) -> MappedFile:
        """One file of one part; its contents are not checked, but its size is."""
        key, maps = (part, kind), self._state.maps
        found = maps.files.get(key)  # without the lock: to look up one key is atomic
        if found is None:
            found = self._add(part, kind)
        elif maps.is_crowded:
            maps.use(key, found)
        try:
            size = found.mapping.size()  # one call of fstat
        except OSError as error:  # `naming` would take longer than the call, at every read
            error.filename = str(found.path)
            raise
        if size != found.size:
            if self._fetch_again(kind, [part]):
                return self.open(part, kind)
            raise _other_size(found.path, size, found.size)
        return found

    def files(self, parts: Sequence[int], kind: str) -> list[MappedFile]:
        """One file of each of some parts, as `open` returns it."""
        found = self._state.maps.present(kind, parts)
        if found is not None:
            return found
        self._fetch(parts, kind)
        return [self.open(part, kind) for part in parts]

    def want(self, parts: Sequence[int], kinds: Sequence[str]) -> int:
        """Begin to download the files of some parts that are not here; returns their bytes.

        Of a store on this machine, no file has to be downloaded.
        """
        if self._cache is None:
            return 0
        return self._cache.want([each for part in parts for each in self._remote(part, kinds)])

    def _fetch(self, parts: Sequence[int], kind: str) -> None:
        """Download files that are used now, several at a time."""
        if self._cache is not None:
            # One that is mapped is used, even if it has no name in the cache any more.
            new = [part for part in parts if (part, kind) not in self._state.maps.files]
            self._cache.fetch([each for part in new for each in self._remote(part, (kind,))])

    def _remote(self, part: int, kinds: Sequence[str]) -> "list[RemoteFile]":
        """The files of some kinds that a part has, and their checksums, as they are downloaded."""
        from penstock.store.remote import RemoteFile

        record = self._parts[part]
        wanted = [*kinds, "checks"] if self.is_checked else kinds
        return [
            RemoteFile(part_file(record.number, kind), *record.files[kind])
            for kind in dict.fromkeys(wanted)
            if kind in record.files
        ]

    def _add(self, part: int, kind: str) -> MappedFile:
        """Map a file that is used for the first time."""
        if self._cache is not None:
            # Without the lock of the maps: other threads read other parts while this one waits.
            self._fetch([part], kind)
            self._state.maps.remove_evicted()
        open_file = partial(self._map, self._parts[part], kind)
        try:
            return self._state.maps.add((part, kind), open_file)
        except StoreError:  # it does not have the header of this file
            if not self._fetch_again(kind, [part]):
                raise
            return self._state.maps.add((part, kind), open_file)

    def _fetch_again(self, kind: str, parts: Sequence[int]) -> bool:
        """Remove damaged files from this machine, so that they are downloaded once more.

        Returns:
            False if they cannot be downloaded, or one of them was downloaded again before: then the
            store itself is damaged.
        """
        keys = {(part, kind) for part in parts}
        if self._cache is None or keys & self._state.fetched_again:
            return False
        self._state.fetched_again |= keys
        for part in parts:
            for each in self._remote(part, (kind, "checks")):
                self._cache.remove(each)
            self._state.sums.pop(part, None)
            self._state.maps.remove((part, kind))
        return True

    def download_anew(self, name: str, size: int, digest: str) -> None:
        """Download a file of a remote store, also if it is here, and compare it with its digest."""
        from penstock.store.remote import RemoteFile

        assert self._cache is not None  # as the store is at a URL
        file = RemoteFile(name, size, digest)
        self._cache.remove(file)
        self._cache.fetch([file])

    def array(self, part: int, kind: str) -> NDArray[Any]:
        """One array of one part, all of which was checked."""
        found, key = self.open(part, kind), (part, kind)
        if key not in self._state.whole:
            record, blocks = self._parts[part], np.arange(num_blocks(len(found.data)))
            self.check(kind, np.full(len(blocks), part), blocks)
            found = self.open(part, kind)  # a damaged one may have been downloaded again
            if kind == "bounds" and (problem := bounds_problem(found.array, record.num_tokens)):
                raise StoreError(f"{self._path}, part {record.number}: {problem}. {REPAIR_ADVICE}")
            keep_newest(self._state.whole, key, True)
        return found.array

    def span(self, part: int, kind: str, start: int, stop: int) -> NDArray[Any]:
        """The items `[start, stop)` of one array of one part, after their blocks were checked."""
        array = self.open(part, kind).array
        if self.is_checked and stop > start:
            first = (HEADER_BYTES + start * array.itemsize) // BLOCK_BYTES
            last = (HEADER_BYTES + stop * array.itemsize - 1) // BLOCK_BYTES
            blocks = np.arange(first, last + 1)
            if not are_marked(self._checked(part, kind), blocks).all():
                self.check(kind, np.full(len(blocks), part), blocks)
                array = self.open(part, kind).array  # perhaps downloaded again
        return array[start:stop]

    def check(self, kind: str, parts: Integers, blocks: Integers) -> None:
        """Check block `blocks[i]` of the `kind` file of part `parts[i]`, for all i.

        The blocks of a part ascend. Those that this process has checked before are skipped.

        Raises:
            StoreError: a block is damaged, or holds ids that are not in the vocabulary.
        """
        if not self.is_checked:
            return
        if self._cache is not None:
            self._fetch(np.unique(parts).tolist(), kind)
        needed: list[tuple[int, Integers]] = []
        for part, chosen in group_rows(parts):
            new = blocks[chosen]
            needed.append((part, new[~are_marked(self._checked(part, kind), new)]))
        runs = runs_of(needed)
        at_once = files_at_once(_RUNS_AT_ONCE)  # each may be in another file
        groups = [runs[first : first + at_once] for first in range(0, len(runs), at_once)]
        for group, following in zip_longest(groups, groups[1:], fillvalue=()):
            # The disk loads the next blocks while these are checked.
            for some in (group, following) if group is groups[0] else (following,):
                request_runs([(self.open(run.part, kind), run) for run in some])
            self._check_runs(kind, group)

    def _check_runs(self, kind: str, runs: Sequence[Run]) -> None:
        failed = check_runs(runs, partial(self._check_run, kind))
        if failed:
            if not self._fetch_again(kind, sorted({run.part for run, _ in failed})):
                raise failed[0][1]
            self._check_runs(kind, [run for run, _ in failed])

    def _check_run(self, kind: str, run: Run) -> None:
        """Check the blocks of a run; those that nobody needs now may be damaged."""
        data = self.open(run.part, kind).data[run.span]
        checked = self._checked(run.part, kind)
        try:
            self._compare(kind, run.part, run.first, data)
            mark(checked, np.arange(run.first, run.stop))
        except StoreError:
            for block in run.needed:
                at = (block - run.first) * BLOCK_BYTES
                self._compare(kind, run.part, block, data[at : at + BLOCK_BYTES])
            mark(checked, np.array(run.needed))

    def _compare(self, kind: str, part: int, first: int, data: NDArray[np.uint8]) -> None:
        """Compare blocks from `first` on with their checksums, and with the vocabulary."""
        sums = self._sums(part, kind)
        if sums is not None:
            known = sums[first : first + num_blocks(len(data))].tolist()
            if (number := damaged_block(data, known)) is not None:
                block = data[number * BLOCK_BYTES :][:BLOCK_BYTES]
                raise StoreError(
                    f"{self._where(part, kind, first + number, len(block))} is damaged: the "
                    f"checksum is {crc32(block.data):08x}, but the store recorded "
                    f"{known[number]:08x}. {REPAIR_ADVICE}"
                )
        if kind != "tokens" or self._vocab_size >= 256**self._dtype.itemsize:
            return
        ids = data[0 if first else HEADER_BYTES :].view(self._dtype)  # the header is not ids
        if ids.max(initial=0) >= self._vocab_size:
            wrong = int(np.argmax(ids >= self._vocab_size))
            number = (len(data) - ids.nbytes + wrong * ids.itemsize) // BLOCK_BYTES
            size = min(BLOCK_BYTES, len(data) - number * BLOCK_BYTES)
            raise StoreError(
                f"{self._where(part, kind, first + number, size)} holds the token id "
                f"{ids[wrong]:,}, but the vocabulary has {self._vocab_size:,} ids. A model has "
                f"no embedding for it. {REPAIR_ADVICE}"
            )

    def _where(self, part: int, kind: str, block: int, size: int) -> str:
        first = block * BLOCK_BYTES
        path = self._path / part_file(self._parts[part].number, kind)
        return f"{path}, block {block:,} (bytes {first:,} to {first + size:,}),"

    def _checked(self, part: int, kind: str) -> NDArray[np.uint8]:
        """Whether each block of a file was checked: see `are_marked`."""
        done = self._state.done.get((part, kind))
        if done is None:
            blocks = num_blocks(self._parts[part].files[kind][0])
            # Another thread may have added it after the line above, and have checked blocks.
            done = keep_newest(self._state.done, (part, kind), np.zeros(-(-blocks // 8), np.uint8))
        return done

    def _sums(self, part: int, kind: str) -> NDArray[np.uint32] | None:
        """The recorded checksums of the blocks of a file; None if the part has none.

        Every part of a build has some. Sparse stores that tests and benchmarks make have none.
        """
        record = self._parts[part]
        if "checks" not in record.files:
            return None
        sums = self._state.sums.get(part)
        if sums is None:
            sums = keep_newest(self._state.sums, part, self._read_sums(record))
        # The checksums of all files follow each other.
        before = CHECKED_KINDS[: CHECKED_KINDS.index(kind)]
        first = sum(num_blocks(record.files[each][0]) for each in before if each in record.files)
        return sums[first : first + num_blocks(record.files[kind][0])]

    def _read_sums(self, record: PartRecord) -> NDArray[np.uint32]:
        path = self._path / part_file(record.number, "checks")
        with explained(path), self._open_file(record, "checks") as stream:
            data = stream.read()
        found, expected = xxhash.xxh3_128(data).hexdigest(), record.files["checks"][1]
        if found != expected:
            raise StoreError(
                f"{path} is damaged, or it is of another part or store: its XXH3-128 is "
                f"{found[:8]}…, but the store recorded {expected[:8]}…. {REPAIR_ADVICE}"
            )
        return np.frombuffer(data, "<u4", offset=HEADER_BYTES)

    def _open_file(self, record: PartRecord, kind: str) -> NamedFile:
        """Open one file of a part, after its size was compared with the manifest."""
        path = self._path / part_file(record.number, kind)
        if self._cache is not None:
            from penstock.store.remote import RemoteFile

            return self._cache.open(RemoteFile(path.name, *record.files[kind]))
        opened = self._directory / path.name
        assert isinstance(opened, Path)  # a store at a URL has a cache
        if not opened.exists():
            raise MissingStoreError(f"{path} is missing. {REPAIR_ADVICE}")
        stream = NamedFile(opened)
        try:
            with naming(str(path)):
                size = os.fstat(stream.fileno()).st_size
            if size != record.files[kind][0]:
                raise _other_size(path, size, record.files[kind][0])
        except BaseException:
            stream.close()
            raise
        return stream

    def _map(self, record: PartRecord, kind: str) -> MappedFile:
        dtype, shape = array_layout(kind, self._dtype, record.num_documents, record.num_tokens)
        path, num_bytes = self._path / part_file(record.number, kind), record.files[kind][0]
        with explained(path), self._open_file(record, kind) as stream, naming(str(path)):
            # Not from the map: there, the kernel would also load up to 8 MB after the header.
            head = stream.read(HEADER_BYTES)
            # The map has a descriptor of its own, so `size` can tell whether the file was cut.
            mapping = map_file(stream, num_bytes)
            name = str(stream.name)
        # The header contains type and shape, so this also finds swapped files of equal size.
        if head != header(dtype, shape):
            raise StoreError(
                f"{path} does not have the header of the {kind} file of part {record.number}, so "
                f"it is another file or damaged. {REPAIR_ADVICE}"
            )
        if kind == "tokens" and self._exceeds_memory:
            # By default the kernel reads about 100 KB around every page. If a store does not fit
            # into memory, these are discarded before they are used: 32 rows took 54 ms with them
            # and 3 ms without them.
            mapping.madvise(mmap.MADV_RANDOM)
        data = np.frombuffer(mapping, np.uint8)
        array = data[HEADER_BYTES:].view(dtype).reshape(shape)
        address = int(array.ctypes.data)
        return MappedFile(array, data, mapping, len(data), address, path, name)

    @cached_property
    def _exceeds_memory(self) -> bool:
        """Whether rows are read at random from more tokens than stay in the page cache."""
        if sys.platform == "win32" or self.read_in_order:  # Windows has no madvise
            return False
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        num_tokens = exact_sum(self._parts.tokens)
        return num_tokens * int(self._dtype.itemsize) > memory // 2


def _other_size(path: StorePath, size: int, expected: int) -> StoreError:
    return StoreError(
        f"{path} has {size:,} bytes, but its manifest says {expected:,}. It was cut off or "
        f"overwritten, perhaps during a copy. {REPAIR_ADVICE}"
    )


def keep_newest(kept: dict[_Key, _Value], key: _Key, value: _Value) -> _Value:
    """Add an entry, if there is none, and forget the oldest ones; returns the entry."""
    # RuntimeError: another thread changed the dict at this moment, and forgets entries as well.
    with suppress(RuntimeError, StopIteration):
        while len(kept) >= _MOST_KEPT:
            kept.pop(next(iter(kept)), None)
    return kept.setdefault(key, value)
