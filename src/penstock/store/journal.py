"""The journal of a running build; after a kill, only the slices in progress are repeated.

    .building.json          settings and inputs; a build with others is refused
    .slice-000007.json      a sealed slice: the records of its parts, its counts, its rejects
    .awaited                touched by readers of a streamed store while they wait for a part
    .failed                 the build cannot succeed with these inputs and settings

The record of a slice is renamed into place after its parts are on disk. So if a record can be
read, its parts were whole when it was written. When the manifest is written, the journal is
removed.

A disk may return other bytes than were written, and files may be copied to the wrong place. So
each record contains a digest of itself, its number, and the digest of the build that it belongs
to. A record that does not fit is removed, and its slice is made again.
"""

import logging
import os
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from penstock.digest import canonical_json, checked_json, digest_json, parse_checked
from penstock.disk import read_file, sync_directory, write_file
from penstock.errors import StoreError
from penstock.sources.batch import Reject, Tally
from penstock.store.manifest import FILE_NAME, JsonObject, PartRecord
from penstock.store.verify import differences

_log = logging.getLogger("penstock")


@dataclass(slots=True)
class SealedSlice:
    """The record of one slice whose parts are on disk."""

    number: int
    tally: Tally = field(default_factory=Tally)
    parts: dict[str, PartRecord] = field(default_factory=dict)
    """By side of the split; a store without a split has the one side ""."""
    rejects: list[Reject] = field(default_factory=list)
    rules: dict[str, int] = field(default_factory=dict)
    """How many files that begin in this slice follow each rule that "auto" found."""
    pieces: list[tuple[int, str]] = field(default_factory=list)
    """The number of an input and the digest of the piece of it that this slice has read."""

    def to_json(self) -> JsonObject:
        """The record as JSON."""
        parts = {side: part.to_json() for side, part in self.parts.items()}
        return asdict(self) | {"parts": parts}

    @classmethod
    def of(cls, record: JsonObject) -> "SealedSlice":
        """The record that `to_json` returned."""
        parts = {side: PartRecord.of(part) for side, part in record["parts"].items()}
        rejects = [Reject(**reject) for reject in record["rejects"]]
        pieces = [(file, digest) for file, digest in record["pieces"]]
        tally = Tally(**record["tally"])
        return cls(record["number"], tally, parts, rejects, record["rules"], pieces)


