r"""Files and directories on disk: published as a whole, locked by one writer, mapped to be read.

A file is written under a temporary name, synced to disk and renamed, and then its directory is
synced. After a power cut, the name has the old contents or the new ones, never a part of them.
If a sync fails, the file is abandoned and the sync is not repeated: the kernel may have dropped
the pages, and would report success the second time.

    out/owt/           a directory that one process at a time writes
    out/.owt.lock      its lock, while somebody writes it

The lock is beside the directory. Inside, it would be deleted with the directory: the next build
would make a new one, and both would write. The kernel releases the lock (`flock`, by filelock) when
the process that holds it ends for any reason, so nothing has to be cleaned up after a kill.

A map of Python keeps a descriptor of its file open, which shows whether the file was truncated:
reading a page that the file no longer has ends the process (SIGBUS). A process may have few
descriptors (`ulimit -n 32`), and stores may have thousands of parts. So all open stores together
keep a limited number of files mapped, and those that were not used for the longest time are
removed. To map a file again takes 60 µs, as long as to read a whole batch from mapped files.

The header of an array file is always 128 bytes of format 1.0, so the bytes of a store do not depend
on the version of NumPy, and a reader compares the header instead of parsing it:

    \x93NUMPY \x01\x00 \x76\x00 {'descr': '<u2', 'fortran_order': False, 'shape': (5,), }   \n

Python's OSError names the file if opening it fails, and nothing if a later call fails, such as
reading, fstat or mmap. So files are read as a `NamedFile`, or inside `naming`.
"""

import errno
import mmap
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from io import FileIO
from itertools import islice
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple
from weakref import WeakSet

import numpy as np
import xxhash
from numpy.typing import NDArray

from penstock.errors import DiskFullError, StoreBusyError, StoreError
from penstock.paths import StorePath, expand_user

if TYPE_CHECKING:
    from zlib import crc32 as crc32

    from _typeshed import WriteableBuffer
else:
    try:
        from isal.isal_zlib import crc32
    except ImportError:
        from zlib import crc32

HEADER_BYTES = 128
_MAGIC = b"\x93NUMPY\x01\x00"  # with version 1.0 of the format
BLOCK_BYTES = 1 << 16
"""The bytes that one checksum covers."""
_PIECE_BYTES = 1 << 20  # written at a time; a multiple of the blocks that have checksums
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

# Not 0: while its holder removes a lock, the lock still looks held for one attempt.
_WAIT_SECONDS = 0.04
_POLL_SECONDS = 0.01

_MOST_MAPPED = 16_384  # Linux allows a process 65,530 maps
# Left to the rest of the process: its streams, locks and directories, what it writes, sockets.
# With torch, an idle process has 5, and a build with two threads 12.
_OTHERS = 24
_LOOKED_AT = 16


@contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Let an error of the system in a `with` block name the file `path`."""
    try:
        yield
    except OSError as error:
        # `shutil.rmtree` names a file by its name in its directory alone, which says too little. An
        # error without a number is not the system's, and has a message of its own.
        if error.errno is not None and not os.path.isabs(error.filename or ""):  # noqa: PTH117
            error.filename = os.fspath(path)
        raise


class NamedFile(FileIO):
    """A file that is open for reading, without a buffer; an error while it is read names it."""

    def read(self, size: int | None = -1, /) -> bytes:
        """Return at most `size` bytes, as one call of the system gives them."""
        with naming(self.name):
            return super().read(size)

    def readall(self) -> bytes:
        """Return the rest of the file."""
        with naming(self.name):
            return super().readall()

    def readinto(self, buffer: "WriteableBuffer", /) -> int:
        """Fill `buffer`; returns the number of bytes."""
        with naming(self.name):
            return super().readinto(buffer)


def cache_directory() -> Path:
    """Return `$PENSTOCK_CACHE`, else `penstock` in `$XDG_CACHE_HOME` or in `~/.cache`.

    Everything in it can be computed or downloaded again. The directory may not exist yet.
    """
    if chosen := os.environ.get("PENSTOCK_CACHE"):
        return expand_user(chosen)
    return expand_user(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock"


def write_file(
    path: Path, pieces: Iterable[Any], *, sums: list[int] | None = None
) -> tuple[int, str]:
    """Write `pieces` (bytes or contiguous arrays) to `path`; returns its size and XXH3-128.

    The caller syncs the directory, once for all files that were renamed into it.

    Args:
        path: The file.
        pieces: Its contents.
        sums: The checksums of the blocks of the file are appended to this list.

    Raises:
        DiskFullError: the disk is full; nothing is left behind.
    """
    # A name that no other writer has, not even a process with the same id on another machine.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(6).hex()}.tmp")
    digest, size = xxhash.xxh3_128(), 0
    with _removed_on_failure(temporary, path):
        # Closed before it is renamed, because Windows does not rename open files.
        with temporary.open("xb", buffering=0) as file:
            for block in _blocks(pieces):
                digest.update(block)
                if sums is not None:
                    sums += block_sums(block)
                size += len(block)
                while block:
                    block = block[file.write(block) :]
            os.fsync(file)
        # Atomic: other processes see the old contents or all of the new ones.
        temporary.replace(path)
    return size, digest.hexdigest()


@contextmanager
def _removed_on_failure(file: Path, path: Path) -> Iterator[None]:
    """Remove `file` if the `with` block fails; an error of the system then names `path`.

    The user knows `path`, and not the temporary name under which it is written.
    """
    try:
        yield
    except BaseException as error:  # also Ctrl-C
        size = file.stat().st_size if file.exists() else 0
        file.unlink(missing_ok=True)
        # The contents may come from another file, whose error names that file. An error without a
        # number is not the system's.
        if (
            isinstance(error, OSError)
            and not isinstance(error, DiskFullError)
            and error.errno is not None
            and error.filename in (None, str(file))
        ):
            if error.errno in _NO_ROOM:
                raise _no_room(error, path, size) from error
            error.filename, error.filename2 = str(path), None
        raise


@contextmanager
def room_for(path: Path) -> Iterator[None]:
    """Raise a DiskFullError if the `with` block cannot create a file because the disk is full."""
    try:
        yield
    except OSError as error:
        if isinstance(error, DiskFullError) or error.errno not in _NO_ROOM:
            raise
        found = Path(os.fsdecode(error.filename or path))
        # The user knows the file, and not the temporary name under which it is written.
        raise _no_room(error, path if found.suffix == ".tmp" else found, 0) from error


def _no_room(error: OSError, path: Path, size: int) -> DiskFullError:
    """The error for a file that does not fit on the disk, of which `size` bytes were written."""
    existing = next(each for each in path.absolute().parents if each.exists())
    free = f"{shutil.disk_usage(existing).free:,} bytes are free"
    why = f"it needs more than {size:,} bytes, and {free} ({error.strerror})"
    if sys.platform != "win32":
        counts = os.statvfs(existing)
        # Some file systems, such as btrfs, count no inodes: both numbers are 0.
        if counts.f_files and not counts.f_favail:
            why = f"all {counts.f_files:,} inodes of the file system are in use, although {free}"
    return DiskFullError(
        error.errno,
        f"No room to write {path}: {why}. Finished parts are kept; make room and run the same "
        "command again to resume",
    )


def _blocks(pieces: Iterable[Any]) -> Iterator[memoryview]:
    """All bytes of `pieces` in blocks of one size, except the last.

    All blocks use one buffer. A block is still in the processor's cache when it is hashed and
    written.
    """
    room = np.empty(_PIECE_BYTES, np.uint8)
    buffer = room.data
    filled = 0
    for piece in pieces:
        view = memoryview(piece).cast("B") if len(piece) else memoryview(b"")
        while view:
            taken = min(len(view), _PIECE_BYTES - filled)
            # NumPy releases the GIL for this copy.
            room[filled : filled + taken] = np.frombuffer(view, np.uint8, taken)
            filled += taken
            view = view[taken:]
            if filled == _PIECE_BYTES:
                yield buffer
                filled = 0
    if filled:
        yield buffer[:filled]


def sync_file(path: Path, *, kept: bool = False) -> None:
    """Sync a file to disk; if that fails, the file is removed, unless it is to be `kept`."""
    # Opened for writing too: Windows does not sync a file that is open for reading only.
    with (
        nullcontext() if kept else _removed_on_failure(path, path),
        naming(path),
        path.open("r+b", buffering=0) as file,
    ):
        os.fsync(file)


def sync_directory(path: Path) -> None:
    """Sync the names in a directory to disk."""
    if os.name == "nt":  # not possible on Windows, where renames are journalled
        return
    # A rename changes the directory and not the file, so syncing the file is not enough.
    directory = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(directory)
    finally:
        os.close(directory)


def rename(source: Path, target: Path) -> None:
    """Give a file or directory another name, on disk; a file of that name is replaced."""
    source.replace(target)
    sync_directory(target.parent)


def make_tree(directory: Path) -> None:
    """Make a directory and its parents, unless they exist.

    Raises:
        StoreError: there is a file of the same name, a link to a missing place, or a file system
            that allows no new directories.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        taken = next(each for each in (directory, *directory.parents) if os.path.lexists(each))
        if taken.is_symlink() and not taken.exists():
            raise StoreError(
                f"{taken} is a link to {taken.readlink()}, which does not exist. Make that "
                "directory, or delete the link."
            ) from None
        raise StoreError(
            f"{taken} is a file, and a directory is needed there. Choose a name that is not taken."
        ) from None
    except FileNotFoundError as error:  # a file system of the kernel, such as /proc
        raise StoreError(
            f"{directory} cannot be made: {error.filename} is in a place where the system allows "
            "no new directories. Name a directory elsewhere."
        ) from None


