"""`merge`: one store of the documents of several, without tokenizing again.

    stores/a    builds A       parts 0 1 2       inputs 0 1
    stores/b    builds B C     parts 0 1         inputs 0 1 2
    merged      builds A B C   parts 0 1 2 3 4   inputs 0 1 2 3 4

The result has the bytes that the first build and appends of the others would have given. Tokens,
bounds and loss masks do not depend on the number of a part or of an input, so their files are hard
links to those of the stores; on another file system, copies. The origin of a document contains the
number of its input. So the origins of all stores but the first are written again, and with them
the checksums of their blocks.

    stores/.merged.merge/    the new store while it is made; the same call continues there
    stores/merged/           the new store, by a rename
"""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from penstock.digest import canonical_json
from penstock.errors import StoreError
from penstock.remote.address import StoreUrl, store_path
from penstock.store.beside import made_beside, refuse_occupied, remove_others
from penstock.store.blocks import num_blocks
from penstock.store.commit import manifest_contents
from penstock.store.copies import link_file, read_recorded
from penstock.store.files import (
    HEADER_BYTES,
    array_layout,
    header,
    make_directory,
    room_for,
    sync_directory,
    write_file,
)
from penstock.store.inputs import read_stamps, remember_stamps
from penstock.store.lock import locked
from penstock.store.manifest import (
    CHECKED_KINDS,
    FILE_NAME,
    JsonObject,
    Manifest,
    PartRecord,
    part_file,
    read_manifest,
    rejects_file,
    write_manifest,
)
from penstock.store.merge_sources import MergeSource, open_source, refuse_twice, refuse_unlike
from penstock.store.reader import TokenStore
from penstock.store.sides import generation_of

Place = str | os.PathLike[str] | StoreUrl


