"""What a build writes down while it runs, so that a kill costs at most the slices in work.

    .building.json          settings and inputs, written first: a build with others refuses to go on
    .slice-00007.json       one slice is sealed: its parts' records, its counts, its rejects

A slice's record is renamed into place after its parts are on disk, so a record that can
be read means parts that are whole. When the manifest is written, the journal is removed.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from penstock.digest import canonical_json
from penstock.errors import StoreError
from penstock.sources.document import Reject, Tally
from penstock.store.files import sync_directory, write_file
from penstock.store.manifest import PartRecord

__all__ = ["Journal", "SealedSlice"]


@dataclass(slots=True)
class SealedSlice:
    """The record of one slice that is safe on disk."""

    number: int
    tally: Tally
    parts: dict[str, PartRecord]
    """By the side of the split they belong to; a store without a split has the side ""."""
    rejects: list[Reject] = field(default_factory=list)

    def spell(self) -> bytes:
        """As JSON."""
        return canonical_json(
            {
                "number": self.number,
                "tally": asdict(self.tally),
                "parts": {side: part.spell() for side, part in self.parts.items()},
                "rejects": [asdict(reject) for reject in self.rejects],
            }
        )

    @classmethod
    def parse(cls, data: bytes) -> "SealedSlice":
        """The record that `spell` wrote."""
        told = json.loads(data)
        parts = {}
        for side, part in told["parts"].items():
            files = {kind: (entry[0], entry[1]) for kind, entry in part["files"].items()}
            parts[side] = PartRecord(part["part"], part["documents"], part["tokens"], files)
        return cls(
            told["number"],
            Tally(**told["tally"]),
            parts,
            [Reject(**reject) for reject in told["rejects"]],
        )


class Journal:
    """The records of a running build in the directory of its store."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._settings = directory / ".building.json"

    def begun(self) -> dict[str, Any] | None:
        """The settings of the build that was begun and not ended, or None."""
        try:
            told: dict[str, Any] = json.loads(self._settings.read_bytes())
        except FileNotFoundError:
            return None
        return told

    def begin(self, settings: dict[str, Any]) -> list[SealedSlice]:
        """Start a build, or go on with one; returns the slices that are sealed already.

        Raises:
            StoreError: an unfinished build with other settings is in the way.
        """
        kept = self.begun()
        if kept is None:
            self._forget_slices()
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
        write_file(self._slice(record.number), [record.spell()])
        sync_directory(self._directory)

    def sealed(self, number: int) -> SealedSlice | None:
        """The record of a slice, or None where it is not sealed."""
        try:
            return SealedSlice.parse(self._slice(number).read_bytes())
        except FileNotFoundError:
            return None

    def _slice(self, number: int) -> Path:
        return self._directory / f".slice-{number:06d}.json"

    def end(self) -> None:
        """Remove the journal of a build whose manifest is written."""
        self._forget_slices()
        self._settings.unlink(missing_ok=True)

    def _forget_slices(self) -> None:
        for path in self._directory.glob(".slice-*.json"):
            path.unlink()


def differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> str:
    """The fields that differ, as `name: old -> new`, five at most."""
    found = []
    for key in sorted({*old, *new}):
        before, after = old.get(key), new.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            if inner := differences(before, after, f"{prefix}{key}."):
                found.append(inner)
        elif before != after:
            found.append(f"{prefix}{key}: {before!r:.60} -> {after!r:.60}")
    return ", ".join(found[:5])
