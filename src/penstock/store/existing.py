"""Checks of what the directory of a build contains before the build begins.

    nothing                     the build begins
    the same build, killed      it is resumed (the journal says where)
    the same build, finished    nothing is left to do
    anything else               an error that says what differs

Inputs are the same if their names, sizes and contents are. Contents are compared only if a
modification time differs, or is not known because the store was copied: see
`penstock.store.inputs`.
"""

import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from penstock.digest import canonical_json
from penstock.disk import remove_temporary
from penstock.errors import StoreError
from penstock.sources.files import InputFile
from penstock.store.inputs import (
    known_stamp,
    piece_digests,
    read_digests,
    read_stamps,
    remember_stamps,
)
from penstock.store.job import Job
from penstock.store.journal import Journal
from penstock.store.manifest import (
    FILE_NAME,
    INPUT_DIGEST,
    JsonObject,
    Manifest,
    part_file,
    read_manifest,
    rejects_file,
    remove_old_tables,
    shared_settings,
)
from penstock.store.part import SIDES, same_split
from penstock.store.verify import comparable, differences

_SHOWN = 5
# Files that a build leaves before its journal is written, or a killed one that was discarded. The
# lock is inside the store if the directory around it is not writable.
_OURS = re.compile(r"\.lock|\..+\.\d+\.[0-9a-f]{12}\.tmp")


def killed_at_the_end(job: Job) -> bool:
    """Whether an earlier run of this build wrote its manifest, and was killed right after that.

    Then only the journal is left, and this function removes it.
    """
    journal = Journal(job.directory)
    begun = journal.begun()
    if begun is None:
        return False
    sides = SIDES if begun["split"] else ("",)
    before = journal.num_builds()
    if before is None or not all(committed(job.directory / side, before) for side in sides):
        return False
    for side in sides:
        remove_old_tables(job.directory / side)
    # All manifests are written, so the journal is not needed any more. If it belongs to another
    # build, that build is complete too, and `earlier_build` compares the two.
    journal.end()
    return canonical_json(begun) == canonical_json(job.stamped)


def discard(directory: Path) -> None:
    """Remove an unfinished build; a finished store that it was to be appended to stays."""
    journal = Journal(directory)
    sides: tuple[str, ...]
    try:
        sides = SIDES if (journal.begun() or {}).get("split") else ("",)
    except StoreError:  # a damaged journal does not say whether there is a split
        sides = tuple(side for side in ("", *SIDES) if (directory / side).is_dir())
    for side in sides:
        of_side = directory / side
        kept = {FILE_NAME}
        if (of_side / FILE_NAME).exists():
            manifest = read_manifest(of_side)
            kept |= {part_file(part.number, kind) for part in manifest.parts for kind in part.files}
            kept |= {rejects_file(number) for number in range(len(manifest.builds))}
            kept |= {manifest.table}
        for pattern in ("part-*.npy", "parts-*.npy", "rejects*.jsonl"):
            for path in of_side.glob(pattern):
                if path.name not in kept:
                    path.unlink(missing_ok=True)
        remove_temporary(of_side)
        if side:
            with suppress(OSError):  # it is not empty, or was never made
                of_side.rmdir()
    # Last: a kill before this line leaves a journal, and the next build comes here again.
    journal.end()


def earlier_build(job: Job) -> tuple[Manifest, int] | None:
    """The manifest that is in the directory already; None if there is none.

    And which build of that store this one is: a finished one, or the next one if it appends.

    Raises:
        StoreError: the directory holds something that this build cannot continue.
    """
    first_side = job.directory / job.sides[0]
    unfinished = Journal(job.directory).begun() is not None
    has_manifest = (first_side / FILE_NAME).exists()
    if not (has_manifest or unfinished):
        _refuse_other_split(job.directory, job.options.split)
    if not (has_manifest or unfinished or job.append):
        refuse_foreign(job.directory)
    if not (has_manifest or job.append):
        return None
    manifest = read_manifest(first_side)
    if job.append:
        _refuse_append(job, manifest)
        return manifest, len(manifest.builds)
    if unfinished:
        raise StoreError(
            f"{job.directory} holds an append that was not finished. Repeat that append, with "
            "append=True (--append) of penstock.build, to finish it."
        )
    same = refuse_other(job.directory, manifest, job.recorded, job.files)
    return manifest, _refuse_changed(job, manifest, same)