def merge(
    stores: Sequence[Place],
    store: Place,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> TokenStore:
    """Make one store of the documents of several, and open it.

    The stores must have the same tokenizer, end and start tokens, chat template and split. Their
    files are linked and not copied, if the new store is on the same file system. The result is the
    store that a build and appends would give, in the order of `stores`: it can be verified,
    repaired and appended to. The same call resumes a merge that was killed, and returns at once if
    the store is finished. Of stores with a split, both sides are merged.

    Args:
        stores: The directories of two stores or more. They stay as they are.
        store: The directory of the new store, which must be empty or not exist.
        progress: Called with the number of parts that are done, and the number of all parts.

    Raises:
        StoreError: the stores do not fit together, one of them is damaged, or the directory holds
            something else.

    >>> import tempfile
    >>> from penstock import Texts, build
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     a = build(Texts(["To be,"]), f"{folder}/a")
    ...     b = build(Texts(["or not to be."]), f"{folder}/b")
    ...     merged = merge([a.path, b.path], f"{folder}/ab")
    ...     print([merged.decode(number) for number in range(2)])
    ['To be,', 'or not to be.']
    """
    if isinstance(stores, str | os.PathLike | StoreUrl) or len(stores) < 2:
        raise StoreError(
            f"merge needs at least two stores, as a list of directories; got {stores!r:.200}."
        )
    directory = _directory_of(store)
    sources = [open_source(_directory_of(each)) for each in stores]
    refuse_unlike(sources)
    refuse_twice(sources)
    with room_for(directory):
        directory.mkdir(parents=True, exist_ok=True)
    merged = {side: _Side(side, sources) for side in sources[0].sides}
    with room_for(directory), locked(directory):
        if not _is_done(directory, merged):
            _make(directory, sources, merged, progress)
    return TokenStore(directory / sources[0].names[0])


def _directory_of(place: Place) -> Path:
    """The directory of a store, which must be on this machine."""
    found = store_path(place)
    if isinstance(found, StoreUrl):
        raise StoreError(
            f"{found} is in object storage, but merge reads and writes directories. Copy the "
            "stores to this machine first, and the merged store back, with `penstock copy` (in "
            "Python, penstock.copy)."
        )
    return found


class _Side:
    """One side of the new store: where its files come from."""

    def __init__(self, side: str, sources: Sequence[MergeSource]) -> None:
        self.side = side
        manifests = [source.sides[side] for source in sources]
        self.contents = manifests[-1].contents
        self.builds = [done for manifest in manifests for done in manifest.builds]
        self.logs: list[tuple[Path, JsonObject]] = []
        self.parts: list[tuple[Path, PartRecord, int, int]] = []
        """For each part: its store, its record there, its new number, and the number of inputs
        before those of its store."""
        first_part = first_file = 0
        for source, manifest in zip(sources, manifests, strict=True):
            path = source.path / side
            self.logs += [
                (path / rejects_file(number), done["rejects"])
                for number, done in enumerate(manifest.builds)
            ]
            self.parts += [
                (path, part, first_part + part.number, first_file) for part in manifest.parts
            ]
            first_part += source.num_slices
            first_file += len(manifest.inputs)

    def files(self) -> Iterator[str]:
        """The names of all files."""
        yield FILE_NAME
        yield from (rejects_file(number) for number in range(len(self.logs)))
        for _, part, number, _ in self.parts:
            yield from (part_file(number, kind) for kind in part.files)


def _is_done(directory: Path, merged: dict[str, _Side]) -> bool:
    """Whether the directory holds the finished store.

    Raises:
        StoreError: it holds something else.
    """
    paths = [directory / side for side in merged]
    if all((path / FILE_NAME).exists() for path in paths):
        manifests = [read_manifest(path) for path in paths]
        if all(map(_is_same, manifests, merged.values())):
            return True
    refuse_occupied(directory, "the store that a merge of these stores gives")
    return False


def _is_same(manifest: Manifest, side: _Side) -> bool:
    """Whether a manifest is that of the merged side; rewritten origins are not compared."""
    if canonical_json(manifest.builds) != canonical_json(side.builds):
        return False
    if len(manifest.parts) != len(side.parts):
        return False
    return all(
        found.number == number and all(found.files[k] == part.files[k] for k in _shared_kinds(part))
        for found, (_, part, number, _) in zip(manifest.parts, side.parts, strict=True)
    )


def _shared_kinds(part: PartRecord) -> list[str]:
    """The files of a part that do not contain numbers of inputs."""
    return [kind for kind in part.files if kind not in ("origin", "checks")]


def _make(
    directory: Path,
    sources: Sequence[MergeSource],
    merged: dict[str, _Side],
    progress: Callable[[int, int], None] | None,
) -> None:
    """Make the new store beside the directory, and move it there."""
    with made_beside(directory, "merge") as new:
        records: dict[str, list[PartRecord]] = {}
        total, done = sum(len(side.parts) for side in merged.values()), 0
        for name, side in merged.items():
            if name:
                make_directory(new / name)
            # Those of an earlier merge of other stores, and a manifest, which is to be the last.
            remove_others(new / name, {*side.files()} - {FILE_NAME})
            for number, (log, entry) in enumerate(side.logs):
                target = new / name / rejects_file(number)
                link_file(log, target, entry["bytes"], entry["sha256"])
            records[name] = []
            for path, part, number, first_file in side.parts:
                dtype = np.dtype(side.contents["dtype"]).newbyteorder("<")
                records[name].append(_place(path, new / name, part, number, first_file, dtype))
                done += 1
                if progress:
                    progress(done, total)
        _refuse_changed(sources)
        _commit(new, merged, records)
    stamps: dict[str, str] = {}
    for source in sources:
        stamps |= read_stamps(source.path, source.first.digest)
    remember_stamps(directory, read_manifest(directory / next(iter(merged))).digest, (), stamps)


def _place(
    source: Path,
    target: Path,
    part: PartRecord,
    number: int,
    first_file: int,
    dtype: "np.dtype[np.generic]",
) -> PartRecord:
    """Put the files of one part into the new store; returns its record there."""
    files = dict(part.files)
    linked = [*files] if not first_file else _shared_kinds(part)
    for kind in linked:
        path = source / part_file(part.number, kind)
        link_file(path, target / part_file(number, kind), *files[kind])
    if first_file:
        # The old bytes are compared with the manifest before they are changed. Otherwise damage
        # in them would get a new digest, and nothing would find it any more.
        origins = read_recorded(source / part_file(part.number, "origin"), *files["origin"])
        array = np.frombuffer(origins, "<u8", offset=HEADER_BYTES).reshape(-1, 2).copy()
        array[:, 0] += np.uint64(first_file)
        layout = array_layout("origin", dtype, part.num_documents, part.num_tokens)
        sums: list[int] = []
        path = target / part_file(number, "origin")
        files["origin"] = write_file(path, [header(*layout), array], sums=sums)
        if "checks" in files:  # parts of version 1 have none
            path = source / part_file(part.number, "checks")
            table = _checks(read_recorded(path, *files["checks"]), part, sums)
            path = target / part_file(number, "checks")
            files["checks"] = write_file(path, [header(table.dtype, table.shape), table])
    return PartRecord(number, part.num_documents, part.num_tokens, files, part.num_continued)


def _checks(data: bytes, part: PartRecord, sums: list[int]) -> "np.ndarray[tuple[int], np.dtype]":
    """The checksums of a part, with `sums` in place of those of its origins."""
    table = np.frombuffer(data, "<u4", offset=HEADER_BYTES).copy()
    before = [kind for kind in CHECKED_KINDS[: CHECKED_KINDS.index("origin")] if kind in part.files]
    first = sum(num_blocks(part.files[kind][0]) for kind in before)
    table[first : first + len(sums)] = sums
    return table


def _refuse_changed(sources: Sequence[MergeSource]) -> None:
    """Raise if a store was replaced while its files were linked."""
    for source in sources:
        for name, manifest in source.sides.items():
            if read_manifest(source.path / name).digest != manifest.digest:
                raise StoreError(
                    f"{source.path} was changed while it was merged. Run this again when nothing "
                    "writes to it."
                )


def _commit(
    directory: Path, merged: dict[str, _Side], records: dict[str, list[PartRecord]]
) -> None:
    split = {"generation": generation_of(records)} if len(merged) > 1 else {}
    for name, side in merged.items():
        contents = manifest_contents(
            side.contents,
            dtype=side.contents["dtype"],
            side=name,
            split=split,
            parts=records[name],
            builds=side.builds,
        )
        write_manifest(directory / name, contents, records[name])
    sync_directory(directory)
