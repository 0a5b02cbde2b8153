"""What a directory holds already when a build comes to it.

    nothing                     the build begins
    the same build, killed      it goes on (the journal knows where)
    the same build, finished    nothing is left to do
    anything else               refused, with what differs

A finished store remembers its inputs by name, size and the time of their last change, the
last in a file beside the manifest that another machine can do without.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.digest import canonical_json
from penstock.errors import StoreError
from penstock.sources.listing import InputFile
from penstock.store.explain import differences
from penstock.store.files import write_file
from penstock.store.holdout import SIDES
from penstock.store.journal import Journal
from penstock.store.manifest import (
    FILE_NAME,
    Manifest,
    builds,
    read_manifest,
    shared_settings,
)

__all__ = ["committed", "earlier_build", "killed_at_the_end", "remember_stamps"]

_STAMPS = ".stamps.json"
_SHOWN = 5


def killed_at_the_end(directory: Path, stamped: dict[str, Any]) -> bool:
    """Whether this very build is committed already, and only its journal was left behind."""
    journal = Journal(directory)
    begun = journal.begun()
    if begun is None:
        return False
    sides = [directory / side for side in SIDES] if begun["split"] else [directory]
    if not all(committed(side, begun) for side in sides):
        return False
    journal.end()
    return canonical_json(begun) == canonical_json(stamped)


def earlier_build(
    directory: Path, settings: dict[str, Any], files: Sequence[InputFile], append: bool
) -> Manifest | None:
    """The manifest that is there already, if the wanted build agrees with it."""
    place = directory / "train" if settings["split"] else directory
    unfinished = (directory / ".building.json").exists()
    finished = (place / FILE_NAME).exists() and not unfinished
    if not (finished or unfinished):
        _refuse_other_split(directory, settings["split"])
    if not append:
        if not finished:
            if (place / FILE_NAME).exists():
                raise StoreError(
                    f"{directory} holds an append that was not finished. Repeat that append, with "
                    "append=True, to finish it."
                )
            _refuse_foreign(directory)
            return None
        manifest = read_manifest(place)
        _refuse_other(directory, manifest, settings)
        _refuse_changed(directory, files)
        if not _stamps(directory):
            remember_stamps(directory, files)
        return manifest
    manifest = read_manifest(place)
    if _is_tail(settings["split"]):
        raise StoreError(
            'A store with split="tail" cannot grow: its validation side is the end of the data. '
            'Build with split="hash", which holds out the same documents when data is added.'
        )
    told, kept = shared_settings(settings), shared_settings(manifest.contents)
    if kept != told:
        raise StoreError(
            f"{directory} was built with other settings, and ids of two kinds cannot share a "
            f"store: {differences(kept, told)}."
        )
    present = _names(manifest)
    twice = [each["name"] for each in settings["inputs"] if each["name"] in present]
    if twice:
        raise StoreError(
            f"{', '.join(twice[:5])} {'is' if len(twice) == 1 else 'are'} in {directory} already; "
            "appended again, its documents would be trained on twice as often."
        )
    return manifest


def committed(directory: Path, settings: dict[str, Any]) -> bool:
    """Whether the last build in the manifest of `directory` is the one with these settings."""
    if not (directory / FILE_NAME).exists():
        return False
    last = builds(read_manifest(directory))[-1]
    return all(last[key] == settings[key] for key in ("inputs", "reading"))


def _refuse_foreign(directory: Path) -> None:
    """Raise where the directory holds something that no build put there."""
    if (directory / ".building.json").exists():
        return
    ours = re.compile(r"\.lock|\.readers|\.\.building\.json\.\d+\.\d+\.tmp")
    found = sorted(entry.name for entry in directory.iterdir() if not ours.fullmatch(entry.name))
    if found:
        raise StoreError(
            f"{directory} is not empty and not a store; it holds {', '.join(found[:5])}. Choose "
            "another directory, or empty this one."
        )


def _refuse_other_split(directory: Path, split: str | None) -> None:
    """Raise where a finished store has two sides and was to have one, or the other way round."""
    if split and (directory / FILE_NAME).exists():
        raise StoreError(
            f"{directory} is a finished store that was built without a split, and split={split!r} "
            "makes two stores. Choose another directory, delete this one to build anew, or leave "
            "split out."
        )
    if split or not (directory / SIDES[0] / FILE_NAME).exists():
        return
    then = read_manifest(directory / SIDES[0]).contents["split"]
    if then:  # else two stores that were built one by one, in a directory of something else
        raise StoreError(
            f"{directory} is a finished store that was built with split={then!r}. Choose another "
            f"directory, delete this one to build anew, or give split={then!r} again."
        )


def _refuse_other(directory: Path, manifest: Manifest, settings: dict[str, Any]) -> None:
    """Raise where a finished store is not what this build would give."""
    kept = shared_settings(manifest.contents)
    for done in builds(manifest):
        told = {**kept, "reading": done["reading"], "inputs": done["inputs"], "append": False}
        if canonical_json(told) == canonical_json(settings):
            return
    first, *later = builds(manifest)
    inputs = [each for done in (first, *later) for each in done["inputs"]]
    told = {**kept, "reading": first["reading"], "inputs": inputs, "append": False}
    changed = differences(told, settings) or f"in {1 + len(later)} builds, by appending"
    added = _to_append(manifest, settings)
    ways = "Delete it to build anew, or choose another directory."
    if added:
        ways = (
            f"Delete it to build anew, choose another directory, or add {added} alone, by a build "
            "with append=True."
        )
    raise StoreError(f"{directory} is a finished store that was built otherwise: {changed}. {ways}")


def _to_append(manifest: Manifest, settings: dict[str, Any]) -> str:
    """The inputs that an append would take; "" if there are none, or it would not."""
    if shared_settings(manifest.contents) != shared_settings(settings) or _is_tail(
        settings["split"]
    ):
        return ""
    present = _names(manifest)
    new = [each["name"] for each in settings["inputs"] if each["name"] not in present]
    rest = f" and {len(new) - _SHOWN:,} more" if len(new) > _SHOWN else ""
    return ", ".join(new[:_SHOWN]) + rest


def _is_tail(split: str | None) -> bool:
    return split is not None and split.startswith("tail")


def _names(manifest: Manifest) -> set[str]:
    """Of the inputs of all builds."""
    return {each["name"] for done in builds(manifest) for each in done["inputs"]}


def remember_stamps(directory: Path, files: Sequence[InputFile]) -> None:
    """Keep when each input was changed last, beside those of earlier builds."""
    stamps = _stamps(directory) | {file.name: file.stamp for file in files}
    write_file(directory / _STAMPS, [canonical_json(stamps)])


def _stamps(directory: Path) -> dict[str, str]:
    try:
        kept = json.loads((directory / _STAMPS).read_bytes())
    except (FileNotFoundError, ValueError):  # copied without it, or damaged
        return {}
    return kept if isinstance(kept, dict) else {}


def _refuse_changed(directory: Path, files: Sequence[InputFile]) -> None:
    """Raise where an input of a finished store was changed since, though it is as long as then."""
    kept = _stamps(directory)
    changed = [file.name for file in files if kept.get(file.name, file.stamp) != file.stamp]
    if changed:
        raise StoreError(
            f"{directory} is finished, but {', '.join(changed[:5])} "
            f"{'was' if len(changed) == 1 else 'were'} changed or replaced after it was built. "
            f"Delete the directory to build anew; if the contents are still the same, delete "
            f"{directory / _STAMPS}."
        )
