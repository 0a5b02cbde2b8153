r"""Writing of files that survive a crash as a whole or not at all.

A file is written under a temporary name, synced to disk and renamed, and then its directory is
synced. After a power cut, the name has the old contents or the new ones, never a part of them.
If a sync fails, the file is abandoned and the sync is not repeated: the kernel may have dropped
the pages, and would report success the second time.

Different versions of NumPy pad the headers of `.npy` files differently. The headers of a store
are always 128 bytes of format 1.0, so a store has the same bytes whichever version wrote it. A
reader needs no parser: a file either begins with exactly the expected 128 bytes, or it is not the
file that the manifest lists.

    \x93NUMPY \x01\x00 \x76\x00 {'descr': '<u2', 'fortran_order': False, 'shape': (5,), }   \n
"""

import errno
import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from penstock.errors import DiskFullError, StoreError
from penstock.paths import NamedFile, expand_user, naming
from penstock.store.blocks import block_sums

HEADER_BYTES = 128
# The magic string of NumPy, and version 1.0 of the format.
_MAGIC = b"\x93NUMPY\x01\x00"


@cache
def keep_freed_memory() -> None:
    """Make malloc keep the memory of large arrays for the next ones; once per process.

    glibc returns freed memory to the system if it is more than twice the largest array that was
    freed before. Freeing one large array, which was never touched, raises that limit to 64 MiB
    (see M_MMAP_THRESHOLD in mallopt(3)). Without this, a build spent a tenth of its time on getting
    pages, and some loaders were a quarter slower.
    """
    np.empty((32 << 20) - (1 << 16), np.uint8)


_BLOCK_BYTES = 1 << 20  # a multiple of the blocks that have checksums

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


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
    with _removed_on_failure(temporary, path):
        # Closed before it is renamed, because Windows does not rename open files.
        with temporary.open("xb", buffering=0) as file:
            written = _fill(file, pieces, sums)
        # Atomic: other processes see the old contents or all of the new ones.
        temporary.replace(path)
    return written


def _fill(file: FileIO, pieces: Iterable[Any], sums: list[int] | None) -> tuple[int, str]:
    """Write `pieces` to an open file and sync it; returns its size and XXH3-128."""
    digest = xxhash.xxh3_128()
    size = 0
    for block in _blocks(pieces):
        digest.update(block)
        if sums is not None:
            sums += block_sums(block)
        size += len(block)
        while block:
            block = block[file.write(block) :]
    os.fsync(file)
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
    except DiskFullError:
        raise
    except OSError as error:
        if error.errno not in _NO_ROOM:
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
    room = np.empty(_BLOCK_BYTES, np.uint8)
    buffer = room.data
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


def cache_directory() -> Path:
    """Return `$PENSTOCK_CACHE`, else `penstock` in `$XDG_CACHE_HOME` or in `~/.cache`.

    Everything in it can be computed or downloaded again. The directory may not exist yet.
    """
    if chosen := os.environ.get("PENSTOCK_CACHE"):
        return expand_user(chosen)
    return expand_user(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock"


def remove_temporary(directory: Path, process: int | None = None) -> None:
    """Remove the temporary files of killed writers, or of one; the caller holds the lock."""
    for path in directory.glob(".*.tmp" if process is None else f".*.{process}.*.tmp"):
        path.unlink(missing_ok=True)


def digest_file(path: Path) -> str:
    """XXH3-128 of a file's contents."""
    digest = xxhash.xxh3_128()
    with NamedFile(path) as stream:
        while block := stream.read(_BLOCK_BYTES):
            digest.update(block)
    return str(digest.hexdigest())


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