def remove_tree(directory: Path) -> None:
    """Delete a directory and everything in it."""
    with naming(directory):
        shutil.rmtree(directory)


def empty_directory(directory: Path) -> None:
    """Delete everything in a directory, except its lock file; the caller holds the lock."""
    for path in directory.iterdir():
        if path.is_dir() and not path.is_symlink():
            remove_tree(path)
        elif path.name != ".lock":
            path.unlink()


def read_file(path: Path) -> bytes:
    """The contents of a file."""
    with NamedFile(path) as stream:
        return stream.read()


def block_sums(data: Any) -> list[int]:
    """The CRC-32 of each block of `data`, which are bytes or contiguous arrays of bytes."""
    return [crc32(data[at : at + BLOCK_BYTES]) for at in range(0, len(data), BLOCK_BYTES)]


def remove_temporary(directory: Path, process: int | None = None) -> None:
    """Remove the temporary files of killed writers, or of one; the caller holds the lock."""
    for path in directory.glob(".*.tmp" if process is None else f".*.{process}.*.tmp"):
        path.unlink(missing_ok=True)


def digest_file(path: Path) -> str:
    """XXH3-128 of a file's contents."""
    digest = xxhash.xxh3_128()
    with NamedFile(path) as stream:
        while block := stream.read(_PIECE_BYTES):
            digest.update(block)
    return str(digest.hexdigest())


def header(dtype: "np.dtype[np.generic]", shape: tuple[int, ...]) -> bytes:
    r"""The first 128 bytes of a C-ordered array file.

    >>> import io
    >>> file = io.BytesIO(header(np.dtype("<u2"), (2,)) + b"\x01\x00\x02\x00")
    >>> np.load(file).tolist()
    [1, 2]
    """
    text = f"{{'descr': '{dtype.str}', 'fortran_order': False, 'shape': {shape!r}, }}".encode()
    # The two bytes before the text hold its length: 128 - 8 - 2 = 118, or 0x76.
    room = HEADER_BYTES - len(_MAGIC) - 2
    return _MAGIC + room.to_bytes(2, "little") + text.ljust(room - 1) + b"\n"


