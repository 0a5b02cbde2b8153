r"""The manifest of a store, which is its only commit point, and the table of its parts.

    penstock.json          settings, inputs, counts, and the size and SHA-256 of the table
    parts-5f0c9a….npy      uint64, shape (14, parts): a column is a part

A directory is a store if and only if it has a valid `penstock.json`. The file contains the SHA-256
of its own bytes (with zeros in place of the digest), and the table contains the digest of every
other file. Neither contains paths: the files of a part are named by its number.

    0            the number of the part
    1            documents, or pieces of them
    2            how many of these continue in the next part
    3            tokens
    4 and 5      the XXH3-128 of its tokens file, then those of bounds, origin, loss and checks;
                 zeros if the part has no such file

The sizes of files follow from the counts. The table is mapped into memory, so the processes of one
machine share it, and a record is made only when somebody asks for it: a list of 10^6 parts as JSON
has 500 MB. The table is on disk before the manifest that needs it is renamed into place, and its
name contains its digest. So a kill at any moment leaves the old manifest with the old table, or the
new manifest with the new table.
"""

import hashlib
import json
import mmap
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np
import xxhash
from numpy.typing import NDArray

from penstock.digest import digest_bytes
from penstock.disk import (
    BLOCK_BYTES,
    HEADER_BYTES,
    NamedFile,
    header,
    map_file,
    naming,
    read_file,
    sync_directory,
    write_file,
)
from penstock.errors import MissingStoreError, StoreError
from penstock.paths import StorePath
from penstock.ranges import Integers

JsonObject = dict[str, Any]
"""A JSON object; its values are checked where they are read from a file."""

FILE_NAME = "penstock.json"
VERSION = 4
_KIND = ("penstock-store", VERSION)
CHECKED_KINDS = ("tokens", "bounds", "origin", "loss")
"""The files whose blocks have checksums, in the order of the checksums."""
ALL_KINDS = (*CHECKED_KINDS, "checks")

_WORD = np.dtype("<u8")
_NUM_COUNTS = 4
_NUMBER, _DOCUMENTS, _CONTINUED, _TOKENS = range(_NUM_COUNTS)
_DIGEST_WORDS = 2
_DIGITS = 16 * _DIGEST_WORDS
_NUM_WORDS = _NUM_COUNTS + _DIGEST_WORDS * len(ALL_KINDS)
_NUM_RECENT = 4096  # the records of the parts of two blocks of rows, in 5 MB
_MAPPED_BYTES = 1 << 20
_ATTEMPTS = 5
_ZEROS = "0" * 64
_HEX = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class PartRecord:
    """What is recorded of one part."""

    number: int
    num_documents: int
    """Documents or pieces of documents, that is, entries of the bounds."""
    num_tokens: int
    files: dict[str, tuple[int, str]]
    """The size and XXH3-128 of the file of each kind."""
    num_continued: int = 0
    """How many of `num_documents` are pieces whose document continues in the next part."""

    def to_json(self) -> JsonObject:
        """The record as JSON."""
        # In a fixed order, also if the record was read from the journal, which sorts keys.
        kinds = [kind for kind in ALL_KINDS if kind in self.files]
        return {
            "part": self.number,
            "documents": self.num_documents,
            **({"continued": self.num_continued} if self.num_continued else {}),
            "tokens": self.num_tokens,
            "files": {kind: list(self.files[kind]) for kind in kinds},
        }

    @classmethod
    def of(cls, entry: JsonObject) -> "PartRecord":
        """The record that `to_json` wrote."""
        files = {kind: (size, digest) for kind, (size, digest) in entry["files"].items()}
        counts = (entry["part"], entry["documents"], entry["tokens"])
        return cls(*counts, files, entry.get("continued", 0))


