"""The manifest of a store, which is its only commit point.

A directory is a store if and only if it has a valid `penstock.json`. The manifest contains a
digest of itself (SHA-256 of its bytes, with zeros in place of the digest), counts that must add
up, and the size and SHA-256 of every other file. It contains no paths: the files of a part are
named by its number. All values are checked against limits before memory is allocated.

Up to 16,384 parts are listed in the manifest itself, and more of them in a table beside it: see
`penstock.store.part_table`. The table is on disk before the manifest that needs it is renamed into
place, and it has another name than the one before. So a kill at any moment leaves the old manifest
with the old table, or the new manifest with the new table.
"""

import json
import re
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from penstock.digest import digest_bytes
from penstock.errors import MissingStoreError, StoreError
from penstock.ranges import Integers
from penstock.remote.address import StorePath
from penstock.store.files import read_file, remove_file, sync_directory, write_file
from penstock.store.manifest_checks import FILE_NAME as FILE_NAME
from penstock.store.manifest_checks import (
    INPUT_DIGESTS,
    TABLE_VERSION,
    absent_store,
    check_contents,
    check_part,
    checked_count,
    checked_digest,
)
from penstock.store.manifest_checks import VERSION as VERSION
from penstock.store.part_lines import parse_lines
from penstock.store.part_table import CHECKED_KINDS as CHECKED_KINDS
from penstock.store.part_table import JsonObject as JsonObject
from penstock.store.part_table import PartRecord as PartRecord
from penstock.store.part_table import (
    PartTable,
    compact,
    continued_counts,
    document_counts,
    exact_sum,
    has_kind,
    kind_sizes,
    read_table,
    table_bytes,
    table_file,
    token_counts,
)

MOST_LISTED = 16_384
"""The most parts that a manifest lists: a JSON text of 8 MB, which is read in 0.2 s."""
_MOST_RECORDS = 256
_ATTEMPTS = 5
_ZEROS = "0" * 64


@dataclass(frozen=True, slots=True)
class Manifest:
    """A manifest that was read and checked."""

    digest: str
    contents: JsonObject
    """The file as JSON, without the parts."""
    parts: Sequence[PartRecord]
    """The record of each part, in order: a tuple, or a table that makes records on access."""

    @property
    def builds(self) -> list[JsonObject]:
        """The first build of the store and all appends."""
        builds: list[JsonObject] = self.contents["builds"]
        return builds

    @property
    def inputs(self) -> list[JsonObject]:
        """The inputs of all builds; the origin of a document is an index into this list."""
        return [each for done in self.builds for each in done["inputs"]]

    @property
    def settings(self) -> JsonObject:
        """Everything that the bytes of the first build depend on."""
        first = self.builds[0]
        # Digests are known when the inputs were read, and settings before that.
        inputs = [
            {key: each[key] for key in each if key not in INPUT_DIGESTS} for each in first["inputs"]
        ]
        shared = shared_settings(self.contents)
        return {**shared, "reading": first["reading"], "inputs": inputs}

    @property
    def table(self) -> tuple[str, int, str] | None:
        """The name, size and SHA-256 of the table of parts; None if the manifest lists them."""
        return self.parts.file if isinstance(self.parts, PartTable) else None

    @property
    def part_tokens(self) -> Integers:
        """The number of tokens of each part."""
        return token_counts(self.parts)

    @property
    def part_documents(self) -> Integers:
        """The number of documents, or pieces of documents, of each part."""
        return document_counts(self.parts)

    def file_sizes(self, kind: str) -> Integers:
        """The size of the file of this kind of each part; 0 where there is none."""
        return kind_sizes(self.parts, kind)

    def has(self, kind: str) -> bool:
        """Whether any part has a file of this kind."""
        return has_kind(self.parts, kind)

    @property
    def num_unchecked(self) -> int:
        """The number of parts that have no checksums, because an earlier version wrote them."""
        return int(np.count_nonzero(self.file_sizes("checks") == 0))

    @property
    def num_pieces(self) -> int:
        """Entries of the bounds of all parts; a document counts once for each of its pieces."""
        return exact_sum(self.part_documents)

    @property
    def num_documents(self) -> int:
        """Documents in all parts; one that is stored in pieces counts once."""
        return self.num_pieces - exact_sum(continued_counts(self.parts))

    @property
    def num_tokens(self) -> int:
        """Tokens in all parts."""
        return exact_sum(self.part_tokens)