def lock_path(directory: Path) -> Path:
    """The file that is locked while `directory` is written.

    Relative paths and links to the same directory share one lock. If the parent is not writable,
    for example because the directory is a mount point, the lock is `.lock` inside the directory.
    """
    resolved = directory.resolve()
    beside = resolved.with_name(f".{resolved.name}.lock") if resolved.name else resolved / ".lock"
    is_usable = os.access(beside.parent, os.W_OK) or beside.exists()
    return beside if is_usable else resolved / ".lock"


def lock_holder(directory: Path) -> str:
    """The process id that is written in the lock of `directory`; "" if there is none."""
    path = lock_path(directory)
    try:
        return read_file(path)[:32].decode(errors="replace").strip()
    except OSError:
        return ""


@contextmanager
def locked(directory: Path, wait: float = _WAIT_SECONDS) -> Iterator[None]:
    """Hold the writer's lock of `directory` during a `with` block.

    A forked child does not hold it: filelock closes the child's copy of the descriptor.

    Args:
        directory: The directory.
        wait: For how many seconds to wait for another holder.

    Raises:
        StoreBusyError: another process, or another thread of this one, holds the lock.
        StoreError: a directory that the block uses was deleted.
        OSError: the file system is read-only or has no locks.
    """
    from filelock import FileLock, Timeout  # readers need no lock

    path, process, descriptors = lock_path(directory), os.getpid(), list[int]()
    lock = FileLock(
        path,
        timeout=wait,
        poll_interval=_POLL_SECONDS,
        thread_local=False,
        # Without flock, filelock would use a marker file, which a killed process leaves for ever.
        fallback_to_soft=False,
        on_acquired=descriptors.append,
    )
    while not descriptors:
        try:
            with naming(path):
                lock.acquire()
        except Timeout:
            raise _busy(directory) from None
        if not _is_named(descriptors[0], path):  # the last holder removed it after we opened it
            descriptors.clear()
            lock.release()
    with suppress(OSError):  # if the disk is full, the first real write reports that
        os.ftruncate(descriptors[0], 0)
        os.write(descriptors[0], f"{process}\n".encode())
    try:
        yield
    except FileNotFoundError as error:
        used = (directory, Path(error.filename or directory).parent)
        deleted = [each for each in used if not each.exists()]
        # An error without a number is not the system's, and has a message of its own.
        if error.errno is None or not deleted:
            raise
        raise StoreError(
            f"{deleted[0]} was deleted while it was in use, so this process stops. Run this again."
        ) from error
    finally:
        if os.getpid() == process:  # a forked child must not remove the lock of its parent
            # The file is removed while it is still locked. A process that waits for this file
            # finds, once it gets the lock, that the name is gone, and starts again.
            with suppress(OSError):  # Windows does not remove open files
                if _is_named(descriptors[0], path):
                    path.unlink()
            lock.release()


def _busy(directory: Path) -> StoreBusyError:
    holder = lock_holder(directory) or "unknown"
    advice = "Wait for it, or stop it and run this again."
    if os.environ.get("WORLD_SIZE", "1") != "1":  # set by torchrun for each process
        advice = (
            "This is one of several processes that were started together: let only rank 0 "
            "build, let all ranks wait in torch.distributed.barrier(), then open the store."
        )
    return StoreBusyError(
        f"{directory} is being written by another process (pid {holder}). Two writers "
        f"would overwrite each other's files. {advice}"
    )


def _is_named(descriptor: int, path: Path) -> bool:
    """Whether the open file is still the one at `path`.

    Its number of links does not show that: NFS renames an open file instead of removing it.
    """
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), path.stat())
    return False


def map_file(file: FileIO | BinaryIO, size: int = 0) -> mmap.mmap:
    """All bytes of an open file, or the first `size`, mapped into memory to be read."""
    return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)


class MappedFile(NamedTuple):
    """One file of a part in memory."""

    array: NDArray[Any]
    data: NDArray[np.uint8]
    """All bytes of the file, with its header."""
    mapping: mmap.mmap
    size: int
    """Bytes of the file."""
    address: int
    """Where `array` begins in memory: to ask NumPy takes 1 µs, and readers ask for each batch."""
    path: StorePath
    """Where the user sees it, for messages: a path or a URL."""
    name: str
    """The path that was opened: of a remote store, that of the file on this machine."""


