"""The journal of a running build; after a kill, only the slices in progress are repeated.

    .building.json          settings and inputs; a build with others is refused
    .slice-000007.json      a sealed slice: the records of its parts, its counts, its rejects
    .ready-000008.json      the same for a slice that can be read, but may not survive a power cut
    .many-000009            a slice in progress that has more than 65,536 tokens already
    .awaited                touched by readers of a streamed store while they wait for a part
    .failed                 the build cannot succeed with these inputs and settings

The record of a slice is renamed into place after its parts are on disk. So if a record can be
read, its parts are whole. When the manifest is written, the journal is removed.

Readers of a streamed store need not wait for the disk. A part that was written is in the page
cache, and a reader gets the same bytes from there before they are on disk. The page cache is lost
when the machine restarts. So a `.ready` file contains the boot id of the machine, and readers
ignore a file with another boot id.
"""

import json
import math
import os
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path

from penstock.digest import canonical_json
from penstock.errors import StoreError
from penstock.sources.document import Reject, Tally
from penstock.store.files import create_file, read_file, remove_file, sync_directory, write_file
from penstock.store.manifest import JsonObject, PartRecord
from penstock.store.verify import differences

MANY_TOKENS = 65_536
"""More tokens than a usual row has."""

_HURRY_SECONDS = 0.5  # how long all workers continue after a reader has waited
_NICENESS = 10
_CALM_SECONDS = 0.3  # readers need this time to notice the first part


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
    digests: list[tuple[int, str]] = field(default_factory=list)
    """The number of an input and the digest of the piece of it that this slice has read."""

    def to_json(self) -> bytes:
        """The record as JSON."""
        parts = {side: part.to_json() for side, part in self.parts.items()}
        return canonical_json(asdict(self) | {"parts": parts})

    @classmethod
    def parse(cls, data: bytes) -> "SealedSlice":
        """The record that `to_json` wrote."""
        record = json.loads(data)
        parts = {side: PartRecord.of(part) for side, part in record["parts"].items()}
        rejects = [Reject(**reject) for reject in record["rejects"]]
        digests = [(file, digest) for file, digest in record["digests"]]
        tally = Tally(**record["tally"])
        return cls(record["number"], tally, parts, rejects, record["rules"], digests)