def part_file(number: int, kind: str) -> str:
    """The name of one file of a part.

    >>> part_file(7, "tokens")
    'part-00007.tokens.npy'
    """
    return f"part-{number:05d}.{kind}.npy"


def rejects_file(number: int) -> str:
    """The name of the reject log of a store's `number`-th build.

    >>> rejects_file(0), rejects_file(1)
    ('rejects.jsonl', 'rejects-00001.jsonl')
    """
    return f"rejects-{number:05d}.jsonl" if number else "rejects.jsonl"


def manifest_bytes(contents: JsonObject, parts: Sequence[PartRecord] | JsonObject) -> bytes:
    """The bytes of a manifest: indented JSON, one part per line, with its own digest first.

    Args:
        contents: Everything but the parts.
        parts: The parts, or the entry of their table.
    """
    # The digest is computed with 64 zeros in its place, and then replaces them.
    # One line per part, so that a diff of two manifests shows the parts that differ.
    head = json.dumps({"digest": _ZEROS, **contents}, indent=1, ensure_ascii=True)
    text = head.removesuffix("\n}") + ',\n "parts": '
    if isinstance(parts, dict):
        text += json.dumps(parts) + "\n}\n"
    else:
        text += "[\n  " + ",\n  ".join(json.dumps(part.to_json()) for part in parts) + "\n ]\n}\n"
    data = text.encode()
    return data.replace(_ZEROS.encode(), digest_bytes(data).encode(), 1)


def manifest_files(
    contents: JsonObject, parts: Sequence[PartRecord], *, most_listed: int = MOST_LISTED
) -> dict[str, bytes]:
    """The name and contents of each file of a manifest, in the order in which they are written.

    The last one is `penstock.json`, the commit point. If there are more than `most_listed` parts,
    or the parts are in a table already, the table of the parts comes before it.
    """
    if len(parts) <= most_listed and not (isinstance(parts, PartTable) and parts.is_file):
        return {FILE_NAME: manifest_bytes(contents, parts)}
    table = table_bytes(parts)
    digest = digest_bytes(table)
    entry = {"number": len(parts), "bytes": len(table), "sha256": digest}
    contents = {**contents, "version": TABLE_VERSION}
    return {table_file(digest): table, FILE_NAME: manifest_bytes(contents, entry)}


def write_manifest(
    directory: Path,
    contents: JsonObject,
    parts: Sequence[PartRecord],
    *,
    most_listed: int = MOST_LISTED,
) -> None:
    """Commit a store; the caller holds its lock, and all other files are written."""
    files = manifest_files(contents, parts, most_listed=most_listed)
    for name, data in files.items():
        # Everything that the manifest names must be on disk before it, and its own name must be
        # on disk before the journal is removed.
        sync_directory(directory)
        write_file(directory / name, [data])
    sync_directory(directory)
    remove_tables(directory, files)


def remove_tables(directory: Path, kept: Collection[str]) -> None:
    """Remove the tables that no manifest needs: of the manifest before, or of a killed commit."""
    # A process that has opened the store has mapped its table, and keeps it.
    for path in directory.glob("parts-*.npy"):
        if path.name not in kept:
            with suppress(PermissionError):  # Windows does not remove a file that is mapped
                remove_file(path)


def side_file(contents: JsonObject) -> tuple[str, int, str] | None:
    """The name, size and SHA-256 of the table that a manifest needs; None if it lists its parts.

    Args:
        contents: The manifest as JSON, with its member "parts".
    """
    entry = contents["parts"]
    if not isinstance(entry, dict):
        return None
    checked_count(entry["number"], "parts.number")
    checked_count(entry["bytes"], "parts.bytes")
    checked_digest(entry["sha256"], "parts.sha256")
    return table_file(entry["sha256"]), entry["bytes"], entry["sha256"]


def read_manifest(directory: Path) -> Manifest:
    """The manifest of the store in `directory`, checked.

    Raises:
        StoreError: there is none, it is damaged, or its kind or version is not supported.
    """
    path = directory / FILE_NAME
    if not path.exists():
        raise absent_store(directory)
    for left in reversed(range(_ATTEMPTS)):
        try:
            return parse_manifest(read_file(path), path, directory)
        except MissingStoreError:
            # An append removes the table of the manifest that it has replaced.
            if not left:
                raise
    raise AssertionError


