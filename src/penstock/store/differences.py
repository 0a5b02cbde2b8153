"""What two descriptions of one thing differ in, for messages."""

from typing import Any

__all__ = ["differences"]


def differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> str:
    """The fields that differ, as `name: old -> new`, five at most."""
    found = []
    for key in sorted({*old, *new}):
        before, after = old.get(key), new.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            if inner := differences(before, after, f"{prefix}{key}."):
                found.append(inner)
        elif before != after:
            found.append(f"{prefix}{key}: {before!r:.60} -> {after!r:.60}")
    return ", ".join(found[:5])
