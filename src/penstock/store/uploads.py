"""Files of a store that are sent to object storage.

A file is sent only if there is none with its name, so no writer can replace what another has
written. If there is one, it must have the same contents: then an earlier run has sent it, or
another process that builds the same store.
"""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from penstock.errors import ConflictError, MissingStoreError, StoreError
from penstock.remote import Objects
from penstock.store.copies import read_recorded
from penstock.store.journal import SealedSlice
from penstock.store.manifest import Manifest, part_file, rejects_file
from penstock.store.parts import REPAIR_ADVICE
from penstock.store.remote_manifest import as_name
from penstock.store.verify import file_problem

# Larger files are sent in several requests. obstore cannot make those depend on a condition.
_ONE_REQUEST = 64 << 20
_ATTEMPTS = 3
_NUM_THREADS = 8
_Item = TypeVar("_Item")


def upload_file(objects: Objects, name: str, path: Path, size: int, digest: str) -> None:
    """Send a file whose contents are compared with the record first.

    Raises:
        StoreError: the file, or the object that is there already, is not the recorded one.
        RemoteError: it could not be sent within the deadline.
    """
    try:
        if size <= _ONE_REQUEST:
            # The bytes that were compared are those that are sent.
            objects.put(name, read_recorded(path, size, digest), if_absent=True)
            return
        if problem := file_problem(path, size, digest):
            raise StoreError(f"{path} {problem}. {REPAIR_ADVICE}")
        if not exists(objects, name):
            objects.put(name, path)
            return
    except ConflictError:
        pass
    refuse_other_object(objects, name, path, size, digest)


def exists(objects: Objects, name: str) -> bool:
    """Whether there is an object with this name."""
    try:
        objects.head(name)
    except MissingStoreError:
        return False
    return True


def refuse_other_object(objects: Objects, name: str, path: Path, size: int, digest: str) -> None:
    """Raise if an object has other contents; it is read to a temporary file beside `path`."""
    found, actual = objects.head(name).size, ""
    if found == size:
        actual = download_file(objects, name, path.with_name(f".{path.name}.there"), size, digest)
    if actual != digest:
        raise StoreError(
            f"{objects.shown(name)} is there already, with other contents than this build makes: "
            f"{found:,} bytes, and not {size:,} with the SHA-256 {digest[:8]}…. Nothing was "
            "replaced. It belongs to another store or to a build that was not finished: use "
            "another URL, or delete all that is stored below this one."
        )


def download_file(objects: Objects, name: str, path: Path, size: int, digest: str) -> str:
    """Read an object to a temporary file and delete it; returns its SHA-256.

    Bytes may change on their way, so an object that has another digest is read again.
    """
    actual = ""
    try:
        for _ in range(_ATTEMPTS):
            actual = objects.download(name, path, size)
            if actual == digest:
                break
    finally:
        path.unlink(missing_ok=True)
    return actual


def in_threads(function: Callable[[_Item], None], items: Iterable[_Item]) -> None:
    """Call a function for all items, several at a time; raises the first error."""
    threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="remote")
    waits = False
    try:
        for each in [threads.submit(function, item) for item in items]:
            each.result()
        waits = True
    except Exception:
        waits = True
        raise
    finally:
        # After Ctrl-C, requests in progress are not waited for: they may take minutes.
        threads.shutdown(wait=waits, cancel_futures=True)


def objects_of(record: SealedSlice) -> Iterator[tuple[str, int, str, str]]:
    """The name, size, SHA-256 and side of each file of a sealed slice."""
    for side, part in record.parts.items():
        for kind, (size, digest) in part.files.items():
            yield as_name(side, part_file(part.number, kind)), size, digest, side


def files_of(manifest: Manifest) -> Iterator[str]:
    """The names of all files of a store, except its manifest."""
    yield from (rejects_file(number) for number in range(len(manifest.builds)))
    if manifest.table is not None:
        yield manifest.table[0]
    for part in manifest.parts:
        yield from (part_file(part.number, kind) for kind in part.files)
