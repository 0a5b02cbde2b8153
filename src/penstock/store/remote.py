"""The files of stores at URLs: downloaded when they are first used, and kept on the local disk.

    ~/.cache/penstock/remote/XXH3              a file of a part, under the XXH3-128 of its contents
    ~/.cache/penstock/remote/.XXH3.tmp         a file that is being downloaded
    ~/.cache/penstock/remote/.locks/ab         locked while files ab… are downloaded
    ~/.cache/penstock/manifests/               manifests, and tables of parts

(or in $PENSTOCK_CACHE). So the directory holds a part of each store that was read, and a file that
two stores share is there once. A file gets its name after its size and XXH3-128 were compared with
the manifest: a name never belongs to an incomplete file, whenever a process is killed. All
processes of a machine share the files: one downloads, and the others wait for its lock, which the
kernel releases if the process dies. Before a download, files that were not used for the longest
time are removed until there is room. A file that is mapped into memory stays valid there.
"""

import atexit
import json
import logging
import os
import queue
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock, Timeout

from penstock.digest import digest_bytes
from penstock.disk import NamedFile, cache_directory, digest_file, read_file, room_for, write_file
from penstock.errors import MissingStoreError, PenstockError, RemoteError, StoreError
from penstock.paths import StoreUrl
from penstock.store.forked import finish, start
from penstock.store.manifest import (
    FILE_NAME,
    JsonObject,
    Manifest,
    parse_manifest,
    table_file,
    with_table,
)
from penstock.store.objects import Objects, ending, is_forked
from penstock.streaming.waits import pause

_log = logging.getLogger("penstock")
_POLL_SECONDS = 0.02
_WAIT_SECONDS = 0.005
# A file may be removed between its download and its use, if the limit is too small for the files
# that all processes use at a time.
_ATTEMPTS = 8
_MANIFEST_ATTEMPTS = 3
_NUM_THREADS = 8
_AHEAD_BYTES = 256 << 20
_END_SECONDS = 20.0


class RemoteFile(NamedTuple):
    """A file of a remote store, as its manifest records it."""

    name: str
    size: int
    digest: str


