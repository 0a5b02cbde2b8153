"""`copy`: a store at another place, on this machine or in object storage.

Every file is compared with the manifest: its size and digest before it is sent, or after it was
received. The manifest is written last. A copy on this machine is made in `.NAME.copy` beside its
directory, and renamed when it is complete. A copy in object storage is announced in `.building`,
as a build is. Both continue where they were killed.
"""

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from penstock.digest import canonical_json
from penstock.disk import (
    NamedFile,
    locked,
    read_file,
    rename,
    room_for,
    sync_directory,
    sync_file,
    write_file,
)
from penstock.errors import MissingStoreError, RemoteError, StoreError
from penstock.paths import StorePath, StoreUrl, store_path
from penstock.store.beside import made_beside, refuse_occupied, remove_others
from penstock.store.journal import Journal
from penstock.store.manifest import (
    FILE_NAME,
    JsonObject,
    Manifest,
    parse_manifest,
    read_manifest,
    shared_settings,
    with_table,
)
from penstock.store.objects import Objects
from penstock.store.part import SIDES
from penstock.store.reader import TokenStore
from penstock.store.remote import as_name, read_manifest_object
from penstock.store.upload import Destination, in_threads, refuse_damaged
from penstock.store.verify import file_problem

Place = str | os.PathLike[str] | StoreUrl
Report = Callable[[int, int], None]
_Sides = dict[str, tuple[bytes, Manifest]]
_ATTEMPTS = 3
_BLOCK_BYTES = 1 << 20


def copy(source: Place, target: Place, *, progress: Report | None = None) -> TokenStore:
    """Copy a store to another directory or URL, and open the copy.

    Every file is compared with the size and digest in the manifest, and the manifest is written
    last. The same call resumes a copy that was killed, and returns at once if it is complete. Of a
    store with a split, both sides are copied.

    Args:
        source: A store: a directory, or a URL.
        target: A directory that is empty or does not exist, or a URL (`s3://`, `gs://`, `az://`)
            below which nothing is stored.
        progress: Called with the number of bytes that are done, and the number of all bytes, from
            several threads, one at a time.

    Raises:
        StoreError: the store is damaged, or there is something else at the target.
        RemoteError: a server refuses, or does not answer within the deadline.

    >>> import tempfile
    >>> from penstock import Texts, build
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     store = build(Texts(["To be,", "or not to be."]), f"{folder}/store")
    ...     print(copy(store.path, f"{folder}/copy").digest == store.digest)
    True
    """
    found, place = store_path(source), store_path(target)
    origin = _Source(found, Objects(found.address) if isinstance(found, StoreUrl) else None)
    sides = _manifests(origin)
    files = [
        _File(side, *each) for side, (_, manifest) in sides.items() for each in manifest.files()
    ]
    done = _Done(sum(each.size for each in files), progress)
    if isinstance(place, StoreUrl):
        remote = Destination(place)
        with remote.naming_it(), room_for(remote.staging):
            remote.staging.mkdir(parents=True, exist_ok=True)
            with locked(remote.staging):
                _copy_to_remote(origin, sides, files, remote, done)
    else:
        with room_for(place):
            place.mkdir(parents=True, exist_ok=True)
            with locked(place):
                _copy_to_directory(origin, sides, files, place, done)
    return TokenStore(place / next(iter(sides)))


class _Source(NamedTuple):
    """The store that is copied."""

    path: StorePath
    objects: Objects | None
    """The files at its URL; None if it is on this machine."""


class _File(NamedTuple):
    """A file of a store, as the manifest of its side records it."""

    side: str
    file: str
    size: int
    digest: str

    @property
    def name(self) -> str:
        """Its name below the store."""
        return as_name(self.side, self.file)


class _Done:
    """Counts the bytes that are done, for several threads."""

    def __init__(self, total: int, progress: Report | None) -> None:
        self._total, self._progress, self._done = total, progress, 0
        self._lock = threading.Lock()

    def add(self, num_bytes: int) -> None:
        with self._lock:
            self._done += num_bytes
            if self._progress:
                self._progress(self._done, self._total)


def _manifests(source: _Source) -> _Sides:
    """The manifests of a store, as bytes and contents, by side; without a split, the side is ""."""
    if (whole := _manifest(source, "")) is not None:
        return {"": whole}
    sides = {side: found for side in SIDES if (found := _manifest(source, side)) is not None}
    if len(sides) < len(SIDES):
        if isinstance(source.path, Path):
            read_manifest(source.path)  # raises an error that says what is there
        raise MissingStoreError(f"{source.path} has no {FILE_NAME}, so it is not a store.")
    if len({manifest.contents.get("generation") for _, manifest in sides.values()}) > 1:
        raise StoreError(
            f"The two sides of {source.path} are of different builds, so the same document may be "
            "in both. A build is being committed, or was stopped. Run this again when it is done."
        )
    return sides


