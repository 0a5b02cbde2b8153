"""What the directory of a build contains before the build begins.

    nothing                     the build begins
    the same build, killed      it is resumed (the journal says where)
    the same build, finished    nothing is left to do
    anything else               an error that says what differs

A finished store remembers the name and size of its inputs in the manifest. Their modification
times are in a file beside it, which is not part of the store: a copy works without it.
"""

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from penstock.digest import canonical_json
from penstock.errors import StoreError
from penstock.sources.listing import InputFile
from penstock.store.files import remove_temporary, write_file
from penstock.store.job import Job
from penstock.store.journal import Journal
from penstock.store.manifest import (
    FILE_NAME,
    JsonObject,
    Manifest,
    part_file,
    read_manifest,
    rejects_file,
    shared_settings,
)
from penstock.store.part import SIDES
from penstock.store.verify import differences

_STAMPS = ".stamps.json"
_SHOWN = 5
# Files that a build leaves before its journal is written. The lock is inside the store if the
# directory around it is not writable.
_OURS = re.compile(r"\.lock|\.\.building\.json\.\d+\.\d+\.tmp")


def killed_at_the_end(job: Job) -> bool:
    """Whether this very build is committed already, and only its journal was left behind."""
    journal = Journal(job.directory)
    begun = journal.begun()
    if begun is None:
        return False
    sides = SIDES if begun["split"] else ("",)
    if not all(committed(job.directory / side, begun) for side in sides):
        return False
    # All manifests are written, so the journal says nothing more. If it is of another build, that
    # one is complete too, and this build is compared with it like with any finished store.
    journal.end()
    return canonical_json(begun) == canonical_json(job.stamped)


def discard(directory: Path) -> None:
    """Remove an unfinished build; a finished store that it was to be appended to stays."""
    journal = Journal(directory)
    for side in SIDES if (journal.begun() or {}).get("split") else ("",):
        of_side = directory / side
        kept = {FILE_NAME}
        if (of_side / FILE_NAME).exists():
            manifest = read_manifest(of_side)
            kept |= {part_file(part.number, kind) for part in manifest.parts for kind in part.files}
            kept |= {rejects_file(number) for number in range(len(manifest.builds))}
        for path in [*of_side.glob("part-*.npy"), *of_side.glob("rejects*.jsonl")]:
            if path.name not in kept:
                path.unlink()
        remove_temporary(of_side)
        if side:
            with suppress(OSError):  # it is not empty, or was never made
                of_side.rmdir()
    # Last: a kill before this line leaves a journal, and the next build comes here again.
    journal.end()


def earlier_build(job: Job) -> Manifest | None:
    """The manifest that is in the directory already; None if there is none.

    Raises:
        StoreError: the directory holds something that this build cannot continue.
    """
    first_side = job.directory / job.sides[0]
    unfinished = Journal(job.directory).begun() is not None
    has_manifest = (first_side / FILE_NAME).exists()
    if not (has_manifest or unfinished):
        _refuse_other_split(job.directory, job.settings.split)
    if not (has_manifest or unfinished or job.settings.append):
        _refuse_foreign(job.directory)
    if not (has_manifest or job.settings.append):
        return None
    manifest = read_manifest(first_side)
    if job.settings.append:
        _refuse_append(job.directory, manifest, job.recorded)
    elif unfinished:
        raise StoreError(
            f"{job.directory} holds an append that was not finished. Repeat that append, with "
            "append=True (--append), to finish it."
        )
    else:
        _refuse_other(job.directory, manifest, job.recorded)
        _refuse_changed(job.directory, job.files)
        if not _stamps(job.directory):  # from now on, a changed input is detected again
            remember_stamps(job.directory, job.files)
    return manifest


def committed(directory: Path, settings: JsonObject) -> bool:
    """Whether the last build in the manifest of `directory` is the one with these settings."""
    if not (directory / FILE_NAME).exists():
        return False
    last = read_manifest(directory).builds[-1]
    return all(last[key] == settings[key] for key in ("inputs", "reading"))


def _refuse_foreign(directory: Path) -> None:
    """Raise if the directory holds a file that no build wrote."""
    found = sorted(entry.name for entry in directory.iterdir() if not _OURS.fullmatch(entry.name))
    if found:
        raise StoreError(
            f"{directory} is not empty and not a store; it holds {_listed(found)}. "
            "Choose another directory, or empty this one."
        )


