"""Index files in JSON, whose values are checked before they are used."""

import json
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from penstock.errors import StoreError
from penstock.formats.mapped import first_bytes

# An index of MDS has about 500 bytes for a shard of 64 MB.
_MOST_BYTES = 1 << 29

_Value = TypeVar("_Value")


def read_index(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        StoreError: the file holds something else.
    """
    text = first_bytes(path, _MOST_BYTES + 1)
    if len(text) > _MOST_BYTES:
        raise StoreError(f"{path} has more than {_MOST_BYTES:,} bytes, which no index has.")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{path} is not a JSON file: {str(error)[:200]}.") from error
    if not isinstance(found, dict):
        raise StoreError(f"{path} holds a {type(found).__name__}, not an object of JSON.")
    return found


def looks_like(path: Path, *names: str) -> bool:
    """Return whether a file is a JSON object with these fields; False if it cannot be read."""
    try:
        found = read_index(path) if path.is_file() else {}
    except StoreError:
        return False
    return all(name in found for name in names)


def value(record: object, name: str, kind: type[_Value], path: Path) -> _Value:
    """Return a field of an object in an index.

    Raises:
        StoreError: it is missing, or of another type.
    """
    found = record.get(name) if isinstance(record, dict) else None
    # True is an int in Python, and not a number in an index.
    if not isinstance(found, kind) or (kind is int and isinstance(found, bool)):
        raise StoreError(
            f"{path} has {str(found)[:60]!r} for {name!r} in {str(record)[:120]}, which must be of "
            f"type {kind.__name__}. The index is damaged."
        )
    return found


def beside(index: Path, name: str) -> Path:
    """Return the path of a file that an index names.

    Raises:
        StoreError: it would be outside of the directory of the index.
    """
    parts = PurePosixPath(name.replace("\\", "/")).parts
    is_outside = not parts or name.startswith(("/", "\\")) or ":" in parts[0] or ".." in parts
    # No system has longer names. A null would end the name.
    if is_outside or max(map(len, parts)) > 255 or len(name) > 1024 or "\0" in name:
        raise StoreError(f"{index} names the file {name[:200]!r}, which is not in its directory.")
    return index.parent.joinpath(*parts)
