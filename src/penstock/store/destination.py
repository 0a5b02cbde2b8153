"""A store in object storage while it is written.

    s3://bucket/owt/.building/settings.json        what is being written here; put if absent
    s3://bucket/owt/.building/slice-000007.json    the record of a slice whose parts are there
    s3://bucket/owt/.building/failed               the build cannot succeed with these settings
    s3://bucket/owt/part-00007.tokens.npy          a file of a part; put if absent
    s3://bucket/owt/penstock.json                  put last: if absent, or if still the same version

The parts of a build are made in a staging directory on this machine. Each is sent when it is
sealed, and then deleted here. Everything that a killed build needs to be resumed is in object
storage, so another machine can resume it.

Object storage has no locks. `settings.json` says who writes: a build with other settings is
refused. A build with the same settings makes the same bytes, so two of them do no harm. No object
is ever replaced, except the manifest by an append, and only if nobody else has replaced it.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

from penstock.digest import digest_bytes, parse_checked
from penstock.errors import (
    ConflictError,
    MissingStoreError,
    RemoteError,
    StoreError,
    TokenMismatchError,
)
from penstock.remote import ObjectInfo, open_objects
from penstock.remote.address import StoreUrl
from penstock.store.files import cache_directory, make_directory, read_file, remove_file, write_file
from penstock.store.folders import empty_directory
from penstock.store.journal import Journal, SealedSlice
from penstock.store.manifest import FILE_NAME, Manifest, parse_manifest, rejects_file
from penstock.store.part import SIDES
from penstock.store.remote_manifest import as_name, fetch_table
from penstock.store.uploads import files_of, in_threads, objects_of, upload_file

WRITABLE = ("s3", "gs", "az")
"""How URLs of stores begin that can be written."""
BUILDING = ".building"
"""The directory of the journal, below the URL of a store."""
_SETTINGS = f"{BUILDING}/settings.json"
_ATTEMPTS, _SHOWN = 3, 5
# The files of a store besides its manifests.
_OURS = re.compile(
    r"(train/|val/)?(part-\d+\.(tokens|bounds|origin|loss|checks)\.npy|parts-[0-9a-f]{16}\.npy"
    r"|rejects(-\d+)?\.jsonl)"
)
_Parsed = TypeVar("_Parsed")


class Destination:
    """The URL that a store is written to, and its staging directory on this machine."""

    def __init__(self, url: StoreUrl) -> None:
        self._url, self._objects = url, open_objects(url.address)
        self.shown = str(url)
        """The URL without secrets, for messages."""
        if urlsplit(url.address).scheme not in WRITABLE or "?" in url.address:
            raise StoreError(
                f"{self.shown} cannot be written. Write to s3://, gs:// or az://, without a query: "
                "other URLs are for reading, and keys are taken from the environment."
            )
        key = digest_bytes(self.shown.encode())[:16]
        self.staging = cache_directory() / "building" / key
        self._manifests: dict[str, tuple[bytes, ObjectInfo]] = {}
        self._settings: bytes | None = None

    @contextmanager
    def naming_it(self) -> Iterator[None]:
        """Let errors in a `with` block name the URL, where they name the staging directory."""
        try:
            yield
        except StoreError as error:
            names = (str(self.staging), str(self.staging.resolve()))
            texts = [each if isinstance(each, str) else str(each) for each in error.args]
            for name in names:
                texts = [text.replace(name, self.shown) for text in texts]
            error.args = tuple(texts)
            raise

    def pull(self) -> None:
        """Make the staging directory a copy of the manifest and journal in object storage.

        The caller holds the lock of the staging directory.
        """
        self.empty_staging()
        for side in ("", *SIDES):
            name = as_name(side, FILE_NAME)
            with suppress(MissingStoreError):
                self._manifests[side] = self._read(name, partial(self._parsed, side))
                write_file(self.staging / name, [self._manifests[side][0]])
        names = [name for name, _ in self._objects.list(BUILDING)]
        # Without settings, the records belong to a build that is finished.
        if _SETTINGS in names:
            in_threads(self._pull_record, names)
            self._settings = read_file(self.staging / ".building.json")

    def _parsed(self, side: str, data: bytes) -> Manifest:
        """The manifest of one side; the table of its parts is put into the staging directory."""
        if side:
            # Not before the manifest was read: a build without a split refuses other directories.
            make_directory(self.staging / side)
        fetch_table(self._objects, side, data, self.staging / side)
        return parse_manifest(data, self._url / side, self.staging / side)

    def empty_staging(self) -> None:
        """Delete everything in the staging directory; the caller holds its lock."""
        empty_directory(self.staging)

    def _pull_record(self, name: str) -> None:
        file = name.removeprefix(f"{BUILDING}/")
        local = {"settings.json": ".building.json", "failed": ".failed"}.get(file, f".{file}")
        is_json = file.endswith(".json")
        try:
            data = self._read(name, parse_checked if is_json else len)[0]
        except ValueError:
            # The journal reports a damaged record, and makes its slice again.
            data = self._objects.read(name)
        write_file(self.staging / local, [data])

    def _read(self, name: str, parse: Callable[[bytes], _Parsed]) -> tuple[bytes, ObjectInfo]:
        """An object and its version; read again if its contents contradict its own digest."""
        for attempt in range(_ATTEMPTS):
            data, version = self._objects.read_version(name)
            try:
                parse(data)
            except ValueError:  # bytes can change on their way
                if attempt == _ATTEMPTS - 1:
                    raise
            else:
                break
        return data, version

    def settle(self) -> None:
        """Remove the journal from object storage, if the one in the staging directory is gone.

        It belonged to a build that was killed after its manifest was written, or that failed. The
        objects of a failed build are deleted.
        """
        if self._settings is None or Journal(self.staging).exists:
            return
        self._delete_parts()
        self.end()

    def _delete_parts(self) -> None:
        """Delete all files of a store that are not in its manifest."""
        kept = {
            as_name(side, name)
            for side, (data, _) in self._manifests.items()
            for name in files_of(self._parsed(side, data))
        }
        found = {name for name, _ in self._objects.list() if _OURS.fullmatch(name)}
        in_threads(self._objects.delete, sorted(found - kept))

    def clear(self) -> None:
        """Delete the store or the unfinished build, the manifest first."""
        listed = [name for name, _ in self._objects.list()]
        manifests = [as_name(side, FILE_NAME) for side in ("", *SIDES)]
        others = [
            name
            for name in listed
            if name not in manifests
            and not _OURS.fullmatch(name)
            and not name.startswith(f"{BUILDING}/")
        ]
        if others:
            raise StoreError(
                f"{self.shown} is not only a store: it holds {', '.join(others[:_SHOWN])}. "
                "overwrite=True (--overwrite) of penstock.build deletes everything there, so there "
                "must be nothing but a store. Move these files, or choose another URL."
            )
        # Without its manifest, nobody takes the rest for a store.
        for name in manifests:
            self._objects.delete(name)
        self._manifests.clear()
        self._delete_parts()
        self.end()
        self.pull()

    def claim(self) -> None:
        """Write the settings of the journal to object storage, so that nobody else builds there.

        Raises:
            StoreError: another process was faster, or the URL holds other files.
        """
        if self._settings is not None:
            self._objects.delete(f"{BUILDING}/failed")
            return
        if not self._manifests:
            self._refuse_foreign()
        data = read_file(self.staging / ".building.json")
        try:
            self._objects.put(_SETTINGS, data, if_absent=True)
        except ConflictError:
            # Ours, if the answer to an earlier attempt was lost; or those of the same build, which
            # makes the same objects.
            if not self._holds(_SETTINGS, data, parse_checked):
                raise StoreError(
                    f"Another process began to write {self.shown} at the same moment, so this one "
                    "stops. It has written nothing. Wait until the other one ends, and run this "
                    "again."
                ) from None
        self._settings = data
        # Another process may have begun and finished after `pull`.
        for side in ("", *SIDES):
            if self._version(side) != self._manifests.get(side, (b"", None))[1]:
                self.end()
                raise StoreError(
                    f"Another process wrote {self.shown} while this one began, so this one stops. "
                    "It has written nothing. Run this again, to see what is there now."
                )

    def _version(self, side: str) -> ObjectInfo | None:
        with suppress(MissingStoreError):
            return self._objects.head(as_name(side, FILE_NAME))
        return None

    def _refuse_foreign(self) -> None:
        found = [name for name, _ in self._objects.list() if not name.startswith(f"{BUILDING}/")]
        if found:
            raise StoreError(
                f"{self.shown} is not empty and not a store; it holds {', '.join(found[:_SHOWN])}. "
                "Choose another URL, or delete what is there."
            )

    @property
    def manifests(self) -> dict[str, bytes]:
        """The manifests that `pull` found, by side."""
        return {side: data for side, (data, _) in self._manifests.items()}

    def sizes(self) -> dict[str, int]:
        """The size of every object, by name."""
        return dict(self._objects.list())

    def intact(self, sealed: list[SealedSlice]) -> list[SealedSlice]:
        """The sealed slices whose parts are in object storage; the others are made again."""
        if not sealed:
            return []
        sizes = self.sizes()
        kept = [
            each for each in sealed if all(sizes.get(n) == s for n, s, _, _ in objects_of(each))
        ]
        for number in {each.number for each in sealed} - {each.number for each in kept}:
            Journal(self.staging).forget(number)
            self._objects.delete(f"{BUILDING}/slice-{number:06d}.json")
        return kept

    def upload(self, record: SealedSlice) -> None:
        """Send the parts of a slice and then its record; the parts are deleted here.

        The slice is sealed in the staging directory. Several threads may call this.
        """
        for name, size, digest, side in objects_of(record):
            path = self.staging / side / name.rpartition("/")[2]
            self.send(name, path, size, digest)
            remove_file(path)
        file = f"slice-{record.number:06d}.json"
        self._objects.put(f"{BUILDING}/{file}", read_file(self.staging / f".{file}"))

    def refuse_deleted(self, done: Sequence[SealedSlice]) -> None:
        """Raise if an object of a sealed part was deleted while other parts were made."""
        sizes = self.sizes()
        for name, size, _, _ in (each for record in done for each in objects_of(record)):
            if sizes.get(name) != size:
                raise StoreError(
                    f"{self._objects.shown(name)} was deleted or changed during the build, so the "
                    "store would not be complete. Run this again: only the missing parts are made "
                    "again."
                )

    def fail(self, error: BaseException) -> None:
        """Record that the build failed, so that the next one may have other settings.

        If the engines disagree, the parts that were sent may hold wrong tokens, and are deleted.
        """
        with suppress(StoreError):  # the error of the build says more
            self._objects.put(f"{BUILDING}/failed", b"")
            if isinstance(error, TokenMismatchError):
                records = [name for name, _ in self._objects.list(BUILDING) if "/slice-" in name]
                in_threads(self._objects.delete, records)
                self._delete_parts()

    def commit(self, sides: Sequence[str]) -> None:
        """Send the manifests that are in the staging directory, and the reject logs before them.

        Raises:
            StoreError: another process has committed another store in the meantime.
        """
        for side in reversed(sides):
            data = read_file(self.staging / side / FILE_NAME)
            manifest = parse_manifest(data, self._url / side, self.staging / side)
            last = manifest.builds
            log, entry = rejects_file(len(last) - 1), last[-1]["rejects"]
            path = self.staging / side / log
            if path.exists():
                self.send(as_name(side, log), path, entry["bytes"], entry["sha256"])
            if manifest.table is not None:
                name, size, digest = manifest.table
                self.send(as_name(side, name), self.staging / side / name, size, digest)
            self.commit_side(side, data)

    def send(self, name: str, path: Path, size: int, digest: str) -> None:
        """Send one file of the store; see `upload_file`."""
        upload_file(self._objects, name, path, size, digest)

    def commit_side(self, side: str, data: bytes) -> None:
        """Put the manifest of one side: the commit point of the store."""
        before, version = self._manifests.get(side, (b"", None))
        # A build that was killed between the sides has committed the first one already.
        if before == data:
            return
        name = as_name(side, FILE_NAME)
        try:
            self._objects.put(name, data, if_absent=version is None, if_match=version)
        except ConflictError:
            # Equal, if the answer to an earlier attempt was lost, or another process has built the
            # same store.
            if not self._holds(name, data, partial(self._parsed, side)):
                raise StoreError(
                    f"Another process committed {self.shown} first, so this one did not. What is "
                    "there now is the store of the other one, whole and unchanged. Run this again, "
                    "to see what it holds, or use another URL."
                ) from None

    def _holds(self, name: str, data: bytes, parse: Callable[[bytes], object]) -> bool:
        """Whether an object has these contents; false if it was deleted, or is damaged."""
        try:
            return self._read(name, parse)[0] == data
        except RemoteError:
            raise
        except ValueError:
            return False

    def end(self) -> None:
        """Remove the journal from object storage, unless it belongs to another build by now."""
        names = [name for name, _ in self._objects.list(BUILDING)]
        with suppress(MissingStoreError):
            if _SETTINGS in names and self._read(_SETTINGS, parse_checked)[0] != self._settings:
                return
        in_threads(self._objects.delete, [name for name in names if name != _SETTINGS])
        # Last: while it is there, the next build sees that this one may be incomplete.
        self._objects.delete(_SETTINGS)
        self._settings = None
