"""Checks of a manifest: that there is one, that this version can read it, and that its parts fit.

A manifest has a digest of itself, so damage is found before. What is checked here is what a reader
relies on: names of files stay inside of the directory, and files have the sizes of their arrays.
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

HEX = re.compile(r"[0-9a-f]{64}")
INPUT_DIGESTS = ("xxh3_128", "digest")
"""The members of an input that may hold its digest. The second is a SHA-256, which earlier versions
wrote."""
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
    if contents["dtype"] == "uint16" and contents["tokenizer"]["vocab_size"] > 65_536:
        raise ValueError("its vocabulary does not fit uint16")
    if not contents["builds"]:
        raise ValueError("no build is listed")


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


def checked_digest(value: object, name: str) -> None:
    """Raise ValueError if `value` is not a SHA-256; it may become a part of a file's name."""
    if not (isinstance(value, str) and HEX.fullmatch(value)):
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
