"""`copy`: a store at another place, on this machine or in object storage.

Every file is compared with the manifest: its size and digest before it is sent, or after it was
received. The manifest is written last. A copy on this machine is made in `.NAME.copy` beside its
directory, and renamed when it is complete. A copy in object storage is announced in `.building`,
as a build is. Both continue where they were killed.
"""

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from penstock.digest import canonical_json
from penstock.errors import MissingStoreError, RemoteError, StoreError
from penstock.paths import StorePath, StoreUrl, store_path
from penstock.store.beside import made_beside, refuse_occupied, remove_others
from penstock.store.copies import copy_file
from penstock.store.destination import Destination, in_threads
from penstock.store.files import (
    make_directory,
    read_file,
    room_for,
    sync_directory,
    sync_file,
    write_file,
)
from penstock.store.folders import opened
from penstock.store.journal import Journal
from penstock.store.lock import locked
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
from penstock.store.verify import file_problem

Place = str | os.PathLike[str] | StoreUrl
Report = Callable[[int, int], None]
_ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of a store, as the manifest records it."""

    side: str
    file: str
    size: int
    digest: str

    @property
    def name(self) -> str:
        """Its name below the store."""
        return as_name(self.side, self.file)


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
    origin: _Origin = _RemoteOrigin(found) if isinstance(found, StoreUrl) else _LocalOrigin(found)
    found_sides = _manifests(origin)
    manifests = {side: data for side, (data, _) in found_sides.items()}
    parsed = {side: manifest for side, (_, manifest) in found_sides.items()}
    files = [each for side, manifest in parsed.items() for each in _files(side, manifest)]
    done = _Done(sum(each.size for each in files), progress)
    first = next(iter(manifests))
    if isinstance(place, StoreUrl):
        remote = Destination(place)
        with remote.naming_it():
            _copy_to_remote(origin, manifests, files, remote, done, _settings(parsed))
    else:
        with room_for(place):
            place.mkdir(parents=True, exist_ok=True)
        with room_for(place), locked(place):
            _copy_to_directory(origin, manifests, files, place, done)
    return TokenStore(place / first)


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


class _Origin(Protocol):
    """The store that is copied."""

    @property
    def path(self) -> StorePath:
        """Where it is."""

    def manifest(self, side: str) -> tuple[bytes, Manifest] | None:
        """The manifest of one side, its bytes and contents; None if there is none."""

    def absent(self) -> StoreError:
        """The error that says that there is no store."""

    def fetch(self, file: StoredFile, path: Path) -> None:
        """Put a file at `path` with its recorded contents, unless it is there already."""

    def send(self, file: StoredFile, remote: Destination) -> None:
        """Send a file to object storage."""


class _LocalOrigin:
    """A store in a directory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def manifest(self, side: str) -> tuple[bytes, Manifest] | None:
        path = self.path / side / FILE_NAME
        if not path.exists():
            return None
        data = read_file(path)
        return data, with_table(parse_manifest(data, path), path, path.parent)

    def absent(self) -> StoreError:
        try:
            read_manifest(self.path)
        except StoreError as error:
            return error
        return StoreError(f"{self.path} changed while it was copied. Run this again.")

    def fetch(self, file: StoredFile, path: Path) -> None:
        copy_file(self.path / file.name, path, file.size, file.digest)

    def send(self, file: StoredFile, remote: Destination) -> None:
        remote.send(file.name, self.path / file.name, file.size, file.digest)


class _RemoteOrigin:
    """A store at a URL."""

    def __init__(self, path: StoreUrl) -> None:
        self.path = path
        self._objects: Objects = Objects(path.address)

    def manifest(self, side: str) -> tuple[bytes, Manifest] | None:
        try:
            return read_manifest_object(self._objects, self.path, side)
        except MissingStoreError:
            return None

    def absent(self) -> StoreError:
        return MissingStoreError(f"{self.path} has no {FILE_NAME}, so it is not a store.")

    def fetch(self, file: StoredFile, path: Path) -> None:
        if not path.is_symlink() and file_problem(path, file.size, file.digest) is None:
            return
        temporary = path.with_name(f".{path.name}.part")
        for _ in range(_ATTEMPTS):
            if self._objects.download(file.name, temporary, file.size) == file.digest:
                break
        else:
            temporary.unlink()
            raise RemoteError(
                f"{self._objects.shown(file.name)} has other contents than the manifest says: its "
                f"XXH3-128 is not {file.digest[:8]}…, in {_ATTEMPTS} attempts. The store is "
                "damaged, or the network changes bytes."
            )
        sync_file(temporary)
        with opened(path.parent) as folder:
            folder.check()
            folder.rename(temporary.name, path.name)

    def send(self, file: StoredFile, remote: Destination) -> None:
        path = remote.staging / file.name.replace("/", "-")
        self.fetch(file, path)
        remote.send(file.name, path, file.size, file.digest)
        path.unlink()


