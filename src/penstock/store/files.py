"""Files that are either there in full or not at all.

A file is written under a temporary name, forced to disk, renamed, and its directory
forced to disk: after a power cut the name shows the old contents or the new ones,
never half. When forcing fails, the file is abandoned and not tried again, because the
kernel may have dropped the pages and would report success the second time.

Large files go to the disk directly (O_DIRECT), not through the page cache: what a build
writes it does not read again, while filling the cache took a fifth of its time and drove
out the input. A stream does read it, and says so. Where the file system knows no such
thing, the same bytes go the usual way.
"""

import errno
import hashlib
import mmap
import os
import shutil
import threading
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from penstock.errors import DiskFullError

__all__ = [
    "digest_file",
    "keep_freed_memory",
    "remove_temporary",
    "sync_directory",
    "sync_file",
    "write_file",
]


@cache
def keep_freed_memory() -> None:
    """Have malloc keep the memory of large arrays for the next ones, once in a process.

    glibc gives freed memory back to the system when it is more than twice the largest array
    that was freed before, and an array that needs it again waits for every page of it. After
    one large array, never touched, that is 64 MiB (see M_MMAP_THRESHOLD in mallopt(3)). Without
    it, a tenth of a build was spent on pages, and loaders were up to a quarter slower, by chance.
    """
    np.empty((32 << 20) - (1 << 16), np.uint8)


# Up to here a file is left in the page cache: small ones cost little, and are read again soon.
_CACHED_BYTES = 4 << 20
_BLOCK_BYTES = 1 << 20

_own = threading.local()
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def write_file(path: Path, pieces: Iterable[Any], *, live: bool = False) -> tuple[int, str]:
    """Write `pieces` (bytes or contiguous arrays) to `path`; returns its size and SHA-256.

    The caller forces the directory to disk, once for all files it renamed into it.

    Args:
        path: The file.
        pieces: Its contents.
        live: It is read again at once: also a large one stays in the page cache, and it is left
            to the caller to force it to disk, with `sync_file`.

    Raises:
        DiskFullError: there is no room; nothing is left behind.
    """
    temporary = _temporary(path)
    digest = hashlib.sha256()
    size = 0
    direct = False
    stream = temporary.open("xb", buffering=0)  # one that is there already is not ours to remove
    try:
        with stream:
            file = stream.fileno()
            for block in _blocks(pieces):
                digest.update(block)
                if size == _CACHED_BYTES and not live:
                    direct = _set_direct(file, True)
                if direct and len(block) < _BLOCK_BYTES:  # no whole number of the disk's blocks
                    direct = _set_direct(file, False)
                size += len(block)
                direct = _write(file, block, direct)
            if not live:
                os.fsync(file)
        temporary.rename(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        if error.errno in _NO_ROOM:
            raise _no_room(path, size, error) from error
        raise
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return size, digest.hexdigest()


def _blocks(pieces: Iterable[Any]) -> Iterator[memoryview]:
    """All bytes of `pieces` in blocks of one size, but for the last.

    In one buffer that begins where the disk wants it; what is hashed and written from there
    is still in the processor's cache.
    """
    buffer: memoryview = _own.__dict__.pop("buffer", None) or _new_buffer()
    room = np.frombuffer(buffer, np.uint8)
    filled = 0
    for piece in pieces:
        view = memoryview(piece).cast("B") if len(piece) else memoryview(b"")
        while view:
            taken = min(len(view), _BLOCK_BYTES - filled)
            # By NumPy, which lets other threads run meanwhile.
            room[filled : filled + taken] = np.frombuffer(view, np.uint8, taken)
            filled += taken
            view = view[taken:]
            if filled == _BLOCK_BYTES:
                yield buffer
                filled = 0
    if filled:
        yield buffer[:filled]
    _own.buffer = buffer


def _new_buffer() -> memoryview:
    """A block of whole pages, of this process alone: by default a fork would share it."""
    if hasattr(mmap, "MAP_PRIVATE"):
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        return memoryview(mmap.mmap(-1, _BLOCK_BYTES, flags=private))
    return memoryview(mmap.mmap(-1, _BLOCK_BYTES))  # Windows, which has no fork


def _temporary(path: Path) -> Path:
    """A name that no other writer has, also not on another machine with the same numbers."""
    drawn = int.from_bytes(os.urandom(6), "little")
    return path.with_name(f".{path.name}.{os.getpid()}.{drawn}.tmp")


def _write(file: int, view: memoryview, direct: bool) -> bool:
    """Write all of `view`; returns whether the file still goes past the page cache."""
    while view:
        try:
            view = view[os.write(file, view) :]
        except OSError as error:
            if not direct or error.errno != errno.EINVAL:
                raise
            direct = _set_direct(file, False)  # opened so, and yet not written so
    return direct


def _set_direct(file: int, wanted: bool) -> bool:
    """Switch writing past the page cache on or off; returns whether it is on."""
    if not hasattr(os, "O_DIRECT"):  # macOS and Windows
        return False
    import fcntl

    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, flags | os.O_DIRECT if wanted else flags & ~os.O_DIRECT)
    except OSError:  # the file system knows no such thing
        return False
    return wanted


def _no_room(path: Path, size: int, error: OSError) -> DiskFullError:
    try:
        free = f"{shutil.disk_usage(path.parent).free:,} bytes are free"
    except OSError:
        free = "how much is free cannot be told"
    return DiskFullError(
        error.errno,
        f"No room to write {path}: it needs more than {size:,} bytes, and {free} "
        f"({error.strerror}). All that was finished before is kept; make room and run the same "
        "command again to go on",
    )


def sync_file(path: Path) -> None:
    """Force a file to disk that was written without; where that fails, it is removed."""
    handle = os.open(path, os.O_RDWR)
    try:
        os.fsync(handle)
    except OSError as error:
        path.unlink(missing_ok=True)
        if error.errno in _NO_ROOM:
            raise _no_room(path, os.fstat(handle).st_size, error) from error
        raise
    finally:
        os.close(handle)


def sync_directory(path: Path) -> None:
    """Force the names in a directory to disk."""
    if os.name == "nt":  # Windows has no such call; renames are journalled there
        return
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove_temporary(directory: Path) -> None:
    """Remove what writers that were killed left behind; only under the store's lock."""
    for path in directory.glob(".*.tmp"):
        path.unlink(missing_ok=True)


def digest_file(path: Path) -> str:
    """SHA-256 of a file's contents."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
