"""Files that are either there in full or not at all.

A file is written under a temporary name, forced to disk, renamed, and its directory
forced to disk: after a power cut the name shows the old contents or the new ones,
never half. When forcing fails, the file is abandoned and not tried again, because the
kernel may have dropped the pages and would report success the second time.
"""

import errno
import hashlib
import itertools
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from penstock.errors import DiskFullError

__all__ = ["digest_file", "remove_temporary", "sync_directory", "write_file"]

_serial = itertools.count()
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def write_file(path: Path, pieces: Iterable[Any]) -> tuple[int, str]:
    """Write `pieces` (bytes or contiguous arrays) to `path`; returns its size and SHA-256.

    The caller forces the directory to disk, once for all files it renamed into it.

    Raises:
        DiskFullError: there is no room; nothing is left behind.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{next(_serial)}.tmp")
    digest = hashlib.sha256()
    size = 0
    try:
        with temporary.open("xb", buffering=0) as stream:
            for piece in pieces:
                view = memoryview(piece).cast("B") if len(piece) else memoryview(b"")
                digest.update(view)
                size += view.nbytes
                while view:
                    view = view[stream.write(view) :]
            os.fsync(stream.fileno())
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


def _no_room(path: Path, size: int, error: OSError) -> DiskFullError:
    try:
        free = f"{shutil.disk_usage(path.parent).free:,} bytes are free"
    except OSError:
        free = "how much is free cannot be told"
    return DiskFullError(
        error.errno,
        f"No room to write {path}: it needs more than {size:,} bytes, and {free} "
        f"({error.strerror}). All parts sealed so far are kept; make room and run the same "
        "command again to go on",
    )


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