def _refuse_other_split(directory: Path, split: str | None) -> None:
    """Raise if a finished store has two sides and should have one, or the other way round."""
    other = directory if split else directory / SIDES[0]
    if not (other / FILE_NAME).exists():
        return
    # Only the manifest of a side says whether a split made it.
    then = read_manifest(other).contents["split"]
    if then or split:  # otherwise these are two stores that were built separately in one directory
        built = f"with split={then!r}" if then else "without a split, and a split makes two stores"
        again = f"give split={then!r} again" if then else "leave split out"
        raise StoreError(
            f"{directory} is a finished store that was built {built}. Choose another directory, "
            f"replace this one with overwrite=True (--overwrite), or {again}."
        )


def _refuse_append(directory: Path, manifest: Manifest, settings: JsonObject) -> None:
    """Raise if the inputs cannot be appended to the store."""
    if (settings["split"] or "").startswith("tail"):
        raise StoreError(
            'A store with split="tail" cannot grow: its validation side is the end of the data. '
            'Build with split="hash", which holds out the same documents when data is added.'
        )
    old, new = shared_settings(manifest.contents), shared_settings(settings)
    if old != new:
        raise StoreError(
            f"{directory} was built with other settings, and ids of two kinds cannot share a "
            f"store: {differences(old, new)}."
        )
    present = {each["name"] for each in manifest.inputs}
    if twice := [each["name"] for each in settings["inputs"] if each["name"] in present]:
        raise StoreError(
            f"{_listed(twice)} {'is' if len(twice) == 1 else 'are'} in {directory} already. If "
            "they were appended again, their documents would be trained on twice as often."
        )


def _refuse_other(directory: Path, manifest: Manifest, settings: JsonObject) -> None:
    """Raise if a finished store is not what this build would give."""
    # Any single build of the store counts as the same: its call returns at once, also after
    # others were appended.
    whole = {**manifest.settings, "append": False}
    for done in manifest.builds:
        one = {**whole, "reading": done["reading"], "inputs": done["inputs"]}
        if canonical_json(one) == canonical_json(settings):
            return
    changed = differences({**whole, "inputs": manifest.inputs}, settings)
    changed = changed or f"in {len(manifest.builds)} builds, by appending"
    present = {each["name"] for each in manifest.inputs}
    new = [each["name"] for each in settings["inputs"] if each["name"] not in present]
    is_same_kind = shared_settings(manifest.contents) == shared_settings(settings)
    can_append = new and is_same_kind and not (settings["split"] or "").startswith("tail")
    also = f" You can also add {_listed(new)} alone, with append=True (--append)."
    raise StoreError(
        f"{directory} is a finished store that was built differently: {changed}. Replace it with "
        f"overwrite=True (--overwrite), or choose another directory.{also if can_append else ''}"
    )


def _listed(names: list[str]) -> str:
    rest = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + rest


def remember_stamps(directory: Path, files: Sequence[InputFile]) -> None:
    """Write the modification time of each input, beside those of earlier builds."""
    # An append must not forget the inputs of the builds before it.
    stamps = _stamps(directory) | {file.name: file.stamp for file in files}
    write_file(directory / _STAMPS, [canonical_json(stamps)])


def _stamps(directory: Path) -> dict[str, str]:
    try:
        kept = json.loads((directory / _STAMPS).read_bytes())
    except (FileNotFoundError, ValueError):  # the store was copied without it, or it is damaged
        return {}
    return kept if isinstance(kept, dict) else {}


def _refuse_changed(directory: Path, files: Sequence[InputFile]) -> None:
    """Raise if an input of a finished store has its old size and another modification time."""
    kept = _stamps(directory)
    # An input without a stamp is accepted: the file may be lost, or the store was copied.
    changed = [file.name for file in files if kept.get(file.name, file.stamp) != file.stamp]
    if changed:
        raise StoreError(
            f"{directory} is finished, but {_listed(changed)} "
            f"{'was' if len(changed) == 1 else 'were'} changed or replaced after it was built. "
            f"Delete the directory to build it again. If the contents are still the same, delete "
            f"{directory / _STAMPS}."
        )
