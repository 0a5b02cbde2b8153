"""Directories that are written through a descriptor, so that no file lands in another directory.

    path of a store ──► directory, open while the lock is held ──► its files, and its sides

A path can name another directory a moment later: somebody deletes the store, and a second build
makes a new one. So a writer opens the directory once (`claimed`) and makes, renames and removes
files in it by `dir_fd`. While a descriptor is open, its inode number is not used again, so a
comparison of the two shows whether the path still names the same directory.

A store may come from somebody else, in an archive. It may contain links with the names of files
and directories that penstock writes. The path that the user gave may be a link. Inside of it, a
link is never followed to write. Links to files are followed to read them, as in the cache of the
Hugging Face Hub. Named pipes and devices are refused, because opening a pipe can wait for ever.
"""

import errno
import os
import shutil
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import StoreBusyError, StoreError
from penstock.paths import NamedFile, naming

if sys.platform == "win32":  # no links to fear, no pipes with names of files, and no `dir_fd`
    _BINARY, _DIRECTORY, _NO_FOLLOW, _NO_WAIT = getattr(os, "O_BINARY", 0), 0, 0, 0
else:
    _BINARY, _DIRECTORY = 0, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    _NO_FOLLOW, _NO_WAIT = os.O_NOFOLLOW, os.O_NONBLOCK


@dataclass(frozen=True, slots=True, eq=False)
class Folder:
    """A directory that is open, and the conditions under which it may be written."""

    path: Path
    descriptor: int | None
    """None on Windows, where files are found by their whole path."""
    is_claimed: bool = False
    """Whether the path must name this directory for as long as it is written."""
    is_held: Callable[[], bool] | None = None
    """Whether the lock is still held. The lock guards the commit: a process that only makes parts
    may claim the directory without one."""
    owner: "Folder | None" = None
    """The claimed directory that this one is inside of, or will replace."""

    def check(self) -> None:
        """Raise if the claimed directory was deleted, moved or replaced, or its lock was lost.

        Raises:
            StoreError: its path names another directory, or none.
            StoreBusyError: the lock file was deleted, so another process may hold a new one.
        """
        if self.owner is not None:
            self.owner.check()
        if self.is_claimed and not self.is_at(self.path):
            raise StoreError(
                f"{self.path} was deleted, moved or replaced while it was being written, so this "
                "process stops. It has not changed the directory that is there now. Run this "
                "again."
            )
        if self.is_held is not None and not self.is_held():
            raise StoreBusyError(
                f"The lock of {self.path} was deleted while it was being written. Another process "
                "may write it now, so this one stops. Run this again when no other process does."
            )

    def is_at(self, path: Path) -> bool:
        """Whether `path` names this directory."""
        with suppress(OSError):
            if self.descriptor is None:
                return path.is_dir()
            return os.path.samestat(path.stat(), os.fstat(self.descriptor))
        return False

    @property
    def identity(self) -> tuple[int, int] | None:
        """The device and inode of the directory; None on Windows."""
        if self.descriptor is None:
            return None
        found = os.fstat(self.descriptor)
        return found.st_dev, found.st_ino

    def open(self, name: str, flags: int) -> int:
        """Open a file of the directory, and never through a link; returns its descriptor."""
        flags |= _BINARY | _NO_FOLLOW | _NO_WAIT
        with naming(self.path / name):
            return os.open(self._at(name), flags, 0o666, dir_fd=self.descriptor)

    def size(self, name: str) -> int:
        """The size of a file; 0 if there is none."""
        with suppress(FileNotFoundError), naming(self.path / name):
            return os.stat(self._at(name), dir_fd=self.descriptor, follow_symlinks=False).st_size
        return 0

    def rename(self, old: str, new: str, *, to: "Folder | None" = None) -> None:
        """Rename a file, also into another directory. If `new` is a link, it is replaced."""
        to = to or self
        source, target = self._at(old), to._at(new)
        with naming(to.path / new):
            os.rename(source, target, src_dir_fd=self.descriptor, dst_dir_fd=to.descriptor)

    def remove(self, name: str) -> None:
        """Remove a file or a link, if there is one."""
        with suppress(FileNotFoundError), naming(self.path / name):
            os.unlink(self._at(name), dir_fd=self.descriptor)

    def make(self, name: str) -> None:
        """Make a directory, unless there is one."""
        with suppress(FileExistsError), naming(self.path / name):
            os.mkdir(self._at(name), dir_fd=self.descriptor)

    def _at(self, name: str) -> str:
        return name if self.descriptor is not None else str(self.path / name)


