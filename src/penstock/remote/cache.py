"""Files of remote stores, kept on the local disk.

    ~/.cache/penstock/remote/SHA256                     a file, under the XXH3-128 of its contents
    ~/.cache/penstock/remote/.SHA256.PID.RANDOM.tmp     a file that is being downloaded
    ~/.cache/penstock/remote/.locks/ab                  locked while files ab… are downloaded
    ~/.cache/penstock/manifests/                        manifests, and tables of parts

(or in $PENSTOCK_CACHE/remote). A file gets its name after its size and XXH3-128 were compared with
the manifest. So a name never belongs to an incomplete file, whenever a process is killed. All
processes of a machine share the files: one downloads, and the others wait for its lock, which the
kernel releases if the process dies. Before a download, files that were not used for the longest
time are removed until there is room. A file that is mapped into memory stays valid there. The
directory belongs to the user alone, and no link in it is followed.
"""

import os
import re
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from filelock import FileLock, Timeout

from penstock.disk import NamedFile, cache_directory, room_for
from penstock.errors import MissingStoreError, RemoteError, StoreError
from penstock.remote.objects import Objects

_POLL_SECONDS = 0.02
# A file may be removed between its download and its use, if the limit is too small for the files
# that all processes use at a time.
_ATTEMPTS = 8
_NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)  # Windows has no such links to fear


class RemoteFile(NamedTuple):
    """A file of a remote store, as its manifest records it."""

    name: str
    size: int
    digest: str


