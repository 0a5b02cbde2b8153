r"""Writing of files that survive a crash as a whole or not at all.

A file is written under a temporary name, synced to disk and renamed, and then its directory is
synced. After a power cut, the name has the old contents or the new ones, never a part of them.
If a sync fails, the file is abandoned and the sync is not repeated: the kernel may have dropped
the pages, and would report success the second time.

Large files go to the disk directly (O_DIRECT) and not through the page cache. A build does not
read again what it writes, and filling the cache took a fifth of its time and displaced the
input. The parts of a live build are read while it runs, so they are written through the cache. If
the file system does not support direct writes, the same bytes are written in the usual way.

Different versions of NumPy pad the headers of `.npy` files differently. The headers of a store
are always 128 bytes of format 1.0, so a store has the same bytes whichever version wrote it. A
reader needs no parser: a file either begins with exactly the expected 128 bytes, or it is not the
file that the manifest lists.

    \x93NUMPY \x01\x00 \x76\x00 {'descr': '<u2', 'fortran_order': False, 'shape': (5,), }   \n
"""

import errno
import hashlib
import mmap
import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from penstock.errors import DiskFullError
from penstock.paths import expand_user

HEADER_BYTES = 128
# The magic string of NumPy, and version 1.0 of the format.
_MAGIC = b"\x93NUMPY\x01\x00"


@cache
def keep_freed_memory() -> None:
    """Make malloc keep the memory of large arrays for the next ones; once per process.

    glibc returns freed memory to the system if it is more than twice the largest array that was
    freed before. The next array must then get each of its pages from the system again. Freeing one
    large array, which was never touched, raises that limit to 64 MiB (see M_MMAP_THRESHOLD in
    mallopt(3)). Without a call of this function, a build spent a tenth of its time on getting
    pages, and some loaders were a quarter slower.
    """
    np.empty((32 << 20) - (1 << 16), np.uint8)


# Up to this size a file stays in the page cache: small files cost little, and are read again soon.
_CACHED_BYTES = 4 << 20
_BLOCK_BYTES = 1 << 20

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def write_file(path: Path, pieces: Iterable[Any], *, live: bool = False) -> tuple[int, str]:
    """Write `pieces` (bytes or contiguous arrays) to `path`; returns its size and SHA-256.

    The caller syncs the directory, once for all files that were renamed into it.

    Args:
        path: The file.
        pieces: Its contents.
        live: Whether the file is read again at once. Then it stays in the page cache, and the
            caller syncs it with `sync_file`.

    Raises:
        DiskFullError: the disk is full; nothing is left behind.
    """
    # A name that no other writer has, not even a process with the same id on another machine.
    drawn = int.from_bytes(os.urandom(6), "little")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{drawn}.tmp")
    digest = hashlib.sha256()
    size = 0
    direct = False
    stream = temporary.open("xb", buffering=0)  # "x": an existing file is not ours to remove
    with _removed_on_failure(temporary, path), stream:
        file = stream.fileno()
        for block in _blocks(pieces):
            digest.update(block)
            # O_DIRECT requires aligned offsets. At this offset all blocks so far were whole.
            if size == _CACHED_BYTES and not live:
                direct = _set_direct(file, True)
            # O_DIRECT writes whole disk blocks only, and the last block may be shorter.
            if direct and len(block) < _BLOCK_BYTES:
                direct = _set_direct(file, False)
            size += len(block)
            direct = _write(file, block, direct)
        if not live:
            os.fsync(file)
        stream.close()  # Windows does not rename open files
        # Atomic: other processes see the old contents or all of the new ones.
        temporary.rename(path)
    return size, digest.hexdigest()


