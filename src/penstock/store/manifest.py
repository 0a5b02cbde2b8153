"""The manifest: what a store is, and its only commit point.

A directory is a store if and only if it has a valid `penstock.json`. The file carries a
digest of itself (SHA-256 of its bytes with the digest's 64 places filled with zeros),
counts that must add up, and the size and SHA-256 of every other file. It names no paths:
a part's files are called by its number. Whatever it says is checked against limits
before anything is allocated.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.digest import digest_bytes
from penstock.errors import StoreError
from penstock.store.npy import HEADER_BYTES

__all__ = [
    "FILE_NAME",
    "KINDS",
    "JsonObject",
    "Manifest",
    "PartRecord",
    "builds",
    "check_contents",
    "check_part",
    "counts",
    "manifest_bytes",
    "part_file",
    "read_manifest",
    "rejects_file",
    "shared_settings",
]

JsonObject = dict[str, Any]
"""A JSON object; its values are checked where they are read from a file."""

_HEX = re.compile(r"[0-9a-f]{64}")
_MAX_COUNT = 2**62
_MAX_VOCAB = 2**32


def check_contents(contents: JsonObject) -> None:
    """Raise ValueError, KeyError or TypeError where a field is absent, odd or out of range."""
    vocab_size = _check_tokenizer(contents["tokenizer"])
    if contents["dtype"] == "uint16" and vocab_size > 65_536:
        raise ValueError(f"a vocabulary of {vocab_size:,} does not fit uint16")
    for name in ("eos_id", "bos_id"):
        if contents[name] is not None:
            _count(contents[name], name, vocab_size)
    if contents["split"] is not None:
        _string(contents["split"], "split")
    if "chat" in contents:
        _string(contents["chat"]["template"], "chat.template")
        _digest(contents["chat"]["digest"], "chat.digest")
    if not contents["builds"]:
        raise ValueError("no build is listed")
    for number, done in enumerate(contents["builds"]):
        _check_build(done, f"builds[{number}]")
    for name in ("documents", "tokens", *({"pieces"} & set(contents["counts"]))):
        _count(contents["counts"][name], f"counts.{name}")


def _check_tokenizer(tokenizer: JsonObject) -> int:
    """Raise where the tokenizer is described oddly; returns the size of its vocabulary."""
    _string(tokenizer["name"], "tokenizer.name")
    _string(tokenizer["canary"], "tokenizer.canary")
    vocab_size = _count(tokenizer["vocab_size"], "tokenizer.vocab_size", _MAX_VOCAB)
    if tokenizer["digest"] is not None:
        _string(tokenizer["digest"], "tokenizer.digest")
    for token, number in tokenizer.get("added_tokens", {}).items():
        _count(number, f"tokenizer.added_tokens[{token!r:.40}]", vocab_size - 1)
    return vocab_size


def _check_build(done: JsonObject, place: str) -> None:
    _count(done["slices"], f"{place}.slices")
    for name, value in done["counts"].items():
        _count(value, f"{place}.counts.{name}")
    _count(done["rejects"]["bytes"], f"{place}.rejects.bytes")
    _digest(done["rejects"]["sha256"], f"{place}.rejects.sha256")
    for reason, value in done["rejects"]["reasons"].items():
        _count(value, f"{place}.rejects.reasons.{reason}")
    for rule, value in done.get("documents", {}).items():
        _count(value, f"{place}.documents.{rule}")
    if not isinstance(done["reading"], dict):
        raise ValueError(f"{place}.reading is {done['reading']!r:.60}")
    for each in done["inputs"]:
        _string(each["name"], f"{place}.inputs.name")
        _count(each["bytes"], f"{place}.inputs.bytes")


def check_part(entry: JsonObject, dtype: str) -> None:
    """Raise where the record of a part is odd, or its files cannot be as long as it says."""
    number, documents, tokens = counts = entry["part"], entry["documents"], entry["tokens"]
    if not all(type(count) is int and 0 <= count <= _MAX_COUNT for count in counts):
        raise ValueError(f"a count of part {number!r:.60} is out of range")
    if "continued" in entry:
        _count(entry["continued"], f"continued of part {number}", documents)
    sizes = {
        "tokens": HEADER_BYTES + tokens * (2 if dtype == "uint16" else 4),
        "bounds": HEADER_BYTES + documents * 8,
        "origin": HEADER_BYTES + documents * 16,
        "loss": HEADER_BYTES + tokens,
    }
    files = entry["files"]
    if not {"tokens", "bounds", "origin"} <= set(files) <= set(sizes):
        raise ValueError(f"part {number} has the files {sorted(files)}")
    for kind, (size, digest) in files.items():
        if type(size) is not int or size != sizes[kind]:
            raise ValueError(f"part {number} says {size!r:.60} bytes of {kind}, not {sizes[kind]}")
        if not _HEX.fullmatch(digest):
            raise ValueError(f"part {number} has no digest of its {kind}")


def _count(value: Any, name: str, limit: int = _MAX_COUNT) -> int:
    if type(value) is not int or not 0 <= value <= limit:
        raise ValueError(f"{name} is {value!r:.60}")
    return value


def _string(value: Any, name: str) -> None:
    if not isinstance(value, str):
        raise ValueError(f"{name} is {value!r:.60}")


def _digest(value: Any, name: str) -> None:
    if not isinstance(value, str) or not _HEX.fullmatch(value):
        raise ValueError(f"{name} is no digest: {value!r:.80}")


FILE_NAME = "penstock.json"
KINDS = ("tokens", "bounds", "origin")
_VERSIONS = (1, 2)
"""The second one only of stores that hold documents in pieces."""
_ZEROS = "0" * 64


@dataclass(frozen=True, slots=True)
class PartRecord:
    """What the manifest says of one part."""

    number: int
    num_documents: int
    """Documents, or pieces of documents: entries of the bounds."""
    num_tokens: int
    files: dict[str, tuple[int, str]]
    """Size and SHA-256 of the file of each kind."""
    num_continued: int = 0
    """How many of `num_documents` are pieces whose document continues in the next part."""

    def to_json(self) -> JsonObject:
        """As it stands in the manifest."""
        # In one order, also when the record was read back from the journal, which sorts.
        kinds = [kind for kind in (*KINDS, "loss") if kind in self.files]
        return {
            "part": self.number,
            "documents": self.num_documents,
            **({"continued": self.num_continued} if self.num_continued else {}),
            "tokens": self.num_tokens,
            "files": {kind: list(self.files[kind]) for kind in kinds},
        }


@dataclass(frozen=True, slots=True)
class Manifest:
    """A store's contents and counts."""

    digest: str
    contents: JsonObject
    """Everything but the parts, as it stands in the file."""
    parts: tuple[PartRecord, ...]

    @property
    def num_pieces(self) -> int:
        """Entries of the bounds of all parts: each document counts as often as it has pieces."""
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
    """The bytes of a manifest: readable, one part a line, with its own digest in front."""
    head = json.dumps({"digest": _ZEROS, **contents}, indent=1, ensure_ascii=True)
    lines = ",\n  ".join(json.dumps(part.to_json()) for part in parts)
    text = head.removesuffix("\n}") + ',\n "parts": [\n  ' + lines + "\n ]\n}\n"
    data = text.encode()
    return data.replace(_ZEROS.encode(), digest_bytes(data).encode(), 1)