class Maps:
    """The mapped files of one store. Safe to use from several threads and after a fork."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.files: dict[tuple[int, str], MappedFile] = {}
        """The files by part and kind. If maps are crowded, one that is used moves to the end; the
        first is the one that was not used for the longest time."""
        self.is_crowded = False
        """Whether so many files are mapped that some may have to be removed soon."""
        with _guard:
            _open.add(self)

    def add(self, key: tuple[int, str], open_file: Callable[[], MappedFile]) -> MappedFile:
        """The file of a key, which is opened unless another thread did that."""
        with self.lock:
            found = self.files.get(key)
            if found is not None:
                return found
            found = self.files[key] = open_file()
        _remove_oldest()
        return found

    def present(self, kind: str, parts: Sequence[int]) -> list[MappedFile] | None:
        """The files of some parts; None if one is not mapped, or does not have its size.

        A batch may have rows of as many parts as it has rows. So these loops do as little as
        possible: for each part one look-up, and one call of fstat, which takes half of the time.
        """
        files = self.files
        try:
            # Without the lock: to look up one key is atomic.
            found = [files[part, kind] for part in parts]
            if [each.mapping.size() for each in found] != [each.size for each in found]:
                return None
        except (KeyError, OSError):  # the caller opens the files one by one, and explains errors
            return None
        if self.is_crowded:
            for part, each in zip(parts, found, strict=True):
                self.use((part, kind), each)
        return found

    def use(self, key: tuple[int, str], found: MappedFile) -> None:
        """Make a file the last one to be removed."""
        with self.lock:
            self.files.pop(key, None)
            self.files[key] = found

    def __len__(self) -> int:
        return len(self.files)

    def remove(self, key: tuple[int, str]) -> None:
        """Remove the map of a key, if there is one."""
        with self.lock:
            self.files.pop(key, None)

    def remove_evicted(self) -> None:
        """Remove some maps of files that have no name any more, so that their space is free.

        Looks at the first few files, and moves those that still have a name to the end: so the
        next calls look at others.
        """
        with self.lock:
            for key in list(islice(self.files, _LOOKED_AT)):
                found = self.files.pop(key, None)  # None: its owner was deleted at this moment
                if found is not None and Path(found.name).exists():
                    self.files[key] = found


_open: "WeakSet[Maps]" = WeakSet()
_guard = Lock()  # a set must not change while it is listed


def files_at_once(most: int) -> int:
    """How many files, at most `most`, a thread may use at a time."""
    return max(1, min(most, (_limit() - _OTHERS) // 4))


@contextmanager
def explained(path: StorePath) -> Iterator[None]:
    """Raise an error that says what to do if the process has no descriptor left for `path`."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        raise StoreError(
            f"{path} cannot be opened: this process has as many open files as it may have, "
            f"{_limit():,}. Arrays of tokens that you keep hold the files of their store open, so "
            "copy them, or allow more files, for example with ulimit -n 1024."
        ) from error


def _remove_oldest() -> None:
    """Remove maps until all open stores together have as many as the process can afford."""
    limit = max(1, min((_limit() - _OTHERS) // 2, _MOST_MAPPED))
    with _guard:
        opened = list(_open)
    if sum(map(len, opened)) > limit // 2:
        for each in opened:
            each.is_crowded = True
    # Only one lock is held at a time, so that two threads cannot wait for each other.
    while sum(map(len, opened)) > limit:
        most = max(opened, key=len)
        # Arrays of the map that are in use stay valid, and keep it open.
        with most.lock, suppress(StopIteration):
            most.files.pop(next(iter(most.files)), None)


def _limit() -> int:
    """The descriptors that the process may have."""
    if sys.platform == "win32":  # where a map needs no descriptor
        return 4 * _MOST_MAPPED
    import resource

    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 4 * _MOST_MAPPED if limit == resource.RLIM_INFINITY else limit


def _after_fork() -> None:
    # Another thread of the parent may have held these locks when the process was forked.
    global _guard
    _guard = Lock()
    for each in _open:
        each.lock = Lock()


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_after_fork)