class PartTable(Sequence[PartRecord]):
    """The records of all parts of a store; each is made when it is asked for.

    Args:
        words: The words of the file, of shape (14, parts).
        item_size: The bytes of a token.
        mapping: The file that `words` is a view of, if it is one.
    """

    def __init__(
        self, words: NDArray[np.uint64], item_size: int, mapping: mmap.mmap | None = None
    ) -> None:
        self._words, self._item_size, self._mapping = words, item_size, mapping
        self._recent: dict[int, PartRecord] = {}

    @classmethod
    def of(cls, records: Iterable[PartRecord], item_size: int) -> "PartTable":
        """The table of some records."""
        parts = list(records)
        if not parts:
            return cls(np.zeros((_NUM_WORDS, 0), _WORD), item_size)
        counts = [(p.number, p.num_documents, p.num_continued, p.num_tokens) for p in parts]
        absent = (0, "0" * _DIGITS)
        text = "".join(p.files.get(kind, absent)[1] for p in parts for kind in ALL_KINDS)
        digests = np.frombuffer(bytes.fromhex(text), _WORD).reshape(len(parts), -1)
        words = np.hstack((np.array(counts, _WORD), digests))
        return cls(np.ascontiguousarray(words.T), item_size)

    def followed_by(self, records: Iterable[PartRecord]) -> "PartTable":
        """The table with more parts at its end."""
        new = PartTable.of(records, self._item_size)
        return PartTable(np.hstack((self.words, new.words)), self._item_size)

    def __getstate__(self) -> JsonObject:
        return {**self.__dict__, "_words": np.array(self.words), "_mapping": None, "_recent": {}}

    @property
    def words(self) -> NDArray[np.uint64]:
        """All words, as they are in the file."""
        # Reading a page that the file no longer has ends the process (SIGBUS).
        if self._mapping is not None and self._mapping.size() != len(self._mapping):
            raise StoreError(
                "The table of parts of an open store was cut off or overwritten. Restore the file "
                "parts-….npy of the store from a copy, and open the store again."
            )
        return self._words

    def to_bytes(self) -> bytes:
        """The contents of the file."""
        return header(_WORD, self.words.shape) + self.words.tobytes()

    def __len__(self) -> int:
        return int(self._words.shape[1])

    @overload
    def __getitem__(self, index: int) -> PartRecord: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[PartRecord, ...]: ...
    def __getitem__(self, index: int | slice) -> PartRecord | tuple[PartRecord, ...]:
        if isinstance(index, slice):
            return tuple(map(self._record, range(*index.indices(len(self)))))
        return self._record(range(len(self))[index])

    def __iter__(self) -> Iterator[PartRecord]:
        return map(self._record, range(len(self)))

    def _record(self, index: int) -> PartRecord:
        # A reader asks for the record of a part several times when it first reads the part.
        found = self._recent.get(index)
        if found is None:
            if len(self._recent) >= _NUM_RECENT:
                self._recent = {}  # another thread may still use the old dict
            found = self._recent[index] = self._made(index)
        return found

    def _made(self, index: int) -> PartRecord:
        column = self.words[:, index]
        number, documents, continued, tokens = column[:_NUM_COUNTS].tolist()
        text = column[_NUM_COUNTS:].tobytes().hex()
        digests = [text[at : at + _DIGITS] for at in range(0, len(text), _DIGITS)]
        found = {k: each for k, each in zip(ALL_KINDS, digests, strict=True) if each.strip("0")}
        sizes = _file_sizes(documents, tokens, self._item_size, found)
        files = {kind: (sizes[kind], digest) for kind, digest in found.items()}
        return PartRecord(number, documents, tokens, files, continued)

    @property
    def tokens(self) -> Integers:
        """The number of tokens of each part, as a view."""
        return np.asarray(self.words[_TOKENS].view(np.int64))

    @property
    def documents(self) -> Integers:
        """The number of documents, or pieces of documents, of each part."""
        return np.asarray(self.words[_DOCUMENTS].view(np.int64))

    @property
    def continued(self) -> Integers:
        """How many pieces of each part continue in the next one."""
        return np.asarray(self.words[_CONTINUED].view(np.int64))

    def has(self, kind: str) -> NDArray[np.bool_]:
        """Whether each part has a file of this kind."""
        first = _NUM_COUNTS + _DIGEST_WORDS * ALL_KINDS.index(kind)
        return np.asarray((self.words[first : first + _DIGEST_WORDS] != 0).any(axis=0), bool)

    def sizes(self) -> dict[str, Integers]:
        """The sizes of the files of each kind, one number for each part; 0 where it has none."""
        has = {kind: self.has(kind).astype(np.int64) for kind in ALL_KINDS}
        return _file_sizes(self.documents, self.tokens, self._item_size, has)

    @property
    def num_bytes(self) -> int:
        """The size of all files of all parts."""
        return sum(map(exact_sum, self.sizes().values()))