class FileCache:
    """Kept files of one store. Safe to use from several threads and processes, and after a fork.

    Args:
        objects: The files of the store.
        limit: The most bytes that files of all stores may take together. If None, it is
            `PENSTOCK_CACHE_BYTES`, such as 200GB, or else half of the space that is free or taken
            by them.
    """

    def __init__(self, objects: Objects, limit: int | None = None) -> None:
        self.objects = objects
        self.directory = cache_directory().absolute() / "remote"
        self._locks = self.directory / ".locks"
        self._limit = _limit_of_environment() if limit is None else limit

    def has(self, file: RemoteFile) -> bool:
        """Whether a file is here; if it is, it counts as used now."""
        path = self.directory / file.digest
        try:
            found = path.lstat()
        except OSError:
            return False
        if not stat.S_ISREG(found.st_mode) or found.st_size != file.size:
            return False
        with suppress(OSError):  # removed in between
            os.utime(path, follow_symlinks=False)
        return True

    def open(self, file: RemoteFile) -> NamedFile:
        """Open a file for reading, after it was downloaded if it is not here."""
        path = self.directory / file.digest
        for _ in range(_ATTEMPTS):
            if not self.has(file):
                self.fetch(file)
            with suppress(FileNotFoundError):
                return NamedFile(path, opener=lambda at, flags: os.open(at, flags | _NO_FOLLOW))
        raise RemoteError(
            f"{self.objects.shown(file.name)} was removed from {self.directory} {_ATTEMPTS} times "
            "before it could be read: the limit is too small for the files that are used at a "
            "time. Raise PENSTOCK_CACHE_BYTES."
        )

    def remove(self, file: RemoteFile) -> None:
        """Remove a file, for example because it is damaged."""
        with suppress(FileNotFoundError):
            (self.directory / file.digest).unlink()

    def fetch(self, file: RemoteFile, *, wait: bool = True) -> bool:
        """Download a file unless it is here; returns whether it is here.

        Args:
            file: The file.
            wait: Whether to wait for another process that is downloading it.

        Raises:
            RemoteError: the server sends other contents twice, or nothing before the deadline.
        """
        until = time.monotonic() + self.objects.seconds
        try:
            return self._fetch(file, until, wait=wait)
        except MissingStoreError:
            raise
        except FileNotFoundError:  # somebody deleted the cache during the download
            return self._fetch(file, until, wait=wait)

    def _fetch(self, file: RemoteFile, until: float, *, wait: bool) -> bool:
        objects = self.objects
        self._make_directories()
        with self._locked(file.digest[:2], until if wait else time.monotonic()) as is_held:
            if not is_held:
                if not wait:
                    return False
                raise RemoteError(
                    f"{objects.shown(file.name)} was not downloaded by another process within "
                    f"{objects.seconds:g} s. Check that process and the network."
                )
            if not self.has(file):
                self._download(file, until)
        return True

    def _download(self, file: RemoteFile, until: float) -> None:
        """Download a file whose lock is held, and give it its name."""
        objects, path = self.objects, self.directory / file.digest
        temporary = self._reserve(file, until)
        try:
            with room_for(path):
                for is_last in (False, True):
                    found = objects.download(file.name, temporary, file.size, until=until)
                    if found == file.digest:
                        break
                    if is_last:
                        raise RemoteError(
                            f"{objects.shown(file.name)} was downloaded twice, and its XXH3-128 is "
                            f"{found[:8]}…, but the manifest says {file.digest[:8]}…. The store is "
                            "damaged, or it is being replaced. Check it with penstock verify."
                        )
                # Locked: a process that counts files at this moment would see neither name, and
                # so exceed the limit. Not synced: after a power cut, checksums of the store find a
                # damaged file.
                with self._locked("count", until):
                    temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    def _reserve(self, file: RemoteFile, until: float) -> Path:
        """Make room for a file; returns a new file of its size, which counts from now on."""
        name = f".{file.digest}.{os.getpid()}.{os.urandom(6).hex()}.tmp"
        temporary = self.directory / name
        while True:
            # All processes count and remove files one after the other, so that all of them
            # together stay below the limit.
            with self._locked("count", until) as is_held:
                if is_held and self._make_room(file.size):
                    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                    os.truncate(descriptor, file.size)  # a hole, which has the size at once
                    os.close(descriptor)
                    return temporary
            if time.monotonic() > until:
                name = self.objects.shown(file.name)
                raise RemoteError(
                    f"There is no room for {name} ({file.size:,} bytes) in {self.directory}: "
                    "other files are being downloaded, and the limit of "
                    f"{self._most_bytes():,} bytes is too small for all. Raise "
                    "PENSTOCK_CACHE_BYTES."
                )
            time.sleep(_POLL_SECONDS)

    def _make_room(self, size: int) -> bool:
        """Remove the oldest files until `size` more bytes fit; False if downloads take the room."""
        files = self._manifests()
        used = sum(size for _, size, _ in files)
        for entry in os.scandir(self.directory):
            with suppress(FileNotFoundError):
                if not entry.is_file(follow_symlinks=False):
                    continue
                found = entry.stat(follow_symlinks=False)
                if entry.name.endswith(".tmp"):
                    if self._is_abandoned(entry.name):
                        os.unlink(entry.path)  # noqa: PTH108  (a path of scandir is a str)
                        continue
                else:
                    files.append((found.st_mtime_ns, found.st_size, entry.path))
                used += found.st_size
        limit = self._most_bytes(used)
        if size > limit:
            raise StoreError(
                f"One file of the store has {size:,} bytes, but files of remote stores may take "
                f"only {limit:,} bytes of {self.directory}. Raise PENSTOCK_CACHE_BYTES or "
                "cache_bytes= of penstock.TokenStore."
            )
        for _, freed, path in sorted(files):
            if used + size <= limit:
                break
            with suppress(FileNotFoundError):
                os.unlink(path)  # noqa: PTH108
            used -= freed
        return used + size <= limit

    def _manifests(self) -> list[tuple[int, int, str]]:
        """When each kept manifest or table of parts was last used, its size and its path."""
        found = []
        with suppress(OSError):  # nothing was kept there
            for entry in os.scandir(self.directory.parent / "manifests"):
                with suppress(FileNotFoundError):
                    known = entry.stat(follow_symlinks=False)
                    if entry.is_file(follow_symlinks=False) and entry.name[0] != ".":
                        found.append((known.st_mtime_ns, known.st_size, entry.path))
        return found

    def _is_abandoned(self, name: str) -> bool:
        """Whether nobody downloads this temporary file: its process was killed."""
        with self._locked(name[1:3], time.monotonic()) as is_free:
            return is_free

    def _most_bytes(self, used: int = 0) -> int:
        if self._limit is not None:
            return self._limit
        return (used + shutil.disk_usage(self.directory).free) // 2

    def _make_directories(self) -> None:
        if self._locks.is_dir():
            return
        self.directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in (self.directory, self._locks):
            with suppress(FileExistsError):
                path.mkdir(mode=0o700)
            if path.is_symlink() or not path.is_dir():
                raise StoreError(
                    f"{path} is a link or a file, but files of remote stores are kept in a "
                    "directory of this name. Delete it, or set PENSTOCK_CACHE to another place."
                )

    @contextmanager
    def _locked(self, name: str, until: float) -> Iterator[bool]:
        """Hold a lock during a `with` block; gives whether it was free before `until`."""
        # The locks of all files are 256, so none has to be removed. fallback_to_soft: without
        # flock, filelock would use a marker file, which a killed process leaves behind for ever.
        lock = FileLock(
            self._locks / name,
            poll_interval=_POLL_SECONDS,
            thread_local=False,
            fallback_to_soft=False,
        )
        try:
            lock.acquire(timeout=max(0.0, until - time.monotonic()))
        except Timeout:
            yield False
            return
        try:
            yield True
        finally:
            lock.release()


def _limit_of_environment() -> int | None:
    text = os.environ.get("PENSTOCK_CACHE_BYTES", "").strip()
    if not text:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(I?)B?", text.upper())
    if found is None or (found[3] and not found[2]):
        raise StoreError(
            f"The environment variable PENSTOCK_CACHE_BYTES is {text!r}. Set it to the bytes that "
            "files of remote stores may take on this disk, such as 200GB."
        )
    return int(float(found[1]) * (1024 if found[3] else 1000) ** " KMGT".index(found[2] or " "))