# The directories that this process writes, by the path that the user gave. One table for all
# threads, like the lock, which belongs to the process as well.
_claims: dict[Path, Folder] = {}

if sys.platform != "win32":
    # A forked child does not hold the lock of its parent.
    os.register_at_fork(after_in_child=_claims.clear)


@contextmanager
def claimed(
    directory: Path, is_held: Callable[[], bool] | None = None, owner: Folder | None = None
) -> Iterator[Folder]:
    """Write `directory` during a `with` block, as long as it stays the directory that it is now.

    Args:
        directory: The path that all writes in the block use.
        is_held: Whether the lock that guards the directory is still held.
        owner: Another claimed directory, which must stay as it is too.
    """
    descriptor = None if sys.platform == "win32" else os.open(directory, _DIRECTORY)
    folder = Folder(directory.absolute(), descriptor, True, is_held, owner)
    _claims[directory] = folder
    try:
        yield folder
    finally:
        _claims.pop(directory, None)  # a forked child has none
        if descriptor is not None:
            os.close(descriptor)


def claim_of(directory: Path) -> Folder | None:
    """The directory as it was claimed; None if this process has not claimed it."""
    return _claims.get(directory)


@contextmanager
def opened(directory: Path) -> Iterator[Folder]:
    """Open a directory to write files in it.

    Raises:
        StoreError: a claimed directory is not there any more; see `Folder.check`. Or `directory` is
            a link inside a claimed directory.
    """
    claim = _claims.get(directory)
    if claim is not None:
        claim.check()
        with _explained(claim):
            yield claim
        return
    owner = _claims.get(directory.parent)
    if owner is not None:
        owner.check()
    folder = Folder(directory, _descriptor(directory, owner), owner=owner)
    try:
        with _explained(folder):
            yield folder
    finally:
        if folder.descriptor is not None:
            os.close(folder.descriptor)


@contextmanager
def _explained(folder: Folder) -> Iterator[None]:
    """Raise the error of `check` instead of FileNotFoundError if the directory was deleted."""
    try:
        yield
    except FileNotFoundError:
        folder.check()
        raise


def _descriptor(directory: Path, owner: Folder | None) -> int | None:
    if sys.platform == "win32":
        return None
    if owner is None:
        return os.open(directory, _DIRECTORY)
    try:
        with naming(directory):
            return os.open(directory.name, _DIRECTORY | _NO_FOLLOW, dir_fd=owner.descriptor)
    except OSError:
        owner.check()  # it may have been deleted since the last check
        refuse_other(directory)
        raise


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


def refuse_other(path: Path) -> None:
    """Raise if `path` is a link or a file, where penstock makes a directory."""
    refuse_link(path)
    if path.exists() and not path.is_dir():
        raise StoreError(
            f"{path} is a file, but a directory is needed there. Delete or move the file."
        )


def refuse_link(path: Path) -> None:
    """Raise if `path` is a link, which penstock does not write through."""
    if path.is_symlink():
        raise StoreError(
            f"{path} is a link to {path.readlink()}. Files are not written through a link, because "
            "that would change something elsewhere. Delete the link."
        )


def open_regular(path: Path, flags: int = os.O_RDONLY) -> int:
    """Open a regular file, through links only to read it; returns its descriptor.

    Raises:
        StoreError: it is a pipe, a device or a directory; or a link, which would be written to.
    """
    is_written = flags & (os.O_WRONLY | os.O_RDWR)
    try:
        # Without O_NONBLOCK, opening a named pipe waits until another process opens its other end.
        file = os.open(path, flags | _BINARY | _NO_WAIT | (_NO_FOLLOW if is_written else 0), 0o666)
    except OSError as error:
        if is_written:
            refuse_link(path)
        if error.errno not in (errno.ENXIO, errno.EISDIR):  # a pipe nobody reads; a directory
            raise
        raise _not_regular(path) from None
    try:
        with naming(path):
            if stat.S_ISREG(os.fstat(file).st_mode):
                return file
        raise _not_regular(path)
    except BaseException:
        os.close(file)
        raise


def open_to_read(path: Path) -> NamedFile:
    """Open a regular file for reading, without a buffer; errors while it is read name it."""
    return NamedFile(path, opener=lambda _, flags: open_regular(path, flags))


def _not_regular(path: Path) -> StoreError:
    return StoreError(
        f"{path} is not a regular file, but a directory, a pipe or a device. Delete or move it."
    )


def empty_directory(directory: Path) -> None:
    """Delete everything in a directory, except its lock file; the caller holds the lock."""
    for path in directory.iterdir():
        if path.is_dir() and not path.is_symlink():
            remove_tree(path)
        elif path.name != ".lock":
            path.unlink()
