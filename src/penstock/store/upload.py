"""A store in object storage while it is written.

    s3://bucket/owt/.building              which build is writing here; put first, deleted last
    s3://bucket/owt/part-00007.tokens.npy  a file of a part
    s3://bucket/owt/penstock.json          put when all parts are there

The parts of a build are made in a staging directory on this machine. Each is sent when it is
sealed, and then deleted here. The journal stays in the staging directory, so a build that was
killed is resumed on the same machine; on another one it begins again.

Object storage has no locks, so there must be one writer. `.building` contains a digest of the
settings and inputs of the build: a build with others is refused until the first one is finished.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

import xxhash

from penstock.digest import digest_bytes, digest_json
from penstock.disk import cache_directory, empty_directory, read_file, write_file
from penstock.errors import MissingStoreError, StoreError, TokenMismatchError
from penstock.paths import StoreUrl
from penstock.store.journal import Journal, SealedSlice
from penstock.store.manifest import FILE_NAME, Manifest, parse_manifest, part_file, with_table
from penstock.store.objects import Objects
from penstock.store.part import SIDES
from penstock.store.parts import REPAIR_ADVICE
from penstock.store.remote import as_name, read_manifest_object
from penstock.store.verify import file_problem

_WRITABLE = ("s3", "gs", "az")
_BUILDING = ".building"
_SHOWN, _NUM_THREADS = 5, 8
# Larger files are not read into memory to be sent.
_ONE_REQUEST = 64 << 20
# The files of a store besides its manifests.
_OURS = re.compile(
    r"(train/|val/)?(part-\d+\.(tokens|bounds|origin|loss|checks)\.npy|parts-[0-9a-f]{16}\.npy"
    r"|rejects(-\d+)?\.jsonl)"
)
_Item = TypeVar("_Item")


def staging_directory(url: StoreUrl) -> Path:
    """The directory of this machine where the parts of a store in object storage are made."""
    return cache_directory() / "building" / digest_bytes(str(url).encode())[:16]


class Destination:
    """The URL that a store is written to, and its staging directory on this machine."""

    def __init__(self, url: StoreUrl) -> None:
        self._url, self._objects = url, Objects(url.address)
        self.shown = str(url)
        """The URL without secrets, for messages."""
        if urlsplit(url.address).scheme not in _WRITABLE or "?" in url.address:
            raise StoreError(
                f"{self.shown} cannot be written. Write to s3://, gs:// or az://, without a query: "
                "other URLs are for reading, and keys are taken from the environment."
            )
        self.staging = staging_directory(url)
        self.manifests: dict[str, bytes] = {}
        """The manifests at the URL, by side."""
        self._parsed: dict[str, Manifest] = {}
        self._building: bytes | None = None
        self._is_ours = False

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
        """Copy the manifests to the staging directory, and find out who builds at the URL.

        The caller holds the lock of the staging directory.
        """
        self.manifests.clear()
        self._parsed.clear()
        for side in ("", *SIDES):
            path = self.staging / side / FILE_NAME
            try:
                found = read_manifest_object(self._objects, self._url, side, path.parent)
            except MissingStoreError:
                if path.exists():
                    path.unlink(missing_ok=True)  # of a commit that was killed before it was sent
                continue
            self.manifests[side], self._parsed[side] = found
            write_file(path, [found[0]])
        self._building = None
        with suppress(MissingStoreError):
            self._building = self._objects.read(_BUILDING)
        self._is_ours = self._building is not None and self._building == self._identity()

    def _identity(self) -> bytes | None:
        """The digest of the build in the staging directory; None if there is none.

        Modification times are not part of it: inputs have others on another machine.
        """
        if (begun := Journal(self.staging).begun()) is None:
            return None
        return digest_json({**begun, "stamps": None}).encode()

    def empty_staging(self) -> None:
        """Delete everything in the staging directory; the caller holds its lock."""
        empty_directory(self.staging)

    def _delete_parts(self) -> None:
        """Delete all files of a store that are not in its manifest."""
        kept = {
            as_name(side, name)
            for side, manifest in self._parsed.items()
            for name, _, _ in manifest.files()
        }
        found = {name for name, _ in self._objects.list() if _OURS.fullmatch(name)}
        in_threads(self._objects.delete, sorted(found - kept))

    def clear(self) -> None:
        """Delete the store or the unfinished build, the manifest first."""
        listed = [name for name, _ in self._objects.list()]
        manifests = [as_name(side, FILE_NAME) for side in ("", *SIDES)]
        ours = {*manifests, _BUILDING}
        others = [name for name in listed if name not in ours and not _OURS.fullmatch(name)]
        if others:
            raise StoreError(
                f"{self.shown} is not only a store: it holds {', '.join(others[:_SHOWN])}. "
                "overwrite=True (--overwrite) of penstock.build deletes everything there, so there "
                "must be nothing but a store. Move these files, or choose another URL."
            )
        # Without its manifest, nobody takes the rest for a store.
        for name in manifests:
            self._objects.delete(name)
        self.manifests.clear()
        self._parsed.clear()
        self._delete_parts()
        self._objects.delete(_BUILDING)
        self.empty_staging()
        self._building = None

    def claim(self) -> None:
        """Keep other writers away: announce the build at the URL. Its journal has begun.

        Raises:
            StoreError: the URL holds other files, or another build that was not finished.
        """
        identity = self._identity()
        assert identity is not None  # as the journal has begun
        if self._building == identity:
            return
        if self._building is not None and not self._is_ours:
            Journal(self.staging).end()  # nothing was begun
            raise StoreError(
                f"{self.shown} holds a build with other settings or inputs that was not finished, "
                "and that may still run on another machine. Finish it there, or replace it with "
                "`penstock build --overwrite` (in Python, overwrite=True)."
            )
        if self._building is None and not self.manifests:
            self._refuse_foreign()
        # Those of a build that failed, and was given up for this one.
        self._delete_parts()
        self._objects.put(_BUILDING, identity)
        self._building, self._is_ours = identity, True

    def _refuse_foreign(self) -> None:
        found = [name for name, _ in self._objects.list()]
        if found:
            Journal(self.staging).end()  # nothing was begun
            raise StoreError(
                f"{self.shown} is not empty and not a store; it holds {', '.join(found[:_SHOWN])}. "
                "Choose another URL, or delete what is there."
            )

    def sizes(self) -> dict[str, int]:
        """The size of every object, by name."""
        return dict(self._objects.list())

    def intact(self, sealed: list[SealedSlice]) -> list[SealedSlice]:
        """The sealed slices whose parts are in object storage; the others are made again."""
        if not sealed:
            return []
        sizes = self.sizes()
        kept = [
            each for each in sealed if all(sizes.get(n) == s for n, s, _, _ in _objects_of(each))
        ]
        for number in {each.number for each in sealed} - {each.number for each in kept}:
            Journal(self.staging).forget(number)
        return kept

    def upload(self, record: SealedSlice) -> None:
        """Send the parts of a slice, and delete them here; several threads may call this."""
        for name, size, digest, side in _objects_of(record):
            path = self.staging / side / name.rpartition("/")[2]
            self.send(name, path, size, digest)
            path.unlink(missing_ok=True)

    def refuse_deleted(self, done: Sequence[SealedSlice]) -> None:
        """Raise if an object of a sealed part was deleted while other parts were made."""
        sizes = self.sizes()
        for name, size, _, _ in (each for record in done for each in _objects_of(record)):
            if sizes.get(name) != size:
                raise StoreError(
                    f"{self._objects.shown(name)} was deleted or changed during the build, so the "
                    "store would not be complete. Run this again: only the missing parts are made "
                    "again."
                )

    def fail(self, error: BaseException) -> None:
        """Delete the parts that were sent if they may hold wrong tokens."""
        if isinstance(error, TokenMismatchError):
            with suppress(StoreError):  # the error of the build says more
                self._delete_parts()

    def commit(self, sides: Sequence[str]) -> None:
        """Send the manifests that are in the staging directory, and the reject logs before them."""
        for side in reversed(sides):
            path = self.staging / side / FILE_NAME
            data = read_file(path)
            manifest = with_table(parse_manifest(data, path), path, path.parent)
            # Its table and its reject log; other files are there, or were sent and removed here.
            for name, size, digest in manifest.files():
                if (path.parent / name).exists():
                    self.send(as_name(side, name), path.parent / name, size, digest)
            self.commit_side(side, data, manifest)

    def send(self, name: str, path: Path, size: int, digest: str) -> None:
        """Send one file of the store, whose contents are compared with the record first.

        Raises:
            StoreError: the file is not the recorded one.
            RemoteError: it could not be sent within the deadline.
        """
        # The bytes that were compared are those that are sent.
        source = read_file(path) if size <= _ONE_REQUEST and path.exists() else path
        if not isinstance(source, bytes) or xxhash.xxh3_128(source).hexdigest() != digest:
            refuse_damaged(path, size, digest)
        self._objects.put(name, source)

    def commit_side(self, side: str, data: bytes, manifest: Manifest) -> None:
        """Put the manifest of one side: the commit point of the store."""
        # A build that was killed between the sides has committed the first one already.
        if self.manifests.get(side) != data:
            self._objects.put(as_name(side, FILE_NAME), data)
            self.manifests[side], self._parsed[side] = data, manifest

    def end(self) -> None:
        """Remove the announcement of a build that is finished."""
        if self._building is None:
            return
        if self._is_ours:
            self._delete_parts()  # the table of parts that an append has replaced
        self._objects.delete(_BUILDING)
        self._building = None


def refuse_damaged(path: Path, size: int, digest: str) -> None:
    """Raise if a file of a store is not the recorded one."""
    if problem := file_problem(path, size, digest):
        kind = StoreError if path.exists() else MissingStoreError
        raise kind(f"{path} {problem}. {REPAIR_ADVICE}")


def in_threads(function: Callable[[_Item], None], items: Iterable[_Item]) -> None:
    """Call a function for all items, several at a time; raises the first error."""
    with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="remote") as threads:
        for _ in threads.map(function, items):
            pass


def _objects_of(record: SealedSlice) -> Iterator[tuple[str, int, str, str]]:
    """The name, size, digest and side of each file of a sealed slice."""
    for side, part in record.parts.items():
        for kind, (size, digest) in part.files.items():
            yield as_name(side, part_file(part.number, kind)), size, digest, side
