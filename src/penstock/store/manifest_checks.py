"""Checks of a manifest: that there is one, and that its values are possible.

The values are checked before anything is allocated or opened because of them.
"""

import re
from pathlib import Path

from penstock.errors import MissingStoreError, StoreError
from penstock.store.part_table import CHECKED_KINDS, KINDS, MAX_COUNT, JsonObject, file_sizes

FILE_NAME = "penstock.json"
VERSION = 2
"""The version of new stores. Those of version 1 have no checksums, and no documents in pieces."""
TABLE_VERSION = 3
"""The version of stores whose parts are in a table."""
VERSIONS = (1, VERSION, TABLE_VERSION)

_ANY = re.compile(r".*", re.DOTALL)
HEX = re.compile(r"[0-9a-f]{64}")
INPUT_DIGESTS = {"xxh3_128": re.compile(r"[0-9a-f]{32}"), "digest": HEX}
"""The members of an input that may hold its digest, and its digits. The second is a SHA-256, which
earlier versions wrote."""
_MAX_VOCAB = 2**32
_NEEDED, _KNOWN = frozenset(KINDS), frozenset((*CHECKED_KINDS, "checks"))


def check_contents(contents: JsonObject) -> None:
    """Raise ValueError, KeyError or TypeError if a field is missing, wrong or out of range."""
    if contents["format"] != "penstock-store":
        raise ValueError("it is not the manifest of a token store")
    if contents["version"] not in VERSIONS:
        raise ValueError(
            f"it is of version {contents['version']!r}; this penstock reads the versions "
            f"{VERSIONS[0]} to {VERSIONS[-1]}. Install a newer penstock to open it"
        )
    if contents["dtype"] not in ("uint16", "uint32"):
        raise ValueError(f"it names the dtype {contents['dtype']!r}, not uint16 or uint32")
    tokenizer = contents["tokenizer"]
    vocab_size = checked_count(tokenizer["vocab_size"], "tokenizer.vocab_size", _MAX_VOCAB)
    if contents["dtype"] == "uint16" and vocab_size > 65_536:
        raise ValueError(f"a vocabulary of {vocab_size:,} does not fit uint16")
    checked_string(tokenizer["name"], "tokenizer.name")
    checked_string(tokenizer["canary"], "tokenizer.canary")
    checked_string(tokenizer["digest"], "tokenizer.digest", optional=True)
    checked_string(contents["split"], "split", optional=True)
    checked_string(contents.get("generation"), "generation", HEX, optional=True)
    ids = {name: contents[name] for name in ("eos_id", "bos_id") if contents[name] is not None}
    for name, number in (ids | tokenizer.get("added_tokens", {})).items():
        checked_count(number, f"{name:.40}", vocab_size)
    if "chat" in contents:
        checked_string(contents["chat"]["template"], "chat.template")
        checked_string(contents["chat"]["digest"], "chat.digest", HEX)
    if not contents["builds"]:
        raise ValueError("no build is listed")
    for number, done in enumerate(contents["builds"]):
        _check_build(done, f"builds[{number}]")
    for name, value in contents["counts"].items():
        checked_count(value, f"counts.{name}")


def _check_build(done: JsonObject, path: str) -> None:
    rejects = done["rejects"]
    checked_string(rejects["sha256"], f"{path}.rejects.sha256", HEX)
    single = {"slices": done["slices"], "rejects.bytes": rejects["bytes"]}
    optional = (done.get(name, {}) for name in ("documents", "skipped_files"))
    for group in (single, done["counts"], rejects["reasons"], *optional):
        for name, value in group.items():
            checked_count(value, f"{path}: {name}")
    if not isinstance(done["reading"], dict):
        raise ValueError(f"{path}.reading is {done['reading']!r:.60}")
    for each in done["inputs"]:
        checked_string(each["name"], f"{path}.inputs.name")
        checked_count(each["bytes"], f"{path}.inputs.bytes")
        for name, digits in INPUT_DIGESTS.items():
            checked_string(each.get(name), f"{path}.inputs.{name}", digits, optional=True)


def check_part(entry: JsonObject, item_size: int) -> None:
    """Raise if the record of a part is wrong, or its file sizes do not fit its counts."""
    number, documents, tokens = counts = entry["part"], entry["documents"], entry["tokens"]
    if not all(type(count) is int and 0 <= count <= MAX_COUNT for count in counts):
        raise ValueError(f"a count of part {number!r:.60} is out of range")
    if "continued" in entry:
        checked_count(entry["continued"], f"continued of part {number}", documents)
    files = entry["files"]
    if not _NEEDED <= files.keys() <= _KNOWN:
        raise ValueError(f"part {number} has the files {sorted(files)}")
    # A part is mapped by its counts, so a wrong size would read past the end of the file.
    has = {kind: int(kind in files) for kind in _KNOWN}
    sizes = file_sizes(documents, tokens, item_size, has)
    for kind, (size, digest) in files.items():
        if type(size) is not int or size != sizes[kind]:
            raise ValueError(f"part {number} says {size!r:.60} bytes of {kind}, not {sizes[kind]}")
        if not HEX.fullmatch(digest):
            raise ValueError(f"part {number} has no digest of its {kind}")


def checked_count(value: object, name: str, limit: int = MAX_COUNT) -> int:
    """`value`, if it is an integer from 0 to `limit`; raises ValueError if it is not."""
    # `type`, because True is an instance of int.
    if type(value) is not int or not 0 <= value <= limit:
        raise ValueError(f"{name} is {value!r:.60}")
    return value


def checked_string(
    value: object, name: str, pattern: re.Pattern[str] = _ANY, *, optional: bool = False
) -> None:
    """Raise ValueError if `value` is not a string that matches the pattern."""
    is_valid = isinstance(value, str) and pattern.fullmatch(value)
    if not is_valid and not (optional and value is None):
        raise ValueError(f"{name} is {value!r:.80}")


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