@contextmanager
def _removed_on_failure(file: Path, path: Path) -> Iterator[None]:
    """Remove `file` if the `with` block fails; a full disk raises an error that names `path`."""
    try:
        yield
    except BaseException as error:  # also Ctrl-C
        size = file.stat().st_size if file.exists() else 0
        file.unlink(missing_ok=True)
        if not isinstance(error, OSError) or error.errno not in _NO_ROOM:
            raise
        raise DiskFullError(
            error.errno,
            f"No room to write {path}: it needs more than {size:,} bytes, and "
            f"{shutil.disk_usage(path.parent).free:,} bytes are free ({error.strerror}). Finished "
            "parts are kept; make room and run the same command again to resume",
        ) from error


def _blocks(pieces: Iterable[Any]) -> Iterator[memoryview]:
    """All bytes of `pieces` in blocks of one size, except the last.

    All blocks use one buffer, which is aligned as O_DIRECT requires. A block is still in the
    processor's cache when it is hashed and written.
    """
    # A map of whole pages, made for this file: two writes at a time do not share it.
    buffer = memoryview(mmap.mmap(-1, _BLOCK_BYTES))
    room = np.frombuffer(buffer, np.uint8)
    filled = 0
    for piece in pieces:
        view = memoryview(piece).cast("B") if len(piece) else memoryview(b"")
        while view:
            taken = min(len(view), _BLOCK_BYTES - filled)
            # NumPy releases the GIL for this copy.
            room[filled : filled + taken] = np.frombuffer(view, np.uint8, taken)
            filled += taken
            view = view[taken:]
            if filled == _BLOCK_BYTES:
                yield buffer
                filled = 0
    if filled:
        yield buffer[:filled]


def _write(file: int, view: memoryview, direct: bool) -> bool:
    """Write all of `view`; returns whether O_DIRECT is still on."""
    while view:
        try:
            view = view[os.write(file, view) :]
        except OSError as error:
            if not direct or error.errno != errno.EINVAL:
                raise
            # Some file systems accept the flag and refuse to write.
            direct = _set_direct(file, False)
    return direct


def _set_direct(file: int, wanted: bool) -> bool:
    """Turn O_DIRECT on or off; returns whether it is on."""
    if sys.platform != "linux":  # macOS and Windows have no O_DIRECT
        return False
    import fcntl

    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, flags | os.O_DIRECT if wanted else flags & ~os.O_DIRECT)
    except OSError:  # the file system does not support it
        return False
    return wanted


def sync_file(path: Path) -> None:
    """Sync a file to disk that was written with `live`; if that fails, the file is removed."""
    # Opened for writing too: Windows does not sync a file that is open for reading only.
    with _removed_on_failure(path, path), path.open("r+b", buffering=0) as stream:
        os.fsync(stream.fileno())


def sync_directory(path: Path) -> None:
    """Sync the names in a directory to disk."""
    if os.name == "nt":  # not possible on Windows, where renames are journalled
        return
    # A rename changes the directory and not the file, so syncing the file is not enough.
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def cache_directory() -> Path:
    """Return `$PENSTOCK_CACHE`, else `penstock` in `$XDG_CACHE_HOME` or in `~/.cache`.

    Everything in it can be computed or downloaded again. The directory may not exist yet: the
    code that writes to it creates it.
    """
    # The variables are read at each call: tests and notebooks set them after the import.
    if chosen := os.environ.get("PENSTOCK_CACHE"):
        return expand_user(chosen)
    return expand_user(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock"


def remove_temporary(directory: Path) -> None:
    """Remove the temporary files of killed writers; the caller holds the store's lock."""
    for path in directory.glob(".*.tmp"):
        path.unlink(missing_ok=True)


def digest_file(path: Path) -> str:
    """SHA-256 of a file's contents."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def array_layout(
    kind: str, dtype: "np.dtype[Any]", num_documents: int, num_tokens: int
) -> tuple["np.dtype[Any]", tuple[int, ...]]:
    """The type and shape of one array of a part; `dtype` is that of the tokens."""
    return {
        "tokens": (dtype, (num_tokens,)),
        "bounds": (np.dtype("<u8"), (num_documents,)),
        "origin": (np.dtype("<u8"), (num_documents, 2)),
        "loss": (np.dtype("u1"), (num_tokens,)),
    }[kind]


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
