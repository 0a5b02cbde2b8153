"""`repair`: make the damaged files of a store again, from the inputs that it was built from.

A part depends on one slice of the inputs and on the recorded settings alone, so a single part can
be made again. A repair reads the whole store to find damaged files, and then:

    out/owt/.repair/     the parts of damaged files are made here
    out/owt/             a file is moved here if it has the size and SHA-256 that the manifest says

Nothing else of the store changes, and a repair that was killed can be repeated. If an input was
changed, its part gets another digest. Then nothing is moved, and the error names the input.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.errors import DiskFullError, SourceError, StoreError
from penstock.sources.settings import Texts
from penstock.store.copies import on_this_machine
from penstock.store.files import remove_file, room_for, sync_directory, write_file
from penstock.store.folders import opened, remove_tree
from penstock.store.inputs import reject_lines
from penstock.store.job import BuildProgress, Job, Report
from penstock.store.journal import Journal, SealedSlice
from penstock.store.lock import locked
from penstock.store.manifest import (
    FILE_NAME,
    Manifest,
    PartRecord,
    part_file,
    read_manifest,
    rejects_file,
)
from penstock.store.part import SIDES, parse_split
from penstock.store.recorded import Place, RecordedBuild
from penstock.store.verify import file_problem
from penstock.store.workers import Workers

_SHOWN = 5


def repair(
    store: str | os.PathLike[str],
    inputs: Place | Sequence[Place] | None = None,
    *,
    tokenizer: object = None,
    chat: object = None,
    threads: int | None = None,
    progress: Report | None = None,
) -> list[Path]:
    """Make the damaged and missing files of a store again; returns the files that were replaced.

    All bytes of the store are compared with its manifest. The parts of files that differ are made
    again from their inputs, and each file must get the digest that the manifest says. Of a store
    with a split, both sides are repaired.

    Args:
        store: The directory of the store.
        inputs: Directories that hold the inputs under their recorded names, or the files
            themselves. Not needed if the store was built on this machine and the inputs are still
            where they were. Texts that were in memory must be given again, as `Texts`.
        tokenizer: The tokenizer of the store, if it is not found without this argument.
        chat: The chat template of the store, or a `Chat`, if the template is not a built-in one.
        threads: How many parts are made at once; by default one per core.
        progress: Called with a `BuildProgress` while the files of the store are read, which are
            its bytes then, and again while parts are made.

    Raises:
        StoreError: the manifest is damaged, an input is missing or was changed, or the tokenizer
            is another one. The message says which.
        StoreBusyError: another process is writing the store.

    >>> import tempfile
    >>> from penstock import Texts, build
    >>> texts = Texts(["To be,", "or not to be."])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     part = build(texts, f"{folder}/store").path / "part-00000.tokens.npy"
    ...     _ = part.write_bytes(b"damaged")
    ...     [path.name for path in repair(f"{folder}/store", texts)]
    ['part-00000.tokens.npy']
    """
    places = [inputs] if isinstance(inputs, str | os.PathLike | Texts) else list(inputs or ())
    root, sides = _sides(on_this_machine(store))
    with room_for(root), locked(root):
        if Journal(root).exists:
            raise StoreError(
                f"{root} holds a build or an append that was not finished. Repeat it to finish it: "
                "that also makes its damaged parts again."
            )
        _remove(root / ".repair")  # a repair was killed
        found = {side: read_manifest(root / side) for side in sides}
        first = found[sides[0]]
        builds = [RecordedBuild(root, first, number) for number in range(len(first.builds))]
        damaged = [
            (one, damage) for one in builds if (damage := _find_damage(one, found, progress))
        ]
        if not damaged:
            return []
        with _workshop(root) as directory:
            made = []
            for one, damage in damaged:
                job, problems = one.job(places, tokenizer, chat, threads)
                job = replace(job, directory=directory / str(one.number))
                job.directory.mkdir()
                _make_again(one, job, damage, problems, progress)
                made.append((one, job, damage))
            # Not before all are made: if an input is missing, nothing is changed.
            return [path for each in made for path in _put_in_place(*each)]


def _sides(directory: Path) -> tuple[Path, tuple[str, ...]]:
    """The directory that is locked, and the sides of it that are repaired."""
    sides = tuple(side for side in SIDES if (directory / side / FILE_NAME).exists())
    if sides and not (directory / FILE_NAME).exists():
        return directory, sides
    side = read_manifest(directory).contents.get("side")
    resolved = directory.resolve()
    if side in SIDES and resolved.name == side:
        return _sides(resolved.parent)
    return directory, ("",)


def _made_side(one: RecordedBuild, side: str) -> str:
    """The side of the split that the directory `side` holds; it may have been copied alone."""
    return side or str(one.manifest.contents.get("side") or "")


@dataclass(frozen=True, slots=True)
class _Damage:
    """The damaged and missing files of one build of a store."""

    files: list[tuple[str, PartRecord, str]]
    """Of parts: the side, the part, and the kind of the file."""
    logs: dict[str, tuple[int, str]]
    """Reject logs: the recorded size and digest, by side."""

    def __bool__(self) -> bool:
        return bool(self.files or self.logs)


def _find_damage(
    one: RecordedBuild, found: Mapping[str, Manifest], progress: Report | None
) -> _Damage:
    """Read all files of one build."""
    numbers = range(one.first_part, one.first_part + one.entry["slices"])
    files = [
        (side, part, kind)
        for side, manifest in found.items()
        for part in manifest.parts
        if part.number in numbers
        for kind in part.files
    ]

    def is_damaged(file: tuple[str, PartRecord, str]) -> bool:
        side, part, kind = file
        path = one.directory / side / part_file(part.number, kind)
        return file_problem(path, *part.files[kind]) is not None

    total, done, flags = sum(part.files[kind][0] for _, part, kind in files), 0, []
    with ThreadPoolExecutor() as threads:  # hashing releases the GIL
        for (_, part, kind), is_bad in zip(files, threads.map(is_damaged, files), strict=True):
            flags.append(is_bad)
            done += part.files[kind][0]
            if progress:  # nothing is tokenized yet
                progress(BuildProgress(done, total, 0, 0, 0, 0))
    logs = {}
    for side, manifest in found.items():
        entry = manifest.builds[one.number]["rejects"]
        path = one.directory / side / rejects_file(one.number)
        if file_problem(path, entry["bytes"], entry["sha256"]):
            logs[side] = (entry["bytes"], entry["sha256"])
    return _Damage([file for file, is_bad in zip(files, flags, strict=True) if is_bad], logs)


@contextmanager
def _workshop(root: Path) -> Iterator[Path]:
    """An empty directory inside the store, so that files can be moved from it by a rename."""
    path = root / ".repair"
    path.mkdir()
    try:
        yield path
    finally:
        _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        remove_tree(path)
    else:  # a file, a pipe or a link, not made by a repair; what a link points to is not ours
        remove_file(path)


def _make_again(
    one: RecordedBuild, job: Job, damage: _Damage, problems: list[str], progress: Report | None
) -> None:
    """Make the parts of damaged files, and compare them with the manifest."""
    numbers = {part.number - one.first_part for _, part, _ in damage.files}
    wanted: frozenset[int] | None = frozenset(numbers)
    if any(size for size, _ in damage.logs.values()):
        wanted = None  # a reject may be in any slice
    try:
        job = replace(job, split=parse_split(job.settings.split, job.files, job.reading))
        made = _make(replace(job, wanted=wanted), progress)
        _refuse_unlike(one, job, damage, made)
    except (SourceError, OSError) as error:
        if not problems or isinstance(error, DiskFullError):
            raise
        shown = "; ".join(problems[:_SHOWN])
        raise StoreError(
            f"{one.directory} cannot be repaired: {len(problems):,} of its {len(job.files):,} "
            f"inputs cannot be used: {shown}. Restore them, or name directories or files with "
            "their recorded names with inputs= (--inputs) of penstock.repair, or build the store "
            "again."
        ) from error


def _put_in_place(one: RecordedBuild, job: Job, damage: _Damage) -> list[Path]:
    """Move the files that were made again to their places; returns these."""
    repaired = [
        _put(
            job.directory / _made_side(one, side) / part_file(part.number, kind),
            one.directory / side,
        )
        for side, part, kind in damage.files
    ]
    log = rejects_file(one.number)
    repaired += [_put(job.directory / side / log, one.directory / side) for side in damage.logs]
    for path in {path.parent for path in repaired}:
        sync_directory(path)
    return sorted(repaired)


def _put(path: Path, directory: Path) -> Path:
    """Move a file into the store, unless `directory` is a link or was replaced."""
    with opened(path.parent) as made, opened(directory) as place:
        place.check()
        made.rename(path.name, path.name, to=place)
    return directory / path.name


def _make(job: Job, progress: Report | None) -> dict[int, SealedSlice]:
    """Make the slices that are wanted; returns their records, by number."""
    Journal(job.directory).begin(job.stamped, 0)
    for side in job.sides:
        (job.directory / side).mkdir(exist_ok=True)
    return {record.number: record for record in Workers(job, []).run(progress)}


def _refuse_unlike(
    one: RecordedBuild, job: Job, damage: _Damage, made: dict[int, SealedSlice]
) -> None:
    """Raise if a file that was made again is not the recorded one; writes the reject logs."""
    wrong: dict[str, int] = {}
    for side, part, kind in damage.files:
        number = part.number - one.first_part
        again = made[number].parts[_made_side(one, side)].files if number in made else {}
        if again.get(kind) != part.files[kind]:
            wrong[part_file(part.number, kind)] = number
    rejects = [reject for number in sorted(made) for reject in made[number].rejects]
    for side, recorded in damage.logs.items():
        log = rejects_file(one.number)
        lines = reject_lines(rejects if recorded[0] else [], one.entry["inputs"])
        if write_file(job.directory / side / log, lines) != recorded:
            wrong[log] = 0
    if not wrong:
        return
    changed = one.changed_inputs(job, wrong.values())
    reason = "; ".join(changed[:_SHOWN]) or (
        "the inputs have their recorded digests, so this version of penstock, or of a library that "
        "it uses, makes other tokens of them"
    )
    advice = "Give the inputs as they were" if changed else "Use the version that built the store"
    raise StoreError(
        f"{one.directory} cannot be repaired: {', '.join(sorted(wrong)[:_SHOWN])} would get other "
        f"contents than were recorded, because {reason}. Nothing was changed. {advice}, copy the "
        "files from a good store, or build the store again."
    )
