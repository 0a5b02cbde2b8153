"""What two descriptions of one thing differ in, for messages.

    eos_id: 256 -> None                       a field
    reading.documents: 'lines' -> 'file'      a field of a field
    inputs: a.txt: 12 bytes -> 17             an input that both have
    inputs: b.txt is left out                 one that only the old has, and
    inputs: c.txt is new                      only the new
    stamps: d.txt was changed or replaced     one that is as long as it was

Five at most are told: a directory of a thousand files is one answer, not a thousand.
"""

from typing import Any

__all__ = ["differences"]

_SHOWN = 5


def differences(old: dict[str, Any], new: dict[str, Any]) -> str:
    """The fields that differ, as `name: old -> new`."""
    return ", ".join(_fields(old, new, "")[:_SHOWN])


def _fields(old: dict[str, Any], new: dict[str, Any], prefix: str) -> list[str]:
    found = []
    for key in sorted({*old, *new}):
        before, after = old.get(key), new.get(key)
        if before == after:
            continue
        if key == "stamps" and isinstance(before, list) and isinstance(after, list):
            # Of the inputs' last changes. One whose length is another is told already.
            if old.get("inputs") == new.get("inputs"):
                files = zip(old["inputs"], before, after, strict=True)
                changed = [file["name"] for file, then, now in files if then != now]
                found += [f"stamps: {name} was changed or replaced" for name in changed]
        elif isinstance(before, dict) and isinstance(after, dict):
            found += _fields(before, after, f"{prefix}{key}.")
        elif named := _inputs(before, after):
            found += [f"{prefix}{key}: {each}" for each in named]
        else:
            found.append(f"{prefix}{key}: {before!r:.60} -> {after!r:.60}")
    return found


def _inputs(before: Any, after: Any) -> list[str]:
    """What differs between two lists of things with names; nothing if they are no such lists."""
    old, new = _by_name(before), _by_name(after)
    if old is None or new is None:
        return []
    found = []
    for name in sorted({*old, *new}):
        if name not in new:
            found.append(f"{name} is left out")
        elif name not in old:
            found.append(f"{name} is new")
        else:
            found += [f"{name}: {each}" for each in _changes(old[name], new[name])]
    return found


def _by_name(told: Any) -> dict[str, dict[str, Any]] | None:
    if not isinstance(told, list) or not all(isinstance(each, dict) for each in told):
        return None
    named = {str(each["name"]): each for each in told if "name" in each}
    return named if len(named) == len(told) else None  # URLs are told without their queries


def _changes(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    if old.get("bytes") != new.get("bytes"):
        return [f"{_number(old.get('bytes'))} bytes -> {_number(new.get('bytes'))}"]
    return _fields(old, new, "")


def _number(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else repr(value)
