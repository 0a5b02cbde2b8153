"""One writer at a time.

The lock is the kernel's (`flock`), so it ends with the process that holds it, however
that ends. Nothing has to be cleaned up after a kill, and a second writer is told at once.
"""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from penstock.errors import StoreBusyError, StoreError

__all__ = ["close_held", "hold", "locked"]

# A forked child has the same locks, and would keep them after the process that took them has
# ended; so what is held is closed there, which lets go of nothing here.
_held: set[int] = set()


def hold(handle: int) -> bool:
    """Lock an open file until it is closed with `close_held`; whether that could be done."""
    if not _try_lock(handle):
        return False
    _held.add(handle)
    return True


def close_held(handle: int) -> None:
    """Close a file that was locked, unless a fork has done so."""
    if handle in _held:
        _held.discard(handle)
        os.close(handle)


def _let_go() -> None:
    for handle in list(_held):
        close_held(handle)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold the writer's lock of the store in `directory`.

    Raises:
        StoreBusyError: another process (or thread) holds it.
        StoreError: the lock is a link to another file.
    """
    handle = _opened(directory / ".lock")
    if not hold(handle):
        holder = os.pread(handle, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(handle)
        raise StoreBusyError(
            f"{directory} is being written by another process (pid {holder}). Two writers "
            "would spoil each other's parts. Wait for it, or stop it and run this again."
        )
    try:
        with suppress(OSError):  # a disk too full for it is told by what needs the room
            _note_holder(handle)
        yield
    finally:
        close_held(handle)


def _opened(path: Path) -> int:
    """The lock file, made where it is missing.

    What is written to it must not end up elsewhere: a store may come from anywhere, and bring a
    link to another file under this name.
    """
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0)
    if path.is_symlink():  # O_NOFOLLOW refuses it, too, but not on Windows
        raise StoreError(
            f"{path} is a link to another file, which this would overwrite. A lock is a file of "
            "its own: delete the link and run this again."
        )
    return os.open(path, flags, 0o644)


def _note_holder(handle: int) -> None:
    """Write this process's number into the lock, for people; not into a file with other names."""
    found = os.fstat(handle)
    if stat.S_ISREG(found.st_mode) and found.st_nlink == 1:
        os.ftruncate(handle, 0)
        os.write(handle, f"{os.getpid()}\n".encode())


def _try_lock(handle: int) -> bool:
    try:
        import fcntl
    except ImportError:  # Windows
        return _try_lock_windows(handle)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _try_lock_windows(handle: int) -> bool:
    import msvcrt

    try:
        msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined,unused-ignore]
    except OSError:
        return False
    return True
