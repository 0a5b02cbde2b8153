"""The lock of a store's directory, which allows one writer at a time.

    out/owt/           the store
    out/.owt.lock      its lock, while somebody writes the store

The lock is beside the store. If it were inside, deleting the store during a build would delete
the lock as well: the next build would make a new one, and both would write. And a copy of a store
that is being written would contain a lock file.

The lock is the kernel's (`flock`, taken by filelock). The kernel releases it when the process that
holds it ends for any reason, so nothing has to be cleaned up after a kill.

A lock belongs to a file and not to a name. If somebody deletes the lock file, or the whole
directory around it, another process can lock a new file of the same name. So the holder looks
before each rename whether the name still leads to the file that it has locked, and the path of the
store to the directory that it writes (see `penstock.store.folders`).
"""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from penstock.errors import StoreBusyError, StoreError
from penstock.paths import naming
from penstock.store.files import read_file
from penstock.store.folders import claimed

# Not 0: while its holder removes a lock, the lock still looks held for one attempt.
_WAIT_SECONDS = 0.04
_POLL_SECONDS = 0.01


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
        return "" if path.is_symlink() else read_file(path)[:32].decode(errors="replace").strip()
    except (OSError, StoreError):
        return ""


@contextmanager
def locked(directory: Path, wait: float = _WAIT_SECONDS) -> Iterator[None]:
    """Hold the writer's lock of `directory` during a `with` block.

    Files are written in `directory` only while the block holds the lock, and while the path names
    the same directory as at the beginning; see `penstock.store.folders.claimed`.

    A forked child does not hold it: filelock closes the child's copy of the descriptor.

    Args:
        directory: The directory.
        wait: For how many seconds to wait for another holder.

    Raises:
        StoreBusyError: another process, or another thread of this one, holds the lock.
        StoreError: the lock file is a link to another file.
        OSError: the file system is read-only or has no locks.
    """
    path = lock_path(directory)
    (lock, descriptor), process = _acquired(path, directory, wait), os.getpid()
    try:
        with claimed(directory, lambda: _is_named(descriptor, path)):
            yield
    finally:
        if os.getpid() == process:  # a forked child must not remove the lock of its parent
            # The file is removed while it is still locked. A process that waits for this file
            # finds, once it gets the lock, that the name is gone, and starts again (see
            # `_acquired`). Another process may lock a new file at once: this one writes no more.
            with suppress(OSError):  # Windows does not remove open files
                # Not if it was deleted before: then this may be the lock of another process.
                if _is_named(descriptor, path) and path.lstat().st_nlink == 1:
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


def _acquired(path: Path, directory: Path, wait: float) -> tuple[FileLock, int]:
    """Acquire the lock at `path`, and write the id of this process into it for messages.

    Returns:
        The lock, and the descriptor of its file.
    """
    while True:
        if path.is_symlink():  # filelock refuses it too, with an error that does not say why
            raise StoreError(
                f"{path} is a link to another file, but the lock must be a regular file. "
                "Delete the link and run this again."
            )
        descriptors: list[int] = []
        # fallback_to_soft: without flock, filelock would use a marker file, which a killed
        # process leaves behind for ever.
        lock = FileLock(
            path,
            timeout=wait,
            poll_interval=_POLL_SECONDS,
            thread_local=False,
            fallback_to_soft=False,
            on_acquired=descriptors.append,
        )
        try:
            with naming(path):
                lock.acquire()
        except Timeout:
            raise _busy(directory) from None
        if _is_named(descriptors[0], path):
            with suppress(OSError):  # if the disk is full, the first real write reports that
                found = os.fstat(descriptors[0])
                # Not into a file with several names: one of them may be a file of the user.
                if stat.S_ISREG(found.st_mode) and found.st_nlink == 1:
                    os.ftruncate(descriptors[0], 0)
                    os.write(descriptors[0], f"{os.getpid()}\n".encode())
            return lock, descriptors[0]
        lock.release()  # the last holder removed this file after we opened it


def _is_named(descriptor: int, path: Path) -> bool:
    """Whether the open file is still the one at `path`.

    Its number of links does not show that: NFS renames an open file instead of removing it.
    """
    with suppress(FileNotFoundError, NotADirectoryError), naming(path):
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    return False
