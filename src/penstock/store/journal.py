"""What a build writes down while it runs, so that a kill costs at most the slices in work.

    .building.json          settings and inputs, written first: a build with others refuses to go on
    .slice-000007.json      one slice is sealed: its parts' records, its counts, its rejects
    .ready-000008.json      the same of one that can be read, but may not outlive a power cut
    .many-000009            one that is being made has more than 65,536 tokens already
    .awaited                touched by readers of a store that grows, while they wait for a part

A slice's record is renamed into place after its parts are on disk, so a record that can
be read means parts that are whole. When the manifest is written, the journal is removed.

Readers of a store that grows need not wait for the disk: what was written is in the page cache,
and whoever reads a part before it is forced to disk reads the same bytes. That holds until the
machine is started anew, so an announcement names the start it was made in and is void in any
other.
"""

import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path

from penstock.digest import canonical_json
from penstock.errors import StoreError
from penstock.sources.document import Reject, Tally
from penstock.store.explain import differences
from penstock.store.files import sync_directory, write_file
from penstock.store.manifest import JsonObject, PartRecord

__all__ = ["MANY_TOKENS", "Journal", "SealedSlice"]

MANY_TOKENS = 65_536
"""More of them than a usual row has."""


@dataclass(slots=True)
class SealedSlice:
    """The record of one slice that is safe on disk."""

    number: int
    tally: Tally
    parts: dict[str, PartRecord]
    """By the side of the split they belong to; a store without a split has the side ""."""
    rejects: list[Reject] = field(default_factory=list)
    rules: dict[str, int] = field(default_factory=dict)
    """How many of the files that begin here follow each rule that "auto" found."""

    def to_json(self) -> bytes:
        """As JSON."""
        return canonical_json(
            {
                "number": self.number,
                "tally": asdict(self.tally),
                "parts": {side: part.to_json() for side, part in self.parts.items()},
                "rejects": [asdict(reject) for reject in self.rejects],
                "rules": self.rules,
            }
        )

    @classmethod
    def parse(cls, data: bytes) -> "SealedSlice":
        """The record that `to_json` wrote."""
        told = json.loads(data)
        parts = {}
        for side, part in told["parts"].items():
            files = {kind: (entry[0], entry[1]) for kind, entry in part["files"].items()}
            counts = (part["part"], part["documents"], part["tokens"])
            parts[side] = PartRecord(*counts, files, part.get("continued", 0))
        return cls(
            told["number"],
            Tally(**told["tally"]),
            parts,
            [Reject(**reject) for reject in told["rejects"]],
            told.get("rules", {}),
        )


class Journal:
    """The records of a running build in the directory of its store."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._settings = directory / ".building.json"
        self._awaited = directory / ".awaited"

    def begun(self) -> JsonObject | None:
        """The settings of the build that was begun and not ended, or None."""
        try:
            told: JsonObject = json.loads(self._settings.read_bytes())
        except FileNotFoundError:
            return None
        return told

    def begin(self, settings: JsonObject) -> list[SealedSlice]:
        """Start a build, or go on with one; returns the slices that are sealed already.

        Raises:
            StoreError: an unfinished build with other settings is in the way.
        """
        kept = self.begun()
        if kept is None:
            self.forget()
            write_file(self._settings, [canonical_json(settings)])
            sync_directory(self._directory)
            return []
        if kept != json.loads(canonical_json(settings)):
            raise StoreError(
                f"{self._directory} holds an unfinished build with other settings: "
                f"{differences(kept, settings)}. Repeat it with the old ones to finish it, or "
                "delete the directory to start anew."
            )
        paths = sorted(self._directory.glob(".slice-*.json"))
        return [SealedSlice.parse(path.read_bytes()) for path in paths]

    def seal(self, record: SealedSlice) -> None:
        """Write the record of a slice whose parts are on disk."""
        write_file(self._slice(record.number), [record.to_json()])
        sync_directory(self._directory)
        self._ready(record.number).unlink(missing_ok=True)
        self._many(record.number).unlink(missing_ok=True)

    def announce(self, record: SealedSlice) -> None:
        """Write the record of a slice whose parts can be read, but may not be on disk yet."""
        started = _machine_start()
        if started is not None:
            path = self._ready(record.number)
            temporary = path.with_suffix(".tmp")
            with suppress(OSError):  # a full disk is told by what needs the room
                temporary.write_bytes(started + b"\n" + record.to_json())
                temporary.rename(path)

    def readable(self, number: int) -> SealedSlice | None:
        """The record of a slice that is sealed, or was announced since the machine started."""
        try:
            return SealedSlice.parse(self._slice(number).read_bytes())
        except FileNotFoundError:
            pass
        try:
            started, _, record = self._ready(number).read_bytes().partition(b"\n")
        except FileNotFoundError:
            return None
        return SealedSlice.parse(record) if started == _machine_start() else None

    def announce_many(self, number: int) -> None:
        """Say that a slice will have more than `MANY_TOKENS` tokens, before it has all of them."""
        with suppress(OSError):
            self._many(number).touch()

    def has_many(self, number: int) -> bool:
        """Whether that was said of a slice."""
        return self._many(number).exists()

    def await_readers(self) -> None:
        """Make it possible for readers to say that they wait."""
        with suppress(OSError):
            self._awaited.touch()

    def ask(self) -> None:
        """Say that a reader waits; nothing comes of it where no build is under way."""
        with suppress(OSError):
            os.utime(self._awaited)

    def asked(self) -> int:
        """A number that is another one when a reader has said so since."""
        try:
            return self._awaited.stat().st_mtime_ns
        except OSError:
            return 0

    def _many(self, number: int) -> Path:
        return self._directory / f".many-{number:06d}"

    def _ready(self, number: int) -> Path:
        return self._directory / f".ready-{number:06d}.json"

    def _slice(self, number: int) -> Path:
        return self._directory / f".slice-{number:06d}.json"

    def end(self) -> None:
        """Remove the journal of a build whose manifest is written."""
        self.forget()
        self._awaited.unlink(missing_ok=True)
        self._settings.unlink(missing_ok=True)

    def forget(self) -> None:
        """Forget all slices, so that a build with the same settings makes them anew."""
        for pattern in (".slice-*.json", ".ready-*.json", ".many-*"):
            for path in self._directory.glob(pattern):
                path.unlink()


@cache
def _machine_start() -> bytes | None:
    """A name for the time since the machine was started, where the system gives one."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
    except OSError:
        return None