class FileCache:
    """Kept files of one store. Safe to use from several threads and processes, and after a fork.

    Args:
        url: The URL of the store.
        limit: The most bytes that files of all stores may take together. If None, it is
            `PENSTOCK_CACHE_BYTES`, such as 200GB, or else half of the space that is free or taken
            by them.
    """

    def __init__(self, url: StoreUrl, limit: int | None = None) -> None:
        self.url, self._objects = url, Objects(url.address)
        self.directory = cache_directory().absolute() / "remote"
        self._locks = self.directory / ".locks"
        self._limit = _limit_of_environment() if limit is None else limit
        self._ahead: list[subprocess.Popen[str]] = []  # of a forked process

    def has(self, file: RemoteFile) -> bool:
        """Whether a file is here; if it is, it counts as used now."""
        path = self.directory / file.digest
        with suppress(OSError):  # it is not here, or was removed in between
            if path.stat().st_size == file.size:
                os.utime(path)
                return True
        return False

    def open(self, file: RemoteFile) -> NamedFile:
        """Open a file for reading, after it was downloaded if it is not here."""
        for _ in range(_ATTEMPTS):
            self.fetch([file])
            with suppress(FileNotFoundError):
                return NamedFile(self.directory / file.digest)
        raise RemoteError(
            f"{self._objects.shown(file.name)} was removed from {self.directory} {_ATTEMPTS} times "
            "before it could be read: the limit is too small for the files that are used at a "
            "time. Raise PENSTOCK_CACHE_BYTES."
        )

    def remove(self, file: RemoteFile) -> None:
        """Remove a file, for example because it is damaged."""
        (self.directory / file.digest).unlink(missing_ok=True)

    def fetch(self, files: Sequence[RemoteFile]) -> None:
        """Download the files that are not here, several at a time, and wait until they are.

        If the limit is too small for all of them, some of them are removed again.

        Raises:
            RemoteError: the server sends other contents twice, or nothing before the deadline.
        """
        left = list(files)
        for _ in range(_ATTEMPTS):
            left = [file for file in left if not self.has(file)]
            if left and is_forked():
                finish(start(self.url, left, self._limit))
                return
            jobs = [_downloads_here().begin(self, file, urgent=True) for file in left]
            left = [file for file, job in zip(left, jobs, strict=True) if not _result(job)]
            if not left:
                return

    def want(self, files: Sequence[RemoteFile]) -> int:
        """Begin to download the files that are not here, and return their bytes.

        Those after the first `_AHEAD_BYTES` are left out.
        """
        missing, num_bytes = list[RemoteFile](), 0
        for file in files:
            if num_bytes < _AHEAD_BYTES and not self.has(file):
                missing.append(file)
                num_bytes += file.size
        if missing and is_forked():
            self._ahead = [each for each in self._ahead if each.poll() is None]
            if len(self._ahead) >= _NUM_THREADS:
                return 0
            self._ahead.append(start(self.url, missing, self._limit, subprocess.DEVNULL))
        elif missing:
            for file in missing:
                _downloads_here().begin(self, file, urgent=False)
        return num_bytes

    def download(self, file: RemoteFile, *, wait: bool) -> bool:
        """Download a file in this thread, unless it is here; returns whether it is here.

        If another process is downloading it, waits for that process, or else returns at once.
        """
        until = time.monotonic() + self._objects.seconds
        self._locks.mkdir(parents=True, exist_ok=True)
        with self._locked(file.digest[:2], until if wait else time.monotonic()) as is_held:
            if not is_held and not wait:
                return False
            if not is_held:
                raise RemoteError(
                    f"{self._objects.shown(file.name)} was not downloaded by another process "
                    f"within {self._objects.seconds:g} s. Check that process and the network."
                )
            if not self.has(file):
                self._download(file, until)
        return True

    def _download(self, file: RemoteFile, until: float) -> None:
        """Download a file whose lock is held, and give it its name."""
        path, temporary = self.directory / file.digest, self.directory / f".{file.digest}.tmp"
        shown = self._objects.shown(file.name)
        self._reserve(temporary, file, until)
        try:
            with room_for(path):
                for is_last in (False, True):
                    found = self._objects.download(file.name, temporary, file.size, until=until)
                    if found == file.digest:
                        break
                    if is_last:
                        raise RemoteError(
                            f"{shown} was downloaded twice, and its XXH3-128 is {found[:8]}…, but "
                            f"the manifest says {file.digest[:8]}…. The store is damaged, or it is "
                            "being replaced. Check it with penstock verify."
                        )
                # Locked: a process that counts files at this moment would see neither name, and
                # so exceed the limit. Not synced: after a power cut, checksums of the store find a
                # damaged file.
                with self._locked("count", until):
                    temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    def _reserve(self, temporary: Path, file: RemoteFile, until: float) -> None:
        """Make room for a file: a temporary one of its size, which counts from now on."""
        temporary.unlink(missing_ok=True)  # of a process that was killed
        while True:
            # All processes count and remove files one after the other, so that all of them
            # together stay below the limit.
            with self._locked("count", until) as is_held:
                if is_held and self._make_room(file.size):
                    with temporary.open("wb") as stream:
                        stream.truncate(file.size)  # a hole, which has the size at once
                    return
            if time.monotonic() > until:
                raise RemoteError(
                    f"There is no room for {self._objects.shown(file.name)} ({file.size:,} bytes) "
                    f"in {self.directory}: other files are being downloaded, and the limit of "
                    f"{self._most_bytes():,} bytes is too small for all. Raise "
                    "PENSTOCK_CACHE_BYTES."
                )
            time.sleep(_POLL_SECONDS)

    def _make_room(self, size: int) -> bool:
        """Remove the oldest files until `size` more bytes fit; False if downloads take the room."""
        files, used = [], 0
        for folder in (self.directory, _manifests()):
            for entry in os.scandir(folder) if folder.is_dir() else ():
                with suppress(FileNotFoundError):
                    found = entry.stat()
                    if entry.is_dir():
                        continue
                    used += found.st_size
                    if not entry.name.endswith(".tmp") or self._is_abandoned(entry.name):
                        files.append((found.st_mtime_ns, found.st_size, entry.path))
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
            Path(path).unlink(missing_ok=True)
            used -= freed
        return used + size <= limit

    def _is_abandoned(self, name: str) -> bool:
        """Whether nobody downloads this temporary file: its process was killed."""
        with self._locked(name[1:3], time.monotonic()) as is_free:
            return is_free

    def _most_bytes(self, used: int = 0) -> int:
        if self._limit is not None:
            return self._limit
        return (used + shutil.disk_usage(self.directory).free) // 2

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