def read_manifest(directory: Path) -> Manifest:
    """The manifest of the store in `directory`, checked.

    Raises:
        StoreError: there is none, it is damaged, or it is of another kind or version.
    """
    path = directory / FILE_NAME
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise StoreError(_absent(directory)) from None
    claimed = data[: len(_ZEROS) + 64].decode(errors="replace")
    found = re.match(r'\{\s*"digest": "([0-9a-f]{64})"', claimed)
    if not found:
        raise StoreError(f"{path} does not begin with a digest, so it is damaged or no manifest.")
    blank = data.replace(found[1].encode(), _ZEROS.encode(), 1)
    actual = digest_bytes(blank)
    if actual != found[1]:
        raise StoreError(
            f"{path} was changed after it was written: its digest is {actual[:8]}, and it says "
            f"{found[1][:8]}. Restore it from a copy, or build the store again."
        )
    return _checked(data, path)


def _absent(directory: Path) -> str:
    if not directory.exists():
        return f"{directory} does not exist, so there is no store."
    whole = directory.parent if directory.name in ("train", "val") else directory
    if (whole / ".building.json").exists():
        return (
            f"{directory} holds a build that was not finished. Run the same `penstock build` "
            "command again: it goes on where it stopped."
        )
    sides = [side for side in ("train", "val") if (directory / side / FILE_NAME).exists()]
    if sides:
        return f"{directory} was built with a split. Open {directory / sides[0]} instead."
    return f"{directory} has no {FILE_NAME}, so it is not a store."


def _checked(data: bytes, path: Path) -> Manifest:
    """A manifest whose every number is within limits and adds up."""
    try:
        contents = json.loads(data)
        if contents["format"] != "penstock-store":
            raise StoreError(f"{path} is not the manifest of a token store.")
        if contents["version"] not in _VERSIONS:
            raise StoreError(
                f"{path} is of version {contents['version']!r}; this penstock reads the versions "
                f"{' and '.join(map(str, _VERSIONS))}. Install a newer penstock to open it."
            )
        if contents["dtype"] not in ("uint16", "uint32"):
            raise StoreError(f"{path} names the dtype {contents['dtype']!r}, not uint16 or uint32.")
        check_contents(contents)
        parts = tuple(_part(entry, contents["dtype"]) for entry in contents.pop("parts"))
        manifest = Manifest(contents["digest"], contents, parts)
        counted = contents["counts"]
        for name, total in counts(parts).items():
            if counted[name] != total:
                raise StoreError(
                    f"{path}: its parts hold {total:,} {name}, but it counts {counted[name]:,}."
                )
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        if isinstance(error, StoreError):
            raise
        raise StoreError(f"{path} lacks or misspells a field: {error!r}.") from error
    numbers = [part.number for part in parts]
    if numbers != sorted(set(numbers)):
        raise StoreError(f"{path} lists parts twice or out of order.")
    return manifest


def _part(entry: JsonObject, dtype: str) -> PartRecord:
    check_part(entry, dtype)
    files = {kind: (size, digest) for kind, (size, digest) in entry["files"].items()}
    continued = entry.get("continued", 0)
    return PartRecord(entry["part"], entry["documents"], entry["tokens"], files, continued)


def counts(parts: Sequence[PartRecord]) -> dict[str, int]:
    """What a manifest counts of its parts; `pieces` only where they are more than documents."""
    manifest = Manifest("", {}, tuple(parts))
    told = {"documents": manifest.num_documents, "tokens": manifest.num_tokens}
    has_pieces = manifest.num_pieces != manifest.num_documents
    return told | ({"pieces": manifest.num_pieces} if has_pieces else {})


def builds(manifest: Manifest | None) -> list[JsonObject]:
    """The builds that made a store, the first one and all that were appended."""
    return manifest.contents["builds"] if manifest else []


def shared_settings(settings: JsonObject) -> JsonObject:
    """The settings that every build of one store shares; only chat stores have "chat"."""
    shared = ("tokenizer", "eos_id", "bos_id", "split", "chat")
    return {key: settings[key] for key in shared if key in settings}
