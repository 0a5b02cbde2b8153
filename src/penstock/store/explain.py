"""What two descriptions of one thing differ in, for messages.

    eos_id: 256 -> None                       a field
    reading.documents: 'lines' -> 'file'      a field of a field
    inputs: a.txt: 12 bytes -> 17             an input that both have
    inputs: b.txt is left out                 one that only the old has, and
    inputs: c.txt is new                      only the new
    stamps: d.txt was changed or replaced     one that is as long as it was

Five at most are told: a directory of a thousand files is one answer, not a thousand.
"""

import logging
from collections import Counter
from typing import TYPE_CHECKING, Any

from penstock.sources.settings import separator_in

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


if TYPE_CHECKING:
    from penstock.store.job import Job

__all__ = ["count_rules", "describe_rules", "log_rules", "rule_text"]

_log = logging.getLogger("penstock")
_WORDS = {
    "lines": "a line",
    "paragraphs": "a paragraph",
    "file": "a whole file",
}


def count_rules(records: "list[Any]") -> dict[str, dict[str, int]]:
    """The member of a build in the manifest that counts files by rule; nothing without "auto"."""
    total: Counter[str] = Counter()
    for record in records:
        total.update(record.rules)
    return {"documents": dict(sorted(total.items()))} if total else {}


def describe_rules(builds: list[dict[str, Any]]) -> str:
    """What a document is in the inputs of all `builds` of a manifest.

    >>> reading = {"documents": "auto"}
    >>> text, table = {"format": "text"}, {"format": "parquet"}
    >>> describe_rules([{"reading": reading, "inputs": [text], "documents": {"file": 1}}])
    'a whole file'
    >>> describe_rules([{"reading": {"documents": "lines"}, "inputs": [text, table]}])
    'a line (1 file), a record (1 file)'
    """
    total: Counter[str] = Counter()
    for done in builds:
        texts = [each for each in done["inputs"] if each.get("format") == "text"]
        records = len(done["inputs"]) - len(texts)
        rules = done.get("documents") or {done["reading"].get("documents", "lines"): len(texts)}
        for rule, number in rules.items():
            total[rule_text(rule)] += number
        total["a record"] += records
    found = {words: number for words, number in total.items() if number}
    if len(found) < 2:
        return "".join(found)
    return ", ".join(
        f"{words} ({number:,} file{'s' * (number != 1)})" for words, number in found.items()
    )


def rule_text(rule: str | None) -> str:
    """What a document is by one rule; None is for files of records.

    >>> rule_text("lines"), rule_text("<|endoftext|>"), rule_text(None)
    ('a line', "the text between '<|endoftext|>'", 'a record')
    """
    if rule is None:
        return "a record"
    separator = separator_in(rule)
    return _WORDS.get(rule, rule) if separator is None else f"the text between {separator!r}"


def log_rules(job: "Job", rules: list[tuple[int, str]]) -> None:
    """Log the rule of a file, the first time that the build meets this rule."""
    for number, rule in rules:
        if rule in job.rules_seen:
            continue
        job.rules_seen.add(rule)
        separators = " or ".join(map(repr, job.reading.separators))
        why = f"no {separators}" if rule == "file" else repr(rule)
        name = job.files[number].name
        _log.info("%s: a document is %s; the first 64 MB contain %s", name, rule_text(rule), why)