def committed(directory: Path, num_builds: int) -> bool:
    """Whether the manifest of `directory` has more than `num_builds` builds."""
    # By their number, because two appended files may have the same name and size.
    return (directory / FILE_NAME).exists() and len(read_manifest(directory).builds) > num_builds


def refuse_foreign(directory: Path) -> None:
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
        again = f"call penstock.build with split={then!r}" if then else "leave split out"
        raise StoreError(
            f"{directory} is a finished store that was built {built}. Choose another directory, "
            "replace this with `penstock build --overwrite` (overwrite=True of penstock.build), "
            f"or {again}."
        )


def _refuse_append(job: Job, manifest: Manifest) -> None:
    """Raise if the inputs cannot be appended to the store."""
    directory, settings = job.directory, job.recorded
    if (settings["split"] or "").startswith("tail"):
        raise StoreError(
            'Inputs cannot be appended to a store with split="tail": its validation side is the '
            'end of the data. Build a store with split="hash", which holds out the same documents '
            "when inputs are appended."
        )
    old, new = shared_settings(renamed(manifest.contents, settings)), shared_settings(settings)
    if old != new:
        raise StoreError(
            f"{directory} was built with other settings: {differences(old, new)}. Inputs can be "
            "appended only with the settings of the store. Use those, or build another store."
        )
    if twice := _appended_before(job, manifest):
        raise StoreError(
            f"{_listed(twice)} {'is' if len(twice) == 1 else 'are'} in {directory} already. If "
            "they were appended again, their documents would be trained on twice as often. "
            "Name only new inputs."
        )


def _appended_before(job: Job, manifest: Manifest) -> list[str]:
    """The inputs that are in the store already: by their path, as a file, or by their contents."""
    known = read_stamps(job.directory, manifest.digest)
    # A link, or another way to write a path, is the same file.
    same_files = {identity for path in known if (identity := _identity(path))}
    present = {(each["name"], each["bytes"], each.get(INPUT_DIGEST)) for each in manifest.inputs}
    keys = [(each["name"], each["bytes"]) for each in job.recorded["inputs"]]
    # A name alone says little: each day's folder may have a file of the same name.
    digested = {(name, size): digest for name, size, digest in present if digest}
    alike = {number: digested[key] for number, key in enumerate(keys) if key in digested}
    digests = read_digests(job.files, job.slices(), alike)
    return [
        file.name
        for number, (file, key) in enumerate(zip(job.files, keys, strict=True))
        if known_stamp(known, file) is not None
        or _identity(file.path) in same_files
        or (*key, digests.get(number)) in present
    ]


def _identity(path: str) -> tuple[int, int] | None:
    """The device and inode of a file; None if it does not exist, or is on another machine."""
    with suppress(OSError, ValueError):
        found = Path(path).stat()  # follows links
        return found.st_dev, found.st_ino
    return None


def refuse_other(
    directory: Path, manifest: Manifest, settings: JsonObject, files: Sequence[InputFile]
) -> list[int]:
    """The numbers of the builds of a finished store that have these settings and inputs.

    Raises:
        StoreError: no build of the store has these settings.
    """
    # The call that made any one build of the store is accepted, and returns at once, even if
    # other inputs were appended later.
    whole = renamed({**manifest.settings, "append": False}, settings)
    same = []
    for number, done in enumerate(manifest.builds):
        one = {**whole, "reading": done["reading"], "inputs": comparable(done["inputs"])}
        if canonical_json(one) == canonical_json(settings):
            same.append(number)
    if same:
        return same
    inputs = [each for done in manifest.builds for each in comparable(done["inputs"])]
    known = read_stamps(directory, manifest.digest)
    given, new, left = [], [], list(inputs)
    for file, now in zip(files, settings["inputs"], strict=True):
        given.append({**now, "name": file.name})
        # A recorded name begins below the common root of all inputs, and with one input more that
        # is another directory. Without times, as in a store that was copied, sizes must do.
        path = Path(file.path).absolute().as_posix()
        for each in left:
            is_same = known_stamp(known, file) if known else each["bytes"] == now["bytes"]
            if each["name"] == now["name"] or (is_same and path.endswith(f"/{each['name']}")):
                left.remove(each)
                each["name"] = file.name
                break
        else:
            new.append(file.name)
    changed = differences({**whole, "inputs": inputs}, {**settings, "inputs": given})
    changed = (
        changed or f"by {len(manifest.builds)} builds, of which the later ones appended inputs"
    )
    is_same_kind = shared_settings(whole) == shared_settings(settings)
    can_append = new and is_same_kind and not (settings["split"] or "").startswith("tail")
    also = f" You can also add {_listed(new)} alone, with append=True (--append) of penstock.build."
    raise StoreError(
        f"{directory} is a finished store that was built differently: {changed}. Replace it with "
        "`penstock build --overwrite` (in Python, overwrite=True), or choose another directory."
        f"{also if can_append else ''}"
    )