def _file_sizes(
    num_documents: Any, num_tokens: Any, item_size: int, kinds: Mapping[str, Any]
) -> dict[str, Any]:
    """The size of each file of a part, or of many parts.

    Args:
        num_documents: A number, or an array with one number for each part.
        num_tokens: Likewise.
        item_size: The bytes of a token.
        kinds: The files that a part has; for many parts, arrays of 1 where a part has the file.
    """
    items = {"tokens": item_size * num_tokens, "bounds": 8 * num_documents}
    items |= {"origin": 16 * num_documents, "loss": num_tokens}
    many = not isinstance(num_tokens, int)
    sizes = {
        kind: (HEADER_BYTES + items[kind]) * (kinds[kind] if many else 1)
        for kind in CHECKED_KINDS
        if kind in kinds
    }
    blocks = sum(-(-size // BLOCK_BYTES) for size in sizes.values())  # a CRC-32 for each
    checks = (HEADER_BYTES + 4 * blocks) * (kinds["checks"] if many else 1)
    return {**sizes, "checks": checks}


def exact_sum(counts: Integers) -> int:
    """The sum of counts below 2^63, also if it is larger.

    >>> exact_sum(np.array([2**62, 2**62, 2**62, 2**62])) == 2**64
    True
    """
    # The sum of 2^31 numbers of 32 bits fits into int64.
    return (int((counts >> 32).sum()) << 32) + int((counts & 0xFFFF_FFFF).sum())


@dataclass(frozen=True, slots=True)
class Manifest:
    """A manifest that was read and checked."""

    digest: str
    contents: JsonObject
    """`penstock.json` as JSON."""
    parts: PartTable
    """The record of each part, in order."""

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
            {key: each[key] for key in each if key != INPUT_DIGEST} for each in first["inputs"]
        ]
        shared = shared_settings(self.contents)
        return {**shared, "reading": first["reading"], "inputs": inputs}

    @property
    def table(self) -> str:
        """The name of the file with the table of parts."""
        return table_file(self.contents["parts"]["sha256"])

    def files(self) -> Iterator[tuple[str, int, str]]:
        """The name, size and XXH3-128 of every file of the store but `penstock.json`."""
        entry = self.contents["parts"]
        yield self.table, entry["bytes"], entry["xxh3_128"]
        for number, done in enumerate(self.builds):
            yield rejects_file(number), done["rejects"]["bytes"], done["rejects"]["xxh3_128"]
        for part in self.parts:
            for kind, (size, digest) in part.files.items():
                yield part_file(part.number, kind), size, digest

    @property
    def part_tokens(self) -> Integers:
        """The number of tokens of each part."""
        return self.parts.tokens

    @property
    def part_documents(self) -> Integers:
        """The number of documents, or pieces of documents, of each part."""
        return self.parts.documents

    def has(self, kind: str) -> bool:
        """Whether any part has a file of this kind."""
        return bool(self.parts.has(kind).any())

    @property
    def num_pieces(self) -> int:
        """Entries of the bounds of all parts; a document counts once for each of its pieces."""
        return exact_sum(self.parts.documents)

    @property
    def num_documents(self) -> int:
        """Documents in all parts; one that is stored in pieces counts once."""
        return self.num_pieces - exact_sum(self.parts.continued)

    @property
    def num_tokens(self) -> int:
        """Tokens in all parts."""
        return exact_sum(self.parts.tokens)


INPUT_DIGEST = "xxh3_128"
"""The member of an input that holds its digest."""


def array_layout(
    kind: str, dtype: "np.dtype[Any]", num_documents: int, num_tokens: int
) -> tuple["np.dtype[Any]", tuple[int, ...]]:
    """The type and shape of one array of a part; `dtype` is that of the tokens."""
    return {
        "tokens": (dtype, (num_tokens,)),
        "bounds": (np.dtype("<u8"), (num_documents,)),
        "origin": (np.dtype("<u8"), (num_documents, 2)),
        "loss": (np.dtype("u1"), (num_tokens,)),
    }[kind]


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


def table_file(digest: str) -> str:
    """The name of the table with this SHA-256.

    >>> table_file("5f0c" * 16)
    'parts-5f0c5f0c5f0c5f0c.npy'
    """
    return f"parts-{digest[:16]}.npy"


def manifest_files(contents: JsonObject, parts: PartTable) -> dict[str, bytes]:
    """The name and bytes of the two files of a manifest, in the order in which they are written.

    The last one is `penstock.json`: indented JSON with its own digest first, the commit point.
    """
    table = parts.to_bytes()
    sha256 = digest_bytes(table)
    entry = {"number": len(parts), "bytes": len(table), "sha256": sha256}
    entry["xxh3_128"] = xxhash.xxh3_128(table).hexdigest()  # as of all other files, for copies
    found = {**contents, "digest": _ZEROS, "parts": entry}
    # The digest is computed with 64 zeros in its place, and then replaces them.
    text = json.dumps({"digest": _ZEROS, **found}, indent=1, ensure_ascii=True) + "\n"
    data = text.encode()
    data = data.replace(_ZEROS.encode(), digest_bytes(data).encode(), 1)
    return {table_file(sha256): table, FILE_NAME: data}


def write_manifest(directory: Path, contents: JsonObject, parts: PartTable) -> None:
    """Commit a store; the caller holds its lock, and all other files are written."""
    files = manifest_files(contents, parts)
    for name, data in files.items():
        # Everything that the manifest names must be on disk before it, and its own name must be
        # on disk before the journal is removed.
        sync_directory(directory)
        write_file(directory / name, [data])
    sync_directory(directory)
    remove_old_tables(directory)


def remove_old_tables(directory: Path) -> None:
    """Remove the tables that the manifest does not need: of the one before, or a killed commit."""
    # A process that has opened the store has mapped its table, and keeps it.
    needed = parse_manifest(read_file(directory / FILE_NAME), directory / FILE_NAME)["parts"]
    for path in directory.glob("parts-*.npy"):
        if path.name != table_file(needed["sha256"]):
            with suppress(PermissionError):  # Windows does not remove a file that is mapped
                path.unlink(missing_ok=True)


def read_manifest(directory: Path) -> Manifest:
    """The manifest of the store in `directory`.

    Raises:
        StoreError: there is none, it is damaged, or another version of penstock wrote it.
    """
    path = directory / FILE_NAME
    if not path.exists():
        raise absent_store(directory)
    for left in reversed(range(_ATTEMPTS)):
        try:
            contents = parse_manifest(read_file(path), path)
            return with_table(contents, path, directory)
        except MissingStoreError:
            # An append removes the table of the manifest that it has replaced.
            if not left:
                raise
    raise AssertionError


def parse_manifest(data: bytes, path: StorePath) -> JsonObject:
    """The contents of the file `path`, a `penstock.json`, as JSON.

    Raises:
        StoreError: it is damaged, or another version of penstock wrote it.
    """
    found = re.match(rb'\{\s*"digest": "([0-9a-f]{64})"', data)
    actual = digest_bytes(data.replace(found[1], _ZEROS.encode(), 1)) if found else ""
    if not found or actual != found[1].decode():
        raise StoreError(
            f"{path} is damaged or was changed after it was written: the digest in its first line "
            "is not that of its contents. Restore it from a copy, or build the store again."
        )
    try:
        contents: JsonObject = json.loads(data)
        kind = contents["format"], contents["version"]
        # It is a part of the table's name, which must not lead out of the directory.
        is_named = kind != _KIND or _HEX.fullmatch(contents["parts"]["sha256"])
    except (ValueError, LookupError, TypeError, RecursionError):
        is_named = None
    if not is_named:
        raise StoreError(f"{path} is not the manifest of a token store. Build the store again.")
    if kind != _KIND:
        raise StoreError(
            f"{path} is of the version {kind}, and this penstock reads {_KIND}. Build the store "
            "again, or use the penstock that wrote it."
        )
    return contents


def with_table(contents: JsonObject, path: StorePath, tables: Path) -> Manifest:
    """The manifest with these contents, and with the table of its parts in `tables`.

    Raises:
        MissingStoreError: the table is missing.
        StoreError: the table is not the one that the manifest says.
    """
    entry, item_size = contents["parts"], np.dtype(contents["dtype"]).itemsize
    table = tables / table_file(entry["sha256"])
    advice = "It lists the parts of the store. Copy it from a good store, or build the store again."
    try:
        opened = NamedFile(table)
    except FileNotFoundError:
        raise MissingStoreError(f"{table} is missing. {advice}") from None
    with opened as stream, naming(table):
        size = os.fstat(stream.fileno()).st_size
        if size != entry["bytes"]:
            raise StoreError(
                f"{table} has {size:,} bytes, but {path} says {entry['bytes']:,}. {advice}"
            )
        # A map keeps its file open, and a process may open a thousand small stores.
        is_mapped = size > _MAPPED_BYTES
        mapping = map_file(stream, size) if is_mapped else None
        data = stream.read() if mapping is None else mapping
    if hashlib.sha256(data).hexdigest() != entry["sha256"]:
        raise StoreError(f"{table} was changed after it was written. {advice}")
    words = np.frombuffer(data, _WORD, offset=HEADER_BYTES).reshape(_NUM_WORDS, -1)
    return Manifest(contents["digest"], contents, PartTable(words, item_size, mapping))


def counts(parts: PartTable) -> dict[str, int]:
    """The counts of a manifest; `pieces` only if there are more of them than documents."""
    pieces = exact_sum(parts.documents)
    documents = pieces - exact_sum(parts.continued)
    total = {"documents": documents, "tokens": exact_sum(parts.tokens)}
    return total | ({"pieces": pieces} if pieces != documents else {})


def shared_settings(settings: JsonObject) -> JsonObject:
    """The settings that all builds of one store share; only chat stores have "chat"."""
    shared = ("tokenizer", "eos_id", "bos_id", "split", "chat")
    return {key: settings[key] for key in shared if key in settings}


def absent_store(directory: Path) -> StoreError:
    """The error that says why there is no store in a directory."""
    if not directory.exists():
        return MissingStoreError(f"{directory} does not exist, so there is no store.")
    whole = directory.parent if directory.name in ("train", "val") else directory
    if (whole / ".failed").exists():
        return StoreError(
            f"{directory} holds a build that failed. Change what its message says, and run "
            "`penstock build` again: it may have other settings."
        )
    if (whole / ".building.json").exists():
        return StoreError(
            f"{directory} holds a build that was not finished. Run the same `penstock build` "
            "command again to resume it."
        )
    sides = [side for side in ("train", "val") if (directory / side / FILE_NAME).exists()]
    if sides:
        open_one = f"Open {directory / sides[0]} instead."
        return StoreError(f"{directory} was built with a split. {open_one}")
    files = " Token ids without a header are opened with open_tokens(path, format=…)."
    return MissingStoreError(
        f"{directory} has no {FILE_NAME}, so it is not a store. Name a directory that penstock "
        f"build wrote.{files if directory.is_file() else ''}"
    )
