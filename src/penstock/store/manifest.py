"""The manifest of a store, which is its only commit point.

A directory is a store if and only if it has a valid `penstock.json`. The manifest contains a
digest of itself (SHA-256 of its bytes, with zeros in place of the digest), counts that must add
up, and the size and SHA-256 of every other file. It contains no paths: the files of a part are
named by its number. All values are checked against limits before memory is allocated.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.digest import digest_bytes
from penstock.errors import MissingStoreError, StoreError
from penstock.remote.address import StorePath
from penstock.store.blocks import num_blocks
from penstock.store.files import HEADER_BYTES, read_file

JsonObject = dict[str, Any]
"""A JSON object; its values are checked where they are read from a file."""

_ANY = re.compile(r".*", re.DOTALL)
_HEX = re.compile(r"[0-9a-f]{64}")
_MAX_COUNT = 2**62  # sums of counts still fit into int64
_MAX_VOCAB = 2**32


def _check_contents(contents: JsonObject) -> None:
    """Raise ValueError, KeyError or TypeError if a field is missing, wrong or out of range."""
    if contents["format"] != "penstock-store":
        raise ValueError("it is not the manifest of a token store")
    if contents["version"] not in _VERSIONS:
        raise ValueError(
            f"it is of version {contents['version']!r}; this penstock reads the versions "
            f"{' and '.join(map(str, _VERSIONS))}. Install a newer penstock to open it"
        )
    if contents["dtype"] not in ("uint16", "uint32"):
        raise ValueError(f"it names the dtype {contents['dtype']!r}, not uint16 or uint32")
    tokenizer = contents["tokenizer"]
    vocab_size = _count(tokenizer["vocab_size"], "tokenizer.vocab_size", _MAX_VOCAB)
    if contents["dtype"] == "uint16" and vocab_size > 65_536:
        raise ValueError(f"a vocabulary of {vocab_size:,} does not fit uint16")
    _string(tokenizer["name"], "tokenizer.name")
    _string(tokenizer["canary"], "tokenizer.canary")
    _string(tokenizer["digest"], "tokenizer.digest", optional=True)
    _string(contents["split"], "split", optional=True)
    _string(contents.get("generation"), "generation", _HEX, optional=True)
    ids = {name: contents[name] for name in ("eos_id", "bos_id") if contents[name] is not None}
    for name, number in (ids | tokenizer.get("added_tokens", {})).items():
        _count(number, f"{name:.40}", vocab_size)
    if "chat" in contents:
        _string(contents["chat"]["template"], "chat.template")
        _string(contents["chat"]["digest"], "chat.digest", _HEX)
    if not contents["builds"]:
        raise ValueError("no build is listed")
    for number, done in enumerate(contents["builds"]):
        _check_build(done, f"builds[{number}]")
    for name, value in contents["counts"].items():
        _count(value, f"counts.{name}")


def _check_build(done: JsonObject, path: str) -> None:
    rejects = done["rejects"]
    _string(rejects["sha256"], f"{path}.rejects.sha256", _HEX)
    single = {"slices": done["slices"], "rejects.bytes": rejects["bytes"]}
    optional = (done.get(name, {}) for name in ("documents", "skipped_files"))
    for group in (single, done["counts"], rejects["reasons"], *optional):
        for name, value in group.items():
            _count(value, f"{path}: {name}")
    if not isinstance(done["reading"], dict):
        raise ValueError(f"{path}.reading is {done['reading']!r:.60}")
    for each in done["inputs"]:
        _string(each["name"], f"{path}.inputs.name")
        _count(each["bytes"], f"{path}.inputs.bytes")
        _string(each.get("digest"), f"{path}.inputs.digest", _HEX, optional=True)


def _check_part(entry: JsonObject, dtype: str) -> None:
    """Raise if the record of a part is wrong, or its file sizes do not fit its counts."""
    number, documents, tokens = counts = entry["part"], entry["documents"], entry["tokens"]
    if not all(type(count) is int and 0 <= count <= _MAX_COUNT for count in counts):
        raise ValueError(f"a count of part {number!r:.60} is out of range")
    if "continued" in entry:
        _count(entry["continued"], f"continued of part {number}", documents)
    # Arithmetic instead of NumPy, because a store may have 10,000 parts.
    sizes = {
        "tokens": HEADER_BYTES + tokens * (2 if dtype == "uint16" else 4),
        "bounds": HEADER_BYTES + documents * 8,
        "origin": HEADER_BYTES + documents * 16,
        "loss": HEADER_BYTES + tokens,
    }
    files = entry["files"]
    # A CRC-32 for each block of each other file.
    blocks = sum(num_blocks(sizes[kind]) for kind in sizes if kind in files)
    sizes["checks"] = HEADER_BYTES + blocks * 4
    # A part is mapped by its counts, so a wrong size would read past the end of the file.
    if not {"tokens", "bounds", "origin"} <= set(files) <= set(sizes):
        raise ValueError(f"part {number} has the files {sorted(files)}")
    for kind, (size, digest) in files.items():
        if type(size) is not int or size != sizes[kind]:
            raise ValueError(f"part {number} says {size!r:.60} bytes of {kind}, not {sizes[kind]}")
        if not _HEX.fullmatch(digest):
            raise ValueError(f"part {number} has no digest of its {kind}")


def _count(value: object, name: str, limit: int = _MAX_COUNT) -> int:
    # `type`, because True is an instance of int.
    if type(value) is not int or not 0 <= value <= limit:
        raise ValueError(f"{name} is {value!r:.60}")
    return value


def _string(
    value: object, name: str, pattern: re.Pattern[str] = _ANY, *, optional: bool = False
) -> None:
    is_valid = isinstance(value, str) and pattern.fullmatch(value)
    if not is_valid and not (optional and value is None):
        raise ValueError(f"{name} is {value!r:.80}")


FILE_NAME = "penstock.json"
KINDS = ("tokens", "bounds", "origin")
CHECKED_KINDS = (*KINDS, "loss")
"""The files whose blocks have checksums, in the order of the checksums."""
VERSION = 2
"""The version of new stores. Those of version 1 have no checksums, and no documents in pieces."""
_VERSIONS = (1, VERSION)
_ZEROS = "0" * 64


@dataclass(frozen=True, slots=True)
class PartRecord:
    """The entry of one part in the manifest."""

    number: int
    num_documents: int
    """Documents or pieces of documents, that is, entries of the bounds."""
    num_tokens: int
    files: dict[str, tuple[int, str]]
    """The size and SHA-256 of the file of each kind."""
    num_continued: int = 0
    """How many of `num_documents` are pieces whose document continues in the next part."""

    def to_json(self) -> JsonObject:
        """The entry as JSON."""
        # In a fixed order, also if the record was read from the journal, which sorts keys.
        kinds = [kind for kind in (*CHECKED_KINDS, "checks") if kind in self.files]
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


@dataclass(frozen=True, slots=True)
class Manifest:
    """A manifest that was read and checked."""

    digest: str
    contents: JsonObject
    """The file as JSON, without the parts."""
    parts: tuple[PartRecord, ...]

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
        inputs = [{key: each[key] for key in each if key != "digest"} for each in first["inputs"]]
        shared = shared_settings(self.contents)
        return {**shared, "reading": first["reading"], "inputs": inputs}

    @property
    def num_unchecked(self) -> int:
        """The number of parts that have no checksums, because an earlier version wrote them."""
        return sum("checks" not in part.files for part in self.parts)

    @property
    def num_pieces(self) -> int:
        """Entries of the bounds of all parts; a document counts once for each of its pieces."""
        return sum(part.num_documents for part in self.parts)

    @property
    def num_documents(self) -> int:
        """Documents in all parts; one that is stored in pieces counts once."""
        return self.num_pieces - sum(part.num_continued for part in self.parts)

    @property
    def num_tokens(self) -> int:
        """Tokens in all parts."""
        return sum(part.num_tokens for part in self.parts)


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


def manifest_bytes(contents: JsonObject, parts: list[PartRecord]) -> bytes:
    """The bytes of a manifest: indented JSON, one part per line, with its own digest first."""
    # The digest is computed with 64 zeros in its place, and then replaces them.
    # One line per part, so that a diff of two manifests shows the parts that differ.
    head = json.dumps({"digest": _ZEROS, **contents}, indent=1, ensure_ascii=True)
    lines = ",\n  ".join(json.dumps(part.to_json()) for part in parts)
    text = head.removesuffix("\n}") + ',\n "parts": [\n  ' + lines + "\n ]\n}\n"
    data = text.encode()
    return data.replace(_ZEROS.encode(), digest_bytes(data).encode(), 1)


def read_manifest(directory: Path) -> Manifest:
    """The manifest of the store in `directory`, checked.

    Raises:
        StoreError: there is none, it is damaged, or its kind or version is not supported.
    """
    path = directory / FILE_NAME
    if not path.exists():
        raise _absent(directory)
    return parse_manifest(read_file(path), path)


def parse_manifest(data: bytes, path: StorePath) -> Manifest:
    """The manifest in the contents of the file `path`, checked; see `read_manifest`."""
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
    return _checked(data, path)


def _absent(directory: Path) -> StoreError:
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
    return MissingStoreError(
        f"{directory} has no {FILE_NAME}, so it is not a store. Name a directory that penstock "
        "build wrote."
    )


def _checked(data: bytes, path: StorePath) -> Manifest:
    """The manifest in `data`, after all its values were checked."""
    try:
        contents = json.loads(data)
        _check_contents(contents)
        entries = contents.pop("parts")
        for entry in entries:
            _check_part(entry, contents["dtype"])
        manifest = Manifest(contents["digest"], contents, tuple(map(PartRecord.of, entries)))
        for name, total in counts(manifest.parts).items():
            if (counted := contents["counts"][name]) != total:
                raise ValueError(f"its parts hold {total:,} {name}, but its counts say {counted:,}")
        numbers = [part.number for part in manifest.parts]
        # Gaps are allowed, where a slice had no documents. But the order of the parts is the order
        # of the data, so numbers must ascend.
        if numbers != sorted(set(numbers)):
            raise ValueError("it lists parts twice or out of order")
    except ValueError as error:
        raise StoreError(f"{path} cannot be used: {error}.") from error
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise StoreError(
            f"{path} has a missing or wrong field: {error!r}. Build the store again."
        ) from error
    return manifest


def counts(parts: Sequence[PartRecord]) -> dict[str, int]:
    """The counts of a manifest; `pieces` only if there are more of them than documents."""
    manifest = Manifest("", {}, tuple(parts))
    total = {"documents": manifest.num_documents, "tokens": manifest.num_tokens}
    has_pieces = manifest.num_pieces != manifest.num_documents
    return total | ({"pieces": manifest.num_pieces} if has_pieces else {})


def shared_settings(settings: JsonObject) -> JsonObject:
    """The settings that all builds of one store share; only chat stores have "chat"."""
    shared = ("tokenizer", "eos_id", "bos_id", "split", "chat")
    return {key: settings[key] for key in shared if key in settings}