def parse_manifest(data: bytes, path: StorePath, tables: Path) -> Manifest:
    """The manifest in the contents of the file `path`, checked; see `read_manifest`.

    Args:
        data: The contents.
        path: The name of the file, for messages.
        tables: The directory of the table of parts, if the manifest needs one (see `side_file`).
    """
    # A pattern finds the digest, and not a JSON parser: nothing is parsed before the digest is
    # right. 64 more bytes have room for the brace, the key and white space.
    claimed = data[: len(_ZEROS) + 64].decode(errors="replace")
    found = re.match(r'\{\s*"digest": "([0-9a-f]{64})"', claimed)
    if not found:
        raise StoreError(
            f"{path} does not begin with a digest: it is damaged or not a manifest. Restore it "
            "from a copy, or build the store again."
        )
    actual = digest_bytes(data.replace(found[1].encode(), _ZEROS.encode(), 1))
    if actual != found[1]:
        raise StoreError(
            f"{path} was changed after it was written: the digest of its contents is "
            f"{actual[:8]}, but the digest written in it is {found[1][:8]}. Restore it from a "
            "copy, or build the store again."
        )
    return _checked(data, path, tables)


def _checked(data: bytes, path: StorePath, tables: Path) -> Manifest:
    """The manifest in `data`, after all its values were checked."""
    try:
        parsed = parse_lines(data) if data.count(b"\n") > _MOST_RECORDS else None
        contents, parts = parsed or _parsed(data, tables)
        manifest = Manifest(contents["digest"], contents, parts)
        for name, total in counts(manifest.parts).items():
            if (counted := contents["counts"][name]) != total:
                raise ValueError(f"its parts hold {total:,} {name}, but its counts say {counted:,}")
    except MissingStoreError:  # the message names the table
        raise
    except ValueError as error:
        raise StoreError(f"{path} cannot be used: {error}.") from error
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise StoreError(
            f"{path} has a missing or wrong field: {error!r}. Build the store again."
        ) from error
    return manifest


def _parsed(data: bytes, tables: Path) -> tuple[JsonObject, Sequence[PartRecord]]:
    """The manifest in `data` without its parts, and its parts, checked."""
    contents = json.loads(data)
    check_contents(contents)
    parts = _checked_parts(contents, tables)
    del contents["parts"]
    return contents, parts


def _checked_parts(contents: JsonObject, directory: Path) -> Sequence[PartRecord]:
    """The parts that a manifest lists, or those of its table, checked."""
    is_table = contents["version"] == TABLE_VERSION
    if is_table != isinstance(contents["parts"], dict):
        raise ValueError(f"version {contents['version']} does not have parts of this kind")
    item_size = np.dtype(contents["dtype"]).itemsize
    if (found := side_file(contents)) is not None:
        name, size, digest = found
        number = contents["parts"]["number"]
        return read_table(directory / name, number, size, digest, item_size)
    for entry in contents["parts"]:
        check_part(entry, item_size)
    parts = tuple(map(PartRecord.of, contents["parts"]))
    numbers = [part.number for part in parts]
    # Gaps are allowed, where a slice had no documents. But the order of the parts is the order
    # of the data, so numbers must ascend.
    if numbers != sorted(set(numbers)):
        raise ValueError("it lists parts twice or out of order")
    # The records of 1,000 stores of 1,000 parts would take more than a gigabyte, and the garbage
    # collector would visit them all again and again.
    return compact(parts, item_size) if len(parts) > _MOST_RECORDS else parts


def counts(parts: Sequence[PartRecord]) -> dict[str, int]:
    """The counts of a manifest; `pieces` only if there are more of them than documents."""
    manifest = Manifest("", {}, parts)
    total = {"documents": manifest.num_documents, "tokens": manifest.num_tokens}
    has_pieces = manifest.num_pieces != manifest.num_documents
    return total | ({"pieces": manifest.num_pieces} if has_pieces else {})


def shared_settings(settings: JsonObject) -> JsonObject:
    """The settings that all builds of one store share; only chat stores have "chat"."""
    shared = ("tokenizer", "eos_id", "bos_id", "split", "chat")
    return {key: settings[key] for key in shared if key in settings}