def _manifests(origin: _Origin) -> dict[str, tuple[bytes, Manifest]]:
    """The manifests of a store by side; without a split, the one side is ""."""
    if (whole := origin.manifest("")) is not None:
        return {"": whole}
    sides = {side: data for side in SIDES if (data := origin.manifest(side)) is not None}
    if len(sides) < len(SIDES):
        raise origin.absent()
    of_build = {manifest.contents.get("generation") for _, manifest in sides.values()}
    if len(of_build) > 1:
        raise StoreError(
            f"The two sides of {origin.path} are of different builds, so the same document may be "
            "in both. A build is being committed, or was stopped. Run this again when it is done."
        )
    return sides


def _files(side: str, manifest: Manifest) -> Iterator[StoredFile]:
    """All files of one side, except its manifest."""
    for file in manifest.files():
        yield StoredFile(side, *file)


def _copy_to_directory(
    origin: _Origin,
    manifests: dict[str, bytes],
    files: list[StoredFile],
    directory: Path,
    done: _Done,
) -> None:
    """Copy a store to a directory whose lock is held."""
    paths = {side: directory / side / FILE_NAME for side in manifests}
    if all(path.exists() and read_file(path) == manifests[side] for side, path in paths.items()):
        return
    refuse_occupied(directory, f"a copy of {origin.path}")
    with made_beside(directory, "copy") as new:
        for side in manifests:
            if side:
                make_directory(new / side)
            remove_others(new / side, {each.file for each in files if each.side == side})

        def fetch(file: StoredFile) -> None:
            origin.fetch(file, new / file.name)
            done.add(file.size)

        in_threads(fetch, files)
        for side, data in manifests.items():
            sync_directory(new / side)
            write_file(new / side / FILE_NAME, [data])
            sync_directory(new / side)


def _copy_to_remote(
    origin: _Origin,
    manifests: dict[str, bytes],
    files: list[StoredFile],
    remote: Destination,
    done: _Done,
    settings: JsonObject,
) -> None:
    """Copy a store to object storage; `settings` are what the journal says of it."""
    with room_for(remote.staging):
        remote.staging.mkdir(parents=True, exist_ok=True)
    with room_for(remote.staging), locked(remote.staging):
        remote.pull()
        journal = Journal(remote.staging)
        begun = journal.begun()
        is_ours = begun is not None and canonical_json(begun) == canonical_json(settings)
        _refuse_unlike(remote, manifests, begun is not None and not is_ours)
        if remote.manifests != manifests:
            journal.begin(settings, 0)
            remote.claim()
            # Nothing was there when this copy was announced, so an object with a name and size
            # of ours is one that this copy has sent.
            sizes = remote.sizes()

            def send(file: StoredFile) -> None:
                if sizes.get(file.name) != file.size:
                    origin.send(file, remote)
                done.add(file.size)

            in_threads(send, files)
            # The training side is committed last: while it is missing, nothing is a store there.
            for side in reversed(manifests):
                remote.commit_side(side, manifests[side])
        remote.end()
        remote.empty_staging()


def _settings(parsed: dict[str, Manifest]) -> JsonObject:
    """What the journal of a copy says, in place of the settings of a build."""
    first = next(iter(parsed.values()))
    digests = {side: each.digest for side, each in parsed.items()}
    return {**shared_settings(first.contents), "copy": digests, "inputs": []}


def _refuse_unlike(remote: Destination, manifests: dict[str, bytes], is_begun: bool) -> None:
    """Raise if there is another store, or an unfinished build or another copy."""
    if is_begun:
        raise StoreError(
            f"{remote.shown} holds a build or a copy of another store that was not finished. "
            "Repeat it to finish it, use another URL, or delete all that is stored below this one."
        )
    if any(data != manifests.get(side) for side, data in remote.manifests.items()):
        raise StoreError(
            f"{remote.shown} is a finished store, and another one. Nothing was replaced. Use "
            "another URL, or delete all that is stored below this one."
        )