def renamed(old: JsonObject, new: JsonObject) -> JsonObject:
    """Settings of a store as the new build writes those that mean the same.

    A digest identifies a tokenizer and a template, and their names say nothing more. The split
    "tail:0.10" is "tail:0.1".
    """
    found = dict(old)
    if same_split(old["split"], new["split"]):
        found["split"] = new["split"]
    for key, name in (("tokenizer", "name"), ("chat", "template")):
        before, after = old.get(key), new.get(key)
        if before and after and before["digest"] and before["digest"] == after["digest"]:
            found[key] = {**before, name: after[name]}
    return found


def _listed(names: list[str]) -> str:
    rest = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + rest


def _refuse_changed(job: Job, manifest: Manifest, same: Sequence[int]) -> int:
    """Raise if an input of a finished store has its old size and other contents.

    Args:
        job: The build, whose inputs have the recorded names and sizes.
        manifest: That of the store.
        same: The numbers of its builds that have these names and sizes. There may be several, if
            files of one name were appended from several directories.

    Returns:
        The number of the build that has these inputs.
    """
    known = read_stamps(job.directory, manifest.digest)
    then = [known_stamp(known, file) for file in job.files]
    touched = {
        n
        for n, file in enumerate(job.files)
        if file.path and (file.stamp != then[n] or len(same) > 1)
    }
    if not touched:
        return same[0]
    recorded = [
        {
            n: digest
            for n in touched
            if (digest := manifest.builds[number]["inputs"][n].get(INPUT_DIGEST))
        }
        for number in same
    ]
    now = read_digests(job.files, job.slices(), recorded[0])
    # Without a digest, as of a remote file, only the time says that a file changed. If that is not
    # known either, because the store was copied, the file is accepted.
    changed = [
        [
            job.files[n].name
            for n in sorted(touched)
            if (
                now.get(n) != digests[n]
                if n in digests
                else then[n] not in (None, job.files[n].stamp)
            )
        ]
        for digests in recorded
    ]
    if all(changed):
        names = changed[-1]
        raise StoreError(
            f"{job.directory} is finished, but {_listed(names)} "
            f"{'was' if len(names) == 1 else 'were'} changed or replaced after it was built. "
            "Replace the store with `penstock build --overwrite` (in Python, overwrite=True), or "
            "choose another directory."
        )
    remember_stamps(job.directory, manifest.digest, job.files, known)
    return same[changed.index([])]


def accept_touched(job: Job) -> None:
    """Let a killed build continue whose inputs have other times and the same contents.

    Only what sealed slices have read is compared: other slices are read anyway.
    """
    journal = Journal(job.directory)
    begun, now = journal.begun(), job.stamped
    if begun is None or len(begun.get("stamps", ())) != len(now["stamps"]):
        return
    pairs = zip(begun["stamps"], now["stamps"], strict=True)
    touched = {number for number, (old, new) in enumerate(pairs) if old != new}
    is_same = canonical_json({**begun, "stamps": now["stamps"]}) == canonical_json(now)
    if not touched or not is_same or any(job.files[number].remote for number in touched):
        return  # anything else that differs is refused by `Journal.begin`
    sealed = {record.number: record.pieces for record in journal.sealed()}
    for piece in job.slices():
        spans = [span for span in piece.spans if span.file in touched]
        old = [each for each in sealed.get(piece.index, ()) if each[0] in touched]
        if piece.index in sealed and piece_digests(job.files, spans) != old:
            return
    journal.record(now, journal.num_builds() or 0)