def _manifest(source: _Source, side: str) -> tuple[bytes, Manifest] | None:
    """The manifest of one side of a store; None if there is none."""
    if isinstance(source.path, StoreUrl):
        assert source.objects is not None  # as it is a URL
        try:
            return read_manifest_object(source.objects, source.path, side)
        except MissingStoreError:
            return None
    path = source.path / side / FILE_NAME
    if not path.exists():
        return None
    data = read_file(path)
    return data, with_table(parse_manifest(data, path), path, path.parent)


def _fetch(source: _Source, file: _File, path: Path) -> None:
    """Put a file of a store at `path` with its recorded contents, unless it is there already."""
    if file_problem(path, file.size, file.digest) is None:
        return
    if isinstance(source.path, Path):
        original = source.path / file.name
        if original.exists() and write_file(path, _blocks(original)) == (file.size, file.digest):
            return
        path.unlink(missing_ok=True)
        refuse_damaged(original, file.size, file.digest)
        raise StoreError(f"{original} changed while it was copied. Run this again.")
    objects, temporary = source.objects, path.with_name(f".{path.name}.part")
    assert objects is not None  # as it is a URL
    for _ in range(_ATTEMPTS):
        if objects.download(file.name, temporary, file.size) == file.digest:
            sync_file(temporary)
            rename(temporary, path)
            return
    temporary.unlink()
    raise RemoteError(
        f"{objects.shown(file.name)} has other contents than the manifest says: its XXH3-128 is "
        f"not {file.digest[:8]}…, in {_ATTEMPTS} attempts. The store is damaged, or the network "
        "changes bytes."
    )


def _blocks(path: Path) -> Iterator[bytes]:
    with NamedFile(path) as stream:
        while block := stream.read(_BLOCK_BYTES):
            yield block


def _copy_to_directory(
    source: _Source, sides: _Sides, files: list[_File], directory: Path, done: _Done
) -> None:
    """Copy a store to a directory whose lock is held."""
    paths = {side: directory / side / FILE_NAME for side in sides}
    if all(path.exists() and read_file(path) == sides[side][0] for side, path in paths.items()):
        return
    refuse_occupied(directory, f"a copy of {source.path}")
    with made_beside(directory, "copy") as new:
        for side in sides:
            if side:
                (new / side).mkdir(exist_ok=True)
            remove_others(new / side, {each.file for each in files if each.side == side})

        def fetch(file: _File) -> None:
            _fetch(source, file, new / file.name)
            done.add(file.size)

        in_threads(fetch, files)
        for side, (data, _) in sides.items():
            sync_directory(new / side)
            write_file(new / side / FILE_NAME, [data])
            sync_directory(new / side)


def _copy_to_remote(
    source: _Source, sides: _Sides, files: list[_File], remote: Destination, done: _Done
) -> None:
    """Copy a store to object storage; the lock of the staging directory is held."""
    remote.pull()
    journal, settings = Journal(remote.staging), _settings(sides)
    begun = journal.begun()
    if begun is not None and canonical_json(begun) != canonical_json(settings):
        raise StoreError(
            f"{remote.shown} holds a build or a copy of another store that was not finished. "
            "Repeat it to finish it, use another URL, or delete all that is stored below this one."
        )
    manifests = {side: data for side, (data, _) in sides.items()}
    if any(data != manifests.get(side) for side, data in remote.manifests.items()):
        raise StoreError(
            f"{remote.shown} is a finished store, and another one. Nothing was replaced. Use "
            "another URL, or delete all that is stored below this one."
        )
    if remote.manifests != manifests:
        journal.begin(settings, 0)
        remote.claim()
        # Nothing was there when this copy was announced, so an object with a name and size of ours
        # is one that this copy has sent.
        sizes = remote.sizes()

        def send(file: _File) -> None:
            if sizes.get(file.name) != file.size:
                if isinstance(source.path, Path):
                    remote.send(file.name, source.path / file.name, file.size, file.digest)
                else:
                    path = remote.staging / file.name.replace("/", "-")
                    _fetch(source, file, path)
                    remote.send(file.name, path, file.size, file.digest)
                    path.unlink()
            done.add(file.size)

        in_threads(send, files)
        # The training side is committed last: while it is missing, nothing is a store there.
        for side in reversed(sides):
            remote.commit_side(side, *sides[side])
    remote.end()
    remote.empty_staging()


def _settings(sides: _Sides) -> JsonObject:
    """What the journal of a copy says, in place of the settings of a build."""
    digests = {side: manifest.digest for side, (_, manifest) in sides.items()}
    first = next(iter(sides.values()))[1]
    return {**shared_settings(first.contents), "copy": digests, "inputs": []}


def on_this_machine(path: Place) -> Path:
    """`path` as a path; raises if it is the URL of a remote store."""
    place = store_path(path)
    if isinstance(place, StoreUrl):
        raise StoreError(
            f"{place} is a URL, and this needs a directory of this machine. `penstock copy` (in "
            "Python, penstock.copy) copies stores from and to object storage."
        )
    return place