class _Downloads:
    """Threads that download files: those that somebody waits for, and then those read ahead.

    The threads are daemons that end before the interpreter does. Those of a ThreadPoolExecutor
    would download all files that were asked for first, and one that is inside of native code when
    the interpreter ends would crash the process.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = count()
        self._queue: queue.PriorityQueue[tuple[bool, int, Any]] = queue.PriorityQueue()
        self._jobs: dict[tuple[Path, str], Future[bool]] = {}
        self._threads: list[threading.Thread] = []

    def begin(self, cache: FileCache, file: RemoteFile, *, urgent: bool) -> "Future[bool]":
        """Download a file on a thread; one that is asked for twice is downloaded once.

        Returns:
            Whether the file is here now. It may be False if it was first asked for ahead: then
            another process downloads it, and the thread takes the next file. So the processes of a
            machine share the work.
        """
        with self._lock:
            job = self._jobs.get((cache.directory, file.digest))
            if job is None:
                job = self._jobs[cache.directory, file.digest] = Future()
            elif not urgent:
                return job
            # A file that is asked for ahead, and then urgently, is in the queue twice. The thread
            # that takes it the second time finds that its job has begun.
            self._queue.put((not urgent, next(self._numbers), (cache, file, job, urgent)))
            if len(self._threads) < _NUM_THREADS:
                name = f"penstock-download-{len(self._threads)}"
                self._threads.append(threading.Thread(target=self._work, name=name, daemon=True))
                self._threads[-1].start()
            return job

    def _work(self) -> None:
        while not ending.is_set():
            cache, file, job, urgent = self._queue.get()[2]
            with self._lock:
                if ending.is_set() or job.running() or job.done():
                    continue
                job.set_running_or_notify_cancel()
            try:
                job.set_result(cache.download(file, wait=urgent))
            except Exception as error:  # noqa: BLE001  (raised where the file is needed)
                if isinstance(error, FileNotFoundError) and not isinstance(error, StoreError):
                    job.set_result(False)  # somebody deleted the cache during the download
                else:
                    job.set_exception(error)
            finally:
                with self._lock:
                    del self._jobs[cache.directory, file.digest]

    def end(self) -> None:
        """Stop all threads, and wait for them."""
        ending.set()
        for _ in self._threads:
            self._queue.put((False, next(self._numbers), (None, None, None, True)))
        for thread in self._threads:
            thread.join(_END_SECONDS / len(self._threads))


def _result(job: "Future[bool]") -> bool:
    """Wait for a download; a fork, or the end of the reader, need not wait for it."""
    while not job.done():
        pause(_WAIT_SECONDS)
    return job.result()


_downloads: dict[int, _Downloads] = {}


def _downloads_here() -> _Downloads:
    """The threads of this process: a fork copies none, and perhaps a lock that one of them held."""
    process = os.getpid()
    return _downloads.get(process) or _downloads.setdefault(process, _Downloads())


@atexit.register
def _at_exit() -> None:
    _downloads_here().end()


# Manifests. A worker process that gets a pickled store uses the manifest that was kept: if the
# store was appended to in between, the new one would be that of other data.


def read_remote_manifest(url: StoreUrl, digest: str | None = None) -> Manifest:
    """The manifest of the store at `url`, checked.

    Args:
        url: The URL of the store.
        digest: If a manifest with this digest was read before, it is returned instead.

    Raises:
        MissingStoreError: there is no store at this URL.
        RemoteError: the server refuses, or does not answer before the deadline.
        StoreError: the manifest is damaged, or its kind or version is not supported.
    """
    if digest is not None and (known := _kept(digest)) is not None:
        return known
    if is_forked() and (known := _kept(finish(start(url)))) is not None:
        return known
    objects = Objects(url.address)
    try:
        data, manifest = read_manifest_object(objects, url)
    except MissingStoreError:
        raise _absent(objects, url) from None
    try:
        write_file(_manifests() / f"{manifest.digest}.json", [data])
    except OSError as error:  # read-only, or full
        _log.debug("The manifest %s is not kept: %s", manifest.digest[:8], error)
    return manifest


def read_manifest_object(
    objects: Objects, url: StoreUrl, side: str = "", tables: Path | None = None
) -> tuple[bytes, Manifest]:
    """The manifest of one side of the store at `url`: its bytes, and its contents, checked.

    Its table of parts is put into the directory `tables`; by default, into the cache.
    """
    name, tables = as_name(side, FILE_NAME), _manifests() if tables is None else tables
    for attempt in range(_MANIFEST_ATTEMPTS):
        data = objects.read(name)
        try:
            contents = parse_manifest(data, url / name)
            _fetch_table(objects, side, contents, tables)
            return data, with_table(contents, url / name, tables)
        except StoreError:
            # A byte may have changed on its way, or an append has replaced the manifest. The
            # manifest has its own digest, so a later answer is as good as the first one.
            if attempt == _MANIFEST_ATTEMPTS - 1:
                raise
    raise AssertionError


def _fetch_table(objects: Objects, side: str, contents: JsonObject, directory: Path) -> None:
    """Download the table of parts of a manifest, unless it is in `directory` already."""
    entry = contents["parts"]
    path = directory / table_file(entry["sha256"])
    with suppress(OSError, StoreError):  # it is not there, or not a file
        if digest_file(path) == entry["xxh3_128"]:
            os.utime(path)  # among the last files to be removed from the cache
            return
    shown = objects.shown(as_name(side, path.name))
    try:
        table = objects.read(as_name(side, path.name))
    except MissingStoreError:
        raise RemoteError(
            f"{shown} is missing. It lists the parts of the store. Copy it from a good store, or "
            "build the store again."
        ) from None
    if len(table) != entry["bytes"] or digest_bytes(table) != entry["sha256"]:
        raise RemoteError(
            f"{shown} has other contents than the manifest says. The store is damaged, or the "
            "network changes bytes."
        )
    directory.mkdir(parents=True, exist_ok=True)
    write_file(path, [table])


def as_name(side: str, file: str) -> str:
    """The name of a file of one side of a store, below the URL of the store.

    >>> as_name("train", "penstock.json"), as_name("", "penstock.json")
    ('train/penstock.json', 'penstock.json')
    """
    return f"{side}/{file}" if side else file


def _absent(objects: Objects, url: StoreUrl) -> StoreError:
    for side in ("train", "val"):
        try:
            objects.size(f"{side}/{FILE_NAME}")
        except MissingStoreError:
            continue
        return StoreError(f"{url} was built with a split. Open {url / side} instead.")
    return MissingStoreError(
        f"{url} has no {FILE_NAME}, so there is no store. Name a URL that a store was written to."
    )


def _manifests() -> Path:
    return cache_directory() / "manifests"


def _kept(digest: str) -> Manifest | None:
    path = _manifests() / f"{digest}.json"
    try:
        found = with_table(parse_manifest(read_file(path), path), path, path.parent)
        for each in (path, path.parent / found.table):
            os.utime(each)  # among the last files to be removed
    except (OSError, StoreError) as error:
        _log.debug("%s cannot be used: %r", path, error)
        return None
    return found if found.digest == digest else None


def main() -> None:
    """Perform the request of a forked process, see `penstock.store.forked.start`."""
    request, answer = json.load(sys.stdin), dict[str, Any](digest="")
    url, files = StoreUrl(request["url"]), [RemoteFile(*each) for each in request["files"]]
    try:
        if files:
            FileCache(url, request["limit"]).fetch(files)
        else:
            answer["digest"] = read_remote_manifest(url).digest
    except (PenstockError, OSError) as error:
        known = error if isinstance(error, PenstockError) else RemoteError(str(error))
        answer = {"error": type(known).__name__, "arguments": list(known.args)}
    sys.stdout.write(f"{json.dumps(answer)}\n")


if __name__ == "__main__":
    main()