class Journal:
    """The records of a running build in the directory of its store."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._settings = directory / ".building.json"
        self._build: str | None = None
        self._awaited = directory / ".awaited"
        self._failed = directory / ".failed"

    def begun(self, expected: JsonObject | None = None) -> JsonObject | None:
        """The settings of the build that was begun and not finished, or None.

        Raises:
            StoreError: these settings are not the `expected` ones, or the file is damaged.
        """
        found = self._read_settings()
        if found is None:
            return None
        settings: JsonObject = found["settings"]
        # Compared as JSON, because tuples, for example, are read back as lists.
        if expected and canonical_json(settings) != canonical_json(expected):
            raise StoreError(
                f"{self._directory} holds an unfinished build with other settings: "
                f"{differences(settings, expected)}. Repeat it with the old settings to finish "
                "it. To start again, use `penstock build --overwrite` (in Python, overwrite=True)."
            )
        return settings

    def num_builds(self) -> int | None:
        """How many builds the store had before the unfinished one; None if that is not known."""
        found = self._read_settings()
        return None if found is None else int(found["num_builds"])

    @property
    def exists(self) -> bool:
        """Whether the directory holds an unfinished build, even if its journal is damaged."""
        return self._settings.exists()

    def _read_settings(self) -> JsonObject | None:
        """The contents of `.building.json`; None if there is no such file."""
        try:
            return parse_checked(read_file(self._settings))
        except FileNotFoundError:
            return None
        except ValueError as error:
            # A finished store is there if the unfinished build is an append. Replacing it would
            # lose its other inputs.
            is_finished = any((self._directory / s / FILE_NAME).exists() for s in ("", "train"))
            advice = "Start again with `penstock build --overwrite` (in Python, overwrite=True)."
            if is_finished:
                advice = "Delete this file and build again: the finished store is not changed."
            raise StoreError(
                f"{self._settings} is damaged, or was written by another version of penstock: "
                f"{error}. It says what the unfinished build in this directory is made of, so the "
                f"build cannot be resumed. {advice}"
            ) from None

    def begin(self, settings: JsonObject, num_builds: int) -> list[SealedSlice]:
        """Start or resume a build; returns the slices that are sealed already.

        Args:
            settings: The settings and inputs.
            num_builds: How many builds the store has already.

        Raises:
            StoreError: the directory holds an unfinished build with other settings.
        """
        if self.begun(settings) is None:
            self.forget()  # records without settings: a build was killed while it removed them
            self.record(settings, num_builds)
        self._failed.unlink(missing_ok=True)
        return self.sealed(remove=True)

    def sealed(self, *, remove: bool = False) -> list[SealedSlice]:
        """The slices whose parts are on disk, in order, without those whose record is damaged.

        `remove` deletes damaged records. Only the holder of the lock may do that: to anybody else,
        the records of a build that ends at this moment look like those of another build.
        """
        found = []
        for path in sorted(self._directory.glob(".slice-*.json")):
            try:
                found.append(self._parse(path, read_file(path)))
            except ValueError as error:
                if remove:
                    _log.warning("%s is damaged: %s. Its slice is made again.", path, error)
                    path.unlink(missing_ok=True)
        return found

    def _parse(self, path: Path, data: bytes) -> SealedSlice:
        """The record in `data`; raises ValueError if it does not belong to `path`."""
        contents = parse_checked(data)
        if contents.get("build") != self.identity:
            raise ValueError("it belongs to another build")
        record = SealedSlice.of(contents["record"])
        if path.stem.rpartition("-")[2] != f"{record.number:06d}":
            raise ValueError(f"it is the record of slice {record.number}")
        return record

    @property
    def identity(self) -> str:
        """The digest of the settings with which the build was begun; "" if there is no build."""
        if self._build is None and (found := self._read_settings()) is not None:
            self._build = found["build"]
        return self._build or ""

    def _record_bytes(self, record: SealedSlice) -> bytes:
        return checked_json({"build": self.identity, "record": record.to_json()})

    def record(self, settings: JsonObject, num_builds: int) -> None:
        """Write the settings of the build; see `begin`."""
        # Sealed slices stay valid if only the modification times in the settings change.
        before = self._read_settings() or {}
        build = before.get("build") or digest_json([settings, num_builds])
        contents = {"settings": settings, "num_builds": num_builds, "build": build}
        # On disk before any part is written: parts without settings belong to no build.
        write_file(self._settings, [checked_json(contents)])
        sync_directory(self._directory)

    def seal(self, record: SealedSlice) -> None:
        """Write the record of a slice whose parts are on disk."""
        write_file(self._path("slice", record.number), [self._record_bytes(record)])
        sync_directory(self._directory)

    def readable(self, number: int) -> SealedSlice | None:
        """The record of a slice that is sealed; None if it is not."""
        # A damaged record is not there either: the build makes its slice again.
        path = self._path("slice", number)
        with suppress(FileNotFoundError, ValueError):
            return self._parse(path, read_file(path))
        return None

    def await_readers(self) -> None:
        """Create the file that waiting readers touch."""
        with suppress(OSError):
            self._awaited.touch()

    def ask(self) -> None:
        """Signal that a reader waits; without a running build this has no effect."""
        with suppress(OSError):
            # The build may run in another process, which sees the file's new modification time.
            if self._awaited.lstat().st_nlink == 1:  # else it is a file of somebody else, too
                os.utime(self._awaited, follow_symlinks=False)

    def asked(self) -> int:
        """The mtime of `.awaited`; it changes when a reader waits."""
        try:
            return self._awaited.lstat().st_mtime_ns
        except OSError:
            return 0

    def _path(self, kind: str, number: int) -> Path:
        return self._directory / f".{kind}-{number:06d}.json"

    def fail(self) -> None:
        """Record that the build failed, so that the next one may have other settings."""
        # StoreError: the directory belongs to another build now.
        with suppress(OSError, StoreError):
            self._failed.touch()

    def failed(self, settings: JsonObject) -> bool:
        """Whether the unfinished build failed, and `settings` are not the ones it had."""
        is_other = canonical_json(self.begun() or {}) != canonical_json(settings)
        return self._failed.exists() and is_other

    def end(self) -> None:
        """Remove the journal of a build whose manifest is written."""
        self.forget()
        self._awaited.unlink(missing_ok=True)
        self._failed.unlink(missing_ok=True)
        # Removed last: while this file exists, the next build sees that this one may be incomplete.
        self._settings.unlink(missing_ok=True)

    def forget(self, number: int | None = None) -> None:
        """Remove the record of a slice, or of all slices, so that they are made again."""
        # The parts themselves stay, and are overwritten.
        which = "*" if number is None else f"{number:06d}"
        for path in self._directory.glob(f".slice-{which}.json"):
            path.unlink(missing_ok=True)
