"""The files of a remote store's parts: downloaded as a whole when they are first used.

Only the files that are needed are downloaded: tokens with the checksums of their blocks, bounds
where documents are read, and origins if they are asked for. A file gets its name on this machine
after its digest was compared (`penstock.remote.cache`). Blocks of it are checked like those of a
local store. If one is damaged, the file is downloaded once more.
"""

from collections.abc import Sequence
from typing import final

from penstock.disk import MappedFile, NamedFile
from penstock.errors import StoreError
from penstock.remote.address import StoreUrl
from penstock.remote.cache import FileCache, RemoteFile
from penstock.remote.downloads import MissingFile
from penstock.remote.objects import open_objects
from penstock.store.manifest import Manifest, PartRecord, part_file
from penstock.store.parts import PartFiles


@final
class RemotePartFiles(PartFiles):
    """The files of the parts of one remote store.

    Args:
        url: The URL of the store.
        manifest: Its manifest.
        cache_bytes: The most bytes that files of remote stores may take on this machine.
    """

    def __init__(self, url: StoreUrl, manifest: Manifest, cache_bytes: int | None) -> None:
        super().__init__(url, manifest)
        self._cache = FileCache(open_objects(url.address), cache_bytes)
        self._fetched_again: set[tuple[int, str]] = set()

    def missing_files(self, part: int, kinds: Sequence[str]) -> list[MissingFile]:
        """The files of a part that are not on this machine; those that are count as used now."""
        record = self._parts[part]
        wanted = [*kinds, "checks"] if self.is_checked else kinds
        files = [self._file_of(record, kind) for kind in wanted if kind in record.files]
        return [MissingFile(self._cache, file) for file in files if not self._cache.has(file)]

    def download_anew(self, name: str, size: int, digest: str) -> None:
        """Download a file, also if it is on this machine, and compare it with its digest."""
        file = RemoteFile(name, size, digest)
        self._cache.remove(file)
        self._cache.fetch(file)

    def _file_of(self, record: PartRecord, kind: str) -> RemoteFile:
        return RemoteFile(part_file(record.number, kind), *record.files[kind])

    def _add(self, part: int, kind: str) -> MappedFile:
        # Here, without the lock of the maps: other threads read other parts while this one waits.
        for missing in self.missing_files(part, (kind,)):
            self._cache.fetch(missing.file)
        self._state.maps.remove_evicted()
        try:
            return super()._add(part, kind)
        except StoreError:  # it does not have the header of this file
            if not self._fetch_again(kind, [part]):
                raise
            return super()._add(part, kind)

    def _open_file(self, record: PartRecord, kind: str) -> NamedFile:
        return self._cache.open(self._file_of(record, kind))

    def _fetch_again(self, kind: str, parts: Sequence[int]) -> bool:
        """Remove files that are damaged on this machine, so that they are downloaded once more.

        Returns:
            False if one of them was downloaded again before: then the store itself is damaged.
        """
        keys = {(part, kind) for part in parts}
        if keys & self._fetched_again:
            return False
        self._fetched_again |= keys
        for part in parts:
            record = self._parts[part]
            for each in (kind, "checks"):
                if each in record.files:
                    self._cache.remove(self._file_of(record, each))
            self._state.sums.pop(part, None)
            self._state.maps.remove((part, kind))
        return True