class Journal:
    """The records of a running build in the directory of its store."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._settings = directory / ".building.json"
        self._awaited = directory / ".awaited"
        self._failed = directory / ".failed"

    def begun(self, expected: JsonObject | None = None) -> JsonObject | None:
        """The settings of the build that was begun and not finished, or None.

        Raises:
            StoreError: these settings are not the `expected` ones.
        """
        try:
            settings: JsonObject = json.loads(read_file(self._settings))
        except FileNotFoundError:
            return None
        settings.pop("num_builds", None)
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
        try:
            found = json.loads(read_file(self._settings)).get("num_builds")
        except FileNotFoundError:
            return None
        return found if isinstance(found, int) else None

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
        remove_file(self._failed)
        return self.sealed()

    def sealed(self) -> list[SealedSlice]:
        """The slices whose parts are on disk, in order."""
        paths = sorted(self._directory.glob(".slice-*.json"))
        return [SealedSlice.parse(read_file(path)) for path in paths]

    def record(self, settings: JsonObject, num_builds: int) -> None:
        """Write the settings of the build; see `begin`."""
        # On disk before any part is written: parts without settings belong to no build.
        write_file(self._settings, [canonical_json({**settings, "num_builds": num_builds})])
        sync_directory(self._directory)

    def seal(self, record: SealedSlice) -> None:
        """Write the record of a slice whose parts are on disk."""
        write_file(self._path("slice", record.number), [record.to_json()])
        sync_directory(self._directory)
        # Removed only now: a reader that finds no `.ready` file must find the record.
        remove_file(self._path("ready", record.number))
        remove_file(self._path("many", record.number))

    def announce(self, record: SealedSlice) -> None:
        """Write the record of a slice whose parts can be read, but may not be on disk yet."""
        # Without a boot id nothing is announced, and readers wait for the sealed record.
        boot = _boot_id()
        if boot is not None:
            path = self._path("ready", record.number)
            with suppress(OSError):  # if the disk is full, `seal` reports it
                # live: not synced, because after a restart it is ignored anyway.
                write_file(path, [boot + b"\n" + record.to_json()], live=True)

    def readable(self, number: int) -> SealedSlice | None:
        """The record of a slice that is sealed or announced; None if it is neither."""
        # The sealed record first: the announcement is removed after the record is written.
        try:
            return SealedSlice.parse(read_file(self._path("slice", number)))
        except FileNotFoundError:
            pass
        try:
            boot, _, record = read_file(self._path("ready", number)).partition(b"\n")
        except FileNotFoundError:
            return None
        # After a restart the page cache is empty, and the part may be incomplete on disk.
        return SealedSlice.parse(record) if boot == _boot_id() else None

    def announce_many(self, number: int) -> None:
        """Announce that a slice in progress has more than `MANY_TOKENS` tokens."""
        with suppress(OSError):
            create_file(self._path("many", number))

    def num_coming(self, number: int) -> int:
        """How many tokens a slice in progress has at least."""
        return MANY_TOKENS if self._path("many", number).exists() else 0

    def await_readers(self) -> None:
        """Create the file that waiting readers touch."""
        with suppress(OSError):
            create_file(self._awaited)

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
        return self._directory / f".{kind}-{number:06d}{'.json' * (kind != 'many')}"

    def fail(self) -> None:
        """Record that the build failed, so that the next one may have other settings."""
        # StoreError: the directory belongs to another build now.
        with suppress(OSError, StoreError):
            create_file(self._failed)

    def failed(self, settings: JsonObject) -> bool:
        """Whether the unfinished build failed, and `settings` are not the ones it had."""
        is_other = canonical_json(self.begun() or {}) != canonical_json(settings)
        return self._failed.exists() and is_other

    def end(self) -> None:
        """Remove the journal of a build whose manifest is written."""
        self.forget()
        remove_file(self._awaited)
        remove_file(self._failed)
        # Removed last: while this file exists, the next build sees that this one may be incomplete.
        remove_file(self._settings)

    def forget(self) -> None:
        """Remove the records of all slices, so that the next build makes them again."""
        # The parts themselves stay, and the next build overwrites them.
        for pattern in (".slice-*.json", ".ready-*.json", ".many-*"):
            for path in self._directory.glob(pattern):
                remove_file(path)


class WaitingReaders:
    """Detects readers that wait for parts. If there are any, one worker is not enough."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._seen = journal.asked()
        self._asked = -math.inf

    def hurry(self, readable: float | None) -> bool:
        """Whether a reader waited in the last half second.

        Readers that wait for the first part do not count: all cores make it anyway.

        Args:
            readable: When the first part was announced, by `time.monotonic`; None before that.
        """
        now = time.monotonic()
        # Read in every case, so that a request before the first part is not seen after it.
        seen, self._seen = self._seen, self._journal.asked()
        if readable is None or now < readable + _CALM_SECONDS:
            return False
        if seen != self._seen:
            self._asked = now
        return now < self._asked + _HURRY_SECONDS


def lower_priority() -> None:
    """Let this thread run only when no reader of the parts needs its core.

    On one core, a loop that launches kernels took 2.1 times as long beside a build. With the lower
    priority it took 1.2 times as long.
    """
    if sys.platform == "linux":  # elsewhere, priorities belong to processes and not to threads
        thread = threading.get_native_id()
        with suppress(OSError):
            # The user may have started the process at an even lower priority.
            niceness = max(_NICENESS, os.getpriority(os.PRIO_PROCESS, thread))
            os.setpriority(os.PRIO_PROCESS, thread, niceness)


@cache
def _boot_id() -> bytes | None:
    """The boot id of the machine; None if the system has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
    except OSError:
        return None
